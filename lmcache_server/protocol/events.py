"""Following what is resident: which chunks came and which went, as a reader is told.

    v1/events(after=None)      "lost": forget what you knew; the first page of all that is resident
    v1/events(after=cursor)    what comes next, until `more` is false; later the same cursor asks what is new

A reader that applies every event in order knows exactly which chunks of its namespace are resident. A cursor belongs to
the instance that was given it. One that the server cannot go on from (its reader was too slow, or a reply got lost) is
answered with "lost" and all that is resident, never with a gap.
"""

from enum import StrEnum

from lmcache_server.protocol.codec import Many, Message
from lmcache_server.protocol.errors import invalid

__all__ = ["MAX_EVENTS", "ChunkEvent", "ChunkEventKind", "Events", "EventsReply"]

MAX_EVENTS = 1024
"""Events of one reply at most."""


class ChunkEventKind(StrEnum):
    """What happened."""

    STORED = "stored"
    """A chunk is complete: all of its parts can be read. It is a hit if the chunks before it are resident too."""
    REMOVED = "removed"
    """A chunk was evicted, or went with the chunk before it."""
    CLEARED = "cleared"
    """Every chunk went."""


class ChunkEvent(Message, frozen=True):
    """One event. A chunk is named by `hash` and `salt` together; `parent` is the hash of the chunk before it, empty for
    a first chunk. Only a stored chunk has `parent`, `tokens` and `extras`.
    """

    kind: ChunkEventKind
    hash: bytes = b""
    salt: str = ""
    parent: bytes = b""
    tokens: bytes = b""
    extras: bytes = b""


class Events(Message, frozen=True):
    """Ask for at most `limit` events of the sender's namespace after the cursor `after`; None: from the beginning."""

    instance: int
    after: int | None = None
    limit: int = MAX_EVENTS

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_EVENTS:
            raise invalid("limit", f"expected 1 to {MAX_EVENTS} events, got {self.limit}")


class EventsReply(Message, frozen=True):
    """`cursor` is where the next question goes on, at once if there is `more`. With `lost`, whatever the reader knew is
    void, and these events are the first of all that is resident.
    """

    events: Many[ChunkEvent]
    cursor: int
    lost: bool
    more: bool
