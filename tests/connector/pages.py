"""Pages and slots for tests. Pages are made by vLLM's own code; where things are in them is written out a second time,
from the names of the layouts, sharing nothing with the connector.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_connector.gpu_connector import ChunkCopy
from lmcache_connector.layout import chunk_pieces
from lmcache_server.protocol.layout import ITEM_BYTES, KernelGroup, slot_bytes


@dataclass(frozen=True)
class Shape:
    """How an engine's pages look: `layout` is one of vLLM's names, `padding` is in bytes per page."""

    layout: str
    group: KernelGroup
    blocks: int
    block_size: int
    kernel_blocks: int = 1
    """Kernel blocks per block."""
    padding: int = 0

    def spec(self) -> AttentionSpec:
        """What vLLM says of such layers."""
        group = self.group
        page = group.planes * group.heads * self.block_size * group.head_size * ITEM_BYTES[group.dtype]
        make = FullAttentionSpec if group.planes == 2 else MLAAttentionSpec
        return make(
            block_size=self.block_size,
            num_kv_heads=group.heads,
            head_size=group.head_size,
            dtype=getattr(torch, group.dtype),
            page_size_padded=page + self.padding if self.padding else None,
        )

    def address(self, layers: int, layer: np.ndarray, block: np.ndarray, head: np.ndarray, token: np.ndarray,
                byte: np.ndarray) -> np.ndarray:  # fmt: skip
        """Where a byte of a token's vectors is, in an allocation of `layers` layers, by the layout's definition: the
        letters of its name are the digits of the address, most significant first; a page is what follows L and B.
        """
        group = self.group
        tokens = self.block_size // self.kernel_blocks
        content = group.planes * group.head_size * ITEM_BYTES[group.dtype]
        sizes = {"L": layers, "B": self.blocks * self.kernel_blocks, "H": group.heads, "N": tokens, "C": content}
        digits = {
            "L": layer, "B": block * self.kernel_blocks + token // tokens, "H": head, "N": token % tokens, "C": byte,
        }  # fmt: skip
        page = max(self.layout.index("L"), self.layout.index("B")) + 1
        place = _number(self.layout[:page], sizes, digits)
        size = int(np.prod([sizes[letter] for letter in self.layout[page:]])) + self.padding
        return place * size + _number(self.layout[page:], sizes, digits)


def _number(letters: str, sizes: dict[str, int], digits: dict[str, np.ndarray]) -> np.ndarray:
    number = np.int64(0)
    for letter in letters:
        number = number * sizes[letter] + digits[letter]
    return np.asarray(number)


@dataclass
class Paged:
    """Pages of `shape` in random memory: layers [0, cuts[0]) in one allocation, [cuts[0], cuts[1]) in the next, ..."""

    shape: Shape
    cuts: tuple[int, ...] = ()
    lead: int = 0
    """Bytes in each allocation before the pages."""
    memories: list[torch.Tensor] = field(default_factory=list)
    """The bytes of each allocation, padding and all."""
    pages: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, spec, layout = self.shape, self.shape.spec(), KVCacheLayout[self.shape.layout]
        for start, end in self._spans():
            layers, blocks = end - start, shape.blocks
            layer_stride, block_stride, *_ = compute_layout_strides(spec, blocks, layers, layout)
            size = self.lead + layers * blocks * spec.page_size_bytes
            memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
            tensor = KVCacheTensor(
                size=size, layers=[str(i) for i in range(start, end)], layer_stride=layer_stride,
                block_stride=block_stride, offset=self.lead,
            )  # fmt: skip
            kernel = shape.block_size // shape.kernel_blocks
            self.pages += create_kv_cache_views(memory.view(torch.int8), spec, blocks, layout, tensor, kernel)
            self.memories.append(memory)

    def _spans(self) -> list[tuple[int, int]]:
        edges = [0, *self.cuts, len(self.shape.group.layers)]
        return list(pairwise(edges))

    def addresses(self, first: int, end: int, block_ids: list[int]) -> list[np.ndarray]:
        """For each allocation `[planes, layers, tokens, heads, bytes]`: where tokens [first, end) are."""
        group = self.shape.group
        row = group.head_size * ITEM_BYTES[group.dtype]
        found = []
        for start, stop in self._spans():
            plane, layer, token, head, byte = np.ogrid[: group.planes, : stop - start, first:end, : group.heads, :row]
            block = np.array(block_ids, dtype=np.int64)[token // self.shape.block_size]
            token, byte = token % self.shape.block_size, plane * row + byte
            found.append(self.lead + self.shape.address(stop - start, layer, block, head, token, byte))
        return found

    def read(self, first: int, end: int, block_ids: list[int]) -> torch.Tensor:
        """The bytes of tokens [first, end), `[planes, layers, tokens, heads * row]`."""
        parts = [
            memory.numpy()[address]
            for memory, address in zip(self.memories, self.addresses(first, end, block_ids), strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts, axis=1)).flatten(3)

    def write(self, first: int, end: int, block_ids: list[int], values: torch.Tensor) -> None:
        """Put such bytes there."""
        addresses = self.addresses(first, end, block_ids)
        for memory, address, (start, stop) in zip(self.memories, addresses, self._spans(), strict=True):
            memory.numpy()[address] = values[:, start:stop].numpy().reshape(address.shape)


def flat_tokens(slots: list[torch.Tensor], group: KernelGroup, first: int, end: int) -> torch.Tensor:
    """The bytes of tokens [first, end) in consecutive chunks' slots, `[planes, layers, tokens, heads * row]`."""
    row = group.hidden * ITEM_BYTES[group.dtype]
    chunks = [slot.reshape(group.planes, len(group.layers), -1, row) for slot in slots]
    return torch.cat(chunks, dim=2)[:, :, first:end]


def new_slots(group: KernelGroup, chunk_size: int, count: int, fill: str = "random") -> list[torch.Tensor]:
    """Flat byte tensors as the SDK hands them out."""
    high = 256 if fill == "random" else 1
    return [torch.randint(0, high, (slot_bytes(group, chunk_size),), dtype=torch.uint8) for _ in range(count)]


def copies(slots: list[torch.Tensor], first: int, end: int, chunk_size: int, block_size: int,
           block_ids: list[int]) -> list[ChunkCopy]:  # fmt: skip
    """Tokens [first, end) of a request, chunk by chunk."""
    return [
        ChunkCopy(slot, chunk_pieces(chunk, first, end, chunk_size, block_size, block_ids))
        for chunk, slot in enumerate(slots)
    ]
