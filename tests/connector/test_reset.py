"""A reset is complete when every plan that is older than it has been carried out, and what it stored is cleared."""

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest

from lmcache_connector.reset import ResetProgress
from tests.connector.rig import Rig, prompt, rig_config
from tests.servers import CacheServer, running_server


def test_a_reset_with_nothing_under_way_is_complete_at_once() -> None:
    reset = ResetProgress()
    reset.planned()
    reset.reported()
    reset.cleared()
    assert (reset.settling, reset.clear_again) == (False, False)


def test_a_reset_waits_for_the_plans_that_are_older_and_not_for_later_ones() -> None:
    reset = ResetProgress()
    reset.planned()
    reset.planned()
    reset.cleared()
    reset.planned()
    seen = []
    for _ in range(2):
        seen.append((reset.settling, reset.clear_again))
        reset.reported()
    assert seen == [(True, False), (True, False)]
    assert (reset.settling, reset.clear_again) == (True, True)
    reset.clear_again = False
    assert not reset.settling
    reset.reported()
    assert (reset.settling, reset.clear_again) == (False, False)


def test_a_second_reset_counts_what_is_under_way_anew() -> None:
    reset = ResetProgress()
    reset.planned()
    reset.cleared()
    reset.planned()
    reset.cleared()
    reset.reported()
    assert (reset.settling, reset.clear_again) == (True, False)
    reset.reported()
    assert reset.clear_again


# --- with a real server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def rig(server: CacheServer) -> Iterator[Rig]:
    with Rig(rig_config(server.url)) as made:
        assert made.scheduler.clear()
        yield made
    server.quiet()


@pytest.mark.process
@pytest.mark.parametrize("answered", [True, False])
def test_what_a_lookup_found_before_a_reset_is_not_promised_after_it(
    rig: Rig, server: CacheServer, answered: bool
) -> None:
    rig.serve("cold", prompt(64))
    served = rig.arrive("warm", prompt(64))
    if answered:
        assert rig.matched(served) == 63
    else:
        rig.scheduler._patience = 0.0
        rig.scheduler.matched_tokens(served.request, 0)
    assert rig.scheduler.clear()
    assert rig.matched(served) == 0
    rig.allocate(served, 0)
    rig.step({served: 64})
    rig.finish(served)
    assert rig.serve("again", prompt(64)).external == 63, "what is computed after the reset is cached"
    assert server.quiet()["counters"]["expired_reads"] == 0, "the lease was given back"


@pytest.mark.process
def test_what_was_computed_before_a_reset_is_not_stored_after_it(rig: Rig, server: CacheServer) -> None:
    served = rig.arrive("r", prompt(70))
    rig.allocate(served, rig.matched(served))
    rig.step({served: 40})
    assert rig.scheduler.clear()
    rig.step({served: 30})
    rig.finish(served)
    assert rig.serve("other", prompt(70)).external == 0


@pytest.mark.process
def test_a_request_that_is_preempted_for_a_reset_is_computed_anew_and_stored(rig: Rig, server: CacheServer) -> None:
    served = rig.arrive("r", prompt(70))
    rig.allocate(served, rig.matched(served))
    rig.step({served: 40})
    served.request.num_computed_tokens = 0
    assert rig.scheduler.clear()
    assert rig.matched(served) == 0
    rig.step({served: 70})
    rig.finish(served)
    assert rig.serve("other", prompt(70)).external == 64


@pytest.mark.process
def test_a_load_that_was_promised_before_a_reset_is_carried_out_and_not_stored_again(
    rig: Rig, server: CacheServer
) -> None:
    rig.serve("cold", prompt(70))
    served = rig.arrive("warm", prompt(70))
    rig.allocate(served, rig.matched(served))
    served.request.num_computed_tokens = 64
    plan = rig.plan({})
    assert rig.scheduler.clear()
    assert rig.report(plan).invalid_block_ids == set()
    assert rig.wrong_tokens(served) == []
    rig.step({served: 6})
    rig.finish(served)
    assert rig.serve("other", prompt(70)).external == 0


@pytest.mark.process
def test_what_the_workers_were_storing_during_a_reset_is_cleared_too_and_found_by_nobody_before_that(
    rig: Rig, server: CacheServer
) -> None:
    served = rig.arrive("r", prompt(64))
    rig.allocate(served, rig.matched(served))
    plan = rig.plan({served: 64})
    rig.compute(served, 0, 64)
    served.request.num_computed_tokens = 64
    assert rig.scheduler.clear()
    early = rig.arrive("early", prompt(64))
    rig.worker.store(plan)
    assert server.status()["storage_manager"]["l1_manager"]["total_object_count"] == 4
    assert rig.matched(early) == 0
    rig.scheduler.done(rig.collect())
    late = rig.arrive("late", prompt(64))
    assert rig.matched(late) == 0
    assert server.status()["storage_manager"]["l1_manager"]["total_object_count"] == 0
    for each in (early, late):
        rig.scheduler.finished(each.request)
    rig.finish(served)
    rig.serve("fresh", prompt(64))
    assert rig.serve("warm", prompt(64)).external == 63


@pytest.mark.process
def test_a_reset_that_cannot_reach_the_server_says_so_in_time_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_server() as server, Rig(rig_config(server.url)) as rig, caplog.at_level(logging.WARNING):
        os.kill(server.pid, signal.SIGSTOP)
        for wait in (rig.config.settings.timeout, 0.0):  # the second time it is known to be away
            caplog.clear()
            started = time.monotonic()
            assert rig.scheduler.clear() is False
            assert time.monotonic() - started < wait + 0.3
            (said,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "not reset" in text]
            assert server.url in said and "lmcache kvcache clear" in said
        os.kill(server.pid, signal.SIGCONT)
