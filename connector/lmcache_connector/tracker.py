"""How far one request's tokens are computed, cached and stored. Numbers only; no vLLM, no clock, no I/O.

    tokens     0 ......... local ......... local + external ......... computed ......... total
               |  own cache  |      loaded      |    this engine computes    |  not yet   |
    chunks     |     0     |     1     |     2     |     3     |     4     |     5     |
    storable   |<----------------------------------------------------->|

What is stored is always a prefix of whole, computed chunks, so no store can leave a hole that later ones lie behind.
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["PackedTokens", "StoreTracker", "external_tokens", "storable_chunks"]

MAX_PAUSE = 64


def external_tokens(hit: int, total: int, local: int) -> int:
    """How many tokens to load behind the `local` ones, if the cache has the first `hit` of `total`.

    The last token is never loaded: the engine must compute it to have something to sample from.
    """
    return max(0, min(hit, total - 1) - local)


def storable_chunks(computed: int, known: int, prompt: int, chunk_size: int, save_decode: bool) -> int:
    """How many leading chunks may be stored once `computed` tokens are.

    `known` tokens are final (a sampled or drafted one is not, even if its KV is there); beyond the `prompt` only if
    `save_decode`.
    """
    return min(computed, known if save_decode else min(known, prompt)) // chunk_size


class StoreTracker:
    """Which prefix of one request was stored, and when to ask for more.

    Asking again is harmless (the server answers what is missing), so whatever is refused, lost or full is simply asked
    for again, with pauses of 1, 2, 4, ... steps as long as nothing comes of it.
    """

    def __init__(self) -> None:
        self.stored = 0
        self._asked = 0
        self._under_way = 0
        self._stale = 0
        """Answers to come that are older than the last `forget`."""
        self._pause = 0
        self._wait = 0

    def ask(self, chunks: int) -> bool:
        """Whether to ask for the first `chunks` chunks in this step; counts as asked for if so."""
        if chunks <= self.stored:
            return False
        if chunks <= self._asked and (self._under_way or self._waits()):
            return False
        self._asked = chunks
        self._under_way += 1
        return True

    def found(self, chunks: int) -> None:
        """A lookup has found the first `chunks` chunks in the cache, so they need not be asked for."""
        self.stored = max(self.stored, chunks)

    def report(self, stored: int) -> None:
        """One answer: the first `stored` chunks are in the cache."""
        if self._stale:
            self._stale -= 1
            return
        self._under_way = max(0, self._under_way - 1)
        if stored > self.stored:
            self._pause = 0
        elif stored < self._asked:
            self._pause = min(MAX_PAUSE, max(1, 2 * self._pause))
        self.stored = max(self.stored, stored)
        self._wait = self._pause

    def forget(self) -> None:
        """The cache was lost: nothing is stored any more, whatever answers to earlier questions will say."""
        self._stale += self._under_way
        self._under_way = 0
        self.stored = self._asked = self._pause = self._wait = 0

    def _waits(self) -> bool:
        self._wait -= 1
        return self._wait >= 0


class PackedTokens:
    """The tokens of one request as uint32 little-endian bytes; each is converted once, however often it is wanted."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def first(self, count: int, tokens: Sequence[int]) -> bytes:
        """The first `count` of `tokens`, which must be those of earlier calls, grown at the end."""
        known = len(self._packed) // 4
        if count > known:
            self._packed += np.array(tokens[known:count], dtype=np.int64).astype("<u4").tobytes()
        return bytes(memoryview(self._packed)[: 4 * count])
