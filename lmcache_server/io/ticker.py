"""Named background tasks with a heartbeat each: a task that dies or hangs turns the health red instead of passing
unnoticed.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Ticker"]

log = logging.getLogger(__name__)


class Ticker:
    """Calls functions at intervals, each in a task of its own; `health` says when each last finished."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._beats: dict[str, float] = {}
        self._intervals: dict[str, float] = {}

    def every(self, seconds: float, name: str, function: Callable[[], None]) -> None:
        """Call `function` every `seconds`; an exception of one call is logged, and the next call still comes."""
        self._beats[name] = self._clock()
        self._intervals[name] = seconds
        self._tasks.append(asyncio.create_task(self._run(seconds, name, function), name=name))

    def health(self) -> dict[str, Any]:
        """Seconds since each task last succeeded, and whether all did within three intervals (at least 3 s)."""
        now = self._clock()
        ages = {name: now - beat for name, beat in self._beats.items()}
        healthy = all(age < max(3.0, 3 * self._intervals[name]) for name, age in ages.items())
        return {"is_healthy": healthy, "seconds_since_heartbeat": {name: round(age, 3) for name, age in ages.items()}}

    async def stop(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, seconds: float, name: str, function: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                function()
            except Exception:  # the boundary of one tick: its heartbeat stays old, which health reports
                log.exception("background task %s failed", name)
            else:
                self._beats[name] = self._clock()
