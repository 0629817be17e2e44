"""The ring: where the queries of a step wait, on the engine's device, until the chunks that they belong to are stored.

It is a fixed number of blocks of the engine's block size, handed out last in, first out; each is free or in the hands
of one request, never both, never of two. What a block holds is whatever was written to it last.
"""

from collections.abc import Iterable, Sequence

import torch

__all__ = ["QRingBuffer", "places"]


class QRingBuffer:
    """`blocks` blocks, each with the queries of `block_size` tokens of every layer, `width` elements per token."""

    def __init__(
        self, layers: int, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self._queries = torch.empty(layers, blocks * block_size, width, dtype=dtype, device=device)
        self._free = list(range(blocks))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many blocks nobody has."""
        return len(self._free)

    @property
    def layers(self) -> int:
        """How many layers have a part of each block."""
        return self._queries.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self._queries.device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
        return self._queries.nbytes

    def take(self, count: int) -> list[int] | None:
        """`count` blocks that nobody has; None, and nothing is taken, if there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """These blocks are nobody's again; raises ValueError, and changes nothing, if one of them was not taken."""
        returned = list(blocks)
        if len(set(returned)) != len(returned) or not self._taken.issuperset(returned):
            raise ValueError(f"blocks {returned}: expected blocks that were taken, each once")
        self._taken.difference_update(returned)
        self._free += returned

    def write(self, layer: int, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Put one layer's queries `rows`, `[tokens, width]`, into the places `into`, `[tokens]`."""
        self._queries[layer].index_copy_(0, into, rows)

    def read(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the queries in the places `source`, `[tokens]`, to `out`, `[layers, tokens, width]`, on any device.

        When it returns the blocks may be given back.
        """
        out.copy_(self._queries.index_select(1, source))


def places(blocks: Sequence[int], base: int, start: int, end: int, block_size: int) -> torch.Tensor:
    """Where tokens [start, end) of a request lie, if `blocks` are its blocks from that of token `base` on.

    A place is `block * block_size + offset`: a slot of vLLM's slot_mapping for the engine's blocks, a row of the ring
    for the ring's.
    """
    tokens = torch.arange(start, end)
    table = torch.tensor(blocks, dtype=torch.int64)
    return table[tokens // block_size - base // block_size] * block_size + tokens % block_size
