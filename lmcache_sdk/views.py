"""Flat slots <-> the tensors that people edit. Pure shape arithmetic over torch: no server, no pool.

A slot holds one part of a chunk, the layers of one kernel group in one shard, in the canonical layout
(lmcache_server.protocol.layout). The parts of a chunk are in the order of the wire: shard-major, then kernel group. In
the tensors [planes, L, tokens, D] that people see (lmcache_sdk.shapes)

    chunk i          is [:, :, i * T : (i + 1) * T]
    shard s          is [..., s * D_shard : (s + 1) * D_shard]
    a kernel group   is those of the L layers that it has: one strided slice, or a few

Chunks that follow each other and whose slots lie at even distances, as a store mostly gets them, are copied by one
strided copy between the tensor and all of their slots; nothing lies in between. A copy for each would hand over to
torch's other threads and wait for them each time: a fifth of the time where they are idle, most of it where the cores
are busy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shapes import CachedTensors, TensorShape, listed, tensor_shapes
from lmcache_server.protocol.layout import CacheLayout, KernelGroup

__all__ = ["ChunkGeometry", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Where the elements of one part are in the tensor that holds it."""

    tensor: int
    """Which of the tensors that is."""
    shape: tuple[int, int, int, int]
    """Of the slot: `[planes, layers of the group, tokens of a chunk, D_shard]`."""
    runs: tuple[tuple[slice, slice], ...]
    """Layers of the slot, and where they are among those of the tensor."""
    columns: slice
    """Of D: the shard."""
    dtype: torch.dtype

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """A flat uint8 slot in its shape, without a copy."""
        return slot.view(self.dtype).view(self.shape)

    def slices(
        self, slots: torch.Tensor, tensor: torch.Tensor, chunk: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views that belong together, of `slots` [n, bytes] and of the n chunks from `chunk` on in `tensor`; all of the
        slots' elements.
        """
        count, tokens = len(slots), self.shape[2]
        viewed = slots.view(self.dtype).view(count, *self.shape)
        taken = slice(chunk * tokens, (chunk + count) * tokens)
        for layers, rows in self.runs:
            run = tensor[:, rows, taken, self.columns]
            planes, held, _, hidden = run.shape
            yield viewed[:, :, layers], run.view(planes, held, count, tokens, hidden).movedim(2, 0)


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """The shape of one chunk: `tokens` per chunk, its `parts` in the order of the wire, the tensors that hold them."""

    tokens: int
    shapes: tuple[TensorShape, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, layout: CacheLayout, chunk_size: int, shards: int) -> "ChunkGeometry":
        """The geometry of `shards` shards of `layout`."""
        shapes, holders = tensor_shapes(layout.groups, shards)
        parts = [
            _part(group, holder, shapes[holder], chunk_size, shard)
            for shard in range(shards)
            for group, holder in zip(layout.groups, holders, strict=True)
        ]
        return cls(chunk_size, shapes, tuple(parts))

    def empty(self, tokens: int) -> CachedTensors:
        """New tensors for `tokens` tokens, their contents undefined."""
        return self._cached([shape.empty(tokens) for shape in self.shapes])

    def join(self, slots: Sequence[torch.Tensor], out: CachedTensors) -> None:
        """Copy chunks 0, 1, ... out of `slots` (chunk-major, then part) to the front of `out`."""
        tensors = [tensor.detach() for tensor in listed(out)]
        for part, run, chunk in self._stretches(range(len(slots) // len(self.parts)), slots):
            for source, target in part.slices(run, tensors[part.tensor], chunk):
                target.copy_(source)

    def split(self, cached: CachedTensors, chunks: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        """Copy the chunks with indices `chunks` of `cached` into those `slots` (chunk-major, then part) that are not
        empty.
        """
        tensors = [tensor.detach() for tensor in listed(cached)]
        for part, run, chunk in self._stretches(chunks, slots):
            for target, source in part.slices(run, tensors[part.tensor], chunk):
                target.copy_(source)

    def chunk(self, slots: Sequence[torch.Tensor]) -> CachedTensors:
        """The chunk in `slots`, one per part; a tensor that lies in one slot is that slot, others are joined."""
        return self._cached([self._chunk_of(i, shape, slots) for i, shape in enumerate(self.shapes)])

    def check(self, cached: CachedTensors, name: str) -> None:
        """Raise LMCacheSDKError unless `cached` is made of such tensors, all of one number of tokens, on the CPU."""
        if len(self.shapes) == 1:
            self.shapes[0].check(cached, name)
            return
        if not isinstance(cached, tuple | list) or len(cached) != len(self.shapes):
            got = f"{len(cached)} of them" if isinstance(cached, tuple | list) else type(cached).__name__
            expected = " and ".join(map(str, self.shapes))
            raise LMCacheSDKError(
                f"{name}: expected a tuple of {len(self.shapes)} tensors, {expected} (the layers of this model differ "
                f"in shape), got {got}"
            )
        for i, (shape, tensor) in enumerate(zip(self.shapes, cached, strict=True)):
            shape.check(tensor, f"{name}[{i}]")
        counts = [tensor.shape[2] for tensor in cached]
        if len(set(counts)) > 1:
            raise LMCacheSDKError(f"{name}: expected tensors of equally many tokens, got {counts}")

    def _stretches(
        self, chunks: Sequence[int], slots: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Part, torch.Tensor, int]]:
        """For each part: its slots that are not empty, in stretches [n, bytes], and the first chunk of each."""
        every = list(slots)
        for number, part in enumerate(self.parts):
            own = every[number :: len(self.parts)]
            start = 0
            while start < len(own):
                count, step = _stretch(own, chunks, start)
                length = len(own[start])
                if length:
                    yield part, own[start].as_strided((count, length), (step, 1)), chunks[start]
                start += count

    def _cached(self, tensors: Sequence[torch.Tensor]) -> CachedTensors:
        return tensors[0] if len(self.shapes) == 1 else tuple(tensors)

    def _chunk_of(self, number: int, shape: TensorShape, slots: Sequence[torch.Tensor]) -> torch.Tensor:
        own = [(part, slot) for part, slot in zip(self.parts, slots, strict=True) if part.tensor == number]
        first, slot = own[0]
        if first.shape == shape.of(self.tokens) and len(first.runs) == 1:
            return first.view(slot)
        tensor = shape.empty(self.tokens)
        for part, slot in own:
            for source, target in part.slices(slot[None], tensor, 0):
                target.copy_(source)
        return tensor


def _stretch(slots: Sequence[torch.Tensor], chunks: Sequence[int], start: int) -> tuple[int, int]:
    """How many slots from `start` on are of consecutive chunks and lie at even distances in one memory, in order; and
    that distance in bytes.
    """
    first = slots[start]
    length, memory, origin = len(first), first.untyped_storage().data_ptr(), int(first.storage_offset())
    step = int(slots[start + 1].storage_offset()) - origin if start + 1 < len(slots) else 0
    count = 1
    while (
        0 < length <= step
        and start + count < len(slots)
        and len(slots[start + count]) == length
        and slots[start + count].storage_offset() == origin + count * step
        and chunks[start + count] == chunks[start] + count
        and slots[start + count].untyped_storage().data_ptr() == memory
    ):
        count += 1
    return count, step if count > 1 else length


def _part(group: KernelGroup, holder: int, shape: TensorShape, chunk_size: int, shard: int) -> Part:
    row = {layer: i for i, layer in enumerate(shape.layers)}
    runs = _runs([row[layer] for layer in group.layers])
    columns = slice(shard * group.hidden, (shard + 1) * group.hidden)
    return Part(holder, (group.planes, len(group.layers), chunk_size, group.hidden), runs, columns, shape.dtype)


def _runs(rows: Sequence[int]) -> tuple[tuple[slice, slice], ...]:
    """`rows` cut where they stop to ascend in equal steps: (slice of `rows`, the same rows as a slice)."""
    runs = []
    start = 0
    while start < len(rows):
        end = start + 1
        step = max(1, rows[end] - rows[start]) if end < len(rows) else 1
        while end < len(rows) and rows[end] - rows[end - 1] == step:
            end += 1
        runs.append((slice(start, end), slice(rows[start], rows[end - 1] + 1, step)))
        start = end
    return tuple(runs)
