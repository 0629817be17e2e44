"""Where a token's K and V are, in the engine's pages and in a chunk's slot. Shape arithmetic only: nothing is copied.

    pages   per layer a tensor [blocks, heads, block_size, C], in whatever physical order its strides tell;
            one (block, head) cell holds the K and V of block_size tokens
    slot    [2, layers, chunk_size, heads, head_size], contiguous: K, then V (see lmcache_server.protocol.layout)

A layout is declared (by shape and strides) or probed (see cpu_packing), never guessed from a shape. Lengths and strides
are in elements unless they are called bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

__all__ = ["Digits", "Piece", "Plane", "chunk_pieces", "common_stride", "declared_planes", "digits", "packed_plane"]

Digits = tuple[tuple[int, int], ...]
"""An index cut into digits, most significant first, each with its (size, stride): (i, j) of ((4, 32), (16, 2)) is index
16 * i + j and lies at 32 * i + 2 * j."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Where K, or V, is in the pages of one layer: element (block, head, token, element) is at `offset` + strides."""

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


def declared_planes(pages: torch.Tensor, head_size: int) -> tuple[Plane, Plane]:
    """K and V of pages `[blocks, heads, block_size, 2 * head_size]` that hold K, then V, for each token."""
    block, head, token, element = pages.stride()
    tokens = ((pages.shape[2], token),)
    elements = ((head_size, element),)
    return (
        Plane(0, block, head, tokens, elements),
        Plane(head_size * element, block, head, tokens, elements),
    )


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


def common_stride(pages: Sequence[torch.Tensor]) -> int | None:
    """The distance between the pages of consecutive layers, if they are equal steps in one storage."""
    first = pages[0]
    if any(page.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for page in pages):
        return None
    offsets = [page.storage_offset() for page in pages]
    steps = {int(b - a) for a, b in pairwise(offsets)}
    return None if len(steps) > 1 or min(steps, default=0) < 0 else max(steps, default=0)


class Piece(NamedTuple):
    """`tokens` tokens that lie together in one chunk, from `in_chunk` on, and in block `block`, from `in_block` on."""

    in_chunk: int
    block: int
    in_block: int
    tokens: int


def chunk_pieces(
    chunk: int, first: int, end: int, chunk_size: int, block_size: int, block_ids: Sequence[int]
) -> list[Piece]:
    """The tokens of `chunk` that are in [first, end), cut at block boundaries.

    Token t of the request lies in block `block_ids[t // block_size]`:

        tokens    0 ............ first ........................ end ....
        chunks    |      chunk - 1      |       chunk       |       ...
        blocks    | ids[0] | ids[1] | ids[2] | ids[3] | ids[4] | ...
        pieces                          [2..][ ids[3] ][4..]
    """
    start, stop = max(first, chunk * chunk_size), min(end, (chunk + 1) * chunk_size)
    pieces = []
    while start < stop:
        index, in_block = divmod(start, block_size)
        tokens = min(stop - start, block_size - in_block)
        pieces.append(Piece(start - chunk * chunk_size, block_ids[index], in_block, tokens))
        start += tokens
    return pieces
