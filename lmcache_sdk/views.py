"""Flat slots <-> the tensors that people edit. Pure shape arithmetic over torch: no server, no pool.

A slot holds one chunk of one shard in the canonical layout (lmcache_server.protocol.layout). A person sees all chunks
and all shards as one tensor

    [planes, L, tokens, D]      planes: 2 (keys, values), or 1 (an MLA latent, queries)
                                D: the shards' hidden sizes side by side

Chunk i is [:, :, i * T : (i + 1) * T], shard s of it [..., s * D_shard : (s + 1) * D_shard]. Each (chunk, shard) is
copied by one strided copy between the tensor and the slot; nothing lies in between.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_server.protocol.layout import CacheLayout

__all__ = ["ChunkGeometry"]

HUGE_BYTES = 8 * 2**20
"""From here on a tensor is worth a mapping of its own."""


@dataclass(frozen=True, slots=True)
class ChunkGeometry:
    """The shape of one chunk: `tokens` per chunk; `hidden` elements per token, layer, plane and shard."""

    dtype: torch.dtype
    planes: int
    layers: int
    tokens: int
    hidden: int
    shards: int

    @classmethod
    def of(cls, layout: CacheLayout, chunk_size: int, shards: int) -> "ChunkGeometry":
        """The geometry of `shards` shards of `layout`. Raises LMCacheSDKError for several kernel groups."""
        if len(layout.groups) != 1:
            sizes = ", ".join(f"{len(group.layers)} layers of {group.hidden} {group.dtype}" for group in layout.groups)
            raise LMCacheSDKError(
                f"layout: this model has {len(layout.groups)} kernel groups ({sizes}), which do not fit into one "
                "tensor; only models with one kernel group can be retrieved and stored"
            )
        group = layout.groups[0]
        dtype: torch.dtype = getattr(torch, group.dtype)
        return cls(dtype, group.planes, len(group.layers), chunk_size, group.hidden, shards)

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """The shape of `tokens` tokens of all shards."""
        return (self.planes, self.layers, tokens, self.hidden * self.shards)

    def empty(self, tokens: int) -> torch.Tensor:
        """A new tensor for `tokens` tokens, its contents undefined.

        Large ones lie in huge pages where the system has them: first touches cost more than the copy that they serve.
        """
        shape = self.shape(tokens)
        size = math.prod(shape) * self.dtype.itemsize
        if size < HUGE_BYTES:
            return torch.empty(shape, dtype=self.dtype)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """A flat uint8 slot as [planes, L, T, D_shard], without a copy."""
        return slot.view(self.dtype).view(self.planes, self.layers, self.tokens, self.hidden)

    def place(self, tensor: torch.Tensor, chunk: int, shard: int) -> torch.Tensor:
        """Where chunk `chunk` of `shard` is in `tensor` [planes, L, tokens, D], without a copy."""
        return tensor[
            :, :, chunk * self.tokens : (chunk + 1) * self.tokens, shard * self.hidden : (shard + 1) * self.hidden
        ]

    def join(self, slots: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Copy chunks 0, 1, ... out of `slots` (chunk-major, then shard) to the front of `out`."""
        out = out.detach()
        for i, slot in enumerate(slots):
            self.place(out, i // self.shards, i % self.shards).copy_(self.view(slot))

    def split(self, tensor: torch.Tensor, chunks: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        """Copy the chunks with indices `chunks` of `tensor` into those `slots` (chunk-major, then shard) that are not
        empty.
        """
        for i, slot in enumerate(slots):
            if len(slot):
                self.view(slot).copy_(self.place(tensor, chunks[i // self.shards], i % self.shards))

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raise LMCacheSDKError unless `tensor` has this dtype and shape, whatever its number of tokens, on the CPU."""
        if not isinstance(tensor, torch.Tensor):
            raise LMCacheSDKError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != self.dtype:
            raise LMCacheSDKError(f"{name}: expected dtype {self.dtype}, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            raise LMCacheSDKError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
        planes, layers, _, hidden = self.shape(0)
        fits = tensor.dim() == 4 and (tensor.shape[0], tensor.shape[1], tensor.shape[3]) == (planes, layers, hidden)
        if not fits:
            raise LMCacheSDKError(f"{name}: expected shape [{planes}, {layers}, T, {hidden}], got {list(tensor.shape)}")
