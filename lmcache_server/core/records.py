"""The plain records that the parts of the L1 share: limits, views, what leases stand for, counters."""

from dataclasses import dataclass
from typing import Protocol

from lmcache_server.core.index import Node
from lmcache_server.core.memory_obj import MemoryObj
from lmcache_server.protocol.keys import Namespace
from lmcache_server.protocol.messages import pack_slot

__all__ = ["ChunkNode", "Counters", "Entry", "GenerationTable", "Limits", "Reading", "Reservation", "View"]

ChunkNode = Node[MemoryObj]
NO_SLOT = pack_slot(0, 0)


class GenerationTable(Protocol):
    """A mutable run of integers: a list, an array, or the table in shared memory."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


Entry = tuple[int, ChunkNode, list[tuple[int, MemoryObj]]]
"""One reserved chunk: its index, its node, and its reserved objects by part."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, `watermark` and `ratio` as shares of the pool."""

    pool_bytes: int
    align_bytes: int
    watermark: float
    ratio: float
    read_ttl: float
    write_ttl: float


@dataclass(frozen=True, slots=True)
class View:
    """How one instance sees a chunk: which of its parts are its own, and the bytes of each part."""

    owner: int
    namespace: Namespace
    part_bytes: tuple[int, ...]
    own: range


@dataclass(slots=True, eq=False)
class Reservation:
    """Chunks that one writer fills: index, node, and the objects of the parts that it fills."""

    view: View
    entries: list[Entry]
    framed: bool = False
    """Whether any byte arrived as a frame: then only what arrived whole may be published."""

    def slots(self) -> bytes:
        """A slot for every own part of each chunk; NO_SLOT for one that is not to be filled."""
        slots: list[bytes] = []
        for _, _, taken in self.entries:
            to_fill = {part: obj.slot for part, obj in taken}
            slots += [to_fill.get(part, NO_SLOT) for part in self.view.own]
        return b"".join(slots)


@dataclass(slots=True)
class Reading:
    """What a read lease covers: the nodes, first to deepest, and the parts that its owner sees."""

    nodes: list[ChunkNode]
    own: range

    def slots(self) -> bytes:
        """The slots of its parts of each chunk, all of which are complete."""
        start, stop = self.own.start * len(NO_SLOT), self.own.stop * len(NO_SLOT)
        return b"".join([node.slots[start:stop] for node in self.nodes])


@dataclass(slots=True)
class Counters:
    """Totals since the start; a scripted workload decides each of them exactly."""

    lookups: int = 0
    requested_tokens: int = 0
    hit_tokens: int = 0
    reserved_chunks: int = 0
    committed_chunks: int = 0
    aborted_chunks: int = 0
    lost_chunks: int = 0
    refused_chunks: int = 0
    evicted_chunks: int = 0
    cleared_objects: int = 0
    expired_reads: int = 0
    stray_releases: int = 0
