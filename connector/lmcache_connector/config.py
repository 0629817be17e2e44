"""vLLM's configuration, translated once into one frozen record; nothing else here looks into a `VllmConfig`.

The scheduler half and every worker build the record from the same facts, so they agree on the layout and on the model's
identity without a word to each other. What we cannot cache correctly is refused here, when the engine starts, with a
sentence that names the layer or the option: never silently, never later.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_connector.identity import PromptRules, prompt_rules
from lmcache_connector.revision import model_revision
from lmcache_connector.settings import Settings, read_settings
from lmcache_connector.shapes import EngineShape, engine_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["ConnectorConfig", "read_config"]


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What both halves of the connector need."""

    settings: Settings
    model_name: str
    revision: str
    shape: EngineShape
    prompts: PromptRules
    stores: bool
    loads: bool
    fails_on_load_errors: bool
    """Whether the engine answers a failed load with an error to the user instead of computing."""
    publishes_events: bool = False
    """Whether the engine publishes KV events."""
    query_blocks: int = 0
    """Blocks of the ring that queries are captured in; 0: they are not captured."""


def read_config(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> ConnectorConfig:
    """The record; raises ValueError with a sentence for whatever is unknown, impossible or not supported."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "vLLM creates a connector only with a kv_transfer_config"
    settings = read_settings(transfer.kv_connector_extra_config)
    _refuse_unsupported(vllm_config)
    events = vllm_config.kv_events_config
    shape = engine_shape(vllm_config, kv_cache_config)
    if not settings.load_async:
        _check_synchronous_loads(vllm_config, shape)
    return ConnectorConfig(
        settings=settings,
        model_name=vllm_config.model_config.model,
        revision=model_revision(vllm_config),
        shape=shape,
        prompts=prompt_rules(vllm_config),
        stores=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        fails_on_load_errors=transfer.kv_load_failure_policy == "fail",
        publishes_events=events is not None and events.enable_kv_cache_events,
        query_blocks=_query_blocks(vllm_config, settings, shape) if settings.transfer_queries else 0,
    )


def _check_synchronous_loads(vllm_config: "VllmConfig", shape: EngineShape) -> None:
    """Raise ValueError where vLLM could not recover from one that fails."""
    key = "lmcache.mp.load_async: false"
    if len(shape.groups) > 1 or shape.layout.groups[0].window:
        raise ValueError(
            f"{key} is not possible for a model with sliding windows that let go of their blocks, because vLLM cannot "
            "compute again what failed to load; remove the key"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            f"{key} is not possible with asynchronous scheduling, where the next step is planned before it is known "
            "that a load failed; remove the key or start vLLM with --no-async-scheduling"
        )


def _query_blocks(vllm_config: "VllmConfig", settings: Settings, shape: EngineShape) -> int:
    """How large the ring for queries is; raises ValueError if this engine's cannot be captured."""
    key = "lmcache.mp.transfer_intermediate_tensors"
    if not vllm_config.model_config.enforce_eager:
        raise ValueError(f"{key}: queries can be captured only in eager execution; start vLLM with --enforce-eager")
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(f"{key}: queries cannot be captured from microbatches; start vLLM without --enable-dbo")
    if not vllm_config.kv_transfer_config.is_kv_producer:
        raise ValueError(f"{key}: kv_role kv_consumer stores nothing; remove the key or set kv_role to kv_both")
    step_blocks = -(-vllm_config.scheduler_config.max_num_batched_tokens // shape.lasting_group.block_size)
    return settings.ring_blocks or step_blocks * settings.ring_depth


def _refuse_unsupported(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    for option, value in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
        ("nnodes", parallel.nnodes),
    ):
        if value != 1:
            raise ValueError(
                f"{option}: {value} is not supported by LMCacheMPConnector, whose server shares memory with the "
                "tensor-parallel ranks of one node; set it to 1"
            )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise ValueError(
            f"speculative_config: method {speculative.method!r} keeps KV of draft tokens, which LMCacheMPConnector "
            "cannot tell from final ones yet; use the method 'ngram' or none"
        )
