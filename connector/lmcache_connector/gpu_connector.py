"""Copies between the engine's pages and slots, all layers at once.

    gather    pages -> slots   after the forward pass that computed them
    scatter   slots -> pages   before the forward pass that reads them

Both return when the bytes are where they belong. A scatter may run in a thread of its own, several at a time: it waits
for a `fence` that the engine's thread has set, behind which nothing that the engine has begun uses the blocks any more.

`StagedCopier` is for attention backends that declare where K and V are (see layout.row_tables). It works on the device,
on a stream of its own: per chunk, plane and allocation one selection of rows, whatever the number of layers, into or
out of a staging buffer that looks like a slot, so that each chunk crosses between host and device in one copy (see
page_lock). Pages in the host's memory need no staging. Nothing in it needs a GPU, and its tests run it on CPU tensors:
IT HAS NOT RUN ON A GPU YET.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from lmcache_connector.layout import Piece, check_pages, row_tables, token_places
from lmcache_server.protocol.layout import ITEM_BYTES, KernelGroup

__all__ = ["ChunkCopy", "Copier", "Fence", "StagedCopier", "slot_planes"]

Fence = torch.cuda.Event | None
"""A point in the work that the engine has given to its device; None where all of it is done."""


class ChunkCopy(NamedTuple):
    """One chunk's slot, as flat bytes, and which of its tokens lie in which blocks, in order and without a gap."""

    slot: torch.Tensor
    pieces: Sequence[Piece]


class Copier(Protocol):
    """Moves tokens between the pages of one kernel group and slots. Blocks are the engine's, not its kernels'."""

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """Fill the slots from the pages; the pieces of each must be all of its tokens."""

    def fence(self) -> Fence:
        """The point that the engine's work has reached; to be called in the engine's thread."""

    def scatter(self, copies: Iterable[ChunkCopy], after: Fence = None) -> None:
        """Write the pieces' part of each slot to the pages, `after` that point; nothing else in the pages changes."""


def slot_planes(slot: torch.Tensor, group: KernelGroup) -> torch.Tensor:
    """A slot's bytes as `[planes, layers, tokens, heads, head_size]`; planes: K and V, or the latent vectors."""
    values = slot.view(getattr(torch, group.dtype))
    return values.view(group.planes, len(group.layers), -1, group.heads, group.head_size)


class StagedCopier:
    """For pages whose K and V, or latent vectors, are plain strided tensors, on any device."""

    def __init__(self, pages: Sequence[torch.Tensor], group: KernelGroup, block_size: int) -> None:
        """`pages`, each `[blocks, heads, tokens, planes * head_size]`, are in the order of `group.layers`.

        The engine's blocks have `block_size` tokens, its kernels' (`tokens`) as many or a divisor of that. Raises
        ValueError if the pages do not fit the group.
        """
        check_pages(pages, group, block_size)
        self._group = group
        self._block_size = block_size
        self._tables = row_tables(pages, group)
        self._device = pages[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        with self._on_own_stream(self.fence()):
            for slot, _, places in self._with_places(copies):
                staging = slot if self._stream is None else torch.empty_like(slot, device=self._device)
                for units, numbers, vectors in self._selections(staging, places):
                    torch.index_select(units, 0, numbers, out=vectors.view(-1, units.shape[1]))
                if staging is not slot:
                    slot.copy_(staging, non_blocking=True)
        self._finish()

    def fence(self) -> Fence:
        """See Copier."""
        if self._stream is None:
            return None
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record(torch.cuda.current_stream(self._device))
        return reached

    def scatter(self, copies: Iterable[ChunkCopy], after: Fence = None) -> None:
        """See Copier."""
        with self._on_own_stream(after):
            for slot, first, places in self._with_places(copies):
                staging = slot if self._stream is None else slot.to(self._device, non_blocking=True)
                for units, numbers, vectors in self._selections(staging, places):
                    part = vectors[:, first : first + len(places)].reshape(-1, units.shape[1])
                    units.index_copy_(0, numbers, part)
        self._finish()

    def _with_places(self, copies: Iterable[ChunkCopy]) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """Each slot that has tokens to copy: (its bytes, its first token, where the tokens are, on the device)."""
        wanted = [copy for copy in copies if copy.pieces]
        pieces = [piece for copy in wanted for piece in copy.pieces]
        places = token_places(pieces, self._block_size).to(self._device)
        counts = [sum(piece.tokens for piece in copy.pieces) for copy in wanted]
        for (slot, (first, *_)), part in zip(wanted, torch.split(places, counts), strict=True):
            yield slot, first.in_chunk, part

    def _selections(
        self, slot: torch.Tensor, places: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each plane in each allocation: (units, their numbers, the slot's vectors `[layers, tokens, words]`)."""
        group = self._group
        row = group.heads * group.head_size * ITEM_BYTES[group.dtype]
        planes = slot.view(group.planes, len(group.layers), -1, row)
        for table in self._tables:
            numbers = table.numbers(places)
            for plane, vectors in enumerate(planes):
                units = table.units[plane * table.plane :]
                yield units, numbers, vectors[table.layers].view(units.dtype)

    def _on_own_stream(self, after: Fence) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()
