"""How the bytes of chunks get here and back: through the shared pool, or as raw frames of messages.

Which of the two is the server's to offer and `attachment` to choose; whoever copies does not know. Both speak of a list
of flat uint8 tensors, one per (chunk, part), chunk-major, and both follow the same order:

    reading   readable(acquired)   copy out   verify(acquired)
    writing   writable(reserved)   copy in    flush(reserved, filled)   then commit

Reading may be limited to a `Share` of a lease: an engine's scheduler leases whole chunks, of which each of its workers
reads its own parts, and only the chunks that the engine does not have itself.

Shared memory: the tensors are views of the pool, nothing is copied here, and a reader checks after its copy that the
slots still have their generations. Frames: the tensors are private buffers; what arrives in one is what was sealed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.lazy import Lazy
from lmcache_sdk.shm import Integers, SharedPool
from lmcache_sdk.transport import PendingReply, ServerConnection
from lmcache_server.protocol.messages import Acquired, Piece, Read, Reserved, Write

__all__ = ["FrameTransfer", "Share", "SharedMemoryTransfer", "Transfer"]

SLOT_BYTES = 16
IN_FLIGHT = 4
"""Messages with frames under way at once: enough to keep both sides busy, few enough to bound their memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """What to read of the lease of another instance, `holder`: parts `own` of the `parts` that it has of each chunk,
    in chunks `chunks` (counted from the first of the lease).
    """

    holder: int
    parts: int
    own: range
    chunks: range


class Transfer(Protocol):
    """Moves the bytes of leased and reserved chunks of one instance."""

    @property
    def memory(self) -> torch.Tensor | None:
        """All the memory that slots lie in, for whoever wants to page-lock it; None if there is no such memory."""

    def readable(
        self, acquired: Acquired, share: Share | None = None, *, shown: bool = False
    ) -> Sequence[torch.Tensor]:
        """The bytes of each leased (chunk, part), or of each in `share`: views of the pool, or private copies.

        What is `shown` to somebody who may forget that is a view that cannot be written to.
        """

    def verify(self, acquired: Acquired, share: Share | None = None) -> list[bool]:
        """After the copy: whether each of them was still there, so that what was copied is its bytes."""

    def writable(self, reserved: Reserved) -> Sequence[torch.Tensor]:
        """Where the bytes of each reserved (chunk, part) belong; of length 0 for a part that needs no filling."""

    def flush(self, reserved: Reserved, filled: Sequence[torch.Tensor]) -> None:
        """Bring what was filled to the server; to be called before the commit."""

    def close(self) -> None:
        """Let go of the memory; tensors that are still held stay valid."""


class SharedMemoryTransfer:
    """Views of the pool: the copies of the caller are the only ones."""

    def __init__(self, pool: SharedPool, part_bytes: Sequence[int]) -> None:
        self._pool: SharedPool | None = pool
        self._part_bytes = np.array(part_bytes, dtype=np.int64)

    def __repr__(self) -> str:
        return f"SharedMemoryTransfer({self._pool.name if self._pool else 'closed'})"

    @property
    def memory(self) -> torch.Tensor | None:
        """The pool."""
        return self._open().tensor

    def readable(
        self, acquired: Acquired, share: Share | None = None, *, shown: bool = False
    ) -> Sequence[torch.Tensor]:
        """Views of the leased slots; valid until the lease is released. A write to `shown` ones ends this process."""
        offsets, _ = _shared(_slots(acquired.slots), share)
        return self._views(offsets, shown=shown)

    def verify(self, acquired: Acquired, share: Share | None = None) -> list[bool]:
        """Whether each slot still has the generation that it was leased with."""
        offsets, generations = _shared(_slots(acquired.slots), share)
        intact: list[bool] = (self._open().generations(offsets) == generations).tolist()
        return intact

    def writable(self, reserved: Reserved) -> Sequence[torch.Tensor]:
        """Views of the reserved slots. Raises LMCacheSDKError if the mapped pool is not the one they are in."""
        offsets, generations = _slots(reserved.slots)
        to_fill = generations != 0
        views = self._views(offsets, len(reserved.chunks), to_fill)
        if not (self._open().generations(offsets) == generations)[to_fill].all():
            raise LMCacheSDKError(
                f"the shared memory {self._open().name} is not the pool that the server reserves from: nothing was "
                "written (is the server on another host, with a server of the same segment name here?)"
            )
        return views

    def flush(self, reserved: Reserved, filled: Sequence[torch.Tensor]) -> None:
        """Nothing to do: what was filled is the pool itself."""

    def close(self) -> None:
        """Give the mapping up; it goes with the last tensor over it."""
        self._pool = None

    def _views(
        self, offsets: Integers, chunks: int | None = None, wanted: Integers | None = None, *, shown: bool = False
    ) -> Sequence[torch.Tensor]:
        pool = self._open()
        _chunks(len(offsets), len(self._part_bytes), chunks)
        ends = (offsets.reshape(-1, len(self._part_bytes)) + self._part_bytes).reshape(-1)
        if wanted is not None:
            ends = np.where(wanted, ends, offsets)
        if len(offsets) and (offsets.min() < 0 or ends.max() > len(pool.tensor)):
            raise LMCacheSDKError(f"slots: the server sent offsets outside of its pool of {len(pool.tensor)} bytes")
        if not shown:
            used = ends > offsets
            pool.touch(offsets[used], (ends - offsets)[used])
        whole, starts, stops = pool.shown if shown else pool.tensor, offsets.tolist(), ends.tolist()
        return Lazy(len(starts), lambda i: whole[starts[i] : stops[i]])

    def _open(self) -> SharedPool:
        if self._pool is None:
            raise LMCacheSDKError("this attachment is closed")
        return self._pool


class FrameTransfer:
    """Private buffers, and messages of at most `frame_bytes` bytes of raw frames each."""

    def __init__(
        self, connection: ServerConnection, instance: int, part_bytes: Sequence[int], frame_bytes: int
    ) -> None:
        self._connection = connection
        self._instance = instance
        self._part_bytes = list(part_bytes)
        self._frame_bytes = frame_bytes

    def __repr__(self) -> str:
        return f"FrameTransfer({self._connection.url})"

    @property
    def memory(self) -> torch.Tensor | None:
        """None: the buffers are private and new each time."""
        return None

    def readable(self, acquired: Acquired, share: Share | None = None, *, shown: bool = False) -> list[torch.Tensor]:
        """Fetch the leased objects into private buffers; raises as `ServerConnection.request` does."""
        share = share or self._all(acquired)
        buffers = self._buffers([True] * (len(share.chunks) * len(share.own)))
        targets = [buffer.numpy().data for buffer in buffers]
        under_way: deque[tuple[PendingReply, tuple[Piece, ...]]] = deque()
        for pieces in self._messages(share.chunks, buffers, share.own):
            message = Read(share.holder, acquired.lease, pieces)
            under_way.append((self._connection.submit(message), pieces))
            if len(under_way) == IN_FLIGHT:
                self._take_in(*under_way.popleft(), targets, share)
        for pending, pieces in under_way:
            self._take_in(pending, pieces, targets, share)
        return buffers

    def verify(self, acquired: Acquired, share: Share | None = None) -> list[bool]:
        """Always true: the server sends sealed bytes, or refuses."""
        share = share or self._all(acquired)
        return [True] * (len(share.chunks) * len(share.own))

    def _all(self, acquired: Acquired) -> Share:
        parts = len(self._part_bytes)
        chunks = _chunks(len(acquired.slots) // SLOT_BYTES, parts, None)
        return Share(self._instance, parts, range(parts), range(chunks))

    def writable(self, reserved: Reserved) -> list[torch.Tensor]:
        """Private buffers, one per reserved object."""
        _, generations = _slots(reserved.slots)
        _chunks(len(generations), len(self._part_bytes), len(reserved.chunks))
        return self._buffers((generations != 0).tolist())

    def flush(self, reserved: Reserved, filled: Sequence[torch.Tensor]) -> None:
        """Send the buffers to the server; raises as `ServerConnection.request` does."""
        sources = [buffer.numpy().data for buffer in filled]
        place = {chunk: i for i, chunk in enumerate(reserved.chunks)}
        under_way: deque[PendingReply] = deque()
        for pieces in self._messages(reserved.chunks, filled, range(len(self._part_bytes))):
            frames = [
                sources[place[p.chunk] * len(self._part_bytes) + p.part][p.offset : p.offset + p.length] for p in pieces
            ]
            message = Write(self._instance, reserved.reservation, pieces)
            under_way.append(self._connection.submit(message, frames=frames))
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().wait()
        for pending in under_way:
            pending.wait()

    def close(self) -> None:
        """Nothing is held between calls."""

    def _buffers(self, wanted: Sequence[bool]) -> list[torch.Tensor]:
        """A buffer for each (chunk, part), empty for one that is not wanted."""
        lengths = self._part_bytes * (len(wanted) // len(self._part_bytes))
        sizes = [length if want else 0 for length, want in zip(lengths, wanted, strict=True)]
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def _messages(
        self, chunks: Sequence[int], buffers: Sequence[torch.Tensor], parts: range
    ) -> Iterator[tuple[Piece, ...]]:
        """Every byte of every buffer (those of `parts` of `chunks`), in order, as lists of pieces that fit into one
        message each.
        """
        pieces: list[Piece] = []
        room = self._frame_bytes
        for i, buffer in enumerate(buffers):
            chunk, part = divmod(i, len(parts))
            offset = 0
            while offset < len(buffer):
                taken = min(room, len(buffer) - offset)
                pieces.append(Piece(chunks[chunk], parts[part], offset, taken))
                offset += taken
                room -= taken
                if not room:
                    yield tuple(pieces)
                    pieces, room = [], self._frame_bytes
        if pieces:
            yield tuple(pieces)

    def _take_in(
        self, pending: PendingReply, pieces: tuple[Piece, ...], targets: list[memoryview], share: Share
    ) -> None:
        pending.wait()
        frames = pending.frames
        if [len(frame) for frame in frames] != [piece.length for piece in pieces]:
            raise LMCacheSDKError(
                f"{self._connection.url} answered a read of {len(pieces)} pieces with {len(frames)} frames "
                "that do not fit them"
            )
        for piece, frame in zip(pieces, frames, strict=True):
            target = targets[share.chunks.index(piece.chunk) * len(share.own) + share.own.index(piece.part)]
            target[piece.offset : piece.offset + piece.length] = frame


def _slots(packed: bytes) -> tuple[Integers, Integers]:
    """Offsets (int64) and generations (uint64)."""
    if len(packed) % SLOT_BYTES:
        raise LMCacheSDKError(f"slots: expected a multiple of {SLOT_BYTES} bytes, got {len(packed)}")
    table = np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    return table[:, 0].astype(np.int64), table[:, 1]


def _shared(slots: tuple[Integers, Integers], share: Share | None) -> tuple[Integers, Integers]:
    """Those of a lease's slots that are in `share`."""
    if share is None:
        return slots
    chunks = _chunks(len(slots[0]), share.parts, None)
    if share.chunks.stop > chunks or share.own.stop > share.parts:
        raise LMCacheSDKError(f"slots: the server sent {chunks} chunks of {share.parts} parts, expected {share}")
    own, rows = slice(share.own.start, share.own.stop), slice(share.chunks.start, share.chunks.stop)
    offsets, generations = (column.reshape(chunks, share.parts)[rows, own].ravel() for column in slots)
    return offsets, generations


def _chunks(slots: int, parts: int, chunks: int | None) -> int:
    """How many chunks `slots` slots are; raises LMCacheSDKError unless each of them is whole."""
    if slots % parts or (chunks is not None and slots != chunks * parts):
        raise LMCacheSDKError(f"slots: the server sent {slots}, which is not {parts} per chunk")
    return slots // parts
