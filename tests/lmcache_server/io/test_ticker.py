"""A background task that fails or hangs is seen, and goes on."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from lmcache_server.io.ticker import Ticker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 10))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_task_is_called_again_and_again_and_beats() -> None:
    async def body() -> None:
        clock, calls = Clock(), []
        ticker = Ticker(clock)
        ticker.every(0.001, "count", lambda: calls.append(clock.now))
        clock.now = 5.0
        await until(lambda: len(calls) > 2)
        health = ticker.health()
        assert health == {"is_healthy": True, "seconds_since_heartbeat": {"count": 0.0}}
        await ticker.stop()
        count = len(calls)
        await asyncio.sleep(0.01)
        assert len(calls) == count

    run(body())


def test_a_task_that_fails_is_logged_turns_the_health_red_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        clock, broken, calls = Clock(), [True], []

        def work() -> None:
            calls.append(1)
            if broken[0]:
                raise RuntimeError("no policy of that name")

        ticker = Ticker(clock)
        ticker.every(0.001, "evict", work)
        ticker.every(0.001, "other", lambda: None)
        await until(lambda: len(calls) > 2)
        clock.now = 2.9
        assert ticker.health()["is_healthy"]
        clock.now = 3.1
        await asyncio.sleep(0.01)
        health = ticker.health()
        assert not health["is_healthy"]
        assert health["seconds_since_heartbeat"] == {"evict": 3.1, "other": 0.0}
        broken[0] = False
        await until(lambda: ticker.health()["is_healthy"])
        await ticker.stop()

    run(body())
    assert "background task evict failed" in caplog.text and "no policy of that name" in caplog.text


def test_a_slow_interval_is_given_three_of_its_own() -> None:
    async def body() -> None:
        clock = Clock()
        ticker = Ticker(clock)
        ticker.every(100.0, "rare", lambda: None)
        clock.now = 299.0
        assert ticker.health()["is_healthy"]
        clock.now = 301.0
        assert not ticker.health()["is_healthy"]
        await ticker.stop()

    run(body())
