"""A server that dies, hangs or comes back in the middle of things: the engine computes, and no hook waits twice."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lmcache_connector.metadata import StepOutcome
from lmcache_sdk.attachment import Attachment
from tests.connector.rig import Rig, prompt, rig_config
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def rig(server: CacheServer) -> Iterator[Rig]:
    with Rig(rig_config(server.url)) as made:
        yield made


@contextmanager
def hanging(server: CacheServer) -> Iterator[None]:
    """The server takes what it is sent and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def links(rig: Rig) -> list[Attachment | None]:
    return [rig.scheduler.link.attachment, rig.worker.link.attachment]


def wait_for_link(rig: Rig, *, other_than: Sequence[Attachment | None] = (), seconds: float = 10.0) -> None:
    """Return when both halves are attached, not as they were in `other_than`."""
    deadline = time.monotonic() + seconds
    while any(link is None or link in other_than for link in links(rig)):
        assert time.monotonic() < deadline, "the link did not come back"
        time.sleep(0.01)


def test_a_server_killed_between_lookup_and_load_costs_the_load_and_nothing_else(rig: Rig, server: CacheServer) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens)
    served = rig.arrive("warm", tokens)
    rig.allocate(served, rig.matched(served))
    before = links(rig)
    server.restart()
    wait_for_link(rig, other_than=before)
    output = rig.step({})
    assert output.finished_recving == {"warm"}
    assert output.invalid_block_ids == set(served.blocks[:4]), "another incarnation's slots are never read"
    assert rig.matched(served) == 0
    rig.allocate(served, 0)
    rig.step({served: 64})
    assert rig.wrong_tokens(served) == []
    rig.finish(served)
    assert rig.serve("again", tokens).external == 63


def test_a_server_killed_a_moment_ago_has_left_its_pool_to_those_who_are_reading_it(
    rig: Rig, server: CacheServer
) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens)
    served = rig.arrive("warm", tokens)
    rig.allocate(served, rig.matched(served))
    server.restart()
    output = rig.step({})
    served.request.num_computed_tokens = 0 if output.invalid_block_ids else 63
    assert rig.wrong_tokens(served) == []
    rig.finish(served)


def test_a_lookup_that_is_never_answered_becomes_a_miss_and_later_ones_are_not_even_asked(
    rig: Rig, server: CacheServer
) -> None:
    with hanging(server):
        served = rig.arrive("r", prompt(64))
        started = time.monotonic()
        assert rig.matched(served) == 0
        assert time.monotonic() - started < 2 * rig.config.settings.timeout
        started = time.monotonic()
        for i in range(100):
            other = rig.arrive(f"r{i}", prompt(64, i))
            assert rig.scheduler.matched_tokens(other.request, 0) == (0, False)
            rig.finish(other)
        assert time.monotonic() - started < 0.1
        rig.allocate(served, 0)
        rig.finish(served)
    wait_for_link(rig)
    rig.serve("cold", prompt(64))
    assert rig.serve("warm", prompt(64)).external == 63


def test_nobody_waits_for_a_server_that_died_a_moment_ago() -> None:
    """Not even the first to ask, though no sign of life has missed it yet."""
    config = {"timeout": 5.0, "heartbeat_interval": 60.0}
    with running_server() as server, Rig(rig_config(server.url, settings=config)) as rig:
        running = rig.arrive("running", prompt(40))
        rig.allocate(running, rig.matched(running))
        server.kill()
        time.sleep(0.2)
        started = time.monotonic()
        assert rig.step({running: 20}).kv_connector_worker_meta == StepOutcome({"running": 0})
        served = rig.arrive("r", prompt(64))
        assert rig.scheduler.matched_tokens(served.request, 0) == (0, False)
        assert time.monotonic() - started < 1
        assert links(rig) == [None, None]
        rig.finish(running)


def test_a_store_that_is_never_answered_delays_one_step_and_is_made_up_for(rig: Rig, server: CacheServer) -> None:
    served = rig.arrive("r", prompt(40))
    rig.allocate(served, rig.matched(served))
    with hanging(server):
        started = time.monotonic()
        assert rig.step({served: 20}).kv_connector_worker_meta == StepOutcome({"r": 0})
        assert time.monotonic() - started < 2 * rig.config.settings.timeout
        started = time.monotonic()
        rig.step({served: 12})
        rig.step({served: 8})
        assert time.monotonic() - started < 0.1
    wait_for_link(rig)
    for token in range(4):
        served.request.append_output_token_ids(token)
        rig.step({served: 1})
    rig.finish(served)
    assert rig.serve("warm", prompt(40)).external == 32
    server.quiet()


def test_a_load_that_is_never_answered_is_over_at_its_deadline_and_writes_nothing_later() -> None:
    with running_server(shared_memory=False) as server, Rig(rig_config(server.url)) as rig:
        rig.serve("cold", prompt(64))
        served = rig.arrive("warm", prompt(64))
        rig.allocate(served, rig.matched(served))
        plan = rig.plan({})
        with hanging(server):
            started = time.monotonic()
            output = rig.report(plan)
            assert time.monotonic() - started < 2 * rig.config.settings.timeout
            assert output.invalid_block_ids == set(served.blocks[:4])
            before = rig.memory.clone()
        wait_for_link(rig)
        assert bool((rig.memory == before).all()), "an answer that came too late was dropped"
        assert rig.matched(served) == 0
        rig.finish(served)
        server.quiet()


def test_stores_and_loads_resume_after_every_restart(rig: Rig, server: CacheServer) -> None:
    tokens = prompt(64)
    for round in range(3):
        rig.serve(f"cold {round}", tokens)
        assert rig.serve(f"warm {round}", tokens).external == 63
        server.kill()
        assert rig.serve(f"away {round}", tokens).external == 0
        server.start()
        wait_for_link(rig)
        assert rig.serve(f"empty {round}", tokens).external == 0
    server.quiet()


@pytest.mark.parametrize("computed", [40, 70])
def test_a_running_request_fills_a_restarted_server_from_its_first_chunk_on(
    rig: Rig, server: CacheServer, computed: int
) -> None:
    served = rig.arrive("r", prompt(70))
    rig.allocate(served, rig.matched(served))
    rig.step({served: computed})
    before = links(rig)
    server.restart()
    wait_for_link(rig, other_than=before)
    served.request.append_output_token_ids(1)
    rig.step({served: 71 - computed})
    rig.finish(served)
    assert rig.serve("warm", prompt(70)).external == 64


def test_an_engine_that_dies_leaves_no_lease(server: CacheServer) -> None:
    rig = Rig(rig_config(server.url))
    rig.serve("cold", prompt(64))
    assert rig.matched(rig.arrive("warm", prompt(64))) == 63
    assert server.status()["read_leases"] == 1
    rig.close()
    server.quiet()
