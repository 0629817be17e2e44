import math
from collections.abc import Callable

import pytest
import torch

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.edits import CachedLayer, HighestScores, Rotary, keydiff, token_dropping
from lmcache_sdk.edits.scoring import cached_layers, mean_scores
from lmcache_sdk.errors import LMCacheSDKError

KV, QUERY = LMCacheSDKCacheKind.KV, LMCacheSDKCacheKind.QUERY
LAYERS, TOKENS, SIZE = 3, 12, 8


def prompt(
    kv_heads: int = 2, heads: int = 6, dtype: torch.dtype = torch.bfloat16
) -> dict[LMCacheSDKCacheKind, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    kv = torch.randn(2, LAYERS, TOKENS, kv_heads * SIZE, generator=source)
    queries = torch.randn(1, LAYERS, TOKENS, heads * SIZE, generator=source)
    return {KV: kv.to(dtype), QUERY: queries.to(dtype)}


def rating(values: list[float]) -> Callable[[CachedLayer], torch.Tensor]:
    """A method that says the same of every layer and head."""
    return lambda layer: torch.tensor(values).expand(layer.keys.shape[0], -1)


def test_layers_hold_the_heads_of_keys_values_and_queries_in_float32() -> None:
    tensors = prompt(kv_heads=2, heads=6)
    layers = list(cached_layers(tensors, SIZE))
    assert len(layers) == LAYERS
    for number, layer in enumerate(layers):
        assert (layer.keys.dtype, layer.values.dtype, layer.queries.dtype) == (torch.float32,) * 3
        for head in range(2):
            columns = slice(head * SIZE, (head + 1) * SIZE)
            assert torch.equal(layer.keys[head], tensors[KV][0, number, :, columns].float())
            assert torch.equal(layer.values[head], tensors[KV][1, number, :, columns].float())
        for head in range(6):
            # Grouped queries: heads 0, 1, 2 look at key head 0 and 3, 4, 5 at key head 1.
            columns = slice(head * SIZE, (head + 1) * SIZE)
            assert torch.equal(layer.queries[head // 3, head % 3], tensors[QUERY][0, number, :, columns].float())


def test_one_query_head_per_key_head_is_a_group_of_one() -> None:
    (layer, *_) = cached_layers(prompt(kv_heads=4, heads=4), SIZE)
    assert layer.queries.shape == (4, 1, TOKENS, SIZE)


def test_every_head_of_every_layer_has_one_vote() -> None:
    tensors = prompt(kv_heads=2)
    votes = torch.randn(LAYERS, 2, TOKENS)
    given = iter(votes)
    assert torch.allclose(mean_scores(lambda layer: next(given), cached_layers(tensors, SIZE)), votes.mean(dim=(0, 1)))


def test_the_best_tokens_stay_in_the_order_of_the_prompt() -> None:
    ratings = [0.0, 5.0, 1.0, 9.0, 2.0, 7.0, 0.5, 0.1, 8.0, 3.0, 4.0, 6.0]
    select = HighestScores(rating(ratings), SIZE, keep=0.5)
    assert list(select(prompt(), range(TOKENS))) == [1, 3, 5, 8, 10, 11]


def test_of_tokens_that_are_rated_alike_the_earlier_ones_stay() -> None:
    assert list(HighestScores(rating([1.0] * TOKENS), SIZE, keep=0.25)(prompt(), range(TOKENS))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("keep", "chunk_size", "count"), [(0.5, 1, 6), (0.5, 4, 8), (0.3, 4, 4), (0.1, 4, 4), (1.0, 4, 12), (0.1, 5, 5)]
)
def test_as_many_tokens_stay_as_fill_whole_chunks(keep: float, chunk_size: int, count: int) -> None:
    select = HighestScores(keydiff, SIZE, keep=keep, chunk_size=chunk_size)
    assert len(select(prompt(), range(TOKENS))) == count


def test_a_token_rated_infinite_by_one_head_of_one_layer_stays() -> None:
    def score(layer: CachedLayer) -> torch.Tensor:
        ratings = torch.arange(TOKENS, dtype=torch.float32).repeat(2, 1)
        ratings[1, 0] = math.inf
        return ratings

    assert list(HighestScores(score, SIZE, keep=0.25)(prompt(), range(TOKENS))) == [0, 10, 11]


def test_more_tokens_that_must_stay_than_may_are_a_contradiction_that_is_told() -> None:
    select = HighestScores(rating([math.inf] * 4 + [0.0] * 8), SIZE, keep=0.25)
    with pytest.raises(LMCacheSDKError, match=r"keep: 0\.25 of 12 tokens are 3, but the method keeps 4 in any case"):
        select(prompt(), range(TOKENS))


def test_a_method_in_three_lines_is_an_edit() -> None:
    def loud_values(layer: CachedLayer) -> torch.Tensor:
        return layer.values.norm(dim=-1)

    tensors = prompt(dtype=torch.float32)
    kv = tensors[KV]
    edit = token_dropping(HighestScores(loud_values, SIZE), Rotary.default(10000.0, SIZE))
    remaining, names = edit(tensors, range(100, 100 + TOKENS))
    loudness = kv[1].unflatten(-1, (-1, SIZE)).norm(dim=-1).sum(dim=(0, 2)).tolist()
    expected = sorted(sorted(range(TOKENS), key=lambda t: -loudness[t])[:6])
    assert list(names) == [100 + t for t in expected]
    assert torch.equal(remaining[1], kv[1][:, expected])


def test_a_method_that_needs_queries_says_so_when_there_are_none() -> None:
    tensors = prompt()
    del tensors[QUERY]
    with pytest.raises(LMCacheSDKError, match=r"needs the prompt's queries, .* qcache\.connect"):
        HighestScores(lambda layer: layer.queries.sum(dim=(1, 3)), SIZE)(tensors, range(TOKENS))


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        (torch.zeros(TOKENS), r"score: expected ratings \[2, 12\], \[heads, tokens\], got \[12\]"),
        (torch.zeros(2, 1, TOKENS), r"score: expected ratings \[2, 12\], \[heads, tokens\], got \[2, 1, 12\]"),
        (torch.full((2, TOKENS), math.nan), "score: expected ratings that are numbers or infinity"),
        (torch.full((2, TOKENS), -math.inf), "score: expected ratings that are numbers or infinity"),
    ],
)
def test_ratings_that_make_no_sense_are_refused(ratings: torch.Tensor, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        HighestScores(lambda layer: ratings, SIZE)(prompt(), range(TOKENS))


def test_tensors_that_do_not_fit_are_refused_with_what_was_expected() -> None:
    tensors = prompt()
    with pytest.raises(LMCacheSDKError, match=r"a latent \(MLA\) cache has no heads to score"):
        list(cached_layers({KV: tensors[KV][:1]}, SIZE))
    with pytest.raises(LMCacheSDKError, match=r"head_size: expected a divisor of D \(16\), got 7"):
        list(cached_layers(tensors, 7))
    with pytest.raises(LMCacheSDKError, match=r"queries: expected \[1, 3, 12, a multiple of 16\] .*, 12, 40\]"):
        list(cached_layers({KV: tensors[KV], QUERY: tensors[QUERY][..., :40]}, SIZE))
    with pytest.raises(LMCacheSDKError, match=r"queries: expected .* got \[1, 3, 11, 48\]"):
        list(cached_layers({KV: tensors[KV], QUERY: tensors[QUERY][:, :, 1:]}, SIZE))


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(keep: float) -> None:
    with pytest.raises(LMCacheSDKError, match="keep: expected a share above 0 and up to 1"):
        HighestScores(keydiff, SIZE, keep=keep)
