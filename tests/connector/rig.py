"""Both halves of the connector with a real server between them, and just enough of an engine to drive them.

The engine's pages are CPU tensors; its "forward pass" writes values that follow from the tokens before them, so that
wrong KV anywhere is a compare. Requests, blocks and scheduler outputs are vLLM's own classes.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.gpu_connector import StagedCopier
from lmcache_connector.metadata import StepPlan
from lmcache_connector.scheduler import SchedulerHalf
from lmcache_connector.settings import Settings
from lmcache_connector.worker import WorkerHalf
from lmcache_server.protocol.layout import CacheLayout, KernelGroup
from tests.connector.pages import Paged, Shape

BLOCKS = 64
SPARE = 24
"""Tokens that a request may generate in the blocks it is given."""


def rig_config(
    url: str, *, block_size: int = 16, model: str = "rig", head_size: int = 8, **changes: Any
) -> ConnectorConfig:
    """A configuration for a model of two layers with two heads."""
    group = KernelGroup((0, 1), planes=2, heads=2, head_size=head_size, dtype="float32")
    settings = Settings(url=url, timeout=1.0, heartbeat_interval=0.2, **changes.pop("settings", {}))
    facts: dict[str, Any] = {
        "settings": settings, "model_name": model, "revision": "r", "world_size": 1, "layout": CacheLayout((group,)),
        "layers": ("layers.0", "layers.1"), "block_size": block_size, "stores": True, "loads": True,
        "fails_on_load_errors": False,
    }  # fmt: skip
    return ConnectorConfig(**(facts | changes))


@dataclass(eq=False)
class Served:
    """A request in the rig's engine: its blocks, and how it was computed."""

    request: Request
    blocks: list[int] = field(default_factory=list)
    external: int = 0
    scheduled_steps: int = 0


class Rig:
    """A toy engine around both halves: `serve` runs a request from arrival to its end."""

    def __init__(self, config: ConnectorConfig, *, step_tokens: int = 10**6) -> None:
        self.config = config
        self.group = config.layout.groups[0]
        paged = Paged(Shape("LBNHC", self.group, BLOCKS, config.block_size))
        self.memory, self.pages = paged.memories[0].view(paged.pages[0].dtype).normal_(), paged.pages
        self.scheduler = SchedulerHalf(config)
        self.worker = WorkerHalf(config, 0, StagedCopier(self.pages, self.group, config.block_size))
        self.step_tokens = step_tokens
        self.free = list(range(BLOCKS))
        self.invalid: set[int] = set()

    def close(self) -> None:
        """Both halves leave the server."""
        self.scheduler.close()
        self.worker.close()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one request, hook by hook -----------------------------------------------------------------------------------

    def arrive(self, request_id: str, tokens: Sequence[int], **facts: Any) -> Served:
        """A new request."""
        request = Request(request_id, list(tokens), SamplingParams(max_tokens=8), None, **facts)
        self.scheduler.add_request(request)
        return Served(request)

    def matched(self, served: Served, local: int = 0, seconds: float = 5.0) -> int:
        """The external tokens; asks until there is an answer, as the engine does."""
        deadline = time.monotonic() + seconds
        while True:
            tokens, asynchronous = self.scheduler.matched_tokens(served.request, local)
            if tokens is not None:
                assert asynchronous == (tokens > 0)
                return tokens
            assert time.monotonic() < deadline, "no answer"
            self.scheduler.plan(SchedulerOutput.make_empty())

    def allocate(self, served: Served, external: int, local_blocks: Sequence[int] = ()) -> None:
        """Give the request blocks for all of its tokens, the first ones being `local_blocks`."""
        served.blocks = list(local_blocks)
        while len(served.blocks) * self.config.block_size < served.request.num_tokens + SPARE:
            served.blocks.append(self.free.pop(0))
        served.external = external
        self.scheduler.allocated(served.request, self.kv_blocks(served), external)

    def kv_blocks(self, served: Served) -> KVCacheBlocks:
        """The request's blocks, as the scheduler hands them out."""
        return KVCacheBlocks(([KVCacheBlock(block) for block in served.blocks],))

    def step(self, scheduled: dict[Served, int]) -> KVConnectorOutput:
        """One step of the engine: plan, forward pass, loads, stores, report."""
        plan = self.plan(scheduled)
        for served, count in scheduled.items():
            start = served.request.num_computed_tokens
            self.compute(served, start, start + count)
            served.request.num_computed_tokens += count
            served.scheduled_steps += 1
        return self.report(plan)

    def plan(self, scheduled: dict[Served, int]) -> StepPlan:
        """What the scheduler half plans for a step."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {served.request.request_id: count for served, count in scheduled.items()}
        tables = {served.request.request_id: (served.blocks,) for served in scheduled}
        output.kv_connector_block_state = KVConnectorBlockState(set(tables), tables.__getitem__, {})
        return self.scheduler.plan(output)

    def report(self, plan: StepPlan) -> KVConnectorOutput:
        """The worker's part of a step, and the scheduler's reaction."""
        self.worker.load(plan)
        self.worker.store(plan)
        output = KVConnectorOutput(
            finished_recving=self.worker.take_loaded(),
            invalid_block_ids=self.worker.take_invalid(),
            kv_connector_worker_meta=self.worker.take_outcome(),
        )
        self.invalid |= output.invalid_block_ids
        self.scheduler.done(output)
        return output

    def finish(self, served: Served) -> None:
        """The request is over and its blocks are free."""
        self.scheduler.finished(served.request)
        self.free += [block for block in served.blocks if block not in self.free]

    # --- all of it ---------------------------------------------------------------------------------------------------

    def serve(self, request_id: str, tokens: Sequence[int], **facts: Any) -> Served:
        """A request from its arrival to its end, its KV checked; `external` says how much was loaded."""
        served = self.arrive(request_id, tokens, **facts)
        external = self.matched(served)
        self.allocate(served, external)
        if external:
            bad = self.step({}).invalid_block_ids
            valid = next((i for i, b in enumerate(served.blocks) if b in bad), None)
            served.request.num_computed_tokens = (
                external if valid is None else min(external, valid * self.config.block_size)
            )
        while served.request.num_computed_tokens < served.request.num_tokens:
            left = served.request.num_tokens - served.request.num_computed_tokens
            self.step({served: min(left, self.step_tokens)})
        assert self.wrong_tokens(served) == []
        self.finish(served)
        return served

    # --- KV that follows from the tokens -----------------------------------------------------------------------------

    def kv_of(self, served: Served, token: int) -> torch.Tensor:
        """`[2, layers, heads, head_size]`: what the model computes for one token after those before it."""
        salt = served.request.cache_salt or ""
        seed = hashlib.blake2b(repr((salt, served.request.all_token_ids[: token + 1])).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        return torch.randn(2, 2, self.group.heads, self.group.head_size, generator=generator)

    def compute(self, served: Served, start: int, end: int) -> None:
        """The forward pass over tokens [start, end)."""
        for token in range(start, end):
            self.slot(served, token).copy_(torch.cat(list(self.kv_of(served, token)), dim=-1))

    def slot(self, served: Served, token: int) -> torch.Tensor:
        """Where a token's K and V are: `[layers, heads, 2 * head_size]`, a view."""
        block, place = served.blocks[token // self.config.block_size], token % self.config.block_size
        page = self.pages[0]  # the layers lie in one allocation, so one view reaches them all
        stride = self.pages[1].storage_offset() - page.storage_offset()
        heads, size = page.shape[1], page.shape[3]
        offset = block * page.stride(0) + place * page.stride(2)
        return page.as_strided((2, heads, size), (stride, page.stride(1), page.stride(3)), offset)

    def wrong_tokens(self, served: Served) -> list[int]:
        """The computed tokens whose KV is not what the model computes."""
        return [
            token
            for token in range(served.request.num_computed_tokens)
            if not torch.equal(self.slot(served, token), torch.cat(list(self.kv_of(served, token)), dim=-1))
        ]
