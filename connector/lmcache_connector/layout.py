"""Where a token's vectors are, in the engine's pages and in a chunk's slot. Arithmetic and views: nothing is copied.

    pages   per layer a tensor [blocks, heads, block_size, C], in whatever physical order, with whatever padding and at
            whatever place its strides tell; C holds K, then V, or one latent vector
    slot    [planes, layers, chunk_size, heads, head_size], contiguous (see lmcache_server.protocol.layout)

A layout is declared (by shape and strides) or probed (see cpu_packing), never guessed from a shape. Declared pages are
seen as tables of rows: a row is one plane's vector of one token and head, and every row has a number that is a sum of
strides, so all layers, tokens and heads of a chunk are one selection, whatever the layout. The engine may cut its
blocks into smaller kernel blocks, which lie one after the other: a token's place, counted in tokens from the first
block on, is the same in both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch

from lmcache_server.protocol.layout import ITEM_BYTES, KernelGroup

__all__ = [
    "WORDS",
    "Piece",
    "RowTable",
    "check_pages",
    "chunk_pieces",
    "cut_at",
    "row_tables",
    "token_places",
]

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes are moved as integers of this many bytes, so that no bit pattern is ever taken for a number."""


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
    cuts = _cuts(start, stop, block_size)
    return [Piece(at - chunk * chunk_size, block_ids[i], in_block, tokens) for at, i, in_block, tokens in cuts]


def cut_at(kernel_block_size: int, pieces: Sequence[Piece], block_size: int) -> list[Piece]:
    """The same tokens, in kernel blocks instead of the engine's."""
    result = []
    for in_chunk, block, in_block, tokens in pieces:
        start = block * block_size + in_block
        for at, *cut in _cuts(start, start + tokens, kernel_block_size):
            result.append(Piece(in_chunk + at - start, *cut))
    return result


def _cuts(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """[start, stop) cut at multiples of `size`: (from, which multiple, how far behind it, length)."""
    while start < stop:
        index, behind = divmod(start, size)
        length = min(stop - start, size - behind)
        yield start, index, behind, length
        start += length


def token_places(pieces: Sequence[Piece], block_size: int) -> torch.Tensor:
    """`[tokens]`, int64: block * block_size + place in the block, of the pieces' tokens one after the other."""
    starts = torch.tensor([piece.block * block_size + piece.in_block for piece in pieces], dtype=torch.int64)
    lengths = torch.tensor([piece.tokens for piece in pieces], dtype=torch.int64)
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if pieces else 0
    return torch.arange(total) + (starts - ends + lengths).repeat_interleave(lengths)


def check_pages(pages: Sequence[torch.Tensor], group: KernelGroup, block_size: int) -> None:
    """Raise ValueError unless these can be the pages of the group's layers, in blocks of `block_size` tokens."""
    content = group.planes * group.head_size
    if len(pages) != len(group.layers):
        raise ValueError(f"expected the KV caches of {len(group.layers)} layers, got {len(pages)}")
    for layer, page in zip(group.layers, pages, strict=True):
        fits = (
            page.dim() == 4
            and (page.shape[1], page.shape[3]) == (group.heads, content)
            and block_size % page.shape[2] == 0
            and page.itemsize == ITEM_BYTES[group.dtype]
        )
        if not fits:
            raise ValueError(
                f"layer {layer}: expected a KV cache [blocks, {group.heads}, {block_size} or a divisor of it, "
                f"{content}] of {group.dtype}, got {list(page.shape)} of {page.dtype}"
            )


@dataclass(frozen=True, slots=True)
class RowTable:
    """The pages of some consecutive layers, in one allocation, as rows. All numbers are in units: a row is one or
    several units, the largest that all rows begin and end at.
    """

    layers: slice
    """Which of the group's layers."""
    units: torch.Tensor
    """`[units, words]`: the allocation, from the first layer's first row on or a little before."""
    firsts: torch.Tensor
    """`[layers, 1]`, int64: the first unit of each layer."""
    vectors: torch.Tensor
    """`[heads * units per row]`, int64: where the units of a token's vectors are, counted from its first."""
    block_size: int
    """Tokens of a kernel block."""
    block: int
    token: int
    plane: int
    """Distances: from a kernel block to the next, from a token to the next, from K to V."""

    def numbers(self, places: torch.Tensor) -> torch.Tensor:
        """`[layers * tokens * heads * units per row]`: the units of plane 0 of the tokens at `places`, in the order of
        a slot; `units[plane * p:]` has those of plane p at the same numbers.
        """
        blocks = places.div(self.block_size, rounding_mode="floor")
        starts = blocks * (self.block - self.block_size * self.token) + places * self.token
        return (self.firsts + (starts[:, None] + self.vectors).flatten()).flatten()


def row_tables(pages: Sequence[torch.Tensor], group: KernelGroup) -> list[RowTable]:
    """`pages` `[blocks, heads, block_size, planes * head_size]`, in the order of the group's layers, as few tables.

    Layers may lie anywhere; those that share an allocation share a table. Raises ValueError if the elements of a
    vector do not lie side by side.
    """
    for layer, page in zip(group.layers, pages, strict=True):
        if page.stride(3) != 1:
            raise ValueError(f"layer {layer}: expected a KV cache whose last stride is 1, got strides {page.stride()}")
    return [_row_table(pages[run], run, group) for run in _runs(pages)]


def _row_table(pages: Sequence[torch.Tensor], layers: slice, group: KernelGroup) -> RowTable:
    first, item = pages[0], pages[0].itemsize
    row = group.head_size * item
    # The stride of a dimension of size 1 means nothing.
    block, head, token = (
        stride * item if size > 1 else 0 for size, stride in zip(first.shape[:3], first.stride()[:3], strict=True)
    )
    starts = [int(page.storage_offset()) * item for page in pages]
    unit = gcd(row, block, head, token, *(start - starts[0] for start in starts))
    origin = starts[0] % unit
    vectors = head // unit * torch.arange(group.heads)[:, None] + torch.arange(row // unit)
    return RowTable(
        layers=layers,
        units=_units(first, origin, unit),
        firsts=(torch.tensor(starts)[:, None] // unit).to(first.device),
        vectors=vectors.flatten().to(first.device),
        block_size=first.shape[2],
        block=block // unit,
        token=token // unit,
        plane=row // unit,
    )


def _units(page: torch.Tensor, origin: int, unit: int) -> torch.Tensor:
    """The allocation of `page` from byte `origin` on, `[units, words]`."""
    storage = page.untyped_storage()
    count = (storage.nbytes() - origin) // unit
    memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=page.device).set_(storage, origin, (count * unit,))  # type: ignore[call-overload]
    word = next(word for size, word in WORDS.items() if unit % size == origin % size == 0)
    return memory.view(word).view(count, unit // word.itemsize)


def _runs(pages: Sequence[torch.Tensor]) -> list[slice]:
    """The longest runs of layers whose pages differ by nothing but their place in one allocation."""

    def kind(page: torch.Tensor) -> tuple[object, ...]:
        return page.untyped_storage().data_ptr(), page.dtype, page.shape, page.stride()

    ends = [i for i in range(1, len(pages)) if kind(pages[i]) != kind(pages[i - 1])]
    return [slice(start, end) for start, end in pairwise([0, *ends, len(pages)])]
