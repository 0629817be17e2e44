"""Every message of our dialect, one typed MessagePack map each, and the table of operations.

Frames (the ROUTER's identity frame is not shown); uid is any bytes and comes back untouched:

    request     uid | operation (MessagePack str) | message | raw frames (write only)
    reply       uid | operation                   | message | raw frames (read only)
    refusal     uid | operation                   | {"error": Refusal}

Each request has exactly one reply. Life of a prompt's KV, stored by one client and read by another:

    hello -> register -> reserve -> (copy into the slots) -> commit -> end
    hello -> register -> acquire -> (copy out of the slots, check their generations) -> release -> end

With shared memory the copies touch the segment directly. Without, `write` and `read` carry the same bytes as raw
frames.

Slots travel packed: for each chunk in order, for each part of the chunk in order, two uint64 little-endian, the
offset in the pool and the generation. A part is one object: shard-major, then kernel group. A client with a
`worker_id` sees that shard's parts only; one without sees all.
"""

import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lmcache_server.protocol.errors import ErrorCode, ProtocolError, invalid
from lmcache_server.protocol.keys import TOKEN_BYTES
from lmcache_server.protocol.layout import CacheLayout, Kind

__all__ = [
    "Abort", "AbortReply", "Acquire", "AcquireReply", "Acquired", "Clear", "ClearReply", "Commit", "CommitReply",
    "CommitState", "Committed", "CommittedChunks", "End", "EndReply", "Hello", "HelloReply", "OPERATIONS", "Piece",
    "Ping", "PingReply", "ProcessId", "PROTOCOL_VERSION", "Prompt", "Read", "ReadReply", "Refusal", "Register",
    "RegisterReply", "Release", "ReleaseReply", "Reserve", "ReserveReply", "Reserved", "SessionId", "SlotRef", "Status",
    "StatusReply", "Transport", "Unregister", "UnregisterReply", "Write", "WriteReply", "check_salt", "pack_slots",
    "unpack_slots",
]  # fmt: skip

PROTOCOL_VERSION = 1
MAX_SALT = 128
MAX_NAME = 1024


class Transport(StrEnum):
    """How the bytes of a chunk reach a client."""

    SHM = "shm"
    FRAMES = "frames"


def check_salt(salt: str) -> None:
    """Raise INVALID unless `salt` may separate tenants: at most 128 characters, none of `@ / \\ NUL`."""
    if len(salt) > MAX_SALT or any(c in "@/\\\0" for c in salt):
        raise invalid("salt", f"expected at most {MAX_SALT} characters without @ / \\ and NUL, got {salt[:40]!r}")


# Being known.


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask what this server is. The first message of a connection; it changes nothing."""

    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class HelloReply:
    """What a client must know before it registers. A new `incarnation` means that every earlier fact is void."""

    protocol: int
    version: str
    server_id: str
    incarnation: int
    chunk_size: int
    hash_algorithm: str
    transport: Transport
    shm_name: str
    pool_bytes: int
    align_bytes: int
    frame_bytes: int
    reap_seconds: float


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process as its own host knows it, so that a server on the same host can tell whether it is gone."""

    pid: int
    started: int
    namespace: int


@dataclass(frozen=True, slots=True)
class Register:
    """Become an instance: a worker of one shard (`worker_id`), or a client of all (None: a scheduler, an SDK)."""

    role: str
    model_name: str
    revision: str
    kind: Kind
    world_size: int
    worker_id: int | None
    layout: CacheLayout
    block_size: int
    process: ProcessId | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.model_name) <= MAX_NAME:
            raise invalid("model_name", f"expected 1 to {MAX_NAME} characters, got {len(self.model_name)}")
        if not 1 <= self.world_size <= 1024:
            raise invalid("world_size", f"expected 1 to 1024 shards, got {self.world_size}")
        if self.worker_id is not None and not 0 <= self.worker_id < self.world_size:
            raise invalid("worker_id", f"expected 0 to {self.world_size - 1} or nil, got {self.worker_id}")
        if self.block_size < 1:
            raise invalid("block_size", f"expected a number of tokens, got {self.block_size}")


@dataclass(frozen=True, slots=True)
class RegisterReply:
    """The issued id, the layout's fingerprint, and how the parts of a chunk look to this instance."""

    instance: int
    incarnation: int
    fingerprint: str
    part_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unregister:
    """Leave: leases are released, reservations aborted, never committed."""

    instance: int


@dataclass(frozen=True, slots=True)
class UnregisterReply:
    """`known` is false if there was nothing to leave."""

    known: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """A sign of life; `renew` lists leases that are still in use and must not run out."""

    instance: int | None = None
    renew: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PingReply:
    """`known` is false when the instance must register again; `renewed` counts the leases that were still there."""

    incarnation: int
    known: bool
    renewed: int


# Reading and writing chunks.


@dataclass(frozen=True, slots=True)
class SessionId:
    """One attempt of one request. What it holds is released when the attempt ends, whatever a later attempt does."""

    request_id: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens (uint32 little-endian) and whatever else decides their KV.

    `extras` maps a chunk's index to tagged bytes for what is in that chunk beside tokens; a LoRA adapter stands at
    chunk 0.
    """

    session: SessionId
    tokens: bytes
    salt: str = ""
    extras: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tokens) % TOKEN_BYTES:
            raise invalid("tokens", f"expected uint32 tokens, got {len(self.tokens)} bytes, not a multiple of 4")
        if self.salt:
            check_salt(self.salt)
        if any(index < 0 for index in self.extras):
            raise invalid("extras", f"expected chunk indices from 0, got {min(self.extras)}")


@dataclass(frozen=True, slots=True)
class Acquire:
    """Ask for the longest cached prefix of each prompt, with a lease on its chunks from `first` (its own) on.

    A second acquire of a session releases that session's earlier lease. With `lease` false nothing is held and
    no slots come back: the answer is only a length.
    """

    instance: int
    prompts: tuple[Prompt, ...]
    first: tuple[int, ...] = ()
    lease: bool = True

    def __post_init__(self) -> None:
        if self.first and len(self.first) != len(self.prompts):
            raise invalid("first", f"expected one per prompt ({len(self.prompts)}) or none, got {len(self.first)}")
        if any(index < 0 for index in self.first):
            raise invalid("first", f"expected chunk indices from 0, got {min(self.first)}")


@dataclass(frozen=True, slots=True)
class Acquired:
    """`chunks` chunks of the prefix are cached; `slots` are those from `first` on. `lease` is 0 if nothing is held."""

    chunks: int
    lease: int = 0
    slots: bytes = b""


@dataclass(frozen=True, slots=True)
class AcquireReply:
    """One result per prompt, in order."""

    results: tuple[Acquired, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Give leases back. Releasing twice, or another's, changes nothing."""

    instance: int
    leases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """How many of the leases were held by this instance until now."""

    released: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for slots for what is missing of each prompt's whole chunks, the leading ones first."""

    instance: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """`chunks` are the indices that are this instance's to fill, ascending, with their slots.

    `resident` counts the leading chunks that are cached already. Fewer slots than missing chunks is not an error: the
    others are being written by somebody else (`busy`), or do not fit (`full`). `reservation` is 0 when there is
    nothing to fill.
    """

    reservation: int
    chunks: tuple[int, ...]
    slots: bytes
    resident: int
    busy: int
    full: int


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """One result per prompt, in order."""

    results: tuple[Reserved, ...]


@dataclass(frozen=True, slots=True)
class CommittedChunks:
    """Chunks of one reservation whose every byte is written; None: all of them. The others are given up."""

    reservation: int
    filled: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish reservations. What is not listed as filled is freed at once."""

    instance: int
    commits: tuple[CommittedChunks, ...]


class CommitState(StrEnum):
    """What became of a reservation."""

    SEALED = "sealed"
    """Every reserved chunk is visible."""
    PARTIAL = "partial"
    """Some chunks are visible; `rejected` lists the others."""
    LOST = "lost"
    """The reservation ran out (or the cache was cleared) before this commit: nothing is visible."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of one commit, per chunk."""

    state: CommitState
    sealed: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitReply:
    """One result per commit, in order."""

    results: tuple[Committed, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Give reservations up; their slots are free at once."""

    instance: int
    reservations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortReply:
    """How many of the reservations were this instance's until now."""

    aborted: int


@dataclass(frozen=True, slots=True)
class End:
    """The attempts are over: release what they still hold, abort what they reserved."""

    instance: int
    sessions: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class EndReply:
    """How many of the sessions were known until now."""

    ended: int


# The bytes, where there is no shared memory.


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one object: `part` of chunk `chunk`, from `offset` in the object, `length` bytes."""

    chunk: int
    part: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Write:
    """Fill reserved objects; raw frame i holds piece i. The pieces of an object arrive in order, without holes."""

    instance: int
    reservation: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class WriteReply:
    """Bytes taken."""

    written: int


@dataclass(frozen=True, slots=True)
class Read:
    """Fetch pieces of leased objects (`chunk` counts from the first chunk of the lease); raw frame i of the reply
    holds piece i.
    """

    instance: int
    lease: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ReadReply:
    """Bytes that follow as raw frames."""

    length: int


# Administration.


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget every cached chunk. What is leased stays readable by its holder and is freed afterwards."""


@dataclass(frozen=True, slots=True)
class ClearReply:
    """Objects freed now, and objects that are freed when their readers or writers are done."""

    freed: int
    held: int


@dataclass(frozen=True, slots=True)
class Status:
    """Ask for the document of `GET /status`."""


@dataclass(frozen=True, slots=True)
class StatusReply:
    """The same JSON document, as UTF-8 bytes."""

    document: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused, as it travels in a reply's `error`."""

    code: ErrorCode
    message: str
    field: str = ""

    def raised(self) -> ProtocolError:
        """The exception a client raises for it."""
        return ProtocolError(self.code, self.message, self.field)


OPERATIONS: dict[str, tuple[type[Any], type[Any]]] = {
    "v1/hello": (Hello, HelloReply),
    "v1/register": (Register, RegisterReply),
    "v1/unregister": (Unregister, UnregisterReply),
    "v1/ping": (Ping, PingReply),
    "v1/acquire": (Acquire, AcquireReply),
    "v1/release": (Release, ReleaseReply),
    "v1/reserve": (Reserve, ReserveReply),
    "v1/commit": (Commit, CommitReply),
    "v1/abort": (Abort, AbortReply),
    "v1/end": (End, EndReply),
    "v1/write": (Write, WriteReply),
    "v1/read": (Read, ReadReply),
    "v1/clear": (Clear, ClearReply),
    "v1/status": (Status, StatusReply),
}
"""Operation name -> (request, reply)."""


# Slots.


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Where one object lies in the pool, and the generation that its bytes must still have after they were read."""

    offset: int
    generation: int


def pack_slots(slots: list[int]) -> bytes:
    """Offsets and generations, alternating, as they travel."""
    return struct.pack(f"<{len(slots)}Q", *slots)


def unpack_slots(data: bytes) -> list[SlotRef]:
    """The slots in `data`; raises INVALID if it is not a whole number of them."""
    if len(data) % 16:
        raise invalid("slots", f"expected a multiple of 16 bytes, got {len(data)}")
    return [SlotRef(offset, generation) for offset, generation in struct.iter_unpack("<QQ", data)]
