"""Loads: from the slots that the scheduler half has leased to the engine's blocks.

    start     copies on threads of its own, beside the engine's forward passes; or at once, by option and where there
              is nothing to be beside: the engine's thread has the cores then, which its idle helpers would spin on
    finished  which requests' loads are over, and what of them did not arrive

A load is over when nothing will write to its blocks any more, good or bad: only then is it reported, so its blocks may
be used, or given to another request. It ends by its deadline in any case: it goes in slices, and a slice that is not
begun in time is not begun. What was not copied, or was not there any more after its copy, is reported as failed.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.gpu_connector import ChunkCopy, Copier, Fence
from lmcache_connector.health import ServerLink
from lmcache_connector.layout import Piece, chunk_pieces
from lmcache_connector.metadata import NULL_BLOCK, LoadJob
from lmcache_connector.stats import Recorder
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.transfer import Share
from lmcache_server.protocol.layout import slot_bytes

__all__ = ["Finished", "Loader"]

logger = logging.getLogger(f"vllm.{__name__}")

SLICE_BYTES = 32 << 20
"""Copied between two looks at the clock: a few milliseconds."""
IDLE_WAIT = 0.01
"""Seconds that an engine without other work waits for a load to end, which it would else spend spinning."""


@dataclass(slots=True)
class Finished:
    """Loads that are over. What failed is told by block; or by request, where blocks of several tables could be meant,
    or what is before a block has left its window, so that nothing can be computed again from there on.
    """

    requests: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)


class Loader:
    """Does the loads of one worker, which holds shard `shard`."""

    def __init__(
        self, config: ConnectorConfig, link: ServerLink, copiers: Sequence[Copier], shard: int, stats: Recorder
    ) -> None:
        self._config = config
        self._shape = config.shape
        self._link = link
        self._copiers = copiers
        self._stats = stats
        groups = len(self._shape.groups)
        self._own = range(shard * groups, (shard + 1) * groups)
        self._pool: ThreadPoolExecutor | None = None
        if config.settings.load_async:
            self._pool = ThreadPoolExecutor(config.settings.load_concurrency, thread_name_prefix="lmcache-load")
        windows = any(group.window for group in self._shape.layout.groups)
        self._by_request = windows or len(self._shape.groups) > 1
        self._change = threading.Condition()
        self._finished = Finished()
        self._under_way = 0

    def start(self, jobs: Sequence[LoadJob], *, idle: bool = False) -> None:
        """Begin these loads; without threads, or in an `idle` engine, they are over when this returns."""
        if not jobs:
            return
        deadline = time.monotonic() + self._config.settings.load_timeout
        fences = [copier.fence() for copier in self._copiers]
        for job in jobs:
            with self._change:
                self._under_way += 1
            if self._pool is None or idle:
                self._run(job, deadline, fences)
            else:
                self._pool.submit(self._run, job, deadline, fences)

    def finished(self, *, idle: bool = False) -> Finished:
        """The loads that are over since the last call; an `idle` engine waits a moment for one that is under way."""
        with self._change:
            if idle and self._under_way and not self._finished.requests:
                self._change.wait(IDLE_WAIT)
            finished, self._finished = self._finished, Finished()
        return finished

    def close(self) -> None:
        """Return when nothing is being loaded any more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    # --- one load ------------------------------------------------------------------------------------------------

    def _run(self, job: LoadJob, deadline: float, fences: Sequence[Fence]) -> None:
        failed: set[int] = set(self._chunks(job))
        started = time.perf_counter()
        try:
            failed = self._load(job, deadline, fences)
            self._count(job, failed, time.perf_counter() - started)
        except Exception:  # the boundary of the thread: an unreported load would keep its request waiting for ever
            logger.exception("request %s: a fault while loading; its tokens are computed", job.request_id)
        finally:
            self._report(job, failed)

    def _report(self, job: LoadJob, failed: set[int]) -> None:
        with self._change:
            self._under_way -= 1
            self._finished.requests.add(job.request_id)
            if failed and self._by_request:
                self._finished.failed_requests.add(job.request_id)
            elif failed:
                self._finished.failed_blocks |= self._blocks(job, failed)
            self._change.notify_all()

    def _count(self, job: LoadJob, failed: set[int], seconds: float) -> None:
        """Count what arrived; a group whose window has moved on had fewer tokens to load."""
        tokens = self._arrived(job, failed, job.first)
        size = 0
        for group, kernel_group in zip(self._shape.groups, self._shape.layout.groups, strict=True):
            gone = job.tables[group.table].count(NULL_BLOCK) * group.block_size
            size += self._arrived(job, failed, max(job.first, gone)) * slot_bytes(kernel_group, 1)
        if tokens:
            self._stats.loaded(tokens, size, seconds)

    def _load(self, job: LoadJob, deadline: float, fences: Sequence[Fence]) -> set[int]:
        """Copy; the chunks that did not arrive."""
        chunks = self._chunks(job)
        attachment = self._link.attachment
        if attachment is None or attachment.incarnation != job.incarnation:
            logger.warning("request %s: not loaded, the server that had its KV is away", job.request_id)
            return set(chunks)
        failed: set[int] = set()
        for part in self._slices(chunks, job.chunk_size):
            if time.monotonic() > deadline:
                logger.warning(
                    "request %s: %d of %d chunks were not loaded within %s s (lmcache.mp.load_timeout)",
                    job.request_id, chunks.stop - part.start, len(chunks), self._config.settings.load_timeout,
                )  # fmt: skip
                return failed | set(range(part.start, chunks.stop))
            try:
                failed |= self._load_slice(attachment, job, part, fences)
            except LMCacheSDKError as error:
                self._link.lost(attachment, error)
                return failed | set(range(part.start, chunks.stop))
        return failed

    def _load_slice(self, attachment: Attachment, job: LoadJob, chunks: range, fences: Sequence[Fence]) -> set[int]:
        groups = len(self._shape.groups)
        share = Share(job.holder, groups * self._shape.shards, self._own, chunks)
        slots = attachment.transfer.readable(job.acquired, share)
        for group, (copier, fence) in enumerate(zip(self._copiers, fences, strict=True)):
            copies = (
                ChunkCopy(slot, self._pieces(job, group, chunk))
                for chunk, slot in zip(chunks, slots[group::groups], strict=True)
            )
            copier.scatter(copies, fence)
        intact = attachment.transfer.verify(job.acquired, share)
        gone = {chunks[i // groups] for i, there in enumerate(intact) if not there}
        for chunk in sorted(gone):
            logger.warning("request %s: chunk %d was gone before it was loaded", job.request_id, chunk)
        return gone

    def _slices(self, chunks: range, chunk_size: int) -> Iterator[range]:
        size = max(1, SLICE_BYTES // sum(slot_bytes(group, chunk_size) for group in self._shape.layout.groups))
        for start in range(chunks.start, chunks.stop, size):
            yield chunks[start - chunks.start : start - chunks.start + size]

    # --- ranges --------------------------------------------------------------------------------------------------

    def _chunks(self, job: LoadJob) -> range:
        return range(job.first // job.chunk_size, -(-job.end // job.chunk_size))

    def _arrived(self, job: LoadJob, failed: set[int], first: int) -> int:
        """How many of the job's tokens from `first` on are in chunks that did not fail."""
        chunks = [chunk for chunk in self._chunks(job) if chunk not in failed]
        ends = [(max(first, c * job.chunk_size), min(job.end, (c + 1) * job.chunk_size)) for c in chunks]
        return sum(max(0, end - start) for start, end in ends)

    def _pieces(self, job: LoadJob, group: int, chunk: int) -> list[Piece]:
        """Where the chunk's promised tokens go; those outside of a sliding window have no block."""
        engine_group = self._shape.groups[group]
        table = job.tables[engine_group.table]
        pieces = chunk_pieces(chunk, job.first, job.end, job.chunk_size, engine_group.block_size, table)
        return [piece for piece in pieces if piece.block != NULL_BLOCK]

    def _blocks(self, job: LoadJob, chunks: set[int]) -> set[int]:
        """The blocks of the only table that hold promised tokens of `chunks`."""
        size = self._shape.groups[0].block_size
        blocks: set[int] = set()
        for chunk in chunks:
            first, end = max(job.first, chunk * job.chunk_size), min(job.end, (chunk + 1) * job.chunk_size)
            blocks |= set(job.tables[0][first // size : -(-end // size)])
        return blocks - {NULL_BLOCK}
