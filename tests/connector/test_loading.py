"""Loads: beside other work or before it, several at a time, and over by their deadline, whatever the server does."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_connector import loading
from lmcache_connector.metadata import StepOutcome, StepPlan
from lmcache_connector.worker import WorkerHalf
from tests.connector.rig import Rig, Served, prompt, rig_config
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


def loading_rig(server: CacheServer, model: str, **settings: Any) -> Rig:
    return Rig(rig_config(server.url, model=model, settings=settings))


def waiting(rig: Rig, request_id: str, length: int = 64, seed: int = 0) -> Served:
    """A request that has its blocks and whose load is planned by the next step."""
    served = rig.arrive(request_id, prompt(length, seed))
    rig.allocate(served, rig.matched(served))
    return served


def busy(rig: Rig) -> StepPlan:
    """The plan of a step that also computes something."""
    return dataclasses.replace(rig.plan({}), idle=False)


def slowed(worker: WorkerHalf, before: Callable[[], None]) -> None:
    """Do something before each copy to the pages."""
    (copier,) = worker._copiers
    scatter = copier.scatter

    def slow(*copies: Any) -> None:
        before()
        scatter(*copies)

    copier.scatter = slow  # type: ignore[method-assign]


def test_a_step_does_not_wait_for_the_loads_that_it_begins(server: CacheServer) -> None:
    with loading_rig(server, "beside") as rig:
        rig.serve("cold", prompt(64))
        served, hold = waiting(rig, "warm"), threading.Event()
        slowed(rig.worker, lambda: hold.wait(10) and None)
        rig.worker.load(busy(rig))
        assert rig.worker.take_finished().requests == set()
        hold.set()
        finished = eventually_finished(rig.worker)
        assert (finished.requests, finished.failed_blocks) == ({"warm"}, set())
        served.request.num_computed_tokens = 63
        assert rig.wrong_tokens(served) == []
        rig.finish(served)


def test_at_most_so_many_loads_run_at_a_time(server: CacheServer) -> None:
    with loading_rig(server, "bounded", load_concurrency=2) as rig:
        rig.serve("cold", prompt(64))
        batch = [waiting(rig, f"warm {i}") for i in range(4)]
        running, most, lock = 0, 0, threading.Lock()

        def count() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1

        slowed(rig.worker, count)
        assert rig.report(busy(rig)).finished_recving == {f"warm {i}" for i in range(4)}
        assert most == 2
        for served in batch:
            rig.finish(served)


def test_a_load_is_over_at_its_deadline_and_what_is_missing_is_listed(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SLICE_BYTES", 1)  # one chunk at a time
    with loading_rig(server, "late", load_timeout=0.8) as rig:
        rig.serve("cold", prompt(96))
        served = waiting(rig, "warm", 96)
        slowed(rig.worker, lambda: time.sleep(0.5))
        output = rig.report(busy(rig))
        assert output.finished_recving == {"warm"}
        assert output.invalid_block_ids == set(served.blocks[2:6]), "the two slices begun in time arrived"
        served.request.num_computed_tokens = 32
        assert rig.wrong_tokens(served) == []
        rig.finish(served)
    server.quiet()


def test_nothing_is_written_after_a_load_was_reported(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SLICE_BYTES", 1)
    with loading_rig(server, "silent", load_timeout=0.1) as rig:
        rig.serve("cold", prompt(96))
        served = waiting(rig, "warm", 96)
        slowed(rig.worker, lambda: time.sleep(0.15))
        rig.report(busy(rig))
        before = rig.memory.clone()
        time.sleep(0.4)
        assert bool((rig.memory == before).all())
        rig.finish(served)


def test_a_load_that_waits_for_others_too_long_is_not_begun(server: CacheServer) -> None:
    with loading_rig(server, "queue", load_concurrency=1, load_timeout=0.1) as rig:
        rig.serve("cold", prompt(64))
        batch = [waiting(rig, f"warm {i}") for i in range(2)]
        slowed(rig.worker, lambda: time.sleep(0.3))
        output = rig.report(busy(rig))
        assert output.invalid_block_ids == set(batch[1].blocks[:4])
        for served in batch:
            rig.finish(served)


def test_a_fault_in_a_copy_fails_its_load_and_the_next_one_works(server: CacheServer) -> None:
    with loading_rig(server, "fault") as rig:
        rig.serve("cold", prompt(64))
        (copier,) = rig.worker._copiers
        scatter = copier.scatter

        def broken(*_: Any) -> None:
            copier.scatter = scatter  # type: ignore[method-assign]
            raise RuntimeError("no such block")

        copier.scatter = broken  # type: ignore[method-assign]
        served = waiting(rig, "warm")
        output = rig.report(busy(rig))
        assert output.invalid_block_ids == set(served.blocks[:4])
        rig.finish(served)
        assert rig.serve("next", prompt(64)).external == 63


def test_an_engine_without_other_work_waits_a_moment_for_a_load_instead_of_spinning(server: CacheServer) -> None:
    with loading_rig(server, "waits") as rig:
        rig.serve("cold", prompt(64))
        served = waiting(rig, "warm")
        slowed(rig.worker, lambda: time.sleep(0.1))
        rig.worker.load(busy(rig))
        rig.worker.load(rig.plan({}))  # the next step has nothing to do
        looks = 0
        while not rig.worker.take_finished().requests:
            looks += 1
        assert 1 <= looks <= 0.1 / loading.IDLE_WAIT + 2
        rig.finish(served)


def test_an_engine_without_other_work_loads_by_itself(server: CacheServer) -> None:
    with loading_rig(server, "idle") as rig:
        rig.serve("cold", prompt(64))
        served, threads = waiting(rig, "warm"), []
        slowed(rig.worker, lambda: threads.append(threading.current_thread()))
        plan = rig.plan({})
        assert plan.idle
        rig.worker.load(plan)
        assert rig.worker.take_finished().requests == {"warm"}
        assert threads == [threading.current_thread()]
        rig.finish(served)


def test_by_option_loads_are_done_before_the_step_and_their_leases_end_with_it(server: CacheServer) -> None:
    with loading_rig(server, "before", load_async=False) as rig:
        assert rig.serve("cold", prompt(64)).external == 0
        served = rig.arrive("warm", prompt(64))
        external = rig.matched(served)
        assert external == 63
        rig.allocate(served, external)
        served.request.num_computed_tokens = 63
        plan = rig.plan({served: 1})
        rig.worker.load(plan)
        assert rig.wrong_tokens(served) == []
        rig.scheduler.done(rig.collect())
        assert rig.scheduler._loading == {}
        rig.finish(served)
        server.quiet()


def test_a_failed_load_before_the_step_lists_its_blocks_in_the_same_step(server: CacheServer) -> None:
    with loading_rig(server, "failed before", load_async=False) as rig:
        rig.serve("cold", prompt(64))
        served = waiting(rig, "warm")
        rig.worker.link.attachment = None
        rig.worker.load(rig.plan({served: 1}))
        output = rig.collect()
        assert output.invalid_block_ids == set(served.blocks[:4])
        rig.scheduler.done(output)
        assert rig.matched(served) == 0
        rig.finish(served)


def test_nothing_is_stored_in_a_step_that_loads_by_itself(server: CacheServer) -> None:
    """What a failed load is discovered behind is computed anew, but only after the step, and after its stores."""
    with loading_rig(server, "unsure", load_async=False) as rig:
        rig.serve("cold", prompt(64))
        longer, other = [*prompt(64), *prompt(40, 1)], prompt(40, 2)
        served, neighbour = rig.arrive("warm", longer), rig.arrive("neighbour", other)
        rig.allocate(neighbour, rig.matched(neighbour))
        rig.allocate(served, rig.matched(served))
        served.request.num_computed_tokens = 64
        rig.worker.link.attachment = None
        plan = rig.plan({served: 40, neighbour: 40})
        assert (len(plan.loads), plan.stores) == (1, ())
        assert rig.report(plan).invalid_block_ids == set(served.blocks[:4])
        served.request.num_computed_tokens = 0  # as vLLM does it then
        rig.compute(neighbour, 0, 40)
        neighbour.request.num_computed_tokens = 40
        neighbour.request.append_output_token_ids(7)
        assert eventually_attached(rig.worker)
        outcome = rig.step({served: 104, neighbour: 1}).kv_connector_worker_meta
        assert outcome == StepOutcome({"warm": 6, "neighbour": 2})
        rig.finish(served)
        rig.finish(neighbour)
        assert rig.serve("again", longer).external == 96


def test_closing_waits_for_the_copy_that_runs_and_begins_no_other(server: CacheServer) -> None:
    rig = loading_rig(server, "closing", load_concurrency=1)
    rig.serve("cold", prompt(64))
    batch = [waiting(rig, f"warm {i}") for i in range(3)]
    copies = []
    slowed(rig.worker, lambda: copies.append(time.sleep(0.2)))
    rig.worker.load(busy(rig))
    time.sleep(0.05)
    rig.close()
    assert len(copies) == 1
    assert batch
    server.quiet()


def eventually_attached(worker: WorkerHalf, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while worker.link.attachment is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return worker.link.attachment is not None


def eventually_finished(worker: WorkerHalf, seconds: float = 5.0) -> loading.Finished:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        finished = worker.take_finished()
        if finished.requests:
            return finished
        time.sleep(0.01)
    raise AssertionError("the load did not end")
