"""Blocking calls for asyncio: each runs in a thread, and is over when its `await` is, cancelled or not."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, which runs beside the event loop.

    A thread cannot be stopped: a cancelled call is waited for, and cancelled then. So nobody writes into a tensor that
    its caller has back already, or reads from it.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # looked at: nobody else will
        raise cancelled
    return running.result()
