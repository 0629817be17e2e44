"""How vLLM's CPU attention packs K and V inside one (block, head) cell, found by asking it.

The packing depends on the instruction set that vLLM chose for a layer, and vLLM does not declare it. So we let vLLM's
own kernel write numbers that name their place into a scratch cache, read off where each of them went, and look for
strides that say the same (`packed_plane`). A cell has 2 * block_size * head_size elements; positions count them.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import torch

__all__ = ["CpuKernel", "Digits", "Plane", "digits", "packed_plane", "probe_cell"]

RADIX = 8
"""Names are written digit by digit: these numbers are exact and different in every type that a cache may have."""
HEADS = 2
BLOCKS = 2

Digits = tuple[tuple[int, int], ...]
"""An index cut into digits, most significant first, each with its (size, stride): (i, j) of ((4, 32), (16, 2)) is index
16 * i + j and lies at 32 * i + 2 * j."""


class CpuKernel(NamedTuple):
    """How a layer calls the kernel that writes its cache: all that the packing may depend on, beside the sizes."""

    isa: str
    """The instruction set that vLLM chose."""
    dtype: torch.dtype
    """Of the keys and values that are computed."""
    kv_cache_dtype: str = "auto"
    """vLLM's option: auto (the cache has `dtype`) or one of fp8 (it has bytes)."""

    @property
    def quantises(self) -> bool:
        """Whether the cache holds something else than was computed."""
        return self.kv_cache_dtype.startswith("fp8")

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the cache."""
        return torch.uint8 if self.quantises else self.dtype

    def write(self, keys: torch.Tensor, values: torch.Tensor, cells: torch.Tensor, places: torch.Tensor) -> None:
        """Put `keys` and `values`, `[tokens, heads, head_size]`, at `places`, block * block_size + place in the block.

        `cells` are a layer's pages as `[blocks, heads, 2 * block_size, head_size]`.
        """
        from vllm._custom_ops import cpu_attn_reshape_and_cache

        caches = cells.chunk(2, dim=2)
        cpu_attn_reshape_and_cache(keys, values, *caches, places, self.isa, kv_cache_dtype=self.kv_cache_dtype)

    def written(self, values: torch.Tensor) -> torch.Tensor:
        """A block's cells `[heads, elements]` after `values` `[heads, 2, tokens, head_size]` were written to it."""
        heads, _, block_size, head_size = values.shape
        cells = torch.zeros(BLOCKS, heads, 2 * block_size, head_size, dtype=self.cache_dtype)
        keys, vals = (values[:, plane].transpose(0, 1).to(self.dtype).contiguous() for plane in (0, 1))
        self.write(keys, vals, cells, torch.arange((BLOCKS - 1) * block_size, BLOCKS * block_size))
        return cells[-1].reshape(heads, -1)


@cache
def probe_cell(block_size: int, head_size: int, kernel: CpuKernel) -> torch.Tensor:
    """`[2, block_size, head_size]`, int64: where in its cell each element of K, and of V, lies.

    Raises ValueError if what the kernel does is not a permutation within each cell, the same in every head.
    """
    cell = 2 * block_size * head_size
    names = torch.arange(HEADS * cell).view(HEADS, 2, block_size, head_size)
    # What a digit looks like, in a cache that may be quantised, is asked as well, for each place.
    looks = torch.stack([kernel.written(torch.full_like(names, digit)) for digit in range(RADIX)])
    found = torch.zeros(HEADS, cell, dtype=torch.int64)
    factor = 1
    while factor < HEADS * cell:
        found += factor * (looks == kernel.written(names // factor % RADIX)).int().argmax(0)
        factor *= RADIX
    found -= cell * torch.arange(HEADS).unsqueeze(1)
    permutation = torch.equal(found[0].sort().values, torch.arange(cell))
    if not permutation or not torch.equal(found, found[:1].expand_as(found)):
        raise ValueError(
            f"vLLM's CPU attention packs its cache (instruction set {kernel.isa!r}, block size {block_size}, head size "
            f"{head_size}, {kernel.dtype}, KV cache dtype {kernel.kv_cache_dtype!r}) in a way that "
            "LMCacheMPConnector does not know; please report this"
        )
    return found[0].argsort().view(2, block_size, head_size)


@dataclass(frozen=True, slots=True)
class Plane:
    """Where K, or V, is in the pages of one layer: element (block, head, token, element) is at `offset` + strides.

    All in elements.
    """

    offset: int
    block: int
    head: int
    token: Digits
    element: Digits

    def of_pages(self, first: torch.Tensor, layers: int, layer_stride: int) -> torch.Tensor:
        """`[layers, blocks, *token digits, heads, *element digits]` over the pages; `first`: the first layer's."""
        blocks, heads = first.shape[:2]
        dims = [(layers, layer_stride), (blocks, self.block), *self.token, (heads, self.head), *self.element]
        sizes, strides = zip(*dims, strict=True)
        return first.as_strided(sizes, strides, first.storage_offset() + self.offset)

    def of_slot(self, plane: torch.Tensor) -> torch.Tensor:
        """`plane`, `[layers, tokens, heads, head_size]` of whole blocks, cut into the dimensions of `of_pages`."""
        layers, tokens, heads, _ = plane.shape
        token, element = ([size for size, _ in digits] for digits in (self.token, self.element))
        return plane.view(layers, tokens // prod(token), *token, heads, *element)


def packed_plane(pages: torch.Tensor, positions: torch.Tensor) -> Plane | None:
    """K or V of pages whose cells are dense and hold token n, element d at `positions[n, d]`.

    None if the positions are not sums of strides.
    """
    offset = int(positions[0, 0])
    rows, columns = positions[:, 0] - offset, positions[0] - offset
    token, element = digits(rows), digits(columns)
    if token is None or element is None or not torch.equal(positions, offset + rows[:, None] + columns):
        return None
    return Plane(offset, pages.stride(0), pages.stride(1), token, element)


def digits(places: torch.Tensor) -> Digits | None:
    """The digits that put index i at `places[i]` (`places[0]` is 0); None if there are none."""
    result: list[tuple[int, int]] = []
    while len(places) > 1:
        stride = int(places[1])
        regular = places == stride * torch.arange(len(places))
        size = len(places) if bool(regular.all()) else int(regular.int().argmin())
        if len(places) % size or not torch.equal(places.view(-1, size), places[::size, None] + places[:size]):
            return None
        result.append((size, stride))
        places = places[::size]
    return tuple(reversed(result)) or ((1, 1),)
