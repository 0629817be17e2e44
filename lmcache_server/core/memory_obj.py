"""The bytes of one key, and what may happen to them. Every change of state goes through `MemoryObj.apply` and this
table.

RESERVED     one writer fills it; nobody else sees it
SEALED       complete, visible, immutable
QUARANTINED  its writer lost it but may still be writing: not visible, not reusable
FREED        the bytes belong to the allocator again
"""

from collections.abc import Sequence
from enum import Enum

from lmcache_server.protocol.messages import pack_slot, unpack_slots

__all__ = ["TRANSITIONS", "Event", "IllegalTransition", "MemoryObj", "State", "put_in_order"]


class State(Enum):
    """Where a MemoryObj is in its life."""

    RESERVED = "reserved"
    SEALED = "sealed"
    QUARANTINED = "quarantined"
    FREED = "freed"

    __hash__ = object.__hash__  # there is one of each: the hash of its name would cost a call per chunk


class Event(Enum):
    """What happens to a MemoryObj."""

    COMMIT = "commit"
    """Its writer says that every byte is there."""
    ABORT = "abort"
    """Its writer gives it up, and will not write again."""
    LOSE = "lose"
    """It is taken from a writer that has not answered."""
    ANSWER = "answer"
    """The writer of a quarantined object answered, or is gone."""
    DROP = "drop"
    """It is evicted or cleared; never while somebody holds a reference."""

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.RESERVED, Event.COMMIT): State.SEALED,
    (State.RESERVED, Event.ABORT): State.FREED,
    (State.RESERVED, Event.LOSE): State.QUARANTINED,
    (State.QUARANTINED, Event.ANSWER): State.FREED,
    (State.SEALED, Event.DROP): State.FREED,
}
"""All that is legal; anything else is a bug of the server."""


class IllegalTransition(AssertionError):
    """A bug: an event that the table does not allow in this state."""


class MemoryObj:
    """`length` bytes at `offset` of the pool, with a reference count for readers and a generation that outlives
    nobody.
    """

    __slots__ = ("length", "offset", "refs", "slot", "state", "written")

    def __init__(self, offset: int, length: int, generation: int) -> None:
        self.offset = offset
        self.length = length
        self.slot = pack_slot(offset, generation)
        """Where it is and its generation, as they travel: packed once, sent with every hit."""
        self.state = State.RESERVED
        self.refs = 0
        self.written = 0
        """Bytes that arrived as frames; a writer in shared memory leaves it at 0."""

    def __repr__(self) -> str:
        return f"<MemoryObj {self.state.value} @{self.offset}+{self.length} gen={self.generation} refs={self.refs}>"

    @property
    def generation(self) -> int:
        """What readers compare with the pool's table, to learn whether the bytes are still this object's."""
        return unpack_slots(self.slot)[0].generation

    def apply(self, event: Event) -> None:
        """Move to the next state; raises IllegalTransition if there is none, or if a held object would be dropped."""
        following = TRANSITIONS.get((self.state, event))
        if following is None or (event is Event.DROP and self.refs):
            raise IllegalTransition(f"{event.value} of {self!r}")
        self.state = following


def put_in_order(objects: Sequence[MemoryObj]) -> None:
    """Let objects that nobody has been told of yet trade places with those of their length, into rising order.

    A full pool hands out what it evicts, last chunk first; who copies runs through rising places at twice the speed.
    """
    by_length: dict[int, list[MemoryObj]] = {}
    for obj in objects:
        by_length.setdefault(obj.length, []).append(obj)
    for same in by_length.values():
        places = sorted((obj.offset, obj.slot) for obj in same)
        for obj, place in zip(same, places, strict=True):
            obj.offset, obj.slot = place
