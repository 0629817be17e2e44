"""What the server says about itself: the documents of /status, /config and /metrics, read off the live parts.

Their shapes are those that existing clients read; what is ours beside them (`layout`, `fingerprint`, ...) is added,
never substituted.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache_server.config import Settings
from lmcache_server.core.instances import Instance, InstanceTable
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.sessions import SessionTable
from lmcache_server.protocol import codec
from lmcache_server.protocol.layout import ITEM_BYTES, KernelGroup, Kind, slot_bytes
from lmcache_server.protocol.messages import HelloReply

__all__ = ["Status"]


@dataclass(frozen=True, slots=True)
class Status:
    """The parts that the documents are read off."""

    settings: Settings
    hello: HelloReply
    cache: L1Cache
    instances: InstanceTable
    sessions: SessionTable
    health: Callable[[], dict[str, Any]]
    traffic: Callable[[], dict[str, int]]

    def status(self) -> dict[str, Any]:
        """The document of GET /status."""
        health = self.health()
        return {
            "is_healthy": health["is_healthy"],
            "health": health,
            "engine_type": "MPCacheServer",
            "server_id": self.hello.server_id,
            "incarnation": self.hello.incarnation,
            "version": self.hello.version,
            "transport": self.hello.transport.value,
            "chunk_size": self.hello.chunk_size,
            "hash_algorithm": self.hello.hash_algorithm,
            "active_sessions": len(self.sessions),
            "active_prefetch_jobs": 0,
            "read_leases": len(self.cache.reads),
            "reservations": len(self.cache.writes),
            "quarantined_bytes": self.cache.quarantined_bytes,
            "counters": dataclasses.asdict(self.cache.counters) | self.traffic(),
            "storage_manager": self._storage(health["is_healthy"]),
            "worker_liveness": {
                "enabled": True,
                "reap_timeout_seconds": self.settings.worker_reap_timeout_seconds,
                "tracked_instances": len(self.instances),
            },
            "cache_context_meta": {str(i.id): self._engine(i) for i in self.instances if i.register.role == "worker"},
        }

    def config(self) -> dict[str, Any]:
        """The document of GET /config."""
        s = self.settings
        return {
            "mp": {
                "transport": "zmq",
                "host": s.host,
                "port": s.port,
                "chunk_size": s.chunk_size,
                "hash_algorithm": s.hash_algorithm,
                "engine_type": "default",
                "supported_transfer_mode": s.supported_transfer_mode,
                "shm_name": s.segment_name if self.hello.shm_name else "",
                "instance_id": s.instance_id,
                "worker_reap_timeout_seconds": s.worker_reap_timeout_seconds,
                "session_ttl_seconds": s.session_ttl_seconds,
                "enable": [s.enable],
            },
            "storage_manager": {
                "l1_manager_config": {
                    "memory_config": {
                        "size_in_bytes": s.pool_bytes,
                        "use_lazy": s.l1_use_lazy,
                        "align_bytes": self.hello.align_bytes,
                        "shm_name": self.hello.shm_name,
                    },
                    "write_ttl_seconds": s.l1_write_ttl_seconds,
                    "read_ttl_seconds": s.l1_read_ttl_seconds,
                },
                "eviction_config": self._eviction(),
            },
            "http": {"host": s.http_host, "port": s.http_port},
        }

    def numbers(self) -> dict[str, float]:
        """Every counter and gauge by name, as /status and /metrics show them."""
        cache = self.cache
        return {
            **dataclasses.asdict(cache.counters),
            **self.traffic(),
            "used_bytes": cache.allocator.used,
            "usage_ratio": self._usage_ratio(),
            "quarantined_bytes": cache.quarantined_bytes,
            "objects": cache.objects,
            "read_leases": len(cache.reads),
            "reservations": len(cache.writes),
            "active_sessions": len(self.sessions),
            "instances": len(self.instances),
            "dropped_events": cache.journal.overflowed,
            "kept_events": len(cache.journal),
            "event_followers": cache.journal.followers,
        }

    def _usage_ratio(self) -> float:
        return self.cache.allocator.used / self.cache.allocator.size

    def _eviction(self) -> dict[str, Any]:
        s = self.settings
        return {
            "eviction_policy": s.eviction_policy,
            "trigger_watermark": s.eviction_trigger_watermark,
            "eviction_ratio": s.eviction_ratio,
        }

    def _storage(self, healthy: bool) -> dict[str, Any]:
        cache, s = self.cache, self.settings
        return {
            "is_healthy": healthy,
            "l1_usage": [cache.allocator.used, cache.allocator.size],
            "l1_manager": {
                "is_healthy": healthy,
                "total_object_count": cache.objects,
                "write_locked_count": len(cache.writes),
                "read_locked_count": len(cache.reads),
                "memory_used_bytes": cache.allocator.used,
                "memory_total_bytes": cache.allocator.size,
                "memory_configured_bytes": s.pool_bytes,
                "memory_usage_ratio": self._usage_ratio(),
                "write_ttl_seconds": s.l1_write_ttl_seconds,
                "read_ttl_seconds": s.l1_read_ttl_seconds,
            },
            "l1_eviction_controller": {"is_healthy": healthy, **self._eviction()},
            "eviction_controller": self._eviction(),  # where `lmcache describe` of LMCache 0.5.6 looks for it
            "l2_adapters": [],
            "num_l2_adapters": 0,
        }

    def _engine(self, instance: Instance) -> dict[str, Any]:
        register = instance.register
        return {
            "model_name": register.model_name,
            "world_size": register.world_size,
            "revision": register.revision,
            "kind": register.kind.value,
            "worker_id": register.worker_id,
            "block_size": register.block_size,
            "fingerprint": instance.view.namespace.layout,
            "layout": codec.to_map(register.layout),
            "kv_cache_layout": {
                "num_layers": sum(len(group.layers) for group in register.layout.groups),
                "num_blocks": 1,
                "cache_size_per_token": sum(slot_bytes(group, 1) for group in register.layout.groups),
                "kernel_groups": [
                    self._group(i, group, register.kind, register.block_size)
                    for i, group in enumerate(register.layout.groups)
                ],
            },
        }

    def _group(self, index: int, group: KernelGroup, kind: Kind, block_size: int) -> dict[str, Any]:
        """One kernel group, described to older clients as a page of one block in split layout."""
        block = math.gcd(block_size, self.hello.chunk_size)
        if group.planes == 2:
            shape, name, symbols = (
                f"[2, 1, {block}, {group.heads}, {group.head_size}]",
                "NL_X_TWO_NB_BS_NH_HS",
                "NL x [2, NB, BS, NH, HS]",
            )
        else:
            shape, name, symbols = f"[1, {block}, {group.hidden}]", "NL_X_NB_BS_HS", "NL x [NB, BS, HS]"
        return {
            "kernel_group_idx": index,
            "engine_group_idx": index,
            "object_group_idx": index,
            "num_layers": len(group.layers),
            "layer_indices": list(group.layers),
            "tokens_per_block": block,
            "slots_per_block": block,
            "dtype": f"torch.{group.dtype}",
            "item_bytes": ITEM_BYTES[group.dtype],
            "engine_kv_concrete_shape": f"{len(group.layers)} x {shape}",
            "is_mla": group.planes == 1 and kind is Kind.KV,
            "engine_kv_format": name,
            "engine_kv_shape": symbols,
            "attention_backend": "canonical chunks",
        }
