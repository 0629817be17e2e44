"""Copies between slots and the pages of vLLM's CPU attention, which packs K and V inside each (block, head) cell.

Where K and V are in a cell is probed once, at registration (see cpu_packing). Gathering then is a strided copy, or, for
a packing that no strides describe, a selection by index. Scattering is done by vLLM's own kernel, the same that writes
what the engine computes: it knows every packing, and writes the tokens it is given and nothing else.
"""

from collections.abc import Iterable, Sequence

import torch

from lmcache_connector.cpu_packing import probe_cell
from lmcache_connector.gpu_connector import ChunkCopy, all_layers, slot_planes
from lmcache_connector.layout import Piece, Plane, packed_plane
from lmcache_server.protocol.layout import KernelGroup

__all__ = ["PackedCopier"]

WIDER = {2: torch.int32, 4: torch.int64}
"""Two elements that stay together in both layouts move as one of twice the size (by bytes of one)."""


class PackedCopier:
    """For pages `[blocks, heads, block_size, 2 * head_size]` with dense cells, packed for the instruction set `isa`."""

    def __init__(self, pages: Sequence[torch.Tensor], group: KernelGroup, isa: str) -> None:
        """`pages` are in the order of `group.layers`; raises ValueError if their packing is unknown."""
        self._group = group
        self._isa = isa
        self._block_size = pages[0].shape[2]
        dense = (self._block_size * pages[0].shape[3], pages[0].shape[3], 1)
        if pages[0].stride()[1:] != dense:
            raise ValueError(f"expected pages with dense blocks, strides {dense}, got {pages[0].stride()[1:]}")
        positions = probe_cell(self._block_size, group.head_size, pages[0].dtype, isa)
        self._readers = [_reader(pages, table) for table in positions]
        self._caches = [page.view(len(page), group.heads, -1, group.head_size).chunk(2, dim=2) for page in pages]

    def page_lock(self, memory: torch.Tensor) -> None:
        """See Copier; nothing to do here."""

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        for slot, pieces in copies:
            for target, reader in zip(slot_planes(slot, self._group), self._readers, strict=True):
                for piece in pieces:
                    part = target[:, piece.in_chunk : piece.in_chunk + piece.tokens]
                    if piece.tokens == self._block_size:
                        reader.read(piece.block, part)
                    else:
                        part.copy_(self._whole_block(reader, piece, part))

    def scatter(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        from vllm._custom_ops import cpu_attn_reshape_and_cache

        for slot, pieces in copies:
            if not pieces:
                continue
            places = torch.cat([self._places(piece) for piece in pieces])
            start = pieces[0].in_chunk
            tokens = slot_planes(slot, self._group)[:, :, start : start + len(places)]
            for keys, values, (key_cache, value_cache) in zip(*tokens, self._caches, strict=True):
                cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, places, self._isa)

    def _places(self, piece: Piece) -> torch.Tensor:
        start = piece.block * self._block_size + piece.in_block
        return torch.arange(start, start + piece.tokens)

    def _whole_block(self, reader: "Reader", piece: Piece, part: torch.Tensor) -> torch.Tensor:
        """The piece's tokens, cut from a copy of its block: a packing may not let a part of a block be viewed."""
        block = part.new_empty(len(part), self._block_size, *part.shape[2:])
        reader.read(piece.block, block)
        return block[:, piece.in_block : piece.in_block + piece.tokens]


class StridedReader:
    """Reads one plane of a block as a strided copy."""

    def __init__(self, pages: Sequence[torch.Tensor], plane: Plane) -> None:
        self._plane = plane
        self._source = all_layers(plane, pages)
        self._pairs = plane.element[-1] == (2, 1) and self._source.itemsize in WIDER
        if self._pairs:
            self._source = self._source.view(WIDER[self._source.itemsize]).squeeze(-1)
        # A plane whose elements are far apart is read head by head, so that the cache lines in use fit the cache.
        self._heads = range(self._source.shape[2 + len(plane.token)]) if plane.element[-1][1] != 1 else None

    def read(self, block: int, into: torch.Tensor) -> None:
        """Copy a block to `into`, `[layers, block_size, heads, head_size]`."""
        target = self._plane.of_slot(into).squeeze(1)
        if self._pairs:
            target = target.view(self._source.dtype).squeeze(-1)
        source = self._source[:, block]
        axis = 1 + len(self._plane.token)
        if self._heads is None:
            target.copy_(source)
        else:
            for head in self._heads:
                target.select(axis, head).copy_(source.select(axis, head))


class IndexedReader:
    """Reads one plane of a block element by element, for packings without strides."""

    def __init__(self, pages: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        heads, cell = pages[0].shape[1], positions.numel() * 2
        whole = Plane(0, pages[0].stride(0), pages[0].stride(1), ((1, 1),), ((cell, 1),))
        self._cells = all_layers(whole, pages).view(len(pages), -1, heads, cell)
        self._positions = positions.flatten()

    def read(self, block: int, into: torch.Tensor) -> None:
        """Copy a block to `into`, `[layers, block_size, heads, head_size]`."""
        layers, tokens, heads, size = into.shape
        found = self._cells[:, block].index_select(-1, self._positions)
        into.copy_(found.view(layers, heads, tokens, size).transpose(1, 2))


Reader = StridedReader | IndexedReader


def _reader(pages: Sequence[torch.Tensor], positions: torch.Tensor) -> Reader:
    plane = packed_plane(pages[0], positions)
    return IndexedReader(pages, positions) if plane is None else StridedReader(pages, plane)
