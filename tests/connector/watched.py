"""A real vLLM in this process with the connector and a real server, and a look at what the connector does in it."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group

from lmcache_connector.cpu_packing import probe_cell
from lmcache_connector.metadata import LoadJob, StepPlan, StoreJob
from lmcache_connector.scheduler import SchedulerHalf
from lmcache_connector.worker import WorkerHalf
from tests.engine import Completion, InProcessEngine, connector_config, in_process_engine, tiny_model
from tests.servers import CacheServer, running_server


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


class Watched:
    """An engine whose plans are recorded; `before_load` may change a plan before the worker carries it out."""

    def __init__(self, engine: InProcessEngine, server: CacheServer) -> None:
        self.engine = engine
        self.server = server
        self.planned: list[LoadJob] = []
        """Every load that the scheduler half has planned; `loads` and `stores` only of a worker in this process."""
        self.loads: list[LoadJob] = []
        self.stores: list[StoreJob] = []
        self.asked: list[tuple[str, int, int | None]] = []
        """Each question to the scheduler half: request, local tokens, answer."""
        self.before_load: Callable[[StepPlan], StepPlan] = lambda plan: plan
        self.after_load: Callable[[StepPlan], None] = lambda plan: None
        self.preemptions = 0
        self._watch()

    @property
    def scheduler_half(self) -> SchedulerHalf:
        half: SchedulerHalf = self.engine.scheduler_connector.scheduler_half
        return half

    @property
    def worker_half(self) -> WorkerHalf:
        half: WorkerHalf = self.engine.worker_connector.worker_half
        return half

    def _watch(self) -> None:
        self._watch_scheduler()
        if has_kv_transfer_group():
            self._watch_worker()

    def _watch_worker(self) -> None:
        load, store = self.worker_half.load, self.worker_half.store

        def watched_load(plan: StepPlan) -> None:
            plan = self.before_load(plan)
            self.loads += plan.loads
            load(plan)
            self.after_load(plan)

        def watched_store(plan: StepPlan) -> None:
            self.stores += plan.stores
            store(plan)

        self.worker_half.load = watched_load  # type: ignore[method-assign]
        self.worker_half.store = watched_store  # type: ignore[method-assign]

    def _watch_scheduler(self) -> None:
        matched, make_plan = self.scheduler_half.matched_tokens, self.scheduler_half.plan

        def watched_plan(output: Any) -> StepPlan:
            plan = make_plan(output)
            self.planned += plan.loads
            return plan

        def watched_matched(request: Any, local: int) -> tuple[int | None, bool]:
            answer = matched(request, local)
            self.preemptions = max(self.preemptions, request.num_preemptions)
            self.asked.append((request.request_id, local, answer[0]))
            assert answer[0] is None or 0 <= answer[0] <= request.num_tokens - 1 - local or answer[0] == 0
            return answer

        self.scheduler_half.plan = watched_plan  # type: ignore[method-assign]
        self.scheduler_half.matched_tokens = watched_matched  # type: ignore[method-assign]

    def wait_for_loads(self) -> None:
        """Return when nothing is being loaded any more."""
        loader = self.worker_half.loader
        with loader._change:
            assert loader._change.wait_for(lambda: loader._under_way == 0, timeout=10)

    def forget(self) -> None:
        """Empty the engine's own cache, the server's, and the record."""
        self.engine.reset_prefix_cache()
        assert self.scheduler_half.clear()
        self.planned.clear()
        self.loads.clear()
        self.stores.clear()
        self.asked.clear()
        self.preemptions = 0

    def complete(self, prompt: list[int], **options: Any) -> Completion:
        """One request; see InProcessEngine."""
        return self.engine.complete(prompt, **options)

    def external(self, prompt: list[int], **options: Any) -> Completion:
        """One request on an engine that has forgotten everything."""
        self.engine.reset_prefix_cache()
        return self.engine.complete(prompt, **options)

    def tokens_in_pages(self, block_ids: tuple[int, ...], count: int) -> torch.Tensor:
        """K and V of the first `count` tokens of a block table: `[layers, 2, count, heads, head_size]`, as bits."""
        layers = []
        for page in self.engine.kv_caches:
            _, heads, block_size, content = page.shape
            kernel = self.worker_half._copiers[0].kernel  # type: ignore[attr-defined]
            positions = probe_cell(block_size, content // 2, kernel)
            cells = page[list(block_ids)].reshape(len(block_ids), heads, -1)
            kv = cells[:, :, positions]  # [blocks, heads, 2, tokens, head_size]
            layers.append(kv.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :count])
        return torch.stack(layers).view(torch.uint8)


@contextmanager
def watched_engine(
    chunk_size: int,
    block_size: int,
    *,
    dtype: Any = "bfloat16",
    model: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    connector: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Watched]:
    """A server and an engine for it; the server is quiet at the end and leaves nothing behind."""
    with running_server("--chunk-size", str(chunk_size), "--l1-size-gb", "0.125") as server:
        transfer = connector_config(server.port, **{"heartbeat_interval": 0.5, **(settings or {})})
        transfer |= {"kv_load_failure_policy": "recompute"} | (connector or {})
        with in_process_engine(
            model or tiny_model(dtype=dtype),
            connector=transfer,
            block_size=block_size,
            **{"max_model_len": 1024, **options},
        ) as engine:
            watched = Watched(engine, server)
            # The first requests of a process load libraries and pick kernels; that is not what is tested.
            watched.complete(prompt_of(200, seed=999))
            watched.forget()
            yield watched
            watched.server.quiet()


def without_lease_on_chunk(plan: StepPlan, chunk: int) -> StepPlan:
    """The plan as if chunk number `chunk` had been evicted and its place given to another since the lookup."""

    def stale(job: LoadJob) -> LoadJob:
        if chunk >= job.acquired.chunks:
            return job
        slots = bytearray(job.acquired.slots)
        parts = len(slots) // 16 // job.acquired.chunks
        slots[16 * parts * chunk + 8] ^= 1
        return dataclasses.replace(job, acquired=msgspec.structs.replace(job.acquired, slots=bytes(slots)))

    return dataclasses.replace(plan, loads=tuple(stale(job) for job in plan.loads))
