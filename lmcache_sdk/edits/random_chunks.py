"""Random chunk dropping: no paper, but the arm that every method has to beat, since it knows nothing of the tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_sdk.edits.scoring import Tensors
from lmcache_sdk.edits.selection import check_share

__all__ = ["RandomChunks"]


@dataclass(frozen=True, slots=True)
class RandomChunks:
    """A TokenSelector that keeps the share `keep` of the chunks, at least one, drawn by lot.

    The draw depends on `seed` and on the tokens: it is the same in every run, and another one for every prompt.
    """

    chunk_size: int
    keep: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.keep, self.chunk_size)

    def __call__(self, tensors: Tensors, tokens: Sequence[int]) -> Sequence[int]:
        """Indices of the tokens in the chunks that were drawn."""
        chunks = -(-len(tokens) // self.chunk_size)
        # Seeding from text is specified: the same on every machine and in every process.
        draw = random.Random(f"{self.seed} {','.join(map(str, tokens))}")
        kept = draw.sample(range(chunks), k=min(chunks, max(1, round(self.keep * chunks))))
        return [
            token
            for chunk in sorted(kept)
            for token in range(chunk * self.chunk_size, min(len(tokens), (chunk + 1) * self.chunk_size))
        ]
