"""Which of the engine's caches are cached, and what one chunk of them looks like; everything else is refused here.

vLLM puts layers with one block table into a group: all of a plain model's layers are one, a hybrid model has some for
full attention and some for sliding windows. Each of its groups is one kernel group of ours, so a chunk is one object
per group, and a hit needs all of them.

Ranks of a tensor-parallel engine hold shards. Where consecutive ranks hold the same bytes (MLA's one latent, or fewer
KV heads than ranks), the first of them stores and all of them read, and they count as one shard.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_server.protocol.layout import ITEM_BYTES, CacheLayout, KernelGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

__all__ = ["EngineGroup", "EngineShape", "engine_shape"]

QUANTISATIONS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""`--kv-cache-dtype` -> what the bytes are; one scale per tensor, which comes with the weights."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The layers of one kernel group, by vLLM's names, in the order of the kernel group's layers.

    Their blocks are those of the request's block table number `table`.
    """

    layers: tuple[str, ...]
    table: int
    block_size: int


@dataclass(frozen=True, slots=True)
class EngineShape:
    """`groups[i]` is where kernel group `layout.groups[i]` is in the engine."""

    groups: tuple[EngineGroup, ...]
    layout: CacheLayout
    shards: int
    """How many different shards the ranks hold."""
    replicas: int
    """How many consecutive ranks hold the same shard."""

    @property
    def lasting_group(self) -> EngineGroup:
        """A group whose blocks stay until their request ends, if there is one: the first with full attention."""
        windows = (group.window for group in self.layout.groups)
        return next((group for group, window in zip(self.groups, windows, strict=True) if not window), self.groups[0])


def engine_shape(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> EngineShape:
    """The shape of this engine's caches; raises ValueError with a layer and a reason for what we cannot cache."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ValueError("kv_cache_groups: this model has no KV cache, so there is nothing to cache; remove the option")
    _check_indices([layer for group in groups for layer in group.layer_names])
    engine_groups, kernel_groups, quantised = [], [], set()
    for table, group in enumerate(groups):
        _check_group(group)
        spec: Any = group.kv_cache_spec
        layers = tuple(sorted(group.layer_names, key=_layer_index))
        engine_groups.append(EngineGroup(layers, table, spec.block_size))
        kernel_groups.append(_kernel_group(layers, spec))
        quantised.add(spec.kv_quant_mode != 0)
    if len(quantised) > 1:
        raise _unsupported(groups[0].layer_names[0], "some layers' KV cache is quantised and some layers' is not")
    quantisation = _quantisation(vllm_config, groups[0].layer_names[0]) if True in quantised else ""
    replicas = kv_cache_config.kv_tp_replicas
    return EngineShape(
        tuple(engine_groups),
        CacheLayout(tuple(kernel_groups), quantisation),
        vllm_config.parallel_config.tensor_parallel_size // replicas,
        replicas,
    )


def _check_group(group: "KVCacheGroupSpec") -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupRole, MLAAttentionSpec, SlidingWindowSpec

    spec: Any = group.kv_cache_spec
    layer = group.layer_names[0]
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
        raise _unsupported(
            layer,
            f"its cache is a {type(spec).__name__}; full attention, sliding windows and MLA are proven to come back "
            "as they were, this is not",
        )
    if group.is_eagle_group or group.host_resident or group.role != KVCacheGroupRole.DEFAULT:
        raise _unsupported(layer, "its cache group has a role of its own (drafts, or blocks on the host)")
    _check_spec(layer, spec)


def _check_spec(layer: str, spec: Any) -> None:
    if spec.head_size_v not in (spec.head_size, 0):
        raise _unsupported(layer, f"keys of {spec.head_size} and values of {spec.head_size_v} elements")
    if spec.tokens_per_state != 1:
        raise _unsupported(layer, f"{spec.tokens_per_state} tokens share one state")
    if spec.state_content_bytes is not None or spec.num_head_slots is not None:
        raise _unsupported(layer, "its attention backend packs its cache in a way of its own")
    if getattr(spec, "non_causal", False):
        raise _unsupported(layer, "tokens attend to later ones, so a prefix has no KV of its own")
    if getattr(spec, "attention_chunk_size", None) is not None:
        raise _unsupported(layer, "chunked local attention is not proven to come back as it was")
    if _dtype_name(spec) not in ITEM_BYTES:
        raise _unsupported(layer, f"dtype {spec.dtype}")


def _quantisation(vllm_config: "VllmConfig", layer: str) -> str:
    """What the quantised bytes are, for the key; raises ValueError for what is more than bytes and one scale."""
    from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

    name = vllm_config.cache_config.cache_dtype
    if get_kv_quant_mode(name) != KVQuantMode.FP8_PER_TENSOR or name not in QUANTISATIONS:
        raise _unsupported(
            layer,
            f"its KV cache is quantised as {name!r}; use --kv-cache-dtype auto or one of {', '.join(QUANTISATIONS)}",
        )
    return QUANTISATIONS[name]


def _kernel_group(layers: tuple[str, ...], spec: Any) -> KernelGroup:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    latent = spec.head_size_v == 0
    return KernelGroup(
        tuple(_layer_index(layer) for layer in layers),
        planes=1 if latent else 2,
        heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=_dtype_name(spec),
        # Only where blocks outside of the window go away; a full-attention group may hold windowed layers too.
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
    )


def _check_indices(layers: list[str]) -> None:
    seen: set[int] = set()
    for layer in layers:
        if _layer_index(layer) in seen:
            raise _unsupported(layer, "another layer of this model has the same index")
        seen.add(_layer_index(layer))


def _layer_index(layer: str) -> int:
    """The number in a layer's name: `model.layers.3.self_attn.attn` is layer 3."""
    numbers = [int(part) for part in layer.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise _unsupported(layer, "its name does not hold exactly one number, so its place in the model is unknown")
    return numbers[0]


def _dtype_name(spec: Any) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _unsupported(layer: str, why: str) -> ValueError:
    return ValueError(f"layer {layer} is not supported by LMCacheMPConnector: {why}")
