"""What the cache keeps is kept out of the garbage collector's sight.

Python's collector walks, now and then, over every object that may be part of a cycle, and nothing else runs meanwhile:
a tenth of a second at 100,000 chunks, seconds at a million. The core does not need it, because what the core lets go of
has no cycles and goes at once, by its reference counts (a test holds it to that). So every EVERY chunks there is one
full pass, over what is new since the last, and what lived through it is frozen: no later pass looks at it, and it still
goes when its last reference does.
"""

import gc
from collections.abc import Callable

__all__ = ["Freezer"]

EVERY = 8192
"""Chunks that a full pass may meet: some milliseconds."""


class Freezer:
    """Freezes what lives each time `made()`, a count that only grows, has grown by EVERY."""

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        self._frozen = made()

    def freeze(self) -> None:
        """Collect what is garbage now, and freeze all the rest."""
        self._frozen = self._made()
        gc.collect()
        gc.freeze()

    def tick(self) -> None:
        """Freeze if it is time."""
        if self._made() - self._frozen >= EVERY:
            self.freeze()

    @staticmethod
    def thaw() -> None:
        """Leave everything to the collector again."""
        gc.unfreeze()
