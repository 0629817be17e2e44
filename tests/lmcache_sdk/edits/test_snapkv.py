import math

import pytest
import torch

from lmcache_sdk.edits import CachedLayer, SnapKV
from lmcache_sdk.errors import LMCacheSDKError
from tests.lmcache_sdk.edits.layers import SIZE, dot, random_layer, softmax


def direct(layer: CachedLayer, head: int, window: int, kernel: int) -> list[float]:
    """Algorithm 1 of the paper for one key head, token by token in float64; the group's query heads are averaged."""
    tokens, group = layer.keys.shape[1], layer.queries.shape[1]
    votes = [0.0] * tokens
    for query_head in range(group):
        for observer in range(tokens - window, tokens):
            query = layer.queries[head, query_head, observer]
            logits = [dot(query, layer.keys[head, seen]) / math.sqrt(SIZE) for seen in range(observer + 1)]
            for seen, share in enumerate(softmax(logits)):
                votes[seen] += share / window / group
    votes = votes[: tokens - window]
    side = kernel // 2
    # Over the edges the neighbours count as zero.
    pooled = [sum(votes[max(0, i - side) : i + side + 1]) / kernel for i in range(len(votes))]
    return pooled + [math.inf] * window


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 4), (1, 3)])
@pytest.mark.parametrize(("window", "kernel"), [(4, 5), (1, 1), (7, 3)])
def test_scores_are_those_of_the_paper_head_by_head(kv_heads: int, group: int, window: int, kernel: int) -> None:
    layer = random_layer(19, kv_heads=kv_heads, group=group)
    expected = torch.tensor([direct(layer, head, window, kernel) for head in range(kv_heads)])
    assert torch.allclose(SnapKV(window, kernel)(layer), expected, atol=1e-6)


def test_a_token_that_the_last_ones_look_at_is_found_with_its_neighbours() -> None:
    layer = random_layer(40, kv_heads=1, group=2)
    # Every observer asks for what token 11 offers.
    layer.queries[:, :, -4:] = 5 * layer.keys[:, None, 11:12]
    scores = SnapKV(window=4, kernel=3)(layer)[0]
    assert set(scores[:-4].topk(3).indices.tolist()) == {10, 11, 12}


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_prompt_no_longer_than_the_window_stays_whole(tokens: int) -> None:
    assert bool(SnapKV(window=8)(random_layer(tokens)).isinf().all())


def test_without_queries_it_says_what_is_missing() -> None:
    layer = random_layer(20)
    with pytest.raises(LMCacheSDKError, match="this method needs the prompt's queries"):
        SnapKV(window=4)(CachedLayer(layer.keys, layer.values))


@pytest.mark.parametrize("arguments", [{"window": 0}, {"kernel": 4}, {"kernel": 0}])
def test_impossible_settings_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(LMCacheSDKError, match="expected window from 1 and an odd kernel from 1"):
        SnapKV(**arguments)
