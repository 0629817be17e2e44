import math

import pytest
import torch

from lmcache_sdk.edits import RKV, CachedLayer, redundancy
from lmcache_sdk.errors import LMCacheSDKError
from tests.lmcache_sdk.edits.layers import SIZE, dot, random_layer, softmax


def direct_redundancy(keys: torch.Tensor, threshold: float, recent: int) -> list[float]:
    """One head `[T, SIZE]` in float64: the matrix of cosines, its diagonal and each row's latest likes taken out."""
    tokens = len(keys)
    units = [key / math.sqrt(dot(key, key)) for key in keys.double()]
    likeness = [[dot(a, b) for b in units] for a in units]
    for i in range(tokens):
        likeness[i][i] = 0.0
        likes = [j for j in range(tokens) if likeness[i][j] > threshold]
        for j in sorted(likes)[-recent:]:
            likeness[i][j] = 0.0
    return softmax([sum(likeness[i][j] for i in range(tokens)) / tokens for j in range(tokens)])


def direct_importance(layer: CachedLayer, head: int, window: int, kernel: int) -> list[float]:
    tokens, group = layer.keys.shape[1], layer.queries.shape[1]
    attention = [0.0] * (tokens - window)
    for observer in range(tokens - window, tokens):
        logits = [
            max(dot(layer.queries[head, g, observer], layer.keys[head, seen]) for g in range(group)) / math.sqrt(SIZE)
            for seen in range(tokens - window)
        ]
        for seen, share in enumerate(softmax(logits)):
            attention[seen] += share / window
    side = kernel // 2
    return [max(attention[max(0, i - side) : i + side + 1]) for i in range(len(attention))]


@pytest.mark.parametrize(("threshold", "recent"), [(0.5, 1), (0.1, 3), (0.99, 1), (-2.0, 40)])
def test_redundancy_is_that_of_the_paper_head_by_head(threshold: float, recent: int) -> None:
    keys = random_layer(23, kv_heads=3).keys
    expected = torch.tensor([direct_redundancy(head, threshold, recent) for head in keys])
    assert torch.allclose(redundancy(keys, threshold, recent), expected, atol=1e-7)


def test_redundancy_of_more_tokens_than_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = random_layer(23, kv_heads=2).keys
    whole = redundancy(keys, 0.1, 2)
    monkeypatch.setattr("lmcache_sdk.edits.rkv.ROWS", 5)
    assert torch.allclose(redundancy(keys, 0.1, 2), whole, atol=1e-8)


def test_of_copies_the_latest_is_the_least_redundant_and_a_stranger_less_than_all() -> None:
    keys = torch.ones(1, 12, SIZE)
    keys[0, 3] = torch.tensor([1.0, -1.0] * (SIZE // 2))
    found = redundancy(keys)[0]
    copies = [t for t in range(12) if t != 3]
    assert found.argmin().item() == 3
    assert min(copies, key=lambda t: found[t].item()) == 11


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 3)])
@pytest.mark.parametrize(("window", "kernel", "balance"), [(4, 7, 0.1), (1, 1, 0.6)])
def test_scores_are_importance_against_redundancy(
    kv_heads: int, group: int, window: int, kernel: int, balance: float
) -> None:
    layer = random_layer(20, kv_heads=kv_heads, group=group)
    expected = []
    for head in range(kv_heads):
        importance = direct_importance(layer, head, window, kernel)
        repeated = direct_redundancy(layer.keys[head], 0.5, 1)
        scores = [balance * i - (1 - balance) * r for i, r in zip(importance, repeated, strict=False)]
        expected.append(scores + [math.inf] * window)
    assert torch.allclose(RKV(window, kernel, balance)(layer), torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_prompt_no_longer_than_the_window_stays_whole(tokens: int) -> None:
    assert bool(RKV(window=8)(random_layer(tokens)).isinf().all())


def test_redundancy_needs_no_queries_and_the_whole_method_says_that_it_does() -> None:
    layer = random_layer(20)
    alone = CachedLayer(layer.keys, layer.values)
    assert redundancy(alone.keys).sum(dim=1).allclose(torch.ones(2))
    with pytest.raises(LMCacheSDKError, match="this method needs the prompt's queries"):
        RKV()(alone)


@pytest.mark.parametrize("arguments", [{"window": 0}, {"kernel": 2}, {"balance": 1.5}])
def test_impossible_settings_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(LMCacheSDKError, match="expected window from 1, an odd kernel from 1 and a balance"):
        RKV(**arguments)  # type: ignore[arg-type]
