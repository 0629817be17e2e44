"""Attention sinks and a recent window: Xiao et al., Efficient Streaming Language Models with Attention Sinks
(StreamingLLM), arXiv 2309.17453, section 3.2.

Models put spare attention on their first tokens, whatever these are; without them attention loses its footing. So the
first few stay beside the most recent ones, and the keys stand at their places within the cache, as the paper has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_sdk.edits.scoring import Tensors
from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["SinksAndRecent"]


@dataclass(frozen=True, slots=True)
class SinksAndRecent:
    """A TokenSelector that keeps the first `sinks` tokens and the last `recent` ones; all if there are no more.

    Only whole chunks of an edit can be cached: let `sinks + recent` be a multiple of the server's chunk size.
    """

    recent: int
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.recent < 1 or self.sinks < 0:
            raise LMCacheSDKError(f"expected recent from 1 and sinks from 0, got {self.recent} and {self.sinks}")

    def __call__(self, tensors: Tensors, tokens: Sequence[int]) -> Sequence[int]:
        """Indices of the first and the last tokens."""
        if len(tokens) <= self.sinks + self.recent:
            return range(len(tokens))
        return [*range(self.sinks), *range(len(tokens) - self.recent, len(tokens))]
