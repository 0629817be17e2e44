import math

import pytest
import torch

from lmcache_sdk.edits import CachedLayer, ExpectedAttention
from lmcache_sdk.edits.expected_attention import expected_logits
from lmcache_sdk.errors import LMCacheSDKError
from tests.lmcache_sdk.edits.layers import ROTARY, SIZE, dot, random_layer, rotation, softmax


def direct(
    raw: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: int, future: int, floor: float
) -> list[float]:
    """One key head in float64: `raw` `[group, T, SIZE]` are its queries before rotation, `keys` `[T, SIZE]` turned."""
    tokens = len(keys)
    average = sum(rotation(t) for t in range(tokens, tokens + future)) / future
    assert isinstance(average, torch.Tensor)
    shares = [0.0] * (tokens - sinks)
    for queries in raw.double():
        samples = [average @ query for query in queries[sinks:]]
        mean = sum(samples) / len(samples)
        covariance = sum(torch.outer(s - mean, s - mean) for s in samples) / len(samples)
        logits = [
            dot(mean, key) / math.sqrt(SIZE) + dot(key, covariance @ key) / (2 * SIZE) for key in keys.double()[sinks:]
        ]
        for i, share in enumerate(softmax(logits)):
            shares[i] += share / len(raw)
    scores = [(share + floor) * math.sqrt(dot(v, v)) for share, v in zip(shares, values.double()[sinks:], strict=True)]
    return [math.inf] * sinks + scores


def layer_of_raw(tokens: int, kv_heads: int, group: int) -> tuple[torch.Tensor, CachedLayer]:
    """Raw queries `[kv_heads, group, T, SIZE]`, and a layer whose queries are those, turned for their places."""
    layer = random_layer(tokens, kv_heads=kv_heads, group=group)
    # Away from zero, so that their mean says something.
    raw = layer.queries.double() + 1.0
    turned = torch.stack([raw[:, :, t] @ rotation(t).T for t in range(tokens)], dim=2)
    return raw, CachedLayer(layer.keys, layer.values, turned.float())


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 3)])
@pytest.mark.parametrize(("sinks", "future", "floor"), [(4, 16, 0.0), (0, 1, 0.02)])
def test_scores_are_those_of_the_closed_form(kv_heads: int, group: int, sinks: int, future: int, floor: float) -> None:
    raw, layer = layer_of_raw(15, kv_heads, group)
    expected = [direct(raw[h], layer.keys[h], layer.values[h], sinks, future, floor) for h in range(kv_heads)]
    scores = ExpectedAttention(ROTARY, future, sinks, floor)(layer)
    assert torch.allclose(scores, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_the_closed_form_is_what_normal_queries_pay_on_average() -> None:
    keys = random_layer(6, kv_heads=1).keys
    source = torch.Generator().manual_seed(3)
    queries = torch.randn(200_000, SIZE, generator=source) * 0.7 + 0.4
    paid = (queries @ keys[0].T / math.sqrt(SIZE)).exp().mean(dim=0)
    assert torch.allclose(expected_logits(queries[None, None], keys)[0, 0], paid.log(), atol=0.02)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_prompt_of_sinks_only_stays_whole(tokens: int) -> None:
    assert bool(ExpectedAttention(ROTARY)(random_layer(tokens)).isinf().all())


def test_without_queries_it_says_what_is_missing() -> None:
    layer = random_layer(20)
    with pytest.raises(LMCacheSDKError, match="this method needs the prompt's queries"):
        ExpectedAttention(ROTARY)(CachedLayer(layer.keys, layer.values))


@pytest.mark.parametrize("arguments", [{"future": 0}, {"sinks": -1}])
def test_impossible_settings_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(LMCacheSDKError, match="expected future from 1 and sinks from 0"):
        ExpectedAttention(ROTARY, **arguments)
