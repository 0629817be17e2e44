"""Choosing tokens by scores: a method rates the tokens of one layer, and those rated highest stay.

    score            the method: one layer's keys, values and queries -> a rating of each token by each key head
    HighestScores    the mean over all layers and heads -> the indices of the best tokens, one set for the request
    token_dropping   gathers them and moves their keys (selection.py)

The papers choose for each head, some for each layer. A cache keeps whole tokens, all layers and heads of each, so here
every head of every layer has one vote of equal weight, and a new method is a function of one layer:

    def loud_values(layer: CachedLayer) -> torch.Tensor:
        return layer.values.norm(dim=-1)

A rating of infinity keeps a token in any case. Layers come one by one, in float32: the wider copies stay small.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.edits.selection import check_share
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shapes import CachedTensors, one_tensor

__all__ = ["CachedLayer", "HighestScores", "Score", "cached_layers", "mean_scores"]

Tensors = Mapping[LMCacheSDKCacheKind, CachedTensors]


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer of a cached prompt by heads, in float32. Keys and queries are turned for positions 0 to T - 1."""

    keys: torch.Tensor
    """`[kv_heads, T, head_size]`"""
    values: torch.Tensor
    """`[kv_heads, T, head_size]`"""
    captured: torch.Tensor | None = None
    """The queries, if there are any; methods that cannot do without use `queries`."""

    @property
    def queries(self) -> torch.Tensor:
        """`[kv_heads, group, T, head_size]`: for each key head the queries of the `group` heads that look at it.

        Raises LMCacheSDKError if the queries were not retrieved.
        """
        if self.captured is None:
            raise LMCacheSDKError(
                "this method needs the prompt's queries, but only its KV was retrieved: have the engine capture them "
                '("lmcache.mp.transfer_intermediate_tensors": true), and give the request a context of each kind, '
                "kvcache.connect(...) and qcache.connect(...)"
            )
        return self.captured


Score = Callable[[CachedLayer], torch.Tensor]
"""A method: one layer -> `[kv_heads, T]`, higher for tokens that should stay, infinite for those that must."""


@dataclass(frozen=True, slots=True)
class HighestScores:
    """A TokenSelector that keeps the share `keep` of the tokens: those that `score` rates highest, earlier ones first.

    Only whole chunks of an edit can be cached: with the server's `chunk_size`, so many are kept that all of them are.
    """

    score: Score
    head_size: int
    keep: float = 0.5
    chunk_size: int = 1

    def __post_init__(self) -> None:
        check_share(self.keep, self.chunk_size)

    def __call__(self, tensors: Tensors, tokens: Sequence[int]) -> Sequence[int]:
        """Indices of the tokens that stay, ascending."""
        scores = mean_scores(self.score, cached_layers(tensors, self.head_size))
        chunks = max(1, round(self.keep * len(tokens) / self.chunk_size))
        count = min(len(tokens), chunks * self.chunk_size)
        certain = int((scores == math.inf).sum())
        if certain > count:
            raise LMCacheSDKError(
                f"keep: {self.keep} of {len(tokens)} tokens are {count}, but the method keeps {certain} in any case"
            )
        return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def mean_scores(score: Score, layers: Iterator[CachedLayer]) -> torch.Tensor:
    """`[T]`: the mean of what `score` says over all layers and heads."""
    total: torch.Tensor | None = None
    count = 0
    for layer in layers:
        rated = score(layer)
        if rated.shape != layer.keys.shape[:2]:
            expected = list(layer.keys.shape[:2])
            raise LMCacheSDKError(f"score: expected ratings {expected}, [heads, tokens], got {list(rated.shape)}")
        if bool(rated.isnan().any()) or bool((rated == -math.inf).any()):
            raise LMCacheSDKError("score: expected ratings that are numbers or infinity, got NaN or minus infinity")
        of_layer = rated.to(torch.float32).sum(dim=0)
        total = of_layer if total is None else total + of_layer
        count += rated.shape[0]
    if total is None:
        raise LMCacheSDKError("kv: expected at least one layer")
    return total / count


def cached_layers(tensors: Tensors, head_size: int) -> Iterator[CachedLayer]:
    """The layers of the retrieved KV `[2, L, T, D]`, each with its queries if `[1, L, T, D_q]` were retrieved too."""
    kv, captured = one_tensor(tensors[LMCacheSDKCacheKind.KV], "kv"), tensors.get(LMCacheSDKCacheKind.QUERY)
    queries = None if captured is None else one_tensor(captured, "queries")
    if kv.ndim != 4 or kv.shape[0] != 2:
        raise LMCacheSDKError(
            f"kv: expected keys and values [2, layers, tokens, D], got {list(kv.shape)}; a latent (MLA) cache has no "
            "heads to score, choose its tokens by their places"
        )
    if kv.shape[3] % head_size:
        raise LMCacheSDKError(f"head_size: expected a divisor of D ({kv.shape[3]}), got {head_size}")
    kv_heads = kv.shape[3] // head_size
    if queries is not None and (
        queries.ndim != 4 or queries.shape[:3] != (1, *kv.shape[1:3]) or queries.shape[3] % (kv_heads * head_size)
    ):
        expected = f"[1, {kv.shape[1]}, {kv.shape[2]}, a multiple of {kv.shape[3]}]"
        raise LMCacheSDKError(f"queries: expected {expected} beside kv {list(kv.shape)}, got {list(queries.shape)}")
    for layer in range(kv.shape[1]):
        grouped = None
        if queries is not None:
            # Heads are in order: the first `group` query heads look at the first key head, and so on.
            grouped = _by_heads(queries[0, layer], head_size).view(kv_heads, -1, kv.shape[2], head_size)
        yield CachedLayer(_by_heads(kv[0, layer], head_size), _by_heads(kv[1, layer], head_size), grouped)


def _by_heads(plane: torch.Tensor, head_size: int) -> torch.Tensor:
    """`[T, heads * head_size]` -> `[heads, T, head_size]` in float32."""
    return plane.to(torch.float32).reshape(plane.shape[0], -1, head_size).transpose(0, 1).contiguous()
