"""vLLM's connector interface, and nothing else: each hook goes to the scheduler half or to the worker half.

The class is chosen by `"kv_connector": "LMCacheMPConnector"` (see plugin), or by `kv_connector_module_path`
`lmcache_connector.mp_connector`. It supports the hybrid KV cache manager, where a model's layers have several block
tables.
"""

# ruff: noqa: E402
from typing import TYPE_CHECKING, Any

import torch

from lmcache_connector.versions import check_vllm, warn_if_untested, warn_of_faults

check_vllm()  # before anything is taken from vLLM that another version may not have

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_connector.config import read_config
from lmcache_connector.copiers import make_copiers
from lmcache_connector.loading import Finished
from lmcache_connector.metadata import StepOutcome, StepPlan
from lmcache_connector.q_store import QueryStore, make_query_store
from lmcache_connector.scheduler import SchedulerHalf
from lmcache_connector.stats import CacheProm, CacheStats
from lmcache_connector.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["LMCacheMPConnector"]

logger = init_logger(f"vllm.{__name__}")


class LMCacheMPConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offloads prompt KV to a cache server on this node and takes it back."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            warn_if_untested()
            warn_of_faults(vllm_config)
        self._config = read_config(vllm_config, kv_cache_config)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self.query_store: QueryStore | None = None
        """What a worker's connector captures queries with, if they are to be captured."""
        self._finished = Finished()
        if role is KVConnectorRole.SCHEDULER:
            if self._config.fails_on_load_errors:
                logger.warning(
                    "kv_load_failure_policy is 'fail', vLLM's default: a request whose cached KV is lost while it "
                    "loads ends with an error; set it to 'recompute' to have it computed instead"
                )
            self._scheduler_half = SchedulerHalf(self._config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is a later miss, nothing else."""
        return False

    @property
    def scheduler_half(self) -> SchedulerHalf:
        """The half that a connector with role SCHEDULER has."""
        assert self._scheduler_half is not None, "a hook of the scheduler was called on a worker's connector"
        return self._scheduler_half

    @property
    def worker_half(self) -> WorkerHalf:
        """The half that a connector with role WORKER has, once its KV caches are registered."""
        assert self._worker_half is not None, "a hook of a worker was called before register_kv_caches"
        return self._worker_half

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheStats:
        """The statistics in `data`, which stays as it is."""
        return CacheStats().aggregate(CacheStats(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CacheProm:
        """The statistics as Prometheus metrics."""
        return CacheProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Leave the server."""
        for half in (self._scheduler_half, self._worker_half, self.query_store):
            if half is not None:
                half.close()

    # --- worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the engine's pages are, and register with the server."""
        copiers = make_copiers(self._vllm_config, self._config.shape, kv_caches)
        device = next(iter(kv_caches.values())).device
        half = WorkerHalf(self._config, self._vllm_config.parallel_config.rank, copiers, device)
        if self._config.query_blocks:
            try:
                self.query_store = make_query_store(self._vllm_config, self._config, device, half.stats)
            except ValueError:
                half.close()  # an engine that does not start leaves the server too
                raise
        self._worker_half = half

    def bind_connector_metadata(self, connector_metadata: "KVConnectorMetadata") -> None:
        """A step begins; of a worker's hooks the only one that vLLM always calls before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self.query_store is not None:
            self.query_store.begin(self._plan())

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Begin the loads of this step."""
        self.worker_half.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is computed only when its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing to do: whole chunks are stored in wait_for_save."""

    def wait_for_save(self) -> None:
        """Do the stores of this step."""
        self.worker_half.store(self._plan())
        if self.query_store is not None:
            self.query_store.store()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The loads that are over, and which of them failed as a whole."""
        self._finished = self.worker_half.take_finished()
        loaded = self._finished.requests if self._config.settings.load_async else set()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=self._finished.failed_requests)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that the loads of the last `get_transfer_results` did not fill."""
        return self._finished.failed_blocks

    def build_connector_worker_meta(self) -> StepOutcome | None:
        """What became of this step's stores and synchronous loads."""
        return self.worker_half.take_outcome()

    def get_kv_connector_stats(self) -> CacheStats | None:
        """What this half counted since the last call."""
        half = self._scheduler_half or self._worker_half
        return half.stats.take() if half is not None else None

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # --- scheduler -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """A request has arrived."""
        self.scheduler_half.add_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones can be loaded (None: ask again), and whether asynchronously."""
        return self.scheduler_half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The request has its blocks."""
        self.scheduler_half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepPlan:
        """What the workers do in this step."""
        return self.scheduler_half.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """What the workers did."""
        self.scheduler_half.done(connector_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks may be freed at once."""
        self.scheduler_half.finished(request)
        return False, None

    def take_events(self) -> list["KVCacheEvent"]:
        """What came to the cache server and went from it since the last call."""
        feed = self.scheduler_half.feed
        return feed.take() if feed is not None else []

    def reset_cache(self) -> bool | None:
        """Make the server forget everything that it has cached, for all engines."""
        return self.scheduler_half.clear()
