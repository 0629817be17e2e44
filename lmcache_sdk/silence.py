"""An engine's answer line by line, where a silence in the middle ends sooner than the wait for the first token.

An engine may keep its first token back for long, while others are served; once it speaks, a silence means that it is
gone. httpx has one limit for all reads of an answer, and that is the one for the first token. The other is watched
here: by a second thread that hangs up, and in asyncio by a time-out.
"""

import asyncio
import codecs
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import httpx

__all__ = ["DATA", "async_lines_within", "lines_within", "watched"]

DATA = "data:"
"""How the lines begin that tell something."""

T = TypeVar("T")


def lines_within(response: httpx.Response, timeout: float) -> Iterator[str]:
    """The lines of the answer; those after the first token within `timeout` each, or TimeoutError."""
    lines = _lines(response)
    for line in lines:
        yield line
        if line.startswith(DATA):
            break
    yield from watched(lines, timeout, lambda: _hang_up(response))


async def async_lines_within(response: httpx.Response, timeout: float) -> AsyncIterator[str]:
    """The same for asyncio."""
    lines, limit = _async_lines(response), None
    while True:
        async with asyncio.timeout(limit):
            line = await anext(lines, None)
        if line is None:
            return
        yield line
        limit = timeout if line.startswith(DATA) else limit


class _Cut:
    """Cuts text into lines at line feeds only: httpx cuts at whatever Unicode calls a line's end, and a token may be
    one.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def lines(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        return [line.removesuffix("\r") for line in whole]

    def last(self) -> list[str]:
        """What follows the last line feed, if anything does."""
        rest = self._rest + self._decoder.decode(b"", True)
        return [rest] if rest else []


def _lines(response: httpx.Response) -> Iterator[str]:
    cut = _Cut()
    for data in response.iter_bytes():
        yield from cut.lines(data)
    yield from cut.last()


async def _async_lines(response: httpx.Response) -> AsyncIterator[str]:
    cut = _Cut()
    async for data in response.aiter_bytes():
        for line in cut.lines(data):
            yield line
    for line in cut.last():
        yield line


def _hang_up(response: httpx.Response) -> None:
    """Make a read of the answer end, from another thread."""
    with contextlib.suppress(OSError):  # gone already
        response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def watched(items: Iterator[T], seconds: float, hang_up: Callable[[], None]) -> Iterator[T]:
    """`items`, each within `seconds`; the time that the caller takes between them does not count.

    If one takes longer, `hang_up` is called in another thread, which must make the wait end. Raises TimeoutError then.
    """
    watch = _Watch(seconds, hang_up)
    try:
        while True:
            watch.begin()
            try:
                item = next(items)
            except Exception as error:  # whatever the end of the wait looks like from inside
                if watch.end():
                    raise TimeoutError from error
                if isinstance(error, StopIteration):
                    return
                raise
            if watch.end():
                raise TimeoutError
            yield item
    finally:
        watch.close()


class _Watch:
    """A thread that sleeps as long as nothing can be late."""

    def __init__(self, seconds: float, hang_up: Callable[[], None]) -> None:
        self._seconds = seconds
        self._hang_up = hang_up
        self._lock = threading.Lock()
        self._since: float | None = None
        self._expired = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lmcache-sdk-silence", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A wait begins."""
        with self._lock:
            self._since = time.monotonic()

    def end(self) -> bool:
        """It is over; whether that took too long."""
        with self._lock:
            self._since = None
            return self._expired

    def close(self) -> None:
        """No wait begins any more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        # A wait that begins during this sleep cannot be late before its end.
        left = self._seconds
        while not self._closed.wait(left):
            with self._lock:
                left = self._seconds if self._since is None else self._since + self._seconds - time.monotonic()
                if left <= 0:
                    self._expired = True
                    self._hang_up()
                    return
