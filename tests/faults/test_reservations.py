"""Faults of writers: unfinished, partial, late, dead or stopped ones."""

import signal
import time
from collections.abc import Iterator

import pytest

from lmcache_server.protocol.errors import ErrorCode, ProtocolError
from lmcache_server.protocol.messages import CommitState, Piece, SessionId, Write
from tests.fake_engine import FakeEngine
from tests.faults.world import REAP, SHORT_TIMES, TICK, WRITE_TTL, assert_quiet, child, tokens, until
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    """A pool of 256 chunks."""
    with running_server(*SHORT_TIMES, "--l1-size-gb", str(1 / 1024)) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["shm", "frames"])
def engine(server: CacheServer, request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    with FakeEngine(server.url, frames=request.param) as engine:
        yield engine


@pytest.fixture
def other(server: CacheServer) -> Iterator[FakeEngine]:
    with FakeEngine(server.url) as engine:
        yield engine


def lost(server: CacheServer) -> bool:
    return server.status()["reservations"] == 0


def test_an_unfinished_write_never_becomes_a_hit_and_the_next_writer_succeeds(
    server: CacheServer, engine: FakeEngine, other: FakeEngine
) -> None:
    prompt = engine.tokens(4)
    writing = engine.reserve(prompt)
    engine.fill(writing, share=0.5)
    until(lambda: lost(server))
    assert other.hit(prompt) == 0
    assert other.store(prompt) == 4
    with FakeEngine(server.url) as third:
        assert third.load(prompt) == 4
    assert engine.commit(writing).state is CommitState.LOST
    assert other.load(prompt) == 4
    assert_quiet(server)


def test_a_commit_frees_at_once_what_it_cannot_fill_and_says_which(server: CacheServer, engine: FakeEngine) -> None:
    used = server.status()["storage_manager"]["l1_usage"][0]
    for _ in range(300):
        prompt = engine.tokens(4)
        writing = engine.reserve(prompt, session="again")
        engine.fill(writing, (0,))
        committed = engine.commit(writing, (0,))
        assert (committed.state, committed.sealed, committed.rejected) == (CommitState.PARTIAL, (0,), (1, 2, 3))
    status = server.status()
    assert (status["reservations"], status["quarantined_bytes"]) == (0, 0)
    assert status["storage_manager"]["l1_usage"][0] <= used + 300 * 4096
    assert engine.load(prompt) == 1
    assert engine.store(prompt) == 3
    assert_quiet(server)


def test_a_part_that_did_not_arrive_whole_is_not_published(server: CacheServer) -> None:
    with FakeEngine(server.url, frames=True) as engine:
        prompt = engine.tokens(4)
        writing = engine.reserve(prompt)
        engine.fill(writing, (0,))
        engine.fill(writing, (1,), share=0.25)
        with pytest.raises(ProtocolError) as refused:
            engine.ask(Write(engine.instance, writing.reservation, (Piece(2, 0, 0, 99999),)), [bytes(99999)])
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID, "pieces[0]")
        committed = engine.commit(writing)
        assert (committed.sealed, committed.rejected) == ((0,), (1, 2, 3))
        assert engine.load(prompt) == 1
    assert_quiet(server)


def test_without_shared_memory_nothing_is_published_that_did_not_arrive() -> None:
    with running_server(*SHORT_TIMES, shared_memory=False) as server, FakeEngine(server.url) as engine:
        assert server.status()["transport"] == "frames"
        prompt = engine.tokens(2)
        assert engine.commit(engine.reserve(prompt)).sealed == ()
        assert (engine.store(prompt), engine.load(prompt)) == (2, 2)
        engine.reserve(prompt + bytes(64))
        until(lambda: lost(server))
        assert server.status()["quarantined_bytes"] == 0
        assert_quiet(server)


def test_a_late_writer_cannot_damage_what_others_store(server: CacheServer, other: FakeEngine) -> None:
    with FakeEngine(server.url) as slow:
        writing = slow.reserve(slow.tokens(16))
        until(lambda: lost(server))
        prompts = [other.tokens(8) for _ in range(3 * 256 // 8)]
        for prompt in prompts:
            assert other.store(prompt) == 8
        slow.fill(writing)
        assert sum(other.load(prompt) for prompt in prompts) >= 150
        assert server.status()["quarantined_bytes"] == 16 * 4096
        assert slow.commit(writing).state is CommitState.LOST
        assert server.status()["quarantined_bytes"] == 0
    assert_quiet(server)


def test_a_killed_writer_does_not_own_its_chunks_for_ever(server: CacheServer, other: FakeEngine) -> None:
    prompt = tokens(4, seed=1)
    script = "w = engine.reserve(tokens(4, 1)); engine.fill(w, (0, 1)); say('reserved'); hear()"
    with child(script, server.url) as writer:
        assert writer.line() == "reserved"
        assert other.reserve(prompt).busy == 4
        writer.send(signal.SIGKILL)
        writer.process.wait()
        began = time.monotonic()
        until(lambda: other.store(prompt) == 4, WRITE_TTL + 5)
        assert time.monotonic() - began < WRITE_TTL + 4 * TICK
    assert other.load(prompt) == 4
    assert_quiet(server)


def test_a_stopped_writer_that_goes_on_late_is_told_so_and_changes_nothing(
    server: CacheServer, other: FakeEngine
) -> None:
    prompt = tokens(8, seed=2)
    script = """
w = engine.reserve(tokens(8, 2)); engine.fill(w, (0, 1)); say('reserved'); hear()
engine.fill(w); say(engine.commit(w).state)
try: engine.hit(tokens(8, 2))
except m.ProtocolError as error: say(error.code)
engine.register(); say(engine.load(tokens(8, 2)))
"""
    with child(script, server.url) as writer:
        assert writer.line() == "reserved"
        writer.send(signal.SIGSTOP)
        until(lambda: other.ping().known and server.status()["worker_liveness"]["tracked_instances"] == 1, REAP + 5)
        assert server.status()["quarantined_bytes"] == 8 * 4096
        assert other.store(prompt) == 8
        for _ in range(60):
            other.store(other.tokens(8))
        assert other.store(prompt) in (0, 8)
        writer.tell()
        writer.send(signal.SIGCONT)
        assert [writer.line() for _ in range(3)] == ["lost", "unknown_instance", "8"]
    assert other.load(prompt) == 8
    assert_quiet(server)


def test_the_end_of_an_attempt_is_idempotent_and_touches_no_other_attempt(
    server: CacheServer, engine: FakeEngine
) -> None:
    prompt = engine.tokens(4)
    engine.store(prompt)
    first, second = SessionId("request", 1), SessionId("request", 2)
    assert engine.end(first) == 0
    engine.acquire(prompt, session=first)
    engine.reserve(engine.tokens(1, prompt), session=first)
    held = engine.acquire(prompt, session=second)
    writing = engine.reserve(engine.tokens(2, prompt), session=second)
    assert [engine.end(first) for _ in range(3)] == [1, 0, 0]
    assert engine.read(held) == [0, 1, 2, 3]
    engine.fill(writing)
    assert engine.commit(writing).state is CommitState.SEALED
    assert (engine.release(held), engine.end(second)) == (1, 1)
    assert_quiet(server)
