"""Shared copies: every item once, by as many threads as it is worth, and done when it is said to be."""

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.crew import PART_BYTES, Crew, crew


@pytest.fixture(scope="module")
def three() -> Crew:
    return Crew(3)


@given(items=st.integers(0, 40), parts=st.integers(0, 6))
def test_every_item_is_worked_on_once(three: Crew, items: int, parts: int) -> None:
    done: list[int] = []
    three.share(lambda part: done.extend(range(items)[part]), items, parts * PART_BYTES)
    assert sorted(done) == list(range(items))


def test_a_small_copy_stays_with_the_caller_and_a_large_one_goes_to_all(three: Crew) -> None:
    def threads(nbytes: int) -> set[int]:
        seen: set[int] = set()
        barrier = threading.Barrier(min(3, max(1, nbytes // PART_BYTES)))

        def work(part: slice) -> None:
            barrier.wait(10)
            seen.add(threading.get_ident())

        three.share(work, 100, nbytes)
        return seen

    assert threads(2 * PART_BYTES - 1) == {threading.get_ident()}
    assert len(threads(2 * PART_BYTES)) == 2
    assert len(threads(100 * PART_BYTES)) == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fault_is_told_when_nothing_is_under_way_any_more(three: Crew, failing: int) -> None:
    ended = []

    def work(part: slice) -> None:
        if (part.start > 0) == failing:
            raise OSError("in a part")
        time.sleep(0.05)
        ended.append(part)

    with pytest.raises(OSError, match="in a part"):
        three.share(work, 2, 2 * PART_BYTES)
    assert len(ended) == 1


def test_helpers_may_run_wherever_the_process_may_though_their_maker_is_bound_to_a_core() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    made: list[Crew] = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores)})
        made.append(Crew(2))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    seen: list[set[int]] = []
    made[0].share(lambda part: seen.append(os.sched_getaffinity(0)), 2, 2 * PART_BYTES)
    assert seen == [cores, cores]


def test_the_process_has_one_crew_as_large_as_torch_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    crew.cache_clear()
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    assert crew().threads == 3
    assert crew() is crew()
    crew.cache_clear()
