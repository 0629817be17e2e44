"""Both halves of the connector with a real server between them, and just enough of an engine to drive them.

The engine's pages are CPU tensors; its "forward pass" writes values that follow from the tokens before them, so that
wrong KV anywhere is a compare. Requests, blocks and scheduler outputs are vLLM's own classes.
"""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.gpu_connector import StagedCopier
from lmcache_connector.identity import PromptRules
from lmcache_connector.metadata import NULL_BLOCK, LoadJob, StepPlan
from lmcache_connector.scheduler import SchedulerHalf
from lmcache_connector.settings import Settings
from lmcache_connector.shapes import EngineGroup, EngineShape
from lmcache_connector.worker import WorkerHalf
from lmcache_server.protocol.layout import CacheLayout, KernelGroup
from tests.connector.pages import Paged, Shape

BLOCKS = 64
SPARE = 24
"""Tokens that a request may generate in the blocks it is given."""


def rig_config(
    url: str,
    *,
    block_size: int | tuple[int, ...] = 16,
    model: str = "rig",
    head_size: int = 8,
    windows: tuple[int, ...] = (0,),
    planes: int = 2,
    shards: int = 1,
    replicas: int = 1,
    **changes: Any,
) -> ConnectorConfig:
    """A configuration for a model with two layers of two heads (or one latent) per group, one for each of `windows`."""
    sizes = block_size if isinstance(block_size, tuple) else (block_size,) * len(windows)
    layers = [(2 * i, 2 * i + 1) for i in range(len(windows))]
    kernel_groups = tuple(
        KernelGroup(
            indices, planes=planes, heads=2 if planes == 2 else 1, head_size=head_size, dtype="float32", window=window
        )
        for indices, window in zip(layers, windows, strict=True)
    )
    groups = tuple(
        EngineGroup(tuple(f"layers.{i}" for i in indices), table, size)
        for table, (indices, size) in enumerate(zip(layers, sizes, strict=True))
    )
    settings = Settings(url=url, **{"timeout": 1.0, "heartbeat_interval": 0.2, **changes.pop("settings", {})})
    facts: dict[str, Any] = {
        "settings": settings, "model_name": model, "revision": "r",
        "shape": EngineShape(groups, CacheLayout(kernel_groups), shards, replicas),
        "stores": True, "loads": True, "fails_on_load_errors": False, "prompts": PromptRules(names_media=True),
    }  # fmt: skip
    return ConnectorConfig(**(facts | changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    tokens: list[int] = torch.randint(0, 2**31, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


@dataclass(eq=False)
class Served:
    """A request in the rig's engine: its blocks by group, and how it was computed."""

    request: Request
    tables: list[list[int]] = field(default_factory=list)
    external: int = 0
    scheduled_steps: int = 0

    @property
    def blocks(self) -> list[int]:
        """The blocks of the first group."""
        return self.tables[0] if self.tables else []


@dataclass(eq=False)
class Rank:
    """One worker of the rig's engine: its half of the connector and its pages."""

    half: WorkerHalf
    memory: list[torch.Tensor]
    pages: list[list[torch.Tensor]]


class Rig:
    """A toy engine around both halves: `serve` runs a request from arrival to its end."""

    def __init__(self, config: ConnectorConfig, *, step_tokens: int = 10**6) -> None:
        self.config = config
        self.groups = config.shape.layout.groups
        self.sizes = [group.block_size for group in config.shape.groups]
        self.scheduler = SchedulerHalf(config)
        self.ranks = [self._rank(rank) for rank in range(config.shape.shards * config.shape.replicas)]
        self.aggregator = KVOutputAggregator(len(self.ranks))
        self.step_tokens = step_tokens
        self.free = list(range(1, BLOCKS))
        self.invalid: set[int] = set()
        self.early: list[LoadJob] = []
        """What was planned to be loaded while another request waited for its answer."""
        self.ended: set[str] = set()
        self.adapters: dict[int, bytes] = {}
        """A digest of the weights that this engine has read, by the adapter's number."""

    def _rank(self, rank: int) -> Rank:
        made = [Paged(Shape("LBNHC", group, BLOCKS, size)) for group, size in zip(self.groups, self.sizes, strict=True)]
        memory = [paged.memories[0].view(paged.pages[0].dtype).normal_() for paged in made]
        pages = [paged.pages for paged in made]
        copiers = [
            StagedCopier(own, group, size) for own, group, size in zip(pages, self.groups, self.sizes, strict=True)
        ]
        return Rank(WorkerHalf(self.config, rank, copiers, torch.device("cpu")), memory, pages)

    @property
    def worker(self) -> WorkerHalf:
        """The first rank's half."""
        return self.ranks[0].half

    @property
    def pages(self) -> list[torch.Tensor]:
        """The first rank's pages of the first group."""
        return self.ranks[0].pages[0]

    @property
    def memory(self) -> torch.Tensor:
        """What they lie in."""
        return self.ranks[0].memory[0]

    def close(self) -> None:
        """Both halves leave the server."""
        self.scheduler.close()
        for rank in self.ranks:
            rank.half.close()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one request, hook by hook -----------------------------------------------------------------------------------

    def arrive(
        self, request_id: str, tokens: Sequence[int], *, sampling: dict[str, Any] | None = None, **facts: Any
    ) -> Served:
        """A new request."""
        parameters = SamplingParams(**({"max_tokens": 8} | (sampling or {})))
        request = Request(request_id, list(tokens), parameters, None, **facts)
        self.scheduler.add_request(request)
        return Served(request)

    def matched(self, served: Served, local: int = 0, seconds: float = 5.0) -> int:
        """The external tokens; asks until there is an answer, as the engine does."""
        deadline = time.monotonic() + seconds
        while True:
            tokens, asynchronous = self.scheduler.matched_tokens(served.request, local)
            if tokens is not None:
                assert asynchronous == (tokens > 0 and self.config.settings.load_async)
                return tokens
            assert time.monotonic() < deadline, "no answer"
            self.early += self.scheduler.plan(SchedulerOutput.make_empty()).loads

    def allocate(self, served: Served, external: int, local_blocks: Sequence[int] = ()) -> None:
        """Give the request blocks for all of its tokens, the first ones of each group being `local_blocks`."""
        served.tables = []
        for size in self.sizes:
            table = list(local_blocks)
            while len(table) * size < served.request.num_tokens + SPARE:
                table.append(self.free.pop(0))
            served.tables.append(table)
        served.external = external
        self.leave_windows(served, len(local_blocks) * self.sizes[0] + external)
        self.scheduler.allocated(served.request, self.kv_blocks(served), external)

    def leave_windows(self, served: Served, computed: int) -> None:
        """Give up the blocks that nothing after `computed` tokens attends to, as vLLM does when it schedules."""
        for group, size, table in zip(self.groups, self.sizes, served.tables, strict=True):
            gone = max(0, computed - group.window + 1) // size if group.window else 0
            self.free += [block for block in table[:gone] if block != NULL_BLOCK]
            table[:gone] = [NULL_BLOCK] * gone

    def kv_blocks(self, served: Served) -> KVCacheBlocks:
        """The request's blocks, as the scheduler hands them out."""
        return KVCacheBlocks(tuple([KVCacheBlock(block) for block in table] for table in served.tables))

    def step(self, scheduled: dict[Served, int]) -> KVConnectorOutput:
        """One step of the engine: plan, forward pass, loads, stores, report."""
        for served in scheduled:
            self.leave_windows(served, served.request.num_computed_tokens)
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
        output.finished_req_ids, self.ended = self.ended, set()
        output.num_scheduled_tokens = {served.request.request_id: count for served, count in scheduled.items()}
        tables = {served.request.request_id: tuple(served.tables) for served in scheduled}
        output.kv_connector_block_state = KVConnectorBlockState(set(tables), tables.__getitem__, {})
        plan = self.scheduler.plan(output)
        early, self.early = tuple(self.early), []
        return dataclasses.replace(plan, loads=early + plan.loads)

    def report(self, plan: StepPlan) -> KVConnectorOutput:
        """The workers' part of a step, and the scheduler's reaction."""
        for rank in self.ranks:
            rank.half.load(plan)
            rank.half.store(plan)
        loads = {job.request_id for job in plan.loads} if self.config.settings.load_async else set()
        output = self.collect()
        while not (output.finished_recving or set()) >= loads:
            more = self.collect()
            output.finished_recving = (output.finished_recving or set()) | (more.finished_recving or set())
            output.invalid_block_ids |= more.invalid_block_ids
            output.failed_recving |= more.failed_recving
        self.invalid |= output.invalid_block_ids
        self.scheduler.done(output)
        return output

    def collect(self) -> KVConnectorOutput:
        """What the workers have to say now, put together as vLLM does it for several ranks."""
        outputs: list[Any] = []
        for rank in self.ranks:
            finished = rank.half.take_finished()
            report = KVConnectorOutput(
                finished_recving=finished.requests if self.config.settings.load_async else set(),
                invalid_block_ids=finished.failed_blocks,
                failed_recving=finished.failed_requests,
                kv_connector_worker_meta=rank.half.take_outcome(),
            )
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report))
        merged = self.aggregator.aggregate(outputs)
        assert merged is not None and merged.kv_connector_output is not None
        return merged.kv_connector_output

    def finish(self, served: Served) -> None:
        """The request is over and its blocks are free."""
        self.scheduler.finished(served.request)
        self.ended.add(served.request.request_id)
        self.finish_blocks(served)

    def finish_blocks(self, served: Served) -> None:
        """The request's blocks are free."""
        for table in served.tables:
            self.free += [block for block in table if block not in self.free and block != NULL_BLOCK]

    # --- all of it ---------------------------------------------------------------------------------------------------

    def serve(self, request_id: str, tokens: Sequence[int], **facts: Any) -> Served:
        """A request from its arrival to its end, its KV checked; `external` says how much was loaded."""
        served = self.arrive(request_id, tokens, **facts)
        external = self.matched(served)
        self.allocate(served, external)
        if external:
            output = self.step({})
            valid = next((i for i, b in enumerate(served.blocks) if b in output.invalid_block_ids), None)
            served.request.num_computed_tokens = external if valid is None else min(external, valid * self.sizes[0])
            if served.request.request_id in output.failed_recving:
                self.finish_blocks(served)
                served.request.num_computed_tokens = 0
                self.allocate(served, 0)
        while served.request.num_computed_tokens < served.request.num_tokens:
            left = served.request.num_tokens - served.request.num_computed_tokens
            self.step({served: min(left, self.step_tokens)})
        assert self.wrong_tokens(served) == []
        self.finish(served)
        return served

    # --- KV that follows from the tokens -----------------------------------------------------------------------------

    def kv_of(self, served: Served, token: int, rank: int = 0, group: int = 0) -> torch.Tensor:
        """`[planes, layers, heads, head_size]`: what a rank computes for one token after those before it."""
        request = served.request
        media = [(m.modality, m.identifier, m.mm_position.offset) for m in request.mm_features]
        adapter = self.adapters[request.lora_request.lora_int_id] if request.lora_request else b""
        items = [item for item in media if item[2] <= token]
        context = (request.cache_salt or "", adapter, items)
        shard = rank // self.config.shape.replicas
        facts = (context, request.all_token_ids[: token + 1], shard, group)
        seed = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        shape = self.groups[group]
        return torch.randn(shape.planes, 2, shape.heads, shape.head_size, generator=generator)

    def compute(self, served: Served, start: int, end: int) -> None:
        """The forward pass over tokens [start, end); reads an adapter when vLLM does."""
        if (lora := served.request.lora_request) is not None and (
            lora.load_inplace or lora.lora_int_id not in self.adapters
        ):
            weights = (Path(lora.lora_path) / "adapter_model.safetensors").read_bytes()
            self.adapters[lora.lora_int_id] = hashlib.blake2b(weights).digest()
        for token in range(start, end):
            for rank, group in self.places():
                place = self.slot(served, token, rank, group)
                place.copy_(torch.cat(list(self.kv_of(served, token, rank, group)), dim=-1))

    def places(self) -> list[tuple[int, int]]:
        """Every (rank, group)."""
        return [(rank, group) for rank in range(len(self.ranks)) for group in range(len(self.groups))]

    def slot(self, served: Served, token: int, rank: int = 0, group: int = 0) -> torch.Tensor:
        """Where a token's K and V are: `[layers, heads, 2 * head_size]`, a view."""
        index, place = divmod(token, self.sizes[group])
        pages = self.ranks[rank].pages[group]
        page = pages[0]  # the layers lie in one allocation, so one view reaches them all
        stride = pages[1].storage_offset() - page.storage_offset()
        heads, size = page.shape[1], page.shape[3]
        offset = served.tables[group][index] * page.stride(0) + place * page.stride(2)
        return page.as_strided((2, heads, size), (stride, page.stride(1), page.stride(3)), offset)

    def wrong_tokens(self, served: Served) -> list[int]:
        """The computed tokens that are still in blocks and whose KV is not what the model computes."""
        return [
            token
            for token in range(served.request.num_computed_tokens)
            if not all(self._right(served, token, rank, group) for rank, group in self.places())
        ]

    def _right(self, served: Served, token: int, rank: int, group: int) -> bool:
        if served.tables[group][token // self.sizes[group]] == NULL_BLOCK:
            return True
        expected = torch.cat(list(self.kv_of(served, token, rank, group)), dim=-1)
        return torch.equal(self.slot(served, token, rank, group), expected)
