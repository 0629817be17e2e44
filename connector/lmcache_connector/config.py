"""vLLM's configuration, translated once into one frozen record; nothing else here looks into a `VllmConfig`.

The scheduler half and every worker build the record from the same facts, so they agree on the layout and on the model's
identity without a word to each other. What we cannot cache correctly is refused here, when the engine starts, with a
sentence that names the layer or the option: never silently, never later.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_connector.identity import model_revision
from lmcache_connector.settings import Settings, read_settings
from lmcache_server.protocol.layout import ITEM_BYTES, CacheLayout, KernelGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

__all__ = ["ConnectorConfig", "check_chunk_size", "read_config"]


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What both halves of the connector need; `layers` are vLLM's names, in the order of the layout's layers."""

    settings: Settings
    model_name: str
    revision: str
    world_size: int
    layout: CacheLayout
    layers: tuple[str, ...]
    block_size: int
    stores: bool
    loads: bool
    fails_on_load_errors: bool
    """Whether the engine answers a failed load with an error to the user instead of computing."""
    publishes_events: bool = False
    """Whether the engine publishes KV events."""


def read_config(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> ConnectorConfig:
    """The record; raises ValueError with a sentence for whatever is unknown, impossible or not supported."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "vLLM creates a connector only with a kv_transfer_config"
    settings = read_settings(transfer.kv_connector_extra_config)
    _refuse_unsupported(vllm_config)
    layers, spec = _one_group(kv_cache_config)
    events = vllm_config.kv_events_config
    return ConnectorConfig(
        settings=settings,
        model_name=vllm_config.model_config.model,
        revision=model_revision(vllm_config),
        world_size=vllm_config.parallel_config.tensor_parallel_size,
        layout=CacheLayout((_kernel_group(layers, spec),)),
        layers=layers,
        block_size=spec.block_size,
        stores=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        fails_on_load_errors=transfer.kv_load_failure_policy == "fail",
        publishes_events=events is not None and events.enable_kv_cache_events,
    )


def check_chunk_size(chunk_size: int, block_size: int) -> None:
    """Raise ValueError unless whole blocks make up a chunk, or whole chunks a block."""
    if chunk_size % block_size and block_size % chunk_size:
        raise ValueError(
            f"the server's chunks have {chunk_size} tokens and the engine's blocks {block_size}: one must divide the "
            f"other; start the server with --chunk-size {block_size} or the engine with --block-size {chunk_size}"
        )


def _refuse_unsupported(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    for option, value in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
        ("nnodes", parallel.nnodes),
    ):
        if value != 1:
            raise ValueError(f"{option}: {value} is not supported by LMCacheMPConnector yet; set it to 1")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise ValueError(
            f"speculative_config: method {speculative.method!r} keeps KV of draft tokens, which LMCacheMPConnector "
            "cannot tell from final ones yet; use the method 'ngram' or none"
        )


def _one_group(kv_cache_config: "KVCacheConfig") -> tuple[tuple[str, ...], "AttentionSpec"]:
    """The layers in the order of their index in the model, and the spec that they share."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        sorts = ", ".join(f"{len(g.layer_names)} layers of {type(g.kv_cache_spec).__name__}" for g in groups)
        raise ValueError(
            f"kv_cache_groups: {len(groups)} groups ({sorts or 'none'}) are not supported by LMCacheMPConnector yet; "
            "start vLLM with --disable-hybrid-kv-cache-manager if the model allows it"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        raise _unsupported(groups[0].layer_names[0], f"{type(spec).__name__}, not full attention")
    _check_spec(groups[0].layer_names[0], spec)
    return tuple(sorted(groups[0].layer_names, key=_layer_index)), spec


def _check_spec(layer: str, spec: Any) -> None:
    if spec.kv_quant_mode != 0:
        raise _unsupported(layer, f"its KV cache is quantised ({spec.kv_quant_mode.name}); use --kv-cache-dtype auto")
    if spec.head_size_v != spec.head_size:
        raise _unsupported(layer, f"keys of {spec.head_size} and values of {spec.head_size_v} elements")
    if spec.tokens_per_state != 1:
        raise _unsupported(layer, f"{spec.tokens_per_state} tokens share one state")
    if spec.state_content_bytes is not None or spec.num_head_slots is not None:
        raise _unsupported(layer, "its attention backend packs K and V in a way of its own")
    if spec.non_causal:
        raise _unsupported(layer, "tokens attend to later ones, so a prefix has no KV of its own")
    if _dtype_name(spec) not in ITEM_BYTES:
        raise _unsupported(layer, f"dtype {spec.dtype}")


def _kernel_group(layers: tuple[str, ...], spec: "AttentionSpec") -> KernelGroup:
    indices = tuple(_layer_index(layer) for layer in layers)
    if len(set(indices)) != len(indices):
        twice = next(layer for layer in layers if indices.count(_layer_index(layer)) > 1)
        raise _unsupported(twice, "another layer of this model has the same index")
    return KernelGroup(indices, planes=2, heads=spec.num_kv_heads, head_size=spec.head_size, dtype=_dtype_name(spec))


def _layer_index(layer: str) -> int:
    """The number in a layer's name: `model.layers.3.self_attn.attn` is layer 3."""
    numbers = [int(part) for part in layer.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise _unsupported(layer, "its name does not hold exactly one number, so its place in the model is unknown")
    return numbers[0]


def _dtype_name(spec: "AttentionSpec") -> str:
    return str(spec.dtype).removeprefix("torch.")


def _unsupported(layer: str, why: str) -> ValueError:
    return ValueError(f"layer {layer} is not supported by LMCacheMPConnector: {why}")
