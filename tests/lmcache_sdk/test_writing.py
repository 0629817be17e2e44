import threading
import time

import numpy as np
import pytest
import torch

import lmcache_sdk
from lmcache_sdk import LMCacheSDKContext, LMCacheSDKError
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.layout import KernelGroup
from lmcache_server.protocol.messages import Commit, CommittedChunks, End, Prompt, Reserve, Reserved, SessionId
from tests.lmcache_sdk.fake_engine import random_kv, registered_engine
from tests.servers import CacheServer, running_server

HUGE = KernelGroup((0, 1), planes=2, heads=16, head_size=2048, dtype="float32")  # 8 MiB per chunk of 16 tokens
SESSION = SessionId("engine")


def reserve(engine: Attachment, tokens: range) -> Reserved:
    prompt = Prompt(SESSION, np.array(tokens, dtype="<u4").tobytes())
    (reserved,) = engine.connection.request(Reserve(engine.instance, (prompt,))).results
    assert len(reserved.chunks) == len(tokens) // 16
    return reserved


def commit(engine: Attachment, reserved: Reserved, value: int) -> None:
    slots = engine.transfer.writable(reserved)
    for slot in slots:
        slot.fill_(value)
    engine.transfer.flush(reserved, slots)
    engine.connection.request(Commit(engine.instance, (CommittedChunks(reserved.reservation),)))
    engine.connection.request(End(engine.instance, (SESSION,)))


def test_chunks_that_another_client_writes_are_waited_for(engine: Attachment, context: LMCacheSDKContext) -> None:
    reserved = reserve(engine, range(32))
    other = threading.Timer(0.3, commit, (engine, reserved, 0))
    other.start()
    kv = random_kv(64)
    start = time.monotonic()
    assert context.store(kv, range(64)) is True
    assert time.monotonic() - start >= 0.25
    back = context.retrieve(range(64))
    assert back is not None
    assert not back[:, :, :32].any()
    assert torch.equal(back[:, :, 32:], kv[:, :, 32:])
    other.join()


def test_if_another_client_wrote_all_of_it_nothing_was_stored(engine: Attachment, context: LMCacheSDKContext) -> None:
    reserved = reserve(engine, range(32))
    other = threading.Timer(0.2, commit, (engine, reserved, 0))
    other.start()
    assert context.store(random_kv(32), range(32)) is False
    other.join()


def test_another_client_that_does_not_finish_is_named_at_the_deadline(
    server: CacheServer, engine: Attachment, model: str
) -> None:
    reserve(engine, range(32))
    with lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=0.5) as context:
        start = time.monotonic()
        with pytest.raises(LMCacheSDKError, match=r"another client is writing 2 of these chunks .* within 0\.5 s"):
            context.store(random_kv(48), range(48))
        assert time.monotonic() - start < 1.5
    engine.connection.request(End(engine.instance, (SESSION,)))
    server.quiet()


def test_what_another_client_gave_up_is_stored_after_all(engine: Attachment, context: LMCacheSDKContext) -> None:
    reserve(engine, range(32))
    other = threading.Timer(0.2, engine.connection.request, (End(engine.instance, (SESSION,)),))
    other.start()
    kv = random_kv(32)
    assert context.store(kv, range(32)) is True
    back = context.retrieve(range(32))
    assert back is not None
    assert torch.equal(back, kv)
    other.join()


def test_a_copy_that_fails_publishes_nothing_and_holds_nothing(
    server: CacheServer, context: LMCacheSDKContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("in the middle of the copy")

    kv = random_kv(48)
    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="in the middle of the copy"):
        patched.setattr(ChunkGeometry, "split", fail)
        context.store(kv, range(48))
    server.quiet()
    assert context.lookup(range(48)) == 0
    assert context.store(kv, range(48)) is True
    back = context.retrieve(range(48))
    assert back is not None
    assert torch.equal(back, kv)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_pool_without_room_is_an_error_that_counts_the_chunks(shared_memory: bool) -> None:
    with (
        running_server(shared_memory=shared_memory) as server,
        registered_engine(server, "m", HUGE),
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=10) as context,
    ):
        kv = random_kv(10 * 16, HUGE)
        with pytest.raises(LMCacheSDKError, match="no room for 2 of 10 chunks; the first 8 are cached"):
            context.store(kv, range(160))
        back = context.retrieve(range(160))
        assert back is not None
        assert back.shape[2] in (96, 112, 128)  # at once, or after the server made room ahead of demand
        assert torch.equal(back, kv[:, :, : back.shape[2]])
        with (
            context.view(range(128)) as view,
            pytest.raises(LMCacheSDKError, match=r"no room for \d of 8 chunks"),
        ):
            context.store(kv[:, :, :128], range(1000, 1128))
        assert view.tokens in (96, 112, 128)
        assert context.store(kv[:, :, :16], range(2000, 2016)) is True
        server.quiet()


def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float, times: int) -> None:
    """Make the next `times` copies into slots take longer than a reservation lasts."""
    split, left = ChunkGeometry.split, [None] * times

    def split_slowly(self: ChunkGeometry, *arguments: object) -> None:
        if left:
            left.pop()
            time.sleep(seconds)
        split(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkGeometry, "split", split_slowly)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_reservation_that_ran_out_during_the_copy_is_made_again(
    shared_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_server("--l1-write-ttl-seconds", "0.1", shared_memory=shared_memory) as server,
        registered_engine(server, "m"),
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=20) as context,
    ):
        kv = random_kv(32)
        slow_copies(monkeypatch, 0.8, 1)
        assert context.store(kv, range(32)) is True
        back = context.retrieve(range(32))
        assert back is not None
        assert torch.equal(back, kv)
        slow_copies(monkeypatch, 0.8, 3)
        with pytest.raises(LMCacheSDKError, match="the server took 3 reservations away"):
            context.store(random_kv(16), range(500, 516))
        assert context.lookup(range(500, 516)) == 0
        server.quiet()
