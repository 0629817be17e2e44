"""What crosses between the connector's halves: plans from the scheduler to the workers, outcomes back.

Plain frozen records; vLLM carries them. Slots travel in the plan, so a worker that loads asks the server nothing. All
token ranges are half-open and count from the request's first token.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from lmcache_server.protocol.messages import Acquired

__all__ = ["BlockTables", "LoadJob", "NULL_BLOCK", "QueryJob", "StepOutcome", "StepPlan", "StoreJob"]

BlockTables = tuple[tuple[int, ...], ...]
"""For each of the engine's cache groups, the blocks of one request: token t is in block `table[t // block_size]`."""

NULL_BLOCK = 0
"""vLLM's placeholder in a table for a block that has left its sliding window, or was never needed."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Write tokens [first, end) of a request into its blocks, from slots that the scheduler half has leased.

    `acquired` has the slots of every chunk from chunk 0 on. They mean something only in the server's `incarnation`.
    """

    request_id: str
    first: int
    end: int
    chunk_size: int
    tables: BlockTables
    acquired: Acquired
    holder: int
    """The instance whose lease it is."""
    incarnation: int


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Store what is missing of the whole chunks in `tokens` (uint32 bytes); all are computed after this step.

    The chunks before `first` have blocks that the engine let go of, so they can only be there already.
    """

    request_id: str
    tokens: bytes
    salt: str
    extras: dict[int, bytes]
    chunk_size: int
    tables: BlockTables
    first: int = 0


@dataclass(frozen=True, slots=True)
class QueryJob:
    """Prompt tokens [first, end) of a request are computed in this step; `tokens` are all up to `end`."""

    request_id: str
    tokens: bytes
    salt: str
    extras: dict[int, bytes]
    chunk_size: int
    first: int
    end: int
    block_ids: tuple[int, ...]
    """Of the shape's lasting group, from the block of token `first` on."""


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers have to do around one step of the engine."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    idle: bool = False
    """Whether this step computes nothing."""
    queries: tuple[QueryJob, ...] = ()
    over: frozenset[str] = frozenset()
    """Requests that ended or lost their blocks since the last step, if queries are captured."""


@dataclass(frozen=True)
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """After one step: by request id, how many leading chunks are in the cache for certain, of those that were stored;
    and the requests whose synchronous load is over.
    """

    stored: dict[str, int] = field(default_factory=dict)
    loaded: frozenset[str] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepOutcome":
        """The outcome for all workers: a chunk is stored when each of them stored its part."""
        assert isinstance(other, StepOutcome)
        requests = self.stored.keys() | other.stored.keys()
        # A worker that has nothing to say about a request has nothing to store for it.
        stored = {r: min(o.stored[r] for o in (self, other) if r in o.stored) for r in requests}
        return StepOutcome(stored, self.loaded | other.loaded)
