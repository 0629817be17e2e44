"""vLLM's real configuration objects, translated; and what is refused when the engine starts."""

from typing import Any

import pytest
import torch

from lmcache_connector.config import read_config
from tests.engine import connector_config, tiny_model

pytest.importorskip("vllm")

from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
QUERIES = {"lmcache.mp.transfer_intermediate_tensors": True}
NAMES = [f"model.layers.{i}.self_attn.attn" for i in (0, 10, 2, 1)]


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    transfer = KVTransferConfig(**connector_config(6555))
    arguments = EngineArgs(model=str(tiny_model()), enforce_eager=True, kv_transfer_config=transfer)
    return arguments.create_engine_config()


def changed(config: VllmConfig, part: str, **values: Any) -> VllmConfig:
    """A shallow copy with other values in one part."""
    copy = object.__new__(VllmConfig)
    copy.__dict__.update(config.__dict__)
    old = getattr(config, part)
    new = object.__new__(type(old))
    new.__dict__.update(old.__dict__ | values)
    copy.__dict__[part] = new
    return copy


def caches(*groups: tuple[list[str], Any]) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in groups],
    )


def test_the_record_says_what_the_engine_is(vllm_config: VllmConfig) -> None:
    config = read_config(vllm_config, caches((NAMES, SPEC)))
    assert config.model_name == str(tiny_model())
    assert config.shape.groups[0].table == 0
    assert (config.stores, config.loads) == (True, True)
    assert config.settings.url == "tcp://127.0.0.1:6555"
    assert config.fails_on_load_errors, "vLLM's default"


def test_both_halves_build_the_same_record(vllm_config: VllmConfig) -> None:
    shuffled = caches((NAMES[::-1], SPEC))
    assert read_config(vllm_config, caches((NAMES, SPEC))) == read_config(vllm_config, shuffled)


@pytest.mark.parametrize(("role", "stores", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)])
def test_the_role_decides_who_stores_and_who_loads(
    vllm_config: VllmConfig, role: str, stores: bool, loads: bool
) -> None:
    config = read_config(changed(vllm_config, "kv_transfer_config", kv_role=role), caches((NAMES, SPEC)))
    assert (config.stores, config.loads) == (stores, loads)


@pytest.mark.parametrize("enabled", [True, False])
def test_kv_events_are_published_if_the_engine_does(vllm_config: VllmConfig, enabled: bool) -> None:
    events = KVEventsConfig(enable_kv_cache_events=enabled, publisher="null")
    config = changed(vllm_config, "parallel_config")
    config.__dict__["kv_events_config"] = events
    assert read_config(config, caches((NAMES, SPEC))).publishes_events is enabled
    assert not read_config(vllm_config, caches((NAMES, SPEC))).publishes_events


def test_whatever_shapes_kv_changes_the_revision(vllm_config: VllmConfig, tmp_path: Any) -> None:
    def revision(config: VllmConfig) -> str:
        return read_config(config, caches((NAMES, SPEC))).revision

    revisions = {
        revision(changed(vllm_config, "model_config", **values))
        for values in (
            {},
            {"hf_overrides": {"rope_parameters": {"rope_theta": 7.0}}},
            {"quantization": "fp8"},
            {"dtype": torch.float32},
            {"model_impl": "transformers"},
            {"model": str(tiny_model(seed=1))},
            {"model": "some/model", "revision": "a"},
            {"model": "some/model", "revision": "b"},
        )
    }
    assert len(revisions) == 8
    assert revision(vllm_config) in revisions


def test_loads_before_the_forward_pass_are_refused_where_vllm_could_not_recover(vllm_config: VllmConfig) -> None:
    window = SlidingWindowSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, sliding_window=64)
    groups = caches((NAMES[:2], SPEC), (NAMES[2:], window))
    assert len(read_config(vllm_config, groups).shape.groups) == 2
    extra = {"lmcache.mp.load_async": False}
    synchronous = changed(vllm_config, "kv_transfer_config", kv_connector_extra_config=extra)
    synchronous = changed(synchronous, "scheduler_config", async_scheduling=False)
    assert not read_config(synchronous, caches((NAMES, SPEC))).settings.load_async
    with pytest.raises(ValueError, match=r"lmcache\.mp\.load_async: false is not possible .* remove the key"):
        read_config(synchronous, groups)
    with pytest.raises(ValueError, match="start vLLM with --no-async-scheduling"):
        read_config(changed(synchronous, "scheduler_config", async_scheduling=True), caches((NAMES, SPEC)))


@pytest.mark.parametrize(
    "option",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"],
)
def test_ranks_that_we_do_not_serve_are_refused_by_their_option(vllm_config: VllmConfig, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: 2 is not supported"):
        read_config(changed(vllm_config, "parallel_config", **{option: 2}), caches((NAMES, SPEC)))


@pytest.mark.parametrize(
    ("ring", "blocks"),
    [({}, 2 * 3), ({"lmcache.mp.q.ring_depth": 5}, 5 * 3), ({"lmcache.q.ring_blocks": 7}, 7)],
)
def test_the_ring_for_queries_has_room_for_the_largest_step_as_often_as_asked(
    vllm_config: VllmConfig, ring: dict[str, int], blocks: int
) -> None:
    assert read_config(vllm_config, caches((NAMES, SPEC))).query_blocks == 0
    step = changed(vllm_config, "scheduler_config", max_num_batched_tokens=2 * 128 + 1)
    config = changed(step, "kv_transfer_config", kv_connector_extra_config=QUERIES | ring)
    assert read_config(config, caches((NAMES, SPEC))).query_blocks == blocks


@pytest.mark.parametrize(
    ("part", "values", "remedy"),
    [
        ("model_config", {"enforce_eager": False}, "start vLLM with --enforce-eager"),
        ("parallel_config", {"enable_dbo": True}, "start vLLM without --enable-dbo"),
        ("kv_transfer_config", {"kv_role": "kv_consumer"}, "set kv_role to kv_both"),
    ],
)
def test_an_engine_whose_queries_cannot_be_captured_is_refused_only_if_they_should_be(
    vllm_config: VllmConfig, part: str, values: dict[str, Any], remedy: str
) -> None:
    config = changed(vllm_config, part, **values)
    assert read_config(config, caches((NAMES, SPEC))).query_blocks == 0
    asked = changed(config, "kv_transfer_config", kv_connector_extra_config=QUERIES)
    with pytest.raises(ValueError, match=rf"lmcache\.mp\.transfer_intermediate_tensors: .*{remedy}"):
        read_config(asked, caches((NAMES, SPEC)))


def test_unknown_keys_end_the_start(vllm_config: VllmConfig) -> None:
    other = changed(vllm_config, "kv_transfer_config", kv_connector_extra_config={"lmcache.mp.prot": 1})
    with pytest.raises(ValueError, match=r"did you mean lmcache\.mp\.port"):
        read_config(other, caches((NAMES, SPEC)))
