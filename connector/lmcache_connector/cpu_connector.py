"""Copies between slots and the pages of vLLM's CPU attention, which packs K and V inside each (block, head) cell.

Where K and V are in a cell is probed once, at registration (see cpu_packing). After that a block is a strided copy in
either direction, or, for a packing that no strides describe, a selection by index. Bytes are moved as they are, so a
quantised cache is no different. A block of which only a part is wanted is copied whole to the side: a packing may not
let a part of it be viewed; what was in the rest of it before is what is in it after. Interleaved packings are scattered
by vLLM's own kernel where it does not quantise: it is a quarter faster there, and half as fast as a copy elsewhere.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from lmcache_connector.cpu_packing import CpuKernel, Plane, packed_plane, probe_cell
from lmcache_connector.gpu_connector import ChunkCopy, Fence, slot_planes
from lmcache_connector.layout import WORDS, Piece, check_pages, cut_at, equal_steps, token_places
from lmcache_server.protocol.layout import KernelGroup

__all__ = ["PackedCopier"]

WIDER = {1: torch.int16, 2: torch.int32, 4: torch.int64}
"""Two elements that stay together in both layouts move as one of twice the size (by bytes of one)."""


class PackedCopier:
    """For pages `[blocks, heads, block_size, 2 * head_size]` with dense cells, packed by vLLM's `kernel`."""

    def __init__(self, pages: Sequence[torch.Tensor], group: KernelGroup, block_size: int, kernel: CpuKernel) -> None:
        """`pages` are in the order of `group.layers`; the engine's blocks have `block_size` tokens, the pages' as many
        or a divisor of that. Raises ValueError if the pages do not fit the group or their packing is unknown.
        """
        check_pages(pages, group, block_size)
        self.kernel = kernel
        self._group = group
        self._block_size = block_size
        self._word = WORDS[pages[0].itemsize]
        cells = [page.view(self._word) for page in pages]
        self._tokens, content = cells[0].shape[2:]
        for page in cells:
            if page.shape[2] != self._tokens or page.stride()[1:] != (self._tokens * content, content, 1):
                raise ValueError(
                    f"expected pages with dense blocks of {self._tokens} tokens, got {list(page.shape)} with strides "
                    f"{page.stride()}"
                )
        positions = probe_cell(self._tokens, group.head_size, kernel)
        self._runs = [
            (layers, [packed_cells(cells[layers], step, table) for table in positions])
            for layers, step in equal_steps(cells)
        ]
        interleaved = any(isinstance(plane, PairedCells) for _, run in self._runs for plane in run)
        self._by_kernel = interleaved and not kernel.quantises
        self._layers = [page.view(len(page), group.heads, -1, group.head_size) for page in pages]

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        for cells, piece, part in self._parts(copies):
            if piece.tokens == self._tokens:
                cells.read(piece.block, part)
            else:
                part.copy_(_in_block(self._whole(cells, piece, part), piece))

    def fence(self) -> Fence:
        """See Copier; on a CPU all that was begun is done."""
        return None

    def scatter(self, copies: Iterable[ChunkCopy], after: Fence = None) -> None:
        """See Copier."""
        if self._by_kernel:
            self._scatter_by_kernel(copies)
            return
        for cells, piece, part in self._parts(copies):
            if piece.tokens == self._tokens:
                cells.write(piece.block, part)
            else:
                whole = self._whole(cells, piece, part)
                _in_block(whole, piece).copy_(part)
                cells.write(piece.block, whole)

    def _scatter_by_kernel(self, copies: Iterable[ChunkCopy]) -> None:
        for slot, pieces in copies:
            if pieces:
                places = token_places(pieces, self._block_size)
                start = pieces[0].in_chunk
                tokens = slot_planes(slot, self._group)[:, :, start : start + len(places)]
                for keys, values, cells in zip(*tokens, self._layers, strict=True):
                    self.kernel.write(keys, values, cells, places)

    def _parts(self, copies: Iterable[ChunkCopy]) -> Iterator[tuple["Cells", Piece, torch.Tensor]]:
        """What to copy: (the cells, which of their tokens, the slot's values `[layers, tokens, heads, head_size]`)."""
        for slot, pieces in copies:
            planes = slot_planes(slot, self._group).view(self._word)
            for piece in cut_at(self._tokens, pieces, self._block_size):
                for layers, run in self._runs:
                    for cells, values in zip(run, planes[:, layers], strict=True):
                        yield cells, piece, values[:, piece.in_chunk : piece.in_chunk + piece.tokens]

    def _whole(self, cells: "Cells", piece: Piece, part: torch.Tensor) -> torch.Tensor:
        """A copy of the piece's block."""
        whole = part.new_empty(len(part), self._tokens, *part.shape[2:])
        cells.read(piece.block, whole)
        return whole


def _in_block(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    return whole[:, piece.in_block : piece.in_block + piece.tokens]


class StridedCells:
    """One plane of some layers' blocks, as strided copies."""

    def __init__(self, pages: Sequence[torch.Tensor], step: int, plane: Plane) -> None:
        self._plane = plane
        self._cells = plane.of_pages(pages[0], len(pages), step)
        self._wider = WIDER[self._cells.itemsize] if plane.element[-1] == (2, 1) else None
        if self._wider is not None:
            self._cells = self._cells.view(self._wider).squeeze(-1)
        # A plane whose elements are far apart is copied head by head, so that the cache lines in use fit the cache.
        self._by_head = plane.element[-1][1] != 1

    def read(self, block: int, values: torch.Tensor) -> None:
        """Copy a block to `values`, `[layers, block_size, heads, head_size]`."""
        for cells, part in self._pairs(block, values):
            part.copy_(cells)

    def write(self, block: int, values: torch.Tensor) -> None:
        """Copy `values`, `[layers, block_size, heads, head_size]`, to a block."""
        for cells, part in self._pairs(block, values):
            cells.copy_(part)

    def _pairs(self, block: int, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The block's cells and the values that belong there, in the same shape."""
        cells, values = self._cells[:, block], self._plane.of_slot(values).squeeze(1)
        if self._wider is not None:
            values = values.view(self._wider).squeeze(-1)
        if self._by_head:
            axis = 1 + len(self._plane.token)
            yield from zip(cells.unbind(axis), values.unbind(axis), strict=True)
        else:
            yield cells, values


class PairedCells:
    """One plane of some layers' blocks where tokens 2n and 2n + 1 are interleaved element by element.

    An element of both is one word of twice the size, so words are copied, and taken apart or put together outside the
    cells, where they lie in long rows: a third faster than element by element.
    """

    def __init__(self, pages: Sequence[torch.Tensor], step: int, plane: Plane) -> None:
        cells = plane.of_pages(pages[0], len(pages), step).movedim(1 + len(plane.token), -1)
        self._bits = 8 * cells.itemsize
        self._words = cells.view(WIDER[cells.itemsize]).squeeze(-1)

    def read(self, block: int, values: torch.Tensor) -> None:
        """Copy a block to `values`, `[layers, block_size, heads, head_size]`."""
        first, second = _by_twos(values)
        words = self._words[:, block].contiguous().view(first.shape)
        first.copy_(words)  # the lower half: a narrower integer keeps the lowest bits
        second.copy_(words.bitwise_right_shift_(self._bits))

    def write(self, block: int, values: torch.Tensor) -> None:
        """Copy `values`, `[layers, block_size, heads, head_size]`, to a block."""
        first, second = _by_twos(values)
        words = second.to(self._words.dtype).bitwise_left_shift_(self._bits)
        words |= first.to(words.dtype).bitwise_and_((1 << self._bits) - 1)
        cells = self._words[:, block]
        cells.copy_(words.view(cells.shape))


def _by_twos(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tokens 0, 2, 4, ... and tokens 1, 3, 5, ... of `[layers, tokens, heads, head_size]`."""
    return values[:, 0::2], values[:, 1::2]


class IndexedCells:
    """One plane of some layers' blocks, element by element, for packings without strides."""

    def __init__(self, pages: Sequence[torch.Tensor], step: int, positions: torch.Tensor) -> None:
        heads, cell = pages[0].shape[1], positions.numel() * 2
        whole = Plane(0, pages[0].stride(0), pages[0].stride(1), ((1, 1),), ((cell, 1),))
        self._cells = whole.of_pages(pages[0], len(pages), step).view(len(pages), -1, heads, cell)
        self._positions = positions.flatten()

    def read(self, block: int, values: torch.Tensor) -> None:
        """Copy a block to `values`, `[layers, block_size, heads, head_size]`."""
        layers, tokens, heads, size = values.shape
        found = self._cells[:, block].index_select(-1, self._positions)
        values.copy_(found.view(layers, heads, tokens, size).transpose(1, 2))

    def write(self, block: int, values: torch.Tensor) -> None:
        """Copy `values`, `[layers, block_size, heads, head_size]`, to a block."""
        flat = values.transpose(1, 2).flatten(2)
        self._cells[:, block].index_copy_(-1, self._positions, flat)


Cells = StridedCells | PairedCells | IndexedCells


def packed_cells(pages: Sequence[torch.Tensor], step: int, positions: torch.Tensor) -> Cells:
    """The plane whose elements are at `positions` in the cells of `pages`, which are `step` elements apart."""
    plane = packed_plane(pages[0], positions)
    if plane is None:
        return IndexedCells(pages, step, positions)
    if plane.token[-1] == (2, 1) and sys.byteorder == "little":
        return PairedCells(pages, step, plane)
    return StridedCells(pages, step, plane)
