import math

import torch

from lmcache_sdk.edits import CachedLayer, keydiff
from tests.lmcache_sdk.edits.layers import SIZE, dot, random_layer


def direct(keys: torch.Tensor) -> list[float]:
    """One head `[T, SIZE]`, as the paper writes it."""
    units = [key / math.sqrt(dot(key, key)) for key in keys.double()]
    anchor = sum(units) / len(units)
    assert isinstance(anchor, torch.Tensor)
    return [-dot(unit, anchor) / math.sqrt(dot(anchor, anchor)) for unit in units]


def test_scores_are_those_of_the_paper_head_by_head() -> None:
    layer = random_layer(17, kv_heads=3)
    expected = torch.tensor([direct(head) for head in layer.keys])
    assert torch.allclose(keydiff(layer), expected, atol=1e-6)


def test_the_one_key_that_points_elsewhere_is_rated_highest_however_long_it_is() -> None:
    keys = torch.ones(1, 9, SIZE) + 0.01 * torch.randn(1, 9, SIZE)
    keys[0, 5] = torch.tensor([1e-3, -1e-3] * (SIZE // 2))
    assert keydiff(CachedLayer(keys, keys)).argmax().item() == 5


def test_it_needs_no_queries() -> None:
    layer = random_layer(6)
    assert torch.equal(keydiff(CachedLayer(layer.keys, layer.values)), keydiff(layer))
