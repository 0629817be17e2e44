"""The worker half: copies between the engine's pages and the server's slots, around the forward pass.

    start_load_kv     loads of this step: copy, then check that the slots were still there; what was not is reported
    wait_for_save     stores of this step: reserve, copy, commit; when it returns the blocks may be reused
    get_finished      the loads that are over, good or bad

Everything is done when the hook returns, so no block is ever read or written later. A server that does not answer costs
its deadline once; then the link is down and the hooks do nothing until it is back.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.cpu_connector import PackedCopier
from lmcache_connector.cpu_packing import CpuKernel
from lmcache_connector.gpu_connector import ChunkCopy, Copier, StagedCopier
from lmcache_connector.health import ServerLink, attacher
from lmcache_connector.layout import Piece, chunk_pieces
from lmcache_connector.metadata import LoadJob, StepPlan, StoreJob, StoreOutcome
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.messages import (
    Commit,
    CommitReply,
    CommittedChunks,
    End,
    Prompt,
    Reserve,
    Reserved,
    ReserveReply,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["WorkerHalf", "make_copier"]

logger = logging.getLogger(f"vllm.{__name__}")

DECLARED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
"""Attention backends whose pages `[blocks, heads, tokens, C]` hold K, then V, for each token and head."""


def make_copier(vllm_config: "VllmConfig", config: ConnectorConfig, kv_caches: Mapping[str, torch.Tensor]) -> Copier:
    """What copies from and to `kv_caches`; raises ValueError if these pages are not of a kind that we know."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    (group,) = config.layout.groups
    pages = [kv_caches[layer] for layer in config.layers]
    names = sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config, list(config.layers))})
    if names == ["CPU_ATTN"]:
        layers = [vllm_config.compilation_config.static_forward_context[layer] for layer in config.layers]
        dtype = vllm_config.model_config.dtype
        kernels = {CpuKernel(layer.isa, dtype, layer.impl.kv_cache_dtype) for layer in layers}
        if len(kernels) != 1:
            raise ValueError(f"the layers' attention writes its cache in several ways {kernels}; expected one")
        return PackedCopier(pages, group, config.block_size, kernels.pop())
    if not set(names) <= set(DECLARED_BACKENDS):
        raise ValueError(
            f"attention backend {', '.join(names)}: LMCacheMPConnector does not know how it lays out its pages; "
            f"known are CPU_ATTN, {', '.join(DECLARED_BACKENDS)} (choose one with --attention-backend)"
        )
    return StagedCopier(pages, group, config.block_size)


class WorkerHalf:
    """Lives in a worker of the engine; called from its thread only."""

    def __init__(self, config: ConnectorConfig, worker_id: int, copier: Copier) -> None:
        self._config = config
        self._copier = copier
        self._loaded: set[str] = set()
        self._invalid: set[int] = set()
        self._outcome: StoreOutcome | None = None
        self._register = attacher(config, "worker", worker_id)
        self.link = ServerLink(config.settings, self._attach)
        self.link.start()

    def _attach(self, connection: ServerConnection) -> Attachment:
        attachment = self._register(connection)
        memory = attachment.transfer.memory
        if memory is not None:
            self._copier.page_lock(memory)
        return attachment

    def close(self) -> None:
        """Leave the server."""
        self.link.close()

    # --- loads ---------------------------------------------------------------------------------------------------

    def load(self, plan: StepPlan) -> None:
        """Copy what the plan says from slots to pages."""
        for job in plan.loads:
            self._loaded.add(job.request_id)
            self._invalid.update(self._load(job))

    def take_loaded(self) -> set[str]:
        """The requests whose loads are over since the last call."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_invalid(self) -> set[int]:
        """The blocks that were to be loaded since the last call and were not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _load(self, job: LoadJob) -> set[int]:
        """Do one load; the blocks that do not hold what they should."""
        attachment = self.link.attachment
        chunk_size = attachment.hello.chunk_size if attachment is not None else 0
        if attachment is None or attachment.incarnation != job.incarnation:
            logger.warning("request %s: not loaded, the server that had its KV is away", job.request_id)
            return self._blocks(job, job.first, job.end)
        chunks = range(job.first // chunk_size, -(-job.end // chunk_size))
        try:
            slots = attachment.transfer.readable(job.acquired, job.holder)
            self._copier.scatter([ChunkCopy(slots[chunk], self._pieces(job, chunk, chunk_size)) for chunk in chunks])
            intact = attachment.transfer.verify(job.acquired)
        except LMCacheSDKError as error:
            self.link.lost(attachment, error)
            return self._blocks(job, job.first, job.end)
        failed: set[int] = set()
        for chunk in chunks:
            if not intact[chunk]:
                logger.warning("request %s: chunk %d was gone before it was loaded", job.request_id, chunk)
                failed |= self._blocks(job, chunk * chunk_size, (chunk + 1) * chunk_size)
        return failed

    def _pieces(self, job: LoadJob, chunk: int, chunk_size: int) -> Sequence[Piece]:
        return chunk_pieces(chunk, job.first, job.end, chunk_size, self._config.block_size, job.block_ids)

    def _blocks(self, job: LoadJob, first: int, end: int) -> set[int]:
        """The blocks of tokens [first, end) as far as they are the job's."""
        size = self._config.block_size
        return set(job.block_ids[max(first, job.first) // size : -(-min(end, job.end) // size)])

    # --- stores --------------------------------------------------------------------------------------------------

    def store(self, plan: StepPlan) -> None:
        """Copy what the server is missing of the plan's chunks from pages to slots, and publish it."""
        if not plan.stores:
            return
        attachment = self.link.attachment
        stored = dict.fromkeys((job.session.request_id for job in plan.stores), 0)
        if attachment is not None:
            try:
                stored |= self._store(attachment, plan.stores)
            except LMCacheSDKError as error:
                self.link.lost(attachment, error)
            self._end(attachment, plan.stores)
        self._outcome = StoreOutcome(stored)

    def take_outcome(self) -> StoreOutcome | None:
        """The outcome of the stores since the last call."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def _store(self, attachment: Attachment, jobs: Sequence[StoreJob]) -> dict[str, int]:
        """Reserve, copy, commit; the leading chunks that each request has in the cache now."""
        prompts = tuple(Prompt(job.session, job.tokens, job.salt, job.extras) for job in jobs)
        reply: ReserveReply = attachment.connection.request(Reserve(attachment.instance, prompts))
        reserved = [(job, result) for job, result in zip(jobs, reply.results, strict=True) if result.reservation]
        sealed: dict[int, set[int]] = {}
        if reserved:
            handles = tuple(result.reservation for _, result in reserved)
            for job, result in reserved:
                self._fill(attachment, job, result)
            message = Commit(attachment.instance, tuple(CommittedChunks(handle) for handle in handles))
            committed: CommitReply = attachment.connection.request(message)
            sealed = {h: set(r.sealed) for h, r in zip(handles, committed.results, strict=True)}
        return {
            job.session.request_id: _prefix(result.resident, sealed.get(result.reservation, set()))
            for job, result in zip(jobs, reply.results, strict=True)
        }

    def _fill(self, attachment: Attachment, job: StoreJob, reserved: Reserved) -> None:
        size = attachment.hello.chunk_size
        slots = attachment.transfer.writable(reserved)
        self._copier.gather(
            [
                ChunkCopy(
                    slot,
                    chunk_pieces(c, c * size, (c + 1) * size, size, self._config.block_size, job.block_ids),
                )
                for c, slot in zip(reserved.chunks, slots, strict=True)
            ]
        )
        attachment.transfer.flush(reserved, slots)

    def _end(self, attachment: Attachment, jobs: Sequence[StoreJob]) -> None:
        """These attempts are over, now: an idle engine takes no further step.

        Whatever they still reserve (nothing, unless a copy failed) is aborted with them.
        """
        try:
            attachment.connection.submit(End(attachment.instance, tuple(job.session for job in jobs)))
        except LMCacheSDKError as error:
            self.link.lost(attachment, error)


def _prefix(resident: int, sealed: set[int]) -> int:
    """How many leading chunks are there, if the first `resident` are and the `sealed` ones besides."""
    while resident in sealed:
        resident += 1
    return resident
