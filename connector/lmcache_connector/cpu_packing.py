"""How vLLM's CPU attention packs K and V inside one (block, head) cell, found by asking it.

The packing depends on the instruction set that vLLM chose for a layer, and vLLM does not declare it. So we let vLLM's
own kernel write numbers that name their place into a scratch cache, read off where each of them went, and look for the
largest tile that all of the packing is made of (`tile_cell`). A cell has 2 * block_size * head_size elements; positions
count them.
"""

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from lmcache_connector.cpu_tiles import Addresses, Tile

__all__ = ["CpuKernel", "Tiling", "probe_cell", "tile_cell"]

RADIX = 8
"""Names are written digit by digit: these numbers are exact and different in every type that a cache may have."""
HEADS = 2
BLOCKS = 2

ROWS = (16, 8, 4, 2, 1)
VECTOR_BYTES = 64
"""Of a row of a tile, at most: what LLVM makes of it depends on the machine."""
WORD_BYTES = 8


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


class Tiling(NamedTuple):
    """One plane (K, or V) of a cell as tiles (see cpu_tiles). All distances in bytes."""

    tile: Tile
    in_cell: Addresses
    """`[tiles]`: where in its cell each tile is."""
    in_values: Addresses
    """`[tiles]`: where it is from the block's first token's row on, among rows."""
    step: int
    """Between the tile's vectors in the cell."""
    row: int
    """Between the rows of two tokens."""


def tile_cell(positions: Addresses, itemsize: int, row: int) -> Tiling:
    """The largest tile that a plane is made of whose tokens and elements are at `positions`, `[tokens, elements]`.

    `row` is the distance in bytes from a token's row to the next one's. There always is a tile: one element.
    """
    positions, itemsize = _as_words(positions, itemsize)
    tiles = [Tile(rows, columns, 8 * itemsize) for rows, columns in product(ROWS, _columns(itemsize))]
    for tile in sorted(tiles, key=lambda tile: tile.rows * tile.columns, reverse=True):
        step = _step(positions, tile)
        if step is not None:
            firsts = positions[:: tile.rows, :: tile.columns]
            tokens, elements = np.indices(firsts.shape) * np.array([tile.rows, tile.columns])[:, None, None]
            in_values = tokens * row + elements * itemsize
            return Tiling(tile, firsts.ravel() * itemsize, in_values.ravel(), step * itemsize, row)
    raise AssertionError("a tile of one element always fits")


def _columns(itemsize: int) -> list[int]:
    return [1 << power for power in range((VECTOR_BYTES // itemsize).bit_length())]


def _as_words(positions: Addresses, itemsize: int) -> tuple[Addresses, int]:
    """Elements that stay side by side in pairs are words of twice the size, and so on."""
    while itemsize < WORD_BYTES and positions.shape[1] % 2 == 0:
        even, odd = positions[:, ::2], positions[:, 1::2]
        if (even % 2).any() or not np.array_equal(odd, even + 1):
            break
        positions, itemsize = even // 2, 2 * itemsize
    return positions, itemsize


def _step(positions: Addresses, tile: Tile) -> int | None:
    """How far the vectors of each tile are from each other in the cell, in words; None if this is not the tile.

    In the cell a tile's words are, column by column, side by side. The columns may be apart if each is one vector.
    """
    tokens, words = positions.shape
    rows, columns = tile.rows, tile.columns
    if tokens % rows or words % columns or (columns == 1 < rows):
        return None
    tiles = (
        positions.reshape(tokens // rows, rows, words // columns, columns) - positions[::rows, None, ::columns, None]
    )
    apart = int(tiles[0, 0, 0, 1]) if columns > 1 else 1
    expected = np.arange(rows)[:, None, None] + apart * np.arange(columns)
    if not np.array_equal(tiles, np.broadcast_to(expected, tiles.shape)):
        return None
    if rows == columns:
        return apart
    return columns if apart == rows else None
