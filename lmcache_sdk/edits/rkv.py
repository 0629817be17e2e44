"""R-KV: Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv 2505.24133, section 3.

Long reasoning repeats itself, and attention alone keeps every copy. So a token's importance, the attention that it gets
from the last tokens, is weighed against its redundancy, how much its key is like the others:

    score = balance * importance - (1 - balance) * redundancy

Of tokens that are alike the most recent one is spared: a token's likeness to its most recent likes does not count
against them. Importance needs queries; `redundancy` needs none and makes a Score by itself:

    HighestScores(lambda layer: -redundancy(layer.keys), head_size)
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import max_pool1d, normalize, pad

from lmcache_sdk.edits.scoring import CachedLayer
from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["RKV", "redundancy"]

ROWS = 256
"""Tokens compared with all others at once: bounds the memory of a comparison of each with each."""


@dataclass(frozen=True, slots=True)
class RKV:
    """A Score: importance, from the last `window` tokens and over `kernel` neighbours (an odd number), against
    redundancy (`threshold`, `recent`: see there). The window stays. The defaults are those of the paper."""

    window: int = 8
    kernel: int = 7
    balance: float = 0.1
    threshold: float = 0.5
    recent: int = 1

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0 or not 0 <= self.balance <= 1:
            raise LMCacheSDKError(
                "expected window from 1, an odd kernel from 1 and a balance from 0 to 1, "
                f"got window {self.window}, kernel {self.kernel} and balance {self.balance}"
            )

    def __call__(self, layer: CachedLayer) -> torch.Tensor:
        """`[kv_heads, T]`; infinite for the window."""
        window = min(self.window, layer.keys.shape[1])
        importance = self._importance(layer, window)
        repeated = redundancy(layer.keys, self.threshold, self.recent)[:, :-window]
        return pad(self.balance * importance - (1 - self.balance) * repeated, (0, window), value=torch.inf)

    def _importance(self, layer: CachedLayer, window: int) -> torch.Tensor:
        """`[kv_heads, T - window]`: the window's attention among the tokens before it."""
        queries, keys = layer.queries[:, :, -window:], layer.keys[:, None, :-window]
        # The heads of a group speak with one voice: the loudest.
        logits = torch.matmul(queries, keys.transpose(2, 3)).amax(dim=1).div_(math.sqrt(queries.shape[-1]))
        attention = logits.softmax(dim=-1).mean(dim=1)
        if attention.shape[1]:
            attention = max_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2)
        return attention


def redundancy(keys: torch.Tensor, threshold: float = 0.5, recent: int = 1) -> torch.Tensor:
    """`[kv_heads, T]`, summing to 1 over the tokens: how much each of `keys` `[kv_heads, T, head_size]` repeats others.

    The mean cosine to all others, where each token overlooks the `recent` latest ones of those that are more alike to
    it than `threshold`; then a softmax over the tokens.
    """
    directions = normalize(keys.to(torch.float32), dim=-1)
    tokens = keys.shape[1]
    places = torch.arange(tokens)
    total = torch.zeros(keys.shape[:2])
    for start in range(0, tokens, ROWS):
        rows = places[start : start + ROWS]
        cosine = directions[:, rows] @ directions.transpose(1, 2)
        cosine[:, torch.arange(len(rows)), rows] = 0.0
        alike = torch.where(cosine > threshold, places.to(torch.int32), -1)
        latest = alike.topk(min(recent, tokens), dim=-1).values.to(torch.int64)
        likes, column = latest >= 0, latest.clamp(min=0)
        overlooked = cosine.gather(2, column).mul_(likes)
        total += cosine.sum(dim=1)
        total.scatter_add_(1, column.flatten(1), -overlooked.flatten(1))
    return (total / tokens).softmax(dim=-1)
