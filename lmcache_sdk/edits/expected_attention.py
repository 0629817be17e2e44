"""Expected Attention: Devoto, Jeblick, Jegou, Expected Attention: KV Cache Compression by Estimating Attention from
Future Queries Distribution, arXiv 2510.00636, section 3.

Queries before their rotation are taken as normally distributed, future ones like those of the prompt; the rotations of
the next positions are averaged. The attention that a key is to expect has then a closed form:

    E[exp(q k / sqrt d)] = exp(mu k / sqrt d + k Sigma k / 2 d)

A token's score is its share of that, times the length of its value: what it will add to the output. (The paper also
multiplies the value by the output projection, which is a weight of the model and not in a cache.) Needs queries.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from lmcache_sdk.edits.rotary import Rotary
from lmcache_sdk.edits.scoring import CachedLayer
from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["ExpectedAttention", "expected_logits"]


@dataclass(frozen=True, slots=True)
class ExpectedAttention:
    """A Score: expected attention over the next `future` positions, for a model whose keys are turned by `rotary`.

    The first `sinks` tokens stay and do not count as samples: they are unlike all others. `floor` is added to each
    share, so that long values without attention count a little.
    """

    rotary: Rotary
    future: int = 512
    sinks: int = 4
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0:
            raise LMCacheSDKError(f"expected future from 1 and sinks from 0, got {self.future} and {self.sinks}")

    def __call__(self, layer: CachedLayer) -> torch.Tensor:
        """`[kv_heads, T]`; infinite for the sinks."""
        tokens = layer.keys.shape[1]
        sinks = min(self.sinks, tokens)
        if sinks == tokens:
            return torch.full(layer.keys.shape[:2], torch.inf)
        keys, values = layer.keys[:, sinks:], layer.values[:, sinks:]
        logits = expected_logits(self._future_queries(layer.queries, sinks), keys)
        shares = logits.softmax(dim=-1).mean(dim=1)
        return pad((shares + self.floor) * values.norm(dim=-1), (sinks, 0), value=torch.inf)

    def _future_queries(self, queries: torch.Tensor, sinks: int) -> torch.Tensor:
        """The prompt's queries `[kv_heads, group, T - sinks, head_size]` as they would stand after it."""
        tokens = queries.shape[2]
        places = torch.arange(tokens)
        samples = queries.flatten(0, 1)
        raw = self.rotary.move(samples, places, torch.zeros_like(places))[:, sinks:].view_as(queries[:, :, sinks:])
        return self.rotary.turn_on_average(raw, torch.arange(tokens, tokens + self.future))


def expected_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`[kv_heads, group, T]`: log E[exp(q k / sqrt d)] for each of `keys` `[kv_heads, T, head_size]`, where q is
    distributed like the samples `queries` `[kv_heads, group, samples, head_size]`."""
    size = keys.shape[-1]
    mean = queries.mean(dim=2, keepdim=True)
    centred = queries - mean
    covariance = torch.matmul(centred.transpose(2, 3), centred).div_(queries.shape[2])
    keys = keys[:, None]
    towards = torch.matmul(mean, keys.transpose(2, 3)).squeeze(2)
    spread = (torch.matmul(keys, covariance) * keys).sum(dim=-1)
    return towards.div_(math.sqrt(size)).add_(spread, alpha=0.5 / size)
