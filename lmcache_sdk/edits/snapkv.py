"""SnapKV: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469, section 4.

What the last tokens of a prompt, the observation window, attend to is what the answer will attend to. Each earlier
token is scored by the attention that it gets from the window, smoothed over its neighbours so that a find brings its
surroundings along; the window itself stays. Needs queries.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d, pad

from lmcache_sdk.edits.scoring import CachedLayer
from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["SnapKV", "window_attention"]


@dataclass(frozen=True, slots=True)
class SnapKV:
    """A Score: attention of the last `window` tokens, averaged over `kernel` neighbours (an odd number).

    The query heads of one key head count alike. The defaults are those of the published code.
    """

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise LMCacheSDKError(
                f"expected window from 1 and an odd kernel from 1, got window {self.window} and kernel {self.kernel}"
            )

    def __call__(self, layer: CachedLayer) -> torch.Tensor:
        """`[kv_heads, T]`: shares of attention; infinite for the window."""
        window = min(self.window, layer.keys.shape[1])
        seen = window_attention(layer, window).mean(dim=(1, 2))[:, :-window]
        if seen.shape[1]:
            seen = avg_pool1d(seen, self.kernel, stride=1, padding=self.kernel // 2)
        return pad(seen, (0, window), value=torch.inf)


def window_attention(layer: CachedLayer, window: int) -> torch.Tensor:
    """`[kv_heads, group, window, T]`: how the last `window` tokens share their attention out, each over those up to
    itself."""
    queries, tokens = layer.queries[:, :, -window:], layer.keys.shape[1]
    logits = torch.matmul(queries, layer.keys.transpose(1, 2)[:, None]).div_(math.sqrt(queries.shape[-1]))
    future = torch.ones(window, tokens, dtype=torch.bool).triu(tokens - window + 1)
    return logits.masked_fill_(future, -torch.inf).softmax(dim=-1)
