"""Stores: from the engine's blocks to slots that the server reserves, published when they are full.

Everything is done when `store` returns, so no block is ever read later. Of each prompt the server answers what is
missing; a store that fails is a later miss, nothing else.
"""

import logging
import time
from collections.abc import Sequence

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.gpu_connector import ChunkCopy, Copier
from lmcache_connector.health import ServerLink
from lmcache_connector.identity import session_id
from lmcache_connector.layout import chunk_pieces
from lmcache_connector.metadata import StoreJob
from lmcache_connector.publishing import end, publish
from lmcache_connector.stats import Recorder
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_server.protocol.messages import Prompt, Reserved

__all__ = ["Storer"]

logger = logging.getLogger(f"vllm.{__name__}")


class Storer:
    """Does the stores of one worker; called from its thread only."""

    def __init__(self, config: ConnectorConfig, link: ServerLink, copiers: Sequence[Copier], stats: Recorder) -> None:
        self._shape = config.shape
        self._link = link
        self._copiers = copiers
        self._stats = stats

    def store(self, jobs: Sequence[StoreJob]) -> dict[str, int]:
        """Copy what the server is missing of `jobs`, and publish it.

        By request id, how many leading chunks are in the cache for certain.
        """
        stored = dict.fromkeys((job.request_id for job in jobs), 0)
        attachment = self._link.attachment
        if attachment is None:
            return stored
        jobs = [job for job in jobs if job.chunk_size == attachment.hello.chunk_size]  # else planned for another server
        if not jobs:
            return stored
        try:
            stored |= self._store(attachment, jobs)
        except LMCacheSDKError as error:
            self._link.lost(attachment, error)
        end(self._link, attachment, [session_id(job.request_id) for job in jobs])
        return stored

    def _store(self, attachment: Attachment, jobs: Sequence[StoreJob]) -> dict[str, int]:
        """Reserve, copy, commit; the leading chunks that each request has in the cache now."""
        started = time.perf_counter()
        filled = 0

        def fill(i: int, reserved: Reserved) -> None:
            nonlocal filled
            filled += self._fill(attachment, jobs[i], reserved)

        prompts = [Prompt(session_id(job.request_id), job.tokens, job.salt, job.extras) for job in jobs]
        published = publish(attachment, prompts, [job.first for job in jobs], fill)
        if tokens := sum(len(sealed) for _, sealed in published) * attachment.hello.chunk_size:
            self._stats.stored(tokens, filled, time.perf_counter() - started)
        return {
            job.request_id: _prefix(reserved.resident, sealed)
            for job, (reserved, sealed) in zip(jobs, published, strict=True)
        }

    def _fill(self, attachment: Attachment, job: StoreJob, reserved: Reserved) -> int:
        """Copy into the reserved slots; the bytes copied."""
        size = attachment.hello.chunk_size
        slots = attachment.transfer.writable(reserved)
        groups = len(self._shape.groups)
        for group, copier in enumerate(self._copiers):
            engine_group = self._shape.groups[group]
            table = job.tables[engine_group.table]
            copier.gather(
                ChunkCopy(slot, chunk_pieces(c, c * size, (c + 1) * size, size, engine_group.block_size, table))
                for c, slot in zip(reserved.chunks, slots[group::groups], strict=True)
                if len(slot)  # a part that is there already has no slot to fill
            )
        attachment.transfer.flush(reserved, slots)
        return sum(len(slot) for slot in slots)


def _prefix(resident: int, sealed: frozenset[int]) -> int:
    """How many leading chunks are there, if the first `resident` are and the `sealed` ones besides."""
    while resident in sealed:
        resident += 1
    return resident
