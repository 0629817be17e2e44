import gc

import numpy as np
import pytest
import torch

from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.transfer import FrameTransfer, SharedMemoryTransfer, Transfer
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.codec import encode
from lmcache_server.protocol.messages import (
    Acquire,
    Acquired,
    Commit,
    CommitState,
    CommittedChunks,
    End,
    Prompt,
    ReadReply,
    Reserve,
    Reserved,
    SessionId,
    pack_slot,
)
from tests.lmcache_sdk.fake_engine import TINY, registered_engine
from tests.lmcache_sdk.router import Router
from tests.servers import CacheServer, running_server

CHUNK_BYTES = 2 * 3 * 16 * 16 * 4


def prompt_of(tokens: int, session: str = "s") -> Prompt:
    return Prompt(SessionId(session), np.arange(tokens, dtype=np.uint32).tobytes())


def reserve(engine: Attachment, tokens: int) -> Reserved:
    (reserved,) = engine.connection.request(Reserve(engine.instance, (prompt_of(tokens, "w"),))).results
    return reserved


def acquire(engine: Attachment, tokens: int) -> Acquired:
    (acquired,) = engine.connection.request(Acquire(engine.instance, (prompt_of(tokens, "r"),))).results
    return acquired


def fill(engine: Attachment, transfer: Transfer, tokens: int) -> list[torch.Tensor]:
    """Store random bytes; what they were."""
    reserved = reserve(engine, tokens)
    slots = transfer.writable(reserved)
    written = [torch.randint(0, 256, slot.shape, dtype=torch.uint8) for slot in slots]
    for slot, value in zip(slots, written, strict=True):
        slot.copy_(value)
    transfer.flush(reserved, slots)
    request = Commit(engine.instance, (CommittedChunks(reserved.reservation),))
    (committed,) = engine.connection.request(request).results
    assert committed.state is CommitState.SEALED
    return written


def end(engine: Attachment) -> None:
    engine.connection.request(End(engine.instance, (SessionId("r"), SessionId("w"))))


def test_what_was_filled_and_committed_is_what_is_read(server: CacheServer, engine: Attachment) -> None:
    written = fill(engine, engine.transfer, 64)
    acquired = acquire(engine, 64)
    read = engine.transfer.readable(acquired)
    assert [len(slot) for slot in read] == [CHUNK_BYTES] * 4
    assert all(torch.equal(a, b) for a, b in zip(written, read, strict=True))
    assert engine.transfer.verify(acquired) == [True] * 4
    end(engine)
    server.quiet()


def test_a_transfer_is_what_the_server_offers(server: CacheServer, engine: Attachment) -> None:
    expected = SharedMemoryTransfer if server.segment else FrameTransfer
    assert type(engine.transfer) is expected
    assert server.status()["transport"] == ("shm" if server.segment else "frames")
    assert (server.segment or server.url) in repr(engine.transfer)


def test_nothing_to_move_is_no_tensors(engine: Attachment) -> None:
    assert len(engine.transfer.readable(Acquired(0))) == 0
    assert engine.transfer.verify(Acquired(0)) == []
    assert len(engine.transfer.writable(Reserved(0, (), b"", 0, 0, 0))) == 0


@pytest.mark.parametrize("frame_bytes", [97, 1000, CHUNK_BYTES, CHUNK_BYTES + 1, 10 * CHUNK_BYTES])
def test_frames_of_any_size_carry_the_same_bytes(engine: Attachment, frame_bytes: int) -> None:
    transfer = FrameTransfer(engine.connection, engine.instance, [CHUNK_BYTES], frame_bytes)
    written = fill(engine, transfer, 48)
    read = transfer.readable(acquire(engine, 48))
    assert all(torch.equal(a, b) for a, b in zip(written, read, strict=True))
    end(engine)


def test_a_client_of_all_shards_moves_each_part_to_its_shard(server: CacheServer, model: str) -> None:
    with (
        registered_engine(server, model, world_size=2, worker_id=0) as first,
        registered_engine(server, model, world_size=2, worker_id=1) as second,
        registered_engine(server, model, world_size=2, worker_id=None) as everyone,
    ):
        assert acquire(everyone, 32).chunks == 0
        of_first = fill(first, first.transfer, 32)
        assert acquire(everyone, 32).chunks == 0
        of_second = fill(second, second.transfer, 32)
        parts = everyone.transfer.readable(acquire(everyone, 32))
        expected = [of_first[0], of_second[0], of_first[1], of_second[1]]
        assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
        for engine in (first, second, everyone):
            end(engine)


def test_a_slot_that_changed_is_noticed() -> None:
    with running_server() as server, registered_engine(server, "m") as engine:
        fill(engine, engine.transfer, 48)
        acquired = acquire(engine, 48)
        pool = engine.hello.pool_bytes
        table = np.memmap(f"/dev/shm/{server.segment}", dtype="<u8", mode="r+", offset=pool, shape=(pool // 4096,))
        offset, generation = np.frombuffer(acquired.slots, dtype="<u8").reshape(-1, 2)[1]
        table[offset // 4096] = generation + 1
        assert engine.transfer.verify(acquired) == [True, False, True]
        table[offset // 4096] = generation
        assert engine.transfer.verify(acquired) == [True, True, True]


def shared(engine: Attachment) -> SharedMemoryTransfer:
    if not isinstance(engine.transfer, SharedMemoryTransfer):
        pytest.skip("only where memory is shared")
    return engine.transfer


def test_slots_outside_of_the_pool_are_refused(engine: Attachment) -> None:
    transfer = shared(engine)
    for offset in (engine.hello.pool_bytes - CHUNK_BYTES + 1, engine.hello.pool_bytes, 2**62):
        with pytest.raises(LMCacheSDKError, match="offsets outside of its pool"):
            transfer.readable(Acquired(1, 1, pack_slot(offset, 1)))
    with pytest.raises(LMCacheSDKError, match="offsets outside of its pool"):
        transfer.readable(Acquired(1, 1, pack_slot(2**64 - 4096, 1)))


@pytest.mark.parametrize("slots", [b"x" * 15, b"x" * 17])
def test_half_a_slot_is_refused(engine: Attachment, slots: bytes) -> None:
    with pytest.raises(LMCacheSDKError, match="slots: expected a multiple of 16 bytes"):
        shared(engine).readable(Acquired(1, 1, slots))


def test_slots_that_are_no_whole_chunks_are_refused(server: CacheServer, model: str) -> None:
    with registered_engine(server, model, world_size=2, worker_id=None) as everyone:
        with pytest.raises(LMCacheSDKError, match="the server sent 3, which is not 2 per chunk"):
            everyone.transfer.readable(Acquired(2, 1, pack_slot(0, 1) * 3))
        with pytest.raises(LMCacheSDKError, match="the server sent 2, which is not 2 per chunk"):
            everyone.transfer.writable(Reserved(1, (0, 1), pack_slot(0, 1) * 2, 0, 0, 0))


def test_nothing_is_written_into_a_pool_that_is_not_the_servers(engine: Attachment) -> None:
    transfer = shared(engine)
    with pytest.raises(LMCacheSDKError, match="is not the pool that the server reserves from: nothing was written"):
        transfer.writable(Reserved(1, (0,), pack_slot(0, 12345678), 0, 0, 0))


def test_a_closed_transfer_is_an_error_and_its_tensors_stay(server: CacheServer, model: str) -> None:
    with registered_engine(server, model) as engine:
        transfer = shared(engine)
        written = fill(engine, transfer, 16)
        acquired = acquire(engine, 16)
        (view,) = transfer.readable(acquired)
        transfer.close()
        gc.collect()
        assert torch.equal(view, written[0])
        with pytest.raises(LMCacheSDKError, match="closed"):
            transfer.verify(acquired)


@pytest.mark.parametrize("frames", [[], [b"x" * 99], [b"x" * 100, b""], [b"x" * 100] * 2])
def test_frames_that_do_not_fit_their_pieces_are_an_error(frames: list[bytes]) -> None:
    reply = encode(ReadReply(100))
    with Router(lambda *_: [[reply, *frames]]) as router, ServerConnection(router.url) as connection:
        transfer = FrameTransfer(connection, 1, [100], 4096)
        with pytest.raises(LMCacheSDKError, match="frames that do not fit them"):
            transfer.readable(Acquired(1, 1, pack_slot(0, 1)))


def test_the_layout_of_these_tests_is_one_chunk_of_tiny() -> None:
    assert TINY.planes * len(TINY.layers) * 16 * TINY.hidden * 4 == CHUNK_BYTES
