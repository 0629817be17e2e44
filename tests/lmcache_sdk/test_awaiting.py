"""A blocking call that is awaited is over when its `await` is."""

import asyncio
import threading
import time

import pytest

from lmcache_sdk.awaiting import in_thread


def test_the_loop_goes_on_while_a_call_blocks() -> None:
    free = threading.Event()

    def wait() -> str:
        assert free.wait(5)
        return "done"

    async def both() -> str:
        call = asyncio.ensure_future(in_thread(wait))
        await asyncio.sleep(0)
        free.set()  # what the loop does meanwhile
        return await call

    assert asyncio.run(both()) == "done"


def test_an_error_of_the_call_is_the_error_of_the_await() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(in_thread(fail))


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_call_is_waited_for_and_then_cancelled(fails: bool) -> None:
    steps: list[str] = []

    def work() -> str:
        steps.append("begun")
        time.sleep(0.2)
        steps.append("over")
        if fails:
            raise ValueError("too late to tell")
        return "too late"

    async def cancel_it() -> None:
        call = asyncio.ensure_future(in_thread(work))
        while not steps:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        steps.append("cancelled")

    asyncio.run(cancel_it())
    assert steps == ["begun", "over", "cancelled"]


def test_a_time_limit_around_a_call_holds_once_the_call_is_over() -> None:
    async def limited() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(lambda: time.sleep(0.1)), 0.01)

    asyncio.run(limited())
