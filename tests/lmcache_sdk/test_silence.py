import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_sdk.silence import watched


class Line:
    """A wait that only a hang-up ends, after `items`."""

    def __init__(self, *items: int, ends_with: Exception | None = None) -> None:
        self.cut = threading.Event()
        self._items, self._ends_with = items, ends_with

    def __iter__(self) -> Iterator[int]:
        yield from self._items
        assert self.cut.wait(10)
        if self._ends_with:
            raise self._ends_with


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "lmcache-sdk-silence"]


@pytest.mark.parametrize("ends_with", [None, OSError("cut")])
def test_a_wait_that_is_too_long_is_cut_and_told(ends_with: Exception | None) -> None:
    line, got = Line(1, 2, ends_with=ends_with), []
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        for item in watched(iter(line), 0.1, line.cut.set):
            got.append(item)
    assert got == [1, 2]
    assert 0.1 <= time.monotonic() - start < 5
    assert threads() == []


def test_the_time_of_the_caller_does_not_count() -> None:
    cuts: list[None] = []
    for _ in watched(iter([1, 2, 3]), 0.05, lambda: cuts.append(None)):
        time.sleep(0.12)
    assert cuts == []
    assert threads() == []


def test_errors_of_the_items_and_of_the_caller_stay_what_they_are() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        list(watched(broken(), 5.0, lambda: None))
    items = watched(iter([1, 2]), 5.0, lambda: None)
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert threads() == []
