"""vLLM's real cache specs, translated into kernel groups; and what is refused when the engine starts."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_connector.shapes import EngineGroup, EngineShape, engine_shape
from lmcache_server.protocol.layout import CacheLayout, KernelGroup

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=64, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, sliding_window=512)
LATENT = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
QUANTISED = dataclasses.replace(SPEC, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
NAMES = [f"model.layers.{i}.self_attn.attn" for i in (0, 10, 2, 1)]


def shape(
    *groups: tuple[list[str], Any], ranks: int = 1, replicas: int = 1, cache_dtype: str = "auto", **facts: Any
) -> EngineShape:
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(names, spec, **facts) for names, spec in groups])
    config.kv_tp_replicas = replicas
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    return engine_shape(engine, config)


def test_a_plain_model_is_one_group_in_the_order_of_its_layers() -> None:
    layers = tuple(NAMES[i] for i in (0, 3, 2, 1))
    assert shape((NAMES, SPEC)) == EngineShape(
        (EngineGroup(layers, 0, 128),), CacheLayout((KernelGroup((0, 1, 2, 10), 2, 4, 64, "bfloat16"),)), 1, 1
    )


def test_both_halves_see_the_same_shape_whatever_order_vllm_lists_layers_in() -> None:
    assert shape((NAMES[::-1], SPEC)) == shape((NAMES, SPEC))


def test_a_hybrid_model_is_a_kernel_group_for_each_block_table() -> None:
    found = shape((NAMES[:2], WINDOW), (NAMES[2:], SPEC))
    assert found.groups == (EngineGroup(tuple(NAMES[:2]), 0, 64), EngineGroup((NAMES[3], NAMES[2]), 1, 128))
    windowed, full = found.layout.groups
    assert (windowed.layers, windowed.window) == ((0, 10), 512)
    assert (full.layers, full.window) == ((1, 2), 0)


def test_windowed_layers_that_keep_all_of_their_blocks_are_full_attention() -> None:
    assert shape((NAMES, dataclasses.replace(SPEC, sliding_window=512))) == shape((NAMES, SPEC))


def test_a_latent_is_one_plane_and_one_shard_for_all_ranks() -> None:
    found = shape((NAMES, LATENT), ranks=4, replicas=4)
    assert (found.shards, found.replicas) == (1, 4)
    assert found.layout.groups == (KernelGroup((0, 1, 2, 10), 1, 1, 576, "bfloat16"),)


@pytest.mark.parametrize(("ranks", "replicas", "shards"), [(2, 1, 2), (8, 2, 4), (1, 1, 1)])
def test_ranks_that_hold_the_same_bytes_count_once(ranks: int, replicas: int, shards: int) -> None:
    assert shape((NAMES, SPEC), ranks=ranks, replicas=replicas).shards == shards


@pytest.mark.parametrize(("option", "named"), [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")])
def test_quantised_bytes_are_named_in_the_layout(option: str, named: str) -> None:
    layout = shape((NAMES, QUANTISED), cache_dtype=option).layout
    assert layout.quantisation == named
    assert layout.groups[0].dtype == "uint8"


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([], "has no KV cache, so there is nothing to cache"),
        ([(NAMES, MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)))], "its cache is a MambaSpec"),
        ([(NAMES[:2], SPEC), (NAMES[2:], MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)))],
         f"layer {NAMES[2]} is not supported by LMCacheMPConnector: its cache is a MambaSpec"),
        ([(NAMES, ChunkedLocalAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16,
                                            attention_chunk_size=64))], "its cache is a ChunkedLocalAttentionSpec"),
        ([(NAMES, SinkFullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16,
                                        sink_len=16))], "its cache is a SinkFullAttentionSpec"),
        ([(NAMES, UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=dict.fromkeys(NAMES, SPEC)))],
         "its cache is a UniformTypeKVCacheSpecs"),
        ([(NAMES, dataclasses.replace(SPEC, attention_chunk_size=64))], "chunked local attention"),
        ([(NAMES, dataclasses.replace(SPEC, head_size_v=32))], "keys of 64 and values of 32"),
        ([(NAMES, dataclasses.replace(SPEC, non_causal=True))], "attend to later ones"),
        ([(NAMES, dataclasses.replace(SPEC, state_content_bytes=96))], "packs its cache in a way of its own"),
        ([(NAMES, dataclasses.replace(LATENT, tokens_per_state=4))], "4 tokens share one state"),
        ([(NAMES, dataclasses.replace(SPEC, dtype=torch.float64))], "dtype torch.float64"),
        ([(NAMES[:2], SPEC), (NAMES[2:], QUANTISED)], "some layers' KV cache is quantised and some layers' is not"),
        ([(["model.layers.0.attn.1"], SPEC)], "exactly one number"),
        ([(["encoder.layers.0.attn", "decoder.layers.0.attn"], SPEC)], "same index"),
        ([(["encoder.layers.0.attn"], SPEC), (["decoder.layers.0.attn"], WINDOW)], "same index"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cached_correctly_is_refused_with_its_layer(
    groups: list[tuple[list[str], Any]], sentence: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        shape(*groups)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "nvfp4", "int8_per_token_head", "fp8_inc"])
def test_a_quantisation_that_is_more_than_bytes_and_a_scale_is_refused(cache_dtype: str) -> None:
    with pytest.raises(ValueError, match=f"quantised as '{cache_dtype}'; use --kv-cache-dtype auto or one of fp8"):
        shape((NAMES, QUANTISED), cache_dtype=cache_dtype)


@pytest.mark.parametrize(
    "facts", [{"is_eagle_group": True}, {"host_resident": True}, {"role": KVCacheGroupRole.HISPARSE_SOURCE}]
)
def test_groups_with_a_role_of_their_own_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its cache group has a role of its own"):
        shape((NAMES, SPEC), **facts)


def test_specs_that_only_look_like_full_attention_are_refused() -> None:
    fields = {field.name: getattr(SPEC, field.name) for field in dataclasses.fields(SPEC) if field.init}
    with pytest.raises(ValueError, match="its cache is a RSWASpec"):
        shape((NAMES, RSWASpec(**fields, rswa_window=64)))
