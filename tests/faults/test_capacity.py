"""Faults that show when memory is short, or only after a long time."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lmcache_server.protocol import messages as m
from lmcache_server.protocol.layout import CacheLayout, KernelGroup
from tests.fake_engine import FakeEngine
from tests.faults.world import SHORT_TIMES, assert_quiet, resident_bytes, segment_bytes
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

MIB = 2**20
LARGE = CacheLayout((KernelGroup((0,), 2, 1, 288, "float32"),))
"""36 KiB per chunk: 28 chunks in 1 MiB."""
HUGE = CacheLayout((KernelGroup((0,), 2, 1, 4096, "float32"),))
"""512 KiB per chunk."""


@pytest.fixture
def one_megabyte() -> Iterator[CacheServer]:
    with running_server(
        *SHORT_TIMES, "--l1-size-gb", str(1 / 1024), "--eviction-trigger-watermark", "1"
    ) as server:  # fmt: skip
        yield server


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run them at once; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_room_is_made_when_it_is_needed_and_the_last_chunks_go_first(one_megabyte: CacheServer) -> None:
    with FakeEngine(one_megabyte.url, layout=LARGE) as engine:
        assert engine.store(engine.tokens(18)) == 18
        assert engine.store(engine.tokens(11)) == 11
        prompt = engine.tokens(28)
        for end in range(3, 31, 3):
            engine.store(prompt[: end * engine.chunk_bytes])
        assert engine.load(prompt) == 28
        engine.store(engine.tokens(3))
        assert engine.load(prompt) == 25
        assert engine.store(engine.tokens(100)) == 28
    assert_quiet(one_megabyte)


def test_memory_is_bounded_by_the_pool_whatever_is_stored() -> None:
    pool = 16 * MIB
    with running_server(*SHORT_TIMES, "--l1-size-gb", str(pool / 2**30)) as server:
        base = resident_bytes(server.pid)
        samples: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                samples.append(resident_bytes(server.pid) - base + segment_bytes(server))
                time.sleep(0.02)

        def writer(layout: CacheLayout, chunks: int, prompts: int) -> Callable[[], None]:
            def work() -> None:
                with FakeEngine(server.url, layout=layout) as engine:
                    for _ in range(prompts):
                        prompt = engine.tokens(chunks)
                        sealed = engine.store(prompt)
                        assert sealed == chunks
                        assert engine.load(prompt) <= chunks

            return work

        # 8 writers, 160 MiB in all: tiny chunks of 4 KiB, medium ones, and some of 512 KiB.
        tiny, medium, huge = (FakeEngine.layout, 64, 80), (LARGE, 8, 70), (HUGE, 2, 20)
        watcher = threading.Thread(target=watch)
        watcher.start()
        in_threads([writer(*sort) for sort in (tiny, tiny, tiny, medium, medium, medium, huge, huge)])
        done.set()
        watcher.join()
        counters = server.status()["counters"]
        assert counters["committed_chunks"] == 3 * 64 * 80 + 3 * 8 * 70 + 2 * 2 * 20
        assert counters["refused_chunks"] == 0
        assert max(samples) < pool + 24 * MIB, max(samples) / MIB
        assert_quiet(server)


def test_memory_is_flat_over_many_keys_sessions_and_clients() -> None:
    with running_server(*SHORT_TIMES, "--l1-size-gb", str(1 / 1024), "--log-level", "warning") as server:
        with FakeEngine(server.url) as engine:

            def keys(count: int) -> None:
                for _ in range(count // 128):
                    writing = engine.reserve(engine.tokens(128), salt=f"tenant-{count}")
                    engine.commit(writing)

            def questions(count: int) -> None:
                for _ in range(count // 64):
                    prompts = tuple(engine.prompt(engine.tokens(1)) for _ in range(64))
                    engine.ask(m.Acquire(engine.instance, prompts))

            def clients(count: int) -> None:
                for _ in range(count):
                    reply = engine.ask(
                        m.Register("worker", "m", "", engine.kind, 1, 0, engine.layout, 16, engine.process)
                    )
                    engine.ask(m.Unregister(reply.instance))

            def documents() -> None:
                for path in ("/status", "/config", "/version"):
                    server.get(path)

            def round_of_everything() -> None:
                keys(12_800)
                questions(6_400)
                clients(200)
                documents()

            for _ in range(2):
                round_of_everything()
            before = resident_bytes(server.pid)
            for _ in range(3):
                round_of_everything()
            assert resident_bytes(server.pid) - before < 4 * MIB
            assert server.status()["counters"]["committed_chunks"] == 5 * 12_800
        assert_quiet(server)


@pytest.mark.parametrize("frames", [False, True], ids=["shm", "frames"])
def test_clearing_in_a_loop_harms_no_running_read_or_write(frames: bool) -> None:
    with running_server(*SHORT_TIMES, "--l1-read-ttl-seconds", "20", "--l1-write-ttl-seconds", "20") as server:
        stop, reads, writes = time.monotonic() + 3.0, [0] * 8, [0] * 8

        def reader(number: int) -> None:
            with FakeEngine(server.url, frames=frames) as engine:
                while time.monotonic() < stop:
                    prompt = engine.tokens(3)
                    engine.store(prompt)
                    held = engine.acquire(prompt)
                    assert engine.read(held, pause=0.02) == list(range(held.hit))
                    reads[number] += held.hit
                    engine.end(held.session)

        def writer(number: int) -> None:
            with FakeEngine(server.url, frames=frames) as engine:
                while time.monotonic() < stop:
                    prompt = engine.tokens(3)
                    writing = engine.reserve(prompt)
                    for chunk in writing.chunks:
                        engine.fill(writing, (chunk,))
                        time.sleep(0.01)
                    state = engine.commit(writing).state
                    assert state in (m.CommitState.SEALED, m.CommitState.LOST)
                    writes[number] += state is m.CommitState.LOST
                    engine.end(writing.session)
                    assert engine.load(prompt) in (0, 3)

        def clear() -> None:
            with FakeEngine(server.url) as engine:
                while time.monotonic() < stop:
                    engine.ask(m.Clear())
                    time.sleep(0.015)

        in_threads([lambda n=n: reader(n) for n in range(8)] + [lambda n=n: writer(n) for n in range(8)] + [clear])
        assert sum(reads) > 5 and sum(writes) > 2
        with FakeEngine(server.url) as engine:
            prompt = engine.tokens(2)
            engine.store(prompt)
            engine.ask(m.Clear())
            assert engine.hit(prompt) == 0
        assert_quiet(server)
