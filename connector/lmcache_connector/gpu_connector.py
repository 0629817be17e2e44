"""Copies between the engine's pages and slots, all layers at once.

    gather    pages -> slots   after the forward pass that computed them
    scatter   slots -> pages   before the forward pass that reads them

Both return when the bytes are where they belong. `StagedCopier` is for attention backends that declare where K and V
are (see layout.declared_planes). It works on the device, on a stream of its own, through a staging buffer that looks
like a slot, so that each chunk crosses between host and device in one copy; for that the pool is page-locked once.
Nothing in it needs a GPU, and its tests run it on CPU tensors: IT HAS NOT RUN ON A GPU YET.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from lmcache_connector.layout import Piece, Plane, common_stride, declared_planes
from lmcache_server.protocol.layout import KernelGroup

__all__ = ["ChunkCopy", "Copier", "StagedCopier", "all_layers", "slot_planes"]


class ChunkCopy(NamedTuple):
    """One chunk's slot, as flat bytes, and which of its tokens lie in which blocks."""

    slot: torch.Tensor
    pieces: Sequence[Piece]


class Copier(Protocol):
    """Moves tokens between the pages of one kernel group and slots."""

    def page_lock(self, memory: torch.Tensor) -> None:
        """Make the memory that slots lie in fit for fast copies; `memory` replaces what was locked before."""

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """Fill the slots from the pages; the pieces of each must be all of its tokens."""

    def scatter(self, copies: Iterable[ChunkCopy]) -> None:
        """Write the pieces' part of each slot to the pages; nothing else in the pages changes."""


def slot_planes(slot: torch.Tensor, group: KernelGroup) -> torch.Tensor:
    """A slot's bytes as `[2, layers, tokens, heads, head_size]`."""
    values = slot.view(getattr(torch, group.dtype))
    return values.view(2, len(group.layers), -1, group.heads, group.head_size)


def all_layers(plane: Plane, pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """`plane` in the pages of all layers, without a copy.

    Raises ValueError if the layers' pages are not at equal distances in one allocation.
    """
    stride = common_stride(pages)
    if stride is None or any(page.stride() != pages[0].stride() for page in pages):
        raise ValueError(
            "the KV caches of this model's layers do not lie at equal distances in one allocation, which "
            "LMCacheMPConnector needs; please report the model and the attention backend"
        )
    return plane.of_pages(pages[0], len(pages), stride)


class StagedCopier:
    """For pages whose K and V are plain strided tensors, on any device."""

    def __init__(self, pages: Sequence[torch.Tensor], group: KernelGroup) -> None:
        """`pages`, each `[blocks, heads, block_size, 2 * head_size]`, are in the order of `group.layers`."""
        self._group = group
        self._device = pages[0].device
        self._block_size = pages[0].shape[2]
        self._planes = [all_layers(plane, pages) for plane in declared_planes(pages[0], group.head_size)]
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._locked: torch.Tensor | None = None

    def page_lock(self, memory: torch.Tensor) -> None:
        """See Copier."""
        if self._stream is None:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._locked is not None:
            cudart.cudaHostUnregister(self._locked.data_ptr())
        torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        self._locked = memory

    def gather(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        with self._on_own_stream():
            for slot, pieces in copies:
                target = slot_planes(slot, self._group)
                staging = torch.empty_like(target, device=self._device)
                for start, ids in self._whole_blocks(pieces):
                    for plane, pages in zip(staging, self._planes, strict=True):
                        found = pages.index_select(1, ids)
                        _tokens(plane, start, found.shape[1] * self._block_size).view(found.shape).copy_(found)
                for piece in self._partial_blocks(pieces):
                    for plane, pages in zip(staging, self._planes, strict=True):
                        _tokens(plane, piece.in_chunk, piece.tokens).copy_(_in_block(pages, piece))
                target.copy_(staging, non_blocking=True)
        self._finish()

    def scatter(self, copies: Iterable[ChunkCopy]) -> None:
        """See Copier."""
        with self._on_own_stream():
            for slot, pieces in copies:
                staging = slot_planes(slot, self._group).to(self._device, non_blocking=True)
                for start, ids in self._whole_blocks(pieces):
                    for plane, pages in zip(staging, self._planes, strict=True):
                        source = _tokens(plane, start, len(ids) * self._block_size)
                        pages.index_copy_(1, ids, source.view(len(source), len(ids), *pages.shape[2:]))
                for piece in self._partial_blocks(pieces):
                    for plane, pages in zip(staging, self._planes, strict=True):
                        _in_block(pages, piece).copy_(_tokens(plane, piece.in_chunk, piece.tokens))
        self._finish()

    def _whole_blocks(self, pieces: Sequence[Piece]) -> Iterable[tuple[int, torch.Tensor]]:
        """The blocks that lie whole in the chunk, one after the other: (first token in it, ids on the device)."""
        whole = [piece for piece in pieces if piece.tokens == self._block_size]
        if whole:
            yield whole[0].in_chunk, torch.tensor([piece.block for piece in whole], device=self._device)

    def _partial_blocks(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if piece.tokens != self._block_size]

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()


def _tokens(plane: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return plane[:, start : start + count]


def _in_block(pages: torch.Tensor, piece: Piece) -> torch.Tensor:
    return pages[:, piece.block, piece.in_block : piece.in_block + piece.tokens]
