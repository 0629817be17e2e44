"""Which chunks came and went, for those who follow it.

A log is kept for each namespace that somebody follows, from the first question on until its last follower leaves;
nothing is noted for the others. A log holds what some follower has not fetched yet, at most MOST events: whoever falls
behind further starts over.

    start over    the walk over what is resident, in pages      cursors below 0, each given once
    then          the log, from where the walk began            cursors from 0: the number of the last event

The walk goes on while the tree changes under it: what it misses, or tells although it is gone by now, is in the log
that follows. So the set is exact whenever a follower has read to the end.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from lmcache_server.core.index import PrefixIndex
from lmcache_server.core.memory_obj import MemoryObj
from lmcache_server.core.records import ChunkNode
from lmcache_server.protocol.events import ChunkEvent, ChunkEventKind, EventsReply
from lmcache_server.protocol.keys import Namespace

__all__ = ["MOST", "Journal"]

MOST = 1 << 14
"""Events of one log. A stored chunk's tokens stay in memory as long as its event."""


@dataclass(slots=True, eq=False)
class Follower:
    """How far one instance has read: `position` in the log; with a `walk`, that is where the walk began."""

    position: int
    walk: Iterator[ChunkNode] | None
    page: int = 0


@dataclass(slots=True, eq=False)
class Log:
    """The events from number `dropped` + 1 on, and who follows them."""

    events: deque[ChunkEvent] = field(default_factory=deque)
    dropped: int = 0
    followers: dict[int, Follower] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self.dropped + len(self.events)

    def drop(self) -> None:
        """Let the oldest event go."""
        self.events.popleft()
        self.dropped += 1

    def drop_fetched(self) -> None:
        """Let go what every follower has."""
        fetched = min(follower.position for follower in self.followers.values())
        while self.dropped < fetched:
            self.drop()


class Journal:
    """The logs of one index. Whoever changes the index says so here, at once."""

    def __init__(self, index: PrefixIndex[MemoryObj]) -> None:
        self._index = index
        self._logs: dict[Namespace, Log] = {}
        self._pages = count(-1, -1)
        self.overflowed = 0
        """Events that went before every follower had fetched them."""

    def __len__(self) -> int:
        """Events that are kept."""
        return sum(len(log.events) for log in self._logs.values())

    @property
    def followers(self) -> int:
        """Instances that follow a log."""
        return sum(len(log.followers) for log in self._logs.values())

    # What happens.

    def stored(self, node: ChunkNode) -> None:
        """A part of `node` was sealed; that is an event if it was the last one that was missing."""
        if self._logs and not node.missing:
            self._note(node, _stored(node, self._index.key(node)[1]))

    def removed(self, node: ChunkNode) -> None:
        """`node` goes; that is an event if lookups could reach it and it was complete."""
        if self._logs and not node.missing and self._index.attached(node):
            self._note(node, ChunkEvent(ChunkEventKind.REMOVED, node.hash, self._index.key(node)[1]))

    def cleared(self) -> None:
        """Everything went."""
        for log in self._logs.values():
            self._append(log, ChunkEvent(ChunkEventKind.CLEARED))

    # Who follows.

    def read(self, owner: int, namespace: Namespace, after: int | None, limit: int) -> EventsReply:
        """What comes after the cursor `after`, or from the beginning; `owner` follows from now on."""
        log = self._logs.setdefault(namespace, Log())
        follower = log.followers.get(owner)
        if follower is None or after is None or not _continues(log, follower, after):
            follower = log.followers[owner] = Follower(log.last, self._walk(namespace))
            return self._page(follower, limit, lost=True)
        if follower.walk is not None:
            return self._page(follower, limit, lost=False)
        follower.position = after
        log.drop_fetched()
        return _entries(log, after, limit)

    def leave(self, owner: int) -> None:
        """`owner` is gone and follows nothing any more."""
        for namespace, log in list(self._logs.items()):
            if log.followers.pop(owner, None) is not None and not log.followers:
                del self._logs[namespace]

    def _page(self, follower: Follower, limit: int, lost: bool) -> EventsReply:
        assert follower.walk is not None
        nodes = list(islice(follower.walk, limit))
        events = tuple([_stored(node, self._index.key(node)[1]) for node in nodes if not node.missing])
        if len(nodes) < limit:
            follower.walk = None
            return EventsReply(events, follower.position, lost, more=True)
        follower.page = next(self._pages)
        return EventsReply(events, follower.page, lost, more=True)

    def _walk(self, namespace: Namespace) -> Iterator[ChunkNode]:
        for key in list(self._index.keys()):
            if key[0] == namespace:
                yield from self._index.below(key)

    def _note(self, node: ChunkNode, event: ChunkEvent) -> None:
        log = self._logs.get(self._index.key(node)[0])
        if log is not None:
            self._append(log, event)

    def _append(self, log: Log, event: ChunkEvent) -> None:
        log.events.append(event)
        if len(log.events) > MOST:
            log.drop()
            self.overflowed += 1


def _continues(log: Log, follower: Follower, after: int) -> bool:
    """Whether `follower` can be told what comes after `after` without a gap."""
    if follower.walk is not None:
        return after == follower.page  # should the log have run on meanwhile, that shows at its end
    return max(follower.position, log.dropped) <= after <= log.last


def _entries(log: Log, after: int, limit: int) -> EventsReply:
    """The log's events after number `after`."""
    start = after - log.dropped
    events = tuple(islice(log.events, start, start + limit))
    cursor = after + len(events)
    return EventsReply(events, cursor, lost=False, more=cursor < log.last)


def _stored(node: ChunkNode, salt: str) -> ChunkEvent:
    assert node.parent is not None
    parent = node.parent.hash if node.parent.parent is not None else b""
    return ChunkEvent(ChunkEventKind.STORED, node.hash, salt, parent, node.tokens, node.extras)
