"""Layers of random numbers, as a cache has them, for tests of methods; and rotation by the book."""

import math

import torch

from lmcache_sdk.edits import CachedLayer, Rotary

SIZE = 8
ROTARY = Rotary.default(10000.0, SIZE)


def random_layer(tokens: int, *, kv_heads: int = 2, group: int = 3, seed: int = 0) -> CachedLayer:
    """Keys, values and queries that are nothing in particular."""
    source = torch.Generator().manual_seed(seed)
    plane = (kv_heads, tokens, SIZE)
    queries = torch.randn(kv_heads, group, tokens, SIZE, generator=source)
    return CachedLayer(torch.randn(plane, generator=source), torch.randn(plane, generator=source), queries)


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


def rotation(position: int) -> torch.Tensor:
    """The matrix `[SIZE, SIZE]` that turns a raw key for `position`; pairs are i and i + SIZE / 2."""
    matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for i in range(SIZE // 2):
        angle = position * 10000.0 ** (-2 * i / SIZE)
        j = i + SIZE // 2
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[j, i], matrix[i, j] = math.sin(angle), -math.sin(angle)
    return matrix
