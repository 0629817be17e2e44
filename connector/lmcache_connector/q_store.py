"""The queries of prompts, from the forward pass that computes them into the cache of queries, `<model>##query`.

    begin    before the forward pass: which tokens lack their queries in the cache, and room for those in the ring
    store    after it: the chunks that are complete now are stored, and their blocks of the ring are free again

A chunk that several steps compute keeps its rows in the ring until it is complete, or its request ends or is preempted.
Queries exist only of tokens that are computed while somebody captures, and only a prefix without gaps can be cached. So
a request's tokens are captured from the first one whose queries are not cached, if that one is still to be computed;
where the engine took KV from a cache and the queries behind it are not cached, this request cannot add any.

The ring has room or it has not: a request that finds none is passed over, from there on, and counted. Whatever goes
wrong, the blocks are free again, and nothing but queries is missing.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.health import ServerLink
from lmcache_connector.identity import session_id
from lmcache_connector.metadata import QueryJob, StepPlan
from lmcache_connector.publishing import end, publish
from lmcache_connector.q_capture import QueryCapture, attention_modules, cached_layers, query_layout
from lmcache_connector.q_ring import QRingBuffer, places
from lmcache_connector.stats import Recorder
from lmcache_sdk.attachment import Attachment, attach
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.keys import QUERY_SUFFIX
from lmcache_server.protocol.layout import CacheLayout, Kind
from lmcache_server.protocol.messages import Acquire, AcquireReply, Prompt, Reserved

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["QueryStore", "make_query_store"]

logger = logging.getLogger(f"vllm.{__name__}")


def make_query_store(
    vllm_config: "VllmConfig", config: ConnectorConfig, device: torch.device, stats: Recorder
) -> "QueryStore":
    """What captures the queries of this worker; raises ValueError if they cannot be, or the ring does not fit."""
    layers = cached_layers(config.shape)
    modules = attention_modules(vllm_config, layers)
    layout = query_layout(modules, layers.values())
    return QueryStore(config, vllm_config.parallel_config.rank, layout, modules, device, stats)


@dataclass(slots=True)
class Rows:
    """The queries of tokens [start, end) of a request wait in `blocks`, which begin with that of token `start`."""

    start: int
    end: int
    blocks: list[int] = field(default_factory=list)


class Captured(NamedTuple):
    """What one step adds to the rows of a request: tokens [first, rows.end)."""

    job: QueryJob
    rows: Rows
    first: int


class QueryStore:
    """Lives in a worker of the engine; called from its thread only."""

    def __init__(
        self,
        config: ConnectorConfig,
        rank: int,
        layout: CacheLayout,
        modules: dict[str, torch.nn.Module],
        device: torch.device,
        stats: Recorder,
    ) -> None:
        """`modules` are the attention modules of the layout's layers, in order."""
        self._config, self._rank, self._layout, self._stats = config, rank, layout, stats
        (self._group,) = layout.groups
        group = config.shape.lasting_group
        self._block_size = group.block_size
        dtype = getattr(torch, self._group.dtype)
        try:
            self.ring = QRingBuffer(
                len(modules), config.query_blocks, self._block_size, self._group.hidden, dtype, device
            )
        except RuntimeError as error:
            raise ValueError(
                f"no memory for the queries of {config.query_blocks * self._block_size} tokens ({error}); lower "
                "lmcache.mp.q.ring_depth, --max-num-batched-tokens or --gpu-memory-utilization"
            ) from error
        logger.info(
            "queries are captured in %d blocks of %d tokens (%.1f MiB)",
            config.query_blocks, self._block_size, self.ring.nbytes / 2**20,
        )  # fmt: skip
        self._rows: dict[str, Rows] = {}
        self._step: list[Captured] = []
        self._attachment: Attachment | None = None
        self._told = False
        """How often a request was passed over because the ring was full."""
        self.link = ServerLink(config.settings, self._attach)
        self.link.start()
        self._capture = QueryCapture(modules, self.ring, group.layers[0])

    def close(self) -> None:
        """Leave the attention modules as they were, and the server."""
        self._capture.close()
        self.link.close()

    def _attach(self, connection: ServerConnection) -> Attachment:
        """Register; every rank has query heads of its own, also where ranks share keys and values."""
        shape = self._config.shape
        return attach(
            connection,
            role="worker",
            model_name=self._config.model_name + QUERY_SUFFIX,
            revision=self._config.revision,
            kind=Kind.QUERY,
            world_size=shape.shards * shape.replicas,
            worker_id=self._rank,
            layout=self._layout,
            block_size=self._block_size,
        )

    # --- before the forward pass ---------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Have the queries captured that this step computes and the cache lacks."""
        self._step = []
        self._capture.take()  # what a pass that failed may have left
        self._forget(plan.over)
        attachment = self.link.attachment
        if attachment is not self._attachment:
            self._forget(list(self._rows))
            self._attachment = attachment
        if attachment is None:
            return
        jobs = [job for job in plan.queries if job.chunk_size == attachment.hello.chunk_size]  # else for another server
        if not jobs:
            return
        try:
            self._find_starts(attachment, jobs)
        except LMCacheSDKError as error:
            self.link.lost(attachment, error)
            return
        self._step = [captured for job in jobs if (captured := self._make_room(job)) is not None]
        if self._step:
            size = self._block_size
            slots = [places(job.block_ids, job.first, first, job.end, size) for job, _, first in self._step]
            room = [places(rows.blocks, rows.start, first, rows.end, size) for _, rows, first in self._step]
            self._capture.expect(torch.cat(slots), torch.cat(room))

    def _find_starts(self, attachment: Attachment, jobs: Sequence[QueryJob]) -> None:
        """Begin rows for the jobs that have none to go on with and compute the first token that is not cached."""
        new = [job for job in jobs if not self._goes_on(job)]
        if not new:
            return
        self._forget(job.request_id for job in new)
        question = Acquire(attachment.instance, tuple(_prompt(job) for job in new), lease=False)
        reply: AcquireReply = attachment.connection.request(question)
        for job, cached in zip(new, reply.results, strict=True):
            start = cached.chunks * attachment.hello.chunk_size
            if job.first <= start < job.end:
                self._rows[job.request_id] = Rows(start, start)

    def _goes_on(self, job: QueryJob) -> bool:
        rows = self._rows.get(job.request_id)
        return rows is not None and rows.end == job.first

    def _make_room(self, job: QueryJob) -> Captured | None:
        """Give a request's rows the blocks that they need up to the end of the job, or end them."""
        rows = self._rows.get(job.request_id)
        if rows is None:
            return None
        size = self._block_size
        blocks = self.ring.take(-(-job.end // size) - rows.start // size - len(rows.blocks))
        if blocks is None:
            self._forget((job.request_id,))
            self._count_skip(job)
            return None
        first, rows.end = rows.end, job.end
        rows.blocks += blocks
        return Captured(job, rows, first)

    def _count_skip(self, job: QueryJob) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        self._stats.skipped_queries()
        logger.log(
            level,
            "request %s: its queries are not captured, %d of the ring's %d blocks are free; raise "
            "lmcache.mp.q.ring_depth if that happens often (it is logged once)",
            job.request_id, self.ring.free, self.ring.blocks,
        )  # fmt: skip

    # --- after it ------------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Store the chunks whose queries are complete."""
        step, self._step = self._step, []
        whole = self._whole(step) if step else []
        attachment = self._attachment
        if not whole or attachment is None:
            return
        if attachment is not self.link.attachment:  # lost during the forward pass
            self._forget(captured.job.request_id for captured in whole)
            return
        try:
            self._publish(attachment, whole)
        except LMCacheSDKError as error:
            self.link.lost(attachment, error)
            self._forget(captured.job.request_id for captured in whole)
        end(self.link, attachment, [session_id(captured.job.request_id) for captured in whole])

    def _whole(self, step: Sequence[Captured]) -> list[Captured]:
        """What of the step completes a chunk; requests whose tokens were not all seen are given up."""
        assert self._attachment is not None, "a step is captured for an attachment"
        size = self._attachment.hello.chunk_size
        seen = self._capture.take()
        whole, at = [], 0
        for captured in step:
            job, rows, first = captured
            tokens = seen[at : at + rows.end - first]
            at += len(tokens)
            if not all(tokens):
                logger.warning("request %s: some of its queries did not come by", job.request_id)
                self._forget((job.request_id,))
            elif rows.end // size > rows.start // size:
                whole.append(captured)
        return whole

    def _publish(self, attachment: Attachment, whole: Sequence[Captured]) -> None:
        """Reserve, copy, commit; rows that cannot go on behind what is stored now are given up."""
        size = attachment.hello.chunk_size

        def fill(i: int, reserved: Reserved) -> None:
            self._fill(attachment, whole[i].rows, reserved)

        prompts = [_prompt(captured.job) for captured in whole]
        first = [captured.rows.start // size for captured in whole]
        published = publish(attachment, prompts, first, fill)
        for (job, rows, _), (reserved, sealed) in zip(whole, published, strict=True):
            if reserved.full or len(sealed) < len(reserved.chunks):
                self._forget((job.request_id,))
            else:
                self._release(rows, rows.end // size * size)

    def _fill(self, attachment: Attachment, rows: Rows, reserved: Reserved) -> None:
        size = attachment.hello.chunk_size
        slots = attachment.transfer.writable(reserved)
        for chunk, slot in zip(reserved.chunks, slots, strict=True):
            source = places(rows.blocks, rows.start, chunk * size, (chunk + 1) * size, self._block_size)
            values = slot.view(getattr(torch, self._group.dtype))
            self.ring.read(values.view(len(self._group.layers), size, self._group.hidden), source)
        attachment.transfer.flush(reserved, slots)

    # --- the ring ------------------------------------------------------------------------------------------------

    def _release(self, rows: Rows, stored: int) -> None:
        """Tokens below `stored` need no room any more."""
        gone = stored // self._block_size - rows.start // self._block_size if stored < rows.end else len(rows.blocks)
        self.ring.give_back(rows.blocks[:gone])
        del rows.blocks[:gone]
        rows.start = stored

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Nothing of these requests waits any more."""
        for request_id in request_ids:
            rows = self._rows.pop(request_id, None)
            if rows is not None:
                self.ring.give_back(rows.blocks)


def _prompt(job: QueryJob) -> Prompt:
    return Prompt(session_id(job.request_id), job.tokens, job.salt, job.extras)
