"""Copies between slots and the pages of vLLM's CPU attention, which packs K and V inside each (block, head) cell.

Where K and V are in a cell is probed once, at registration, and cut into tiles (see cpu_packing). After that all whole
blocks of a copy, of all layers and heads, are one call of a compiled function for K and one for V, shared by a few
threads. Bytes are moved as they are, so a quantised cache is no different. A block of which only a part is wanted is
copied whole to the side: what was in the rest of it before is what is in it after.

The compiled functions get addresses and check nothing. So the pages are checked when the copier is made, and before
each copy that every block is one of the pages' and that its tokens are inside of its slot.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lmcache_connector.cpu_packing import CpuKernel, probe_cell, tile_cell
from lmcache_connector.cpu_tiles import Addresses, Copy, compile_read, compile_write
from lmcache_connector.crew import crew
from lmcache_connector.gpu_connector import ChunkCopy, Fence, slot_planes
from lmcache_connector.layout import Piece, check_pages, cut_at
from lmcache_server.protocol.layout import KernelGroup, slot_bytes

__all__ = ["PackedCopier"]


class Block(NamedTuple):
    """A whole block, and where in a slot its tokens begin."""

    slot: torch.Tensor
    in_slot: int
    block: int


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
        self._pages = pages  # keeps what the addresses lie in
        self._tokens, content = pages[0].shape[2:]
        for page in pages:
            if page.shape[2] != self._tokens or page.stride()[1:] != (self._tokens * content, content, 1):
                raise ValueError(
                    f"expected pages with dense blocks of {self._tokens} tokens, got {list(page.shape)} with strides "
                    f"{page.stride()}"
                )
        self._count = min(len(page) for page in pages)
        item = pages[0].itemsize
        self._cell = self._tokens * content * item
        self._firsts = np.array([[page.data_ptr()] for page in pages])
        self._steps = np.array([[page.stride(0) * item] for page in pages])
        positions = probe_cell(self._tokens, group.head_size, kernel).numpy()
        self._tilings = [tile_cell(plane, item, slot_bytes(group, 1) // 2 // len(pages)) for plane in positions]
        self._reads = [compile_read(tiling.tile) for tiling in self._tilings]
        self._writes = [compile_write(tiling.tile) for tiling in self._tilings]

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        whole, parts = self._blocks(copies)
        self._move(whole, self._reads)
        for slot, piece in parts:
            _part(slot_planes(slot, self._group), piece.in_chunk, piece).copy_(self._part_aside(piece)[1])

    def fence(self) -> Fence:
        """See Copier; on a CPU all that was begun is done."""
        return None

    def scatter(self, copies: Iterable[ChunkCopy], after: Fence = None) -> None:
        """See Copier."""
        whole, parts = self._blocks(copies)
        self._move(whole, self._writes)
        for slot, piece in parts:
            aside, part = self._part_aside(piece)
            part.copy_(_part(slot_planes(slot, self._group), piece.in_chunk, piece))
            self._move([Block(aside, 0, piece.block)], self._writes)

    def _blocks(self, copies: Iterable[ChunkCopy]) -> tuple[list[Block], list[tuple[torch.Tensor, Piece]]]:
        """The whole blocks of the copies, and the pieces that are less."""
        whole, parts = [], []
        for slot, pieces in copies:
            for piece in cut_at(self._tokens, pieces, self._block_size):
                if piece.tokens == self._tokens:
                    whole.append(Block(slot, piece.in_chunk, piece.block))
                else:
                    parts.append((slot, piece))
        return whole, parts

    def _move(self, blocks: Sequence[Block], copies: Sequence[Copy]) -> None:
        """Copy whole blocks; their slots are of one size."""
        if not blocks:
            return
        cells = self._cells_of(blocks)
        planes = self._planes_of(blocks)

        def work(part: slice) -> None:
            for copy, tiling, values in zip(copies, self._tilings, planes, strict=True):
                copy(cells[part], values[part], tiling.in_cell, tiling.in_values, tiling.step, tiling.row)

        crew().share(work, len(cells), len(cells) * self._cell)

    def _cells_of(self, blocks: Sequence[Block]) -> Addresses:
        """`[blocks * layers * heads]`: the blocks' cells."""
        numbers = np.array([block.block for block in blocks])[:, None, None]
        if numbers.min() < 0 or numbers.max() >= self._count:
            raise IndexError(f"expected blocks from 0 to {self._count - 1}, got {numbers.min()} to {numbers.max()}")
        heads = self._cell * np.arange(self._group.heads)
        cells: Addresses = self._firsts + self._steps * numbers + heads
        return cells.ravel()

    def _planes_of(self, blocks: Sequence[Block]) -> list[Addresses]:
        """For K and for V, in the order of the cells: the rows of the blocks' first tokens, in their slots."""
        group, slot = self._group, blocks[0].slot
        token = self._tilings[0].row
        layer = slot.nbytes // 2 // len(group.layers)
        end = max(block.in_slot for block in blocks) + self._tokens
        if any(block.slot.nbytes != slot.nbytes or not block.slot.is_contiguous() for block in blocks):
            raise ValueError("expected contiguous slots of one size")
        if slot.nbytes % slot_bytes(group, 1) or end * token > layer:
            raise ValueError(f"expected slots of at least {end} whole tokens, got {slot.nbytes} bytes")
        firsts = np.array([block.slot.data_ptr() + block.in_slot * token for block in blocks])[:, None, None]
        layers = layer * np.arange(len(group.layers))[:, None]
        heads = token // group.heads * np.arange(group.heads)
        keys = (firsts + layers + heads).ravel()
        return [keys, keys + slot.nbytes // 2]

    def _part_aside(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the piece's block, which looks like a slot, and the piece in it."""
        aside = torch.empty(slot_bytes(self._group, self._tokens), dtype=torch.uint8)
        self._move([Block(aside, 0, piece.block)], self._reads)
        return aside, _part(slot_planes(aside, self._group), piece.in_block, piece)


def _part(planes: torch.Tensor, first: int, piece: Piece) -> torch.Tensor:
    return planes[:, :, first : first + piece.tokens]
