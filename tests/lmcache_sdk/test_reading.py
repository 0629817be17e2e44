import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import lmcache_sdk
from lmcache_sdk import LMCacheSDKContext, LMCacheSDKError
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.transfer import SharedMemoryTransfer
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.layout import KernelGroup
from lmcache_server.protocol.messages import Acquire, Acquired, Clear, End, Prompt, SessionId
from tests.lmcache_sdk.fake_engine import random_kv, registered_engine
from tests.servers import CacheServer, running_server

READ_TTL = 1.0
LARGE = KernelGroup((0, 1), planes=2, heads=8, head_size=1024, dtype="float32")
LARGE_CHUNK = 2 * 2 * 16 * 8192 * 4  # 2 MiB, so that 32 of them fill the pool of 64 MiB


class Table:
    """The generations of a server's pool, to be changed behind everybody's back."""

    def __init__(self, server: CacheServer, engine: Attachment) -> None:
        size = engine.hello.pool_bytes
        path = f"/dev/shm/{server.segment}"
        self._entries = np.memmap(path, dtype="<u8", mode="r+", offset=size, shape=(size // engine.hello.align_bytes,))
        self._align = engine.hello.align_bytes

    def bump(self, engine: Attachment, tokens: range, chunk: int) -> None:
        """As if the slot of a chunk had been given to another object."""
        session = SessionId("bump")
        prompt = Prompt(session, np.array(tokens, dtype="<u4").tobytes())
        (acquired,) = engine.connection.request(Acquire(engine.instance, (prompt,))).results
        engine.connection.request(End(engine.instance, (session,)))
        self._entries[int(np.frombuffer(acquired.slots, dtype="<u8")[2 * chunk]) // self._align] += 1_000_000


@pytest.fixture
def shared() -> Iterator[tuple[CacheServer, Attachment, LMCacheSDKContext]]:
    """A server of its own, with shared memory."""
    with (
        running_server() as server,
        registered_engine(server, "m") as engine,
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=10) as context,
    ):
        yield server, engine, context


def on_join(monkeypatch: pytest.MonkeyPatch, *actions: object) -> None:
    """Run one action after each copy out of the pool, before it is verified."""
    join, left = ChunkGeometry.join, list(actions)

    def copy_and_act(self: ChunkGeometry, slots: list[torch.Tensor], out: torch.Tensor) -> None:
        join(self, slots, out)
        if left:
            left.pop(0)()  # type: ignore[operator]

    monkeypatch.setattr(ChunkGeometry, "join", copy_and_act)


def test_a_slot_that_changes_during_the_copy_is_read_again(
    shared: tuple[CacheServer, Attachment, LMCacheSDKContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, context = shared
    kv = random_kv(64)
    context.store(kv, range(64))

    def replace() -> None:
        engine.connection.request(Clear())
        context.store(kv, range(64))

    table = Table(shared[0], engine)
    on_join(monkeypatch, lambda: (table.bump(engine, range(64), 1), replace()))
    back = context.retrieve(range(64))
    assert back is not None
    assert torch.equal(back, kv)


def test_what_cannot_be_verified_twice_is_not_returned(
    shared: tuple[CacheServer, Attachment, LMCacheSDKContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engine, context = shared
    kv = random_kv(64)
    context.store(kv, range(64))
    table = Table(server, engine)
    bump = lambda: table.bump(engine, range(64), 2)  # noqa: E731
    on_join(monkeypatch, bump, bump, lambda: table.bump(engine, range(64), 0), lambda: table.bump(engine, range(64), 0))
    back = context.retrieve(range(64))
    assert back is not None
    assert torch.equal(back, kv[:, :, :32])
    out = torch.zeros_like(kv)
    assert context.retrieve(range(64), out=out) is None


def test_a_view_shows_the_chunks_where_they_lie(server: CacheServer, context: LMCacheSDKContext) -> None:
    kv = random_kv(48)
    context.store(kv, range(48))
    with context.view(range(50)) as view:
        assert view.tokens == 48
        assert len(view) == 3
        assert [chunk.shape for chunk in view] == [(2, 3, 16, 16)] * 3
        assert torch.equal(torch.cat(list(view), dim=2), kv)
        assert torch.equal(view[-1], kv[:, :, 32:])
        assert [torch.equal(a, b) for a, b in zip(view[:2], kv.split(16, dim=2), strict=False)] == [True, True]
        assert repr(view) == "<CacheView: 48 tokens, 3 chunks of [2, 3, 16, 16]>"
        if isinstance(context.transfer_ctx, SharedMemoryTransfer):
            pool = context.transfer_ctx._open().shown
            assert all(pool.data_ptr() <= c.data_ptr() < pool.data_ptr() + len(pool) for c in view)
        assert server.status()["read_leases"] == 1
    assert server.quiet()["read_leases"] == 0


VANDAL = """
import sys
import lmcache_sdk
url, http_url, how = sys.argv[1:]
with lmcache_sdk.kvcache.connect(url, http_url, "m") as context, context.view(range(48)) as view:
    copy = view[1].clone()
    copy.zero_()
    print("looked", flush=True)
    {"fill": view[1].zero_, "multiply": lambda: view[1][0].mul_(2), "copy": lambda: view[1].copy_(copy)}[how]()
    print("wrote", flush=True)
"""


@pytest.mark.parametrize("how", ["fill", "multiply", "copy"])
def test_who_writes_to_a_view_ends_and_the_cache_does_not_change(
    shared: tuple[CacheServer, Attachment, LMCacheSDKContext], how: str
) -> None:
    server, _, context = shared
    kv = random_kv(48)
    context.store(kv, range(48))
    vandal = subprocess.run(
        [sys.executable, "-c", VANDAL, server.url, server.http_url, how], capture_output=True, text=True, timeout=120
    )
    assert (vandal.returncode, vandal.stdout) == (-signal.SIGSEGV, "looked\n"), vandal.stderr
    back = context.retrieve(range(48))
    assert back is not None
    assert torch.equal(back, kv)


def test_a_view_of_nothing_is_empty(context: LMCacheSDKContext) -> None:
    for tokens in (range(64), range(15), []):
        with context.view(tokens) as view:
            assert (view.tokens, len(view), list(view)) == (0, 0, [])


def test_an_error_in_the_block_is_the_error_and_the_lease_ends(server: CacheServer, context: LMCacheSDKContext) -> None:
    context.store(random_kv(16), range(16))
    with pytest.raises(ZeroDivisionError), context.view(range(16)):
        raise ZeroDivisionError
    server.quiet()


def test_a_view_of_slots_that_were_reused_is_an_error(
    shared: tuple[CacheServer, Attachment, LMCacheSDKContext],
) -> None:
    server, engine, context = shared
    context.store(random_kv(48), range(48))
    table = Table(server, engine)
    with (
        pytest.raises(LMCacheSDKError, match="1 of 3 slots were reused"),
        context.view(range(48)),
    ):
        table.bump(engine, range(48), 1)
    server.quiet()


def test_a_view_stays_after_its_context_is_closed(
    shared: tuple[CacheServer, Attachment, LMCacheSDKContext],
) -> None:
    kv = random_kv(16)
    shared[2].store(kv, range(16))
    with pytest.raises(LMCacheSDKError, match="closed"), shared[2].view(range(16)) as view:
        shared[2].close()
        gc.collect()
        assert torch.equal(view[0], kv)


def test_a_lease_ends_with_the_call_even_if_the_call_fails(server: CacheServer, context: LMCacheSDKContext) -> None:
    context.store(random_kv(32), range(32))
    assert context.retrieve(range(32)) is not None
    server.quiet()
    with pytest.raises(LMCacheSDKError, match="out: expected room"):
        context.retrieve(range(32), out=torch.zeros(2, 3, 16, 16))
    server.quiet()


def test_a_retrieve_after_a_wait_longer_than_the_read_lease_succeeds(context: LMCacheSDKContext) -> None:
    kv = random_kv(32)
    context.store(kv, range(32))
    assert context.lookup(range(32)) == 32
    assert context.retrieve(range(32)) is not None
    time.sleep(2 * READ_TTL)
    back = context.retrieve(range(32))
    assert back is not None
    assert torch.equal(back, kv)


def fill_pool(context: LMCacheSDKContext) -> None:
    """Store three times what the pool holds, which evicts whatever is not held."""
    kv = random_kv(64, LARGE)
    for i in range(24):
        context.store(kv, range(1000 * i + 1000, 1000 * i + 1064))


def test_a_view_is_renewed_as_long_as_it_is_open() -> None:
    with (
        running_server("--l1-read-ttl-seconds", str(READ_TTL)) as server,
        registered_engine(server, "m", LARGE),
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=10) as context,
    ):
        kv = random_kv(32, LARGE)
        context.store(kv, range(32))
        with context.view(range(32)) as view:
            time.sleep(2.5 * READ_TTL)
            fill_pool(context)
            assert torch.equal(torch.cat(list(view), dim=2), kv)
        assert server.status()["counters"]["expired_reads"] == 0
        assert server.status()["counters"]["evicted_chunks"] > 0


def test_a_view_whose_lease_ran_out_is_an_error_once_its_slots_are_reused() -> None:
    with (
        running_server("--l1-read-ttl-seconds", "0.3") as server,
        registered_engine(server, "m", LARGE),
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=10) as context,
    ):
        context.store(random_kv(32, LARGE), range(32))
        context._registrar.current().heartbeat.stop()
        with pytest.raises(LMCacheSDKError, match="2 of 2 slots were reused"), context.view(range(32)):
            time.sleep(1.2)
            fill_pool(context)


def test_the_large_chunk_of_these_tests_is_as_large_as_they_assume() -> None:
    assert LARGE.planes * len(LARGE.layers) * 16 * LARGE.hidden * 4 == LARGE_CHUNK


def test_a_lease_that_ended_before_frames_were_fetched_is_taken_again(
    server: CacheServer, context: LMCacheSDKContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = random_kv(32)
    context.store(kv, range(32))
    transfer = type(context.transfer_ctx)
    readable, late = transfer.readable, [True]

    def read_late(self: SharedMemoryTransfer, acquired: Acquired) -> list[torch.Tensor]:
        if late:
            late.clear()
            context._registrar.current().heartbeat._held.clear()
            time.sleep(1.7 * READ_TTL)
        return readable(self, acquired)

    monkeypatch.setattr(transfer, "readable", read_late)
    back = context.retrieve(range(32))
    assert back is not None
    assert torch.equal(back, kv)
