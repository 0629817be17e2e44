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
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from lmcache_server.protocol.codec import Extras, Many, Message
from lmcache_server.protocol.errors import ErrorCode, ProtocolError, invalid
from lmcache_server.protocol.events import Events, EventsReply
from lmcache_server.protocol.frames import Piece, Read, ReadReply, Write, WriteReply
from lmcache_server.protocol.keys import TOKEN_BYTES
from lmcache_server.protocol.layout import Kind
from lmcache_server.protocol.registration import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    Ping,
    PingReply,
    ProcessId,
    Register,
    RegisterReply,
    Transport,
    Unregister,
    UnregisterReply,
)  # fmt: skip

__all__ = [
    "Abort", "AbortReply", "Acquire", "AcquireReply", "Acquired", "Clear", "ClearReply", "Commit", "CommitReply",
    "CommitState", "Committed", "CommittedChunks", "Elsewhere", "End", "EndReply", "Events", "EventsReply", "Explain",
    "ExplainReply", "Hello", "HelloReply", "OPERATIONS", "Piece", "Ping", "PingReply", "ProcessId", "PROTOCOL_VERSION",
    "Prompt", "Read", "ReadReply", "Refusal", "Refused", "Register", "RegisterReply", "Release", "ReleaseReply",
    "Reserve", "ReserveReply", "Reserved", "SessionId", "SlotRef", "Status", "StatusReply", "Stop", "Transport",
    "Unregister", "UnregisterReply", "Write", "WriteReply", "check_salt", "pack_slot", "unpack_slots",
]  # fmt: skip

MAX_SALT = 128
MAX_REQUEST_ID = 4096
MAX_EXTRA = 1 << 16
"""Bytes of `extras` per chunk; they stay in memory as long as the chunk."""


def check_salt(salt: str) -> None:
    """Raise INVALID unless `salt` may separate tenants: at most 128 characters, none of `@ / \\ NUL`."""
    if len(salt) > MAX_SALT or any(c in "@/\\\0" for c in salt):
        raise invalid("salt", f"expected at most {MAX_SALT} characters without @ / \\ and NUL, got {salt[:40]!r}")


# Reading and writing chunks.


class SessionId(Message, frozen=True):
    """One attempt of one request. What it holds is released when the attempt ends, whatever a later attempt does."""

    request_id: str
    attempt: int = 0

    def __post_init__(self) -> None:
        if len(self.request_id) > MAX_REQUEST_ID:
            raise invalid("request_id", f"expected at most {MAX_REQUEST_ID} characters, got {len(self.request_id)}")


class Prompt(Message, frozen=True):
    """Tokens (uint32 little-endian) and whatever else decides their KV.

    `extras` maps a chunk's index to tagged bytes for what is in that chunk beside tokens; a LoRA adapter stands at
    chunk 0.
    """

    session: SessionId
    tokens: bytes
    salt: str = ""
    extras: Extras = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tokens) % TOKEN_BYTES:
            raise invalid("tokens", f"expected uint32 tokens, got {len(self.tokens)} bytes, not a multiple of 4")
        if self.salt:
            check_salt(self.salt)
        if self.extras and min(self.extras) < 0:
            raise invalid("extras", f"expected chunk indices from 0, got {min(self.extras)}")
        if self.extras and max(map(len, self.extras.values())) > MAX_EXTRA:
            raise invalid("extras", f"expected at most {MAX_EXTRA} bytes per chunk; send a digest instead")


def _check_first(first: tuple[int, ...], prompts: tuple[Prompt, ...]) -> None:
    if first and len(first) != len(prompts):
        raise invalid("first", f"expected one per prompt ({len(prompts)}) or none, got {len(first)}")
    if first and min(first) < 0:
        raise invalid("first", f"expected chunk indices from 0, got {min(first)}")


class Acquire(Message, frozen=True):
    """Ask for the longest cached prefix of each prompt, with a lease on its chunks from `first` (its own) on.

    A second acquire of a session releases that session's earlier lease. With `lease` false nothing is held and
    no slots come back: the answer is only a length.
    """

    instance: int
    prompts: Many[Prompt]
    first: Many[int] = ()
    lease: bool = True

    def __post_init__(self) -> None:
        _check_first(self.first, self.prompts)
        several = self.lease and len(self.prompts) > 1
        if several and len({prompt.session for prompt in self.prompts}) != len(self.prompts):
            raise invalid("prompts", "expected a session of its own for each prompt: a session holds one read lease")


class Acquired(Message, frozen=True):
    """`chunks` chunks of the prefix are cached; `slots` are those from `first` on. `lease` is 0 if nothing is held."""

    chunks: int
    lease: int = 0
    slots: bytes = b""


class AcquireReply(Message, frozen=True):
    """One result per prompt, in order."""

    results: Many[Acquired]


class Release(Message, frozen=True):
    """Give leases back. Releasing twice, or another's, changes nothing."""

    instance: int
    leases: Many[int]


class ReleaseReply(Message, frozen=True):
    """How many of the leases were held by this instance until now."""

    released: int


class Reserve(Message, frozen=True):
    """Ask for slots for what is missing of each prompt's whole chunks, the leading ones first.

    Chunks before `first` (one per prompt, or none: 0) are not offered: if one of them is missing, nothing is.
    """

    instance: int
    prompts: Many[Prompt]
    first: Many[int] = ()

    def __post_init__(self) -> None:
        _check_first(self.first, self.prompts)


class Reserved(Message, frozen=True):
    """`chunks` are the indices that are this instance's to fill, ascending, with the slots of all its parts of each.

    A part that is there already, or that somebody else is writing, is not to be filled: its slot is (0, 0).
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


class ReserveReply(Message, frozen=True):
    """One result per prompt, in order."""

    results: Many[Reserved]


class CommittedChunks(Message, frozen=True):
    """Chunks of one reservation whose every byte is written; None: all of them. The others are given up."""

    reservation: int
    filled: Many[int] | None = None


class Commit(Message, frozen=True):
    """Publish reservations. What is not listed as filled is freed at once."""

    instance: int
    commits: Many[CommittedChunks]


class CommitState(StrEnum):
    """What became of a reservation."""

    SEALED = "sealed"
    """Every reserved chunk is visible."""
    PARTIAL = "partial"
    """Some chunks are visible; `rejected` lists the others."""
    LOST = "lost"
    """The reservation ran out (or the cache was cleared) before this commit: nothing is visible."""


class Committed(Message, frozen=True):
    """Outcome of one commit, per chunk."""

    state: CommitState
    sealed: tuple[int, ...]
    rejected: tuple[int, ...]


class CommitReply(Message, frozen=True):
    """One result per commit, in order."""

    results: Many[Committed]


class Abort(Message, frozen=True):
    """Give reservations up; their slots are free at once."""

    instance: int
    reservations: Many[int]


class AbortReply(Message, frozen=True):
    """How many of the reservations were this instance's until now."""

    aborted: int


class End(Message, frozen=True):
    """The attempts are over: release what they still hold, abort what they reserved."""

    instance: int
    sessions: Many[SessionId]


class EndReply(Message, frozen=True):
    """How many of the sessions were known until now."""

    ended: int


# Questions.


class Explain(Message, frozen=True):
    """Ask why `prompt` is cached as far as it is. Nothing is held, and it does not count as a lookup."""

    instance: int
    prompt: Prompt


class Stop(StrEnum):
    """What is where the first chunk that is not cached should be."""

    NOTHING = "nothing"
    """Every whole chunk of the prompt is cached."""
    END = "end"
    """Nothing was stored behind the chunk before it, or it is gone."""
    OTHER_TOKENS = "other_tokens"
    """Only other tokens (or other extras) follow the chunk before it."""
    BEING_WRITTEN = "being_written"
    """Somebody is writing it now."""
    PART_MISSING = "part_missing"
    """Some of its shards or kernel groups were not stored."""


class Elsewhere(Message, frozen=True):
    """Another namespace that has `chunks` chunks of the prompt, under the same salt."""

    chunks: int
    model_name: str
    revision: str
    kind: Kind
    layout: str
    world_size: int


class ExplainReply(Message, frozen=True):
    """`chunks` are cached; `absent` are the parts (of all shards) of the next one that nobody has or writes, if any
    others are there. `elsewhere` has more of the prompt, most first.
    """

    chunks: int
    stop: Stop
    absent: Many[int]
    elsewhere: Many[Elsewhere]


# Administration.


class Clear(Message, frozen=True):
    """Forget every cached chunk. What is leased stays readable by its holder and is freed afterwards."""


class ClearReply(Message, frozen=True):
    """Objects freed now, and objects that are freed when their readers or writers are done."""

    freed: int
    held: int


class Status(Message, frozen=True):
    """Ask for the document of `GET /status`."""


class StatusReply(Message, frozen=True):
    """The same JSON document, as UTF-8 bytes."""

    document: bytes


class Refusal(Message, frozen=True):
    """Why a request was refused, as it travels in a reply's `error`."""

    code: ErrorCode
    message: str
    field: str = ""

    def raised(self) -> ProtocolError:
        """The exception a client raises for it."""
        return ProtocolError(self.code, self.message, self.field)


class Refused(Message, frozen=True):
    """The message frame of a reply that is a refusal."""

    error: Refusal


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
    "v1/explain": (Explain, ExplainReply),
    "v1/events": (Events, EventsReply),
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


_SLOT = struct.Struct("<2Q")


def pack_slot(offset: int, generation: int) -> bytes:
    """One slot as it travels; several are joined."""
    return _SLOT.pack(offset, generation)


def unpack_slots(data: bytes) -> list[SlotRef]:
    """The slots in `data`; raises INVALID if it is not a whole number of them."""
    if len(data) % _SLOT.size:
        raise invalid("slots", f"expected a multiple of 16 bytes, got {len(data)}")
    return [SlotRef(offset, generation) for offset, generation in _SLOT.iter_unpack(data)]
