import pytest
import torch

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.edits import EveryOtherChunk, Rotary, keep_tokens, token_dropping
from lmcache_sdk.errors import LMCacheSDKError

LAYERS, HEADS, SIZE = 2, 2, 8
ROTARY = Rotary.default(10000.0, SIZE)


def cache(tokens: int) -> torch.Tensor:
    return torch.randn(2, LAYERS, tokens, HEADS * SIZE, generator=torch.Generator().manual_seed(tokens))


def test_kept_tokens_bring_their_values_along_and_their_keys_are_moved_to_where_they_stand() -> None:
    kv, tokens = cache(8), list(range(100, 108))
    before = kv.clone()
    remaining, names = keep_tokens(kv, tokens, [0, 1, 4, 5], ROTARY)
    assert names == [100, 101, 104, 105]
    assert remaining.shape == (2, LAYERS, 4, HEADS * SIZE)
    assert torch.equal(remaining[1], kv[1][:, [0, 1, 4, 5]])
    assert torch.equal(remaining[0], ROTARY.move(kv[0][:, [0, 1, 4, 5]], [0, 1, 4, 5], [0, 1, 2, 3]))
    assert torch.equal(kv, before)


def test_keeping_everything_changes_nothing() -> None:
    kv = cache(6)
    remaining, names = keep_tokens(kv, [1, 2, 3, 4, 5, 6], range(6), ROTARY)
    assert torch.equal(remaining, kv)
    assert names == [1, 2, 3, 4, 5, 6]


def test_keeping_a_prefix_is_the_prefix_bit_for_bit() -> None:
    kv = cache(6)
    remaining, _ = keep_tokens(kv, [1, 2, 3, 4, 5, 6], range(4), ROTARY)
    assert torch.equal(remaining, kv[:, :, :4])


def test_two_edits_in_a_row_are_the_same_as_one() -> None:
    kv, tokens = cache(12).to(torch.float64), list(range(12))
    first, names = keep_tokens(kv, tokens, [0, 2, 3, 5, 8, 11], ROTARY)
    second, names = keep_tokens(first, names, [0, 3, 5], ROTARY)
    at_once, expected = keep_tokens(kv, tokens, [0, 5, 11], ROTARY)
    assert names == expected
    assert torch.allclose(second, at_once, atol=1e-12)


def test_every_other_chunk_keeps_the_first_of_each_two() -> None:
    assert list(EveryOtherChunk(2)({}, range(9))) == [0, 1, 4, 5, 8]


def test_token_dropping_joins_a_selector_and_an_embedding_into_one_edit() -> None:
    kv, tokens = cache(8), list(range(8))
    edit = token_dropping(EveryOtherChunk(4), ROTARY)
    remaining, names = edit({LMCacheSDKCacheKind.KV: kv}, tokens)
    assert list(names) == [0, 1, 2, 3]
    assert torch.equal(remaining, kv[:, :, :4])


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([0, 2, 2], "kept: expected indices in strictly ascending order"),
        ([3, 1], "kept: expected indices in strictly ascending order"),
        ([0, 8], "kept: expected indices from 0 to 7, got 0 to 8"),
        ([-1, 3], "kept: expected indices from 0 to 7, got -1 to 3"),
    ],
)
def test_indices_that_do_not_name_tokens_in_order_are_refused(kept: list[int], message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        keep_tokens(cache(8), range(8), kept, ROTARY)


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(LMCacheSDKError, match=r"kv: expected \[2, layers, 7, D\] of keys and values for 7 tokens"):
        keep_tokens(cache(8), range(7), [0], ROTARY)


def test_kept_latents_are_moved_in_their_rotated_part_only() -> None:
    rotary = Rotary(ROTARY.frequencies, SIZE, interleaved=True, latent=True)
    latents = torch.randn(1, LAYERS, 8, 20 + SIZE)
    remaining, names = keep_tokens(latents, range(8), [0, 3, 7], rotary)
    assert names == [0, 3, 7]
    assert torch.equal(remaining[..., :20], latents[:, :, [0, 3, 7], :20])
    assert torch.equal(remaining[0], rotary.move(latents[0][:, [0, 3, 7]], [0, 3, 7], [0, 1, 2]))


def test_latents_and_an_embedding_of_heads_do_not_go_together() -> None:
    latent = Rotary(ROTARY.frequencies, SIZE, latent=True)
    with pytest.raises(LMCacheSDKError, match=r"expected \[2, layers, 8, D\] of keys and values .* \[1, 2, 8, 16\]"):
        keep_tokens(cache(8)[:1], range(8), [0], ROTARY)
    with pytest.raises(LMCacheSDKError, match=r"expected \[1, layers, 8, D\] of an MLA model's latents"):
        keep_tokens(cache(8), range(8), [0], latent)
    with pytest.raises(LMCacheSDKError, match="keys: expected latents of more than 8, got 8"):
        keep_tokens(cache(8)[:1, ..., :SIZE], range(8), [0, 2], latent)
