"""A moved key must be the key that the model would have computed at the new position.

The references turn raw keys directly: in float64 by complex multiplication, and with transformers' own rotary modules.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV2Config, GPT2Config, GPTJConfig, LlamaConfig, OPTConfig, PhiConfig
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb as apply_to_latents
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from lmcache_sdk.edits import Rotary
from lmcache_sdk.errors import LMCacheSDKError

HEADS, SIZE = 3, 16


def turned(raw: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Raw keys [T, HEADS, SIZE] at `positions`: each pair as one complex number, in float64."""
    pairs = len(frequencies)
    angle = (positions.to(torch.float32)[:, None] * frequencies).to(torch.float64)[:, None, :]
    part, rest = raw.to(torch.float64)[..., : 2 * pairs], raw.to(torch.float64)[..., 2 * pairs :]
    x, y = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    z = torch.complex(x.contiguous(), y.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    part = torch.stack((z.real, z.imag), dim=-1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), dim=-1)
    return torch.cat((part, rest), dim=-1)


def raw_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HEADS, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    old=st.lists(st.integers(0, 131071), min_size=1, max_size=8),
    shift=st.integers(-131071, 131071),
    rotary_dim=st.sampled_from([2, 8, SIZE]),
    interleaved=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_moved_key_is_the_raw_key_turned_for_the_new_position(
    old: list[int], shift: int, rotary_dim: int, interleaved: bool
) -> None:
    rotary = Rotary.default(10000.0, SIZE, rotary_dim=rotary_dim, interleaved=interleaved)
    before = torch.tensor(old)
    after = (before + shift).abs()
    raw = raw_keys(len(old))
    keys = turned(raw, before, rotary.frequencies, interleaved)
    moved = rotary.move(keys.flatten(1), before, after).view_as(keys)
    assert (moved - turned(raw, after, rotary.frequencies, interleaved)).abs().max() < 1e-12


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 4e-7), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_moved_key_is_rounded_once_to_its_own_dtype(dtype: torch.dtype, error: float) -> None:
    rotary = Rotary.default(1e6, SIZE)
    before, after = torch.arange(40) * 771, torch.arange(40) * 3
    # Start from keys that the dtype can hold, so that only the move's own error remains.
    keys = turned(raw_keys(40), before, rotary.frequencies, False).to(dtype)
    moved = rotary.move(keys.flatten(1), before, after).view_as(keys)
    exact = rotary.move(keys.to(torch.float64).flatten(1), before, after).view_as(keys)
    assert moved.dtype == dtype
    # A pair's elements are sums of two products: the error is relative to the pair's length.
    length = keys.to(torch.float64).norm(dim=-1, keepdim=True)
    assert ((moved.to(torch.float64) - exact).abs() / length).max() < error


def test_keys_that_do_not_move_keep_their_bits_and_the_argument_is_left_alone() -> None:
    rotary = Rotary.default(10000.0, SIZE)
    keys = torch.randn(2, 5, HEADS * SIZE).to(torch.bfloat16)
    given_keys = keys.clone()
    moved = rotary.move(keys, [0, 1, 2, 7, 9], [0, 1, 2, 3, 4])
    assert torch.equal(keys, given_keys)
    assert torch.equal(moved[:, :3], keys[:, :3])
    assert not torch.equal(moved[:, 3:], keys[:, 3:])


def test_every_layer_is_moved_alike_and_views_that_are_not_contiguous_are_taken() -> None:
    rotary = Rotary.default(10000.0, SIZE)
    keys = torch.randn(5, 4, HEADS * SIZE).transpose(0, 1)
    moved = rotary.move(keys, range(5), range(100, 105))
    for layer in range(4):
        assert torch.equal(moved[layer], rotary.move(keys[layer].contiguous(), range(5), range(100, 105)))


def test_moving_there_and_back_in_steps_ends_where_it_began() -> None:
    rotary = Rotary.default(10000.0, SIZE)
    keys = torch.randn(6, HEADS * SIZE, dtype=torch.float64)
    there = rotary.move(rotary.move(keys, range(6), range(50, 56)), range(50, 56), range(7, 13))
    assert torch.allclose(rotary.move(there, range(7, 13), range(6)), keys, atol=1e-12)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048,
    },
    "yarn, not truncated": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.1 * i for i in range(32)], "long_factor": [1.0 + i for i in range(32)],
    },
}  # fmt: skip


def moves_to_what_is_computed_there(rotary: Rotary, embedding: torch.nn.Module) -> None:
    """`embedding` is transformers' module for two heads of 64."""
    raw = torch.randn(1, 2, 300, rotary.rotary_dim, generator=torch.Generator().manual_seed(1))

    def at(positions: torch.Tensor) -> torch.Tensor:
        # A last position far out makes transformers choose the frequencies of long prompts for all.
        cos, sin = embedding(raw, torch.cat((positions, torch.tensor([8191])))[None])
        keys = torch.ones(300, 2, 64)
        keys[..., : rotary.rotary_dim] = apply_rotary_pos_emb(raw, raw, cos[:, :-1], sin[:, :-1])[1][0].transpose(0, 1)
        return keys.flatten(1)

    before, after = torch.arange(300) * 25, torch.arange(300) * 11
    assert torch.allclose(rotary.move(at(before), before, after), at(after), atol=2e-5)


@pytest.mark.parametrize("name", ROPES)
def test_keys_of_each_scaling_move_to_what_transformers_computes_there(name: str) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters=ROPES[name].copy(),
    )
    moves_to_what_is_computed_there(Rotary.from_config(config), LlamaRotaryEmbedding(config))


def test_partly_rotated_keys_move_to_what_transformers_computes_there() -> None:
    config = PhiConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=8192, partial_rotary_factor=0.5)
    rotary = Rotary.from_config(config)
    assert (rotary.rotary_dim, rotary.head_size) == (32, 64)
    moves_to_what_is_computed_there(rotary, PhiRotaryEmbedding(config))


def test_interleaved_keys_move_to_what_transformers_computes_there() -> None:
    rotary = Rotary.from_config(
        {"model_type": "cohere", "head_dim": 64, "num_attention_heads": 2, "rope_theta": 10000.0}
    )
    assert rotary.interleaved
    raw = torch.randn(1, 2, 50, 64)

    def at(positions: torch.Tensor) -> torch.Tensor:
        angle = (positions[:, None] * rotary.frequencies).repeat_interleave(2, dim=-1)[None]
        return apply_interleaved(raw, raw, angle.cos(), angle.sin())[1][0].transpose(0, 1).flatten(1)

    before, after = torch.arange(50) + 900, torch.arange(50)
    assert torch.allclose(rotary.move(at(before), before, after), at(after), atol=1e-5)


def test_only_the_rotated_part_of_a_latent_is_moved_and_lands_on_what_transformers_computes_there() -> None:
    config = DeepseekV2Config(kv_lora_rank=24, qk_rope_head_dim=16, max_position_embeddings=4096)
    rotary = Rotary.from_config(config)
    assert (rotary.latent, rotary.interleaved, rotary.head_size, rotary.rotary_dim) == (True, True, 16, 16)
    embedding = DeepseekV2RotaryEmbedding(config)
    source = torch.Generator().manual_seed(2)
    content, raw = torch.randn(50, 24, generator=source), torch.randn(1, 1, 50, 16, generator=source)

    def at(positions: torch.Tensor) -> torch.Tensor:
        key = apply_to_latents(raw, raw, embedding(raw, positions[None]))[1][0, 0]
        return torch.cat((content, key), dim=-1)

    before, after = torch.arange(50) + 900, torch.arange(50) * 3
    moved = rotary.move(torch.stack((at(before), at(before))), before, after)
    assert torch.equal(moved[0], moved[1])
    assert torch.equal(moved[0, :, :24], content)
    assert torch.allclose(moved[0], at(after), atol=1e-5)


def test_a_model_that_computes_latents_but_caches_heads_is_refused() -> None:
    config = {"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32, "num_attention_heads": 4}
    with pytest.raises(LMCacheSDKError, match="model_type: 'minicpm3' turns the last part of each head"):
        Rotary.from_config({**config, "hidden_size": 256, "rope_theta": 10000.0})


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_on_average_is_the_average_of_turning(interleaved: bool) -> None:
    rotary = Rotary.default(10000.0, SIZE, rotary_dim=12, interleaved=interleaved)
    raw = torch.randn(2, 5, SIZE, dtype=torch.float64)
    places = torch.arange(40, 90)
    each = [rotary.move(raw, torch.zeros(5), torch.full((5,), place)) for place in places.tolist()]
    assert torch.allclose(rotary.turn_on_average(raw, places), torch.stack(each).mean(dim=0), atol=1e-12)


def test_a_configuration_is_read_in_the_old_form_and_in_the_new_one(tmp_path: Path) -> None:
    new = {
        "head_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0},
    }  # fmt: skip
    old = {
        "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 4096,
        "rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(old))
    a, b = Rotary.from_config(new), Rotary.from_config(json.loads((tmp_path / "config.json").read_text()))
    assert torch.equal(a.frequencies, b.frequencies)
    assert (a.head_size, a.interleaved) == (b.head_size, b.interleaved) == (32, False)
    assert math.isclose(a.frequencies[0].item(), 0.5)


def test_a_model_with_several_embeddings_is_asked_for_one_of_them() -> None:
    config = {
        "text_config": {
            "head_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 4096,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    }  # fmt: skip
    sliding = Rotary.from_config(config, "sliding_attention")
    assert torch.equal(sliding.frequencies, Rotary.default(1e4, 32).frequencies)
    with pytest.raises(LMCacheSDKError, match="layer_type: expected one of full_attention, sliding_attention"):
        Rotary.from_config(config)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "fourier"}, "rope_type: expected one of default, .* got 'fourier'"),
        ({"rope_type": "yarn", "factor": 2.0}, "type 'yarn' needs 'original_max_position_embeddings'"),
        (
            {"rope_type": "default", "mrope_section": [1, 2, 3]},
            "mrope_section: this model turns keys by three positions",
        ),
    ],
)
def test_an_embedding_whose_keys_cannot_be_moved_is_refused_with_the_reason(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        Rotary.from_config({"head_dim": 32, "num_attention_heads": 4, "rope_parameters": rope})


def test_keys_that_do_not_fit_are_refused_with_the_field_and_the_value() -> None:
    rotary = Rotary.default(10000.0, SIZE)
    keys = torch.zeros(4, SIZE)
    with pytest.raises(LMCacheSDKError, match=r"old: expected one position per token of keys \[4, 16\], got \[3\]"):
        rotary.move(keys, range(3), range(4))
    with pytest.raises(LMCacheSDKError, match="keys: expected a multiple of 16 per token, got 15"):
        rotary.move(keys[:, :15], range(4), range(4))
    with pytest.raises(LMCacheSDKError, match=r"keys: expected a floating dtype, got torch\.float8_e4m3fn"):
        rotary.move(keys.to(torch.float8_e4m3fn), range(4), range(1, 5))
    with pytest.raises(LMCacheSDKError, match="frequencies: expected 1 to 8 for a head of 16, got 9"):
        Rotary(torch.ones(9), SIZE)


def test_a_model_without_a_rotary_embedding_is_refused() -> None:
    for config in (GPT2Config(), OPTConfig()):
        with pytest.raises(LMCacheSDKError, match=r"model_type: '\w+' has no rotary embedding"):
            Rotary.from_config(config)
    Rotary.from_config(GPTJConfig())


def test_a_configuration_without_sizes_is_refused_by_their_names() -> None:
    with pytest.raises(LMCacheSDKError, match="expected head_dim, or hidden_size and num_attention_heads"):
        Rotary.from_config({"rope_theta": 1e6})
