"""Faults of readers: leases that are too short, released by others, or missing when memory is short."""

import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_server.protocol.messages import Release
from tests.fake_engine import FakeEngine
from tests.faults.world import READ_TTL, SHORT_TIMES, assert_quiet, until
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    """A pool of 256 chunks."""
    with running_server(*SHORT_TIMES, "--l1-size-gb", str(1 / 1024)) as server:
        yield server


@pytest.fixture
def engine(server: CacheServer) -> Iterator[FakeEngine]:
    with FakeEngine(server.url) as engine:
        yield engine


@pytest.fixture
def other(server: CacheServer) -> Iterator[FakeEngine]:
    with FakeEngine(server.url) as engine:
        yield engine


def press(engine: FakeEngine, chunks: int = 512) -> None:
    """Store more than the pool holds."""
    for _ in range(chunks // 16):
        engine.store(engine.tokens(16))


def no_reads(server: CacheServer) -> bool:
    return server.status()["read_leases"] == 0


def test_a_reader_that_comes_after_its_lease_finds_the_bytes_if_nobody_needed_the_room(
    server: CacheServer, engine: FakeEngine
) -> None:
    prompt = engine.tokens(4)
    engine.store(prompt)
    held = engine.acquire(prompt)
    time.sleep(2 * READ_TTL)
    until(lambda: no_reads(server))
    assert engine.read(held) == [0, 1, 2, 3]
    assert engine.release(held) == 0
    assert_quiet(server)


def test_a_reader_that_comes_after_its_lease_under_pressure_has_a_clean_miss(
    server: CacheServer, engine: FakeEngine, other: FakeEngine
) -> None:
    prompt = engine.tokens(4)
    engine.store(prompt)
    held = engine.acquire(prompt)
    until(lambda: no_reads(server))
    press(other)
    assert engine.read(held) == []
    assert engine.hit(prompt) == 0
    assert_quiet(server)


def test_a_renewed_lease_outlives_any_wait_and_any_pressure(
    server: CacheServer, engine: FakeEngine, other: FakeEngine
) -> None:
    prompt = engine.tokens(4)
    engine.store(prompt)
    held = engine.acquire(prompt)
    began = time.monotonic()
    while time.monotonic() - began < 4 * READ_TTL:
        assert engine.ping(held.lease).renewed == 1
        press(other, 128)
    assert engine.read(held) == [0, 1, 2, 3]
    assert engine.release(held) == 1
    assert_quiet(server)


def test_nobody_can_release_what_another_holds(server: CacheServer, engine: FakeEngine, other: FakeEngine) -> None:
    prompt = engine.tokens(4)
    engine.store(prompt)
    mine, theirs = engine.acquire(prompt), other.acquire(prompt)
    before = server.status()["counters"]["stray_releases"]
    every_handle = tuple(range(mine.lease - 50, mine.lease + 50))
    assert [engine.ask(Release(engine.instance, every_handle)).released for _ in range(3)] == [1, 0, 0]
    assert server.status()["counters"]["stray_releases"] == before + 299
    stop = threading.Event()

    def pressure() -> None:
        with FakeEngine(server.url) as third:
            while not stop.is_set():
                third.store(third.tokens(16))

    thread = threading.Thread(target=pressure)
    thread.start()
    try:
        assert other.ping(theirs.lease).renewed == 1
        assert other.read(theirs, pause=0.15) == [0, 1, 2, 3]
    finally:
        stop.set()
        thread.join()
    assert other.release(theirs) == 1
    assert_quiet(server)


def test_a_reader_without_shared_memory_is_refused_when_its_lease_has_ended(server: CacheServer) -> None:
    with FakeEngine(server.url, frames=True) as engine:
        prompt = engine.tokens(2)
        engine.store(prompt)
        held = engine.acquire(prompt)
        assert engine.read(held) == [0, 1]
        until(lambda: no_reads(server))
        assert engine.read(held) == []
    assert_quiet(server)
