"""Least recently used, leaves first: the order in which chunks go.

Only leaves stand in the queue, so a chunk never goes before what builds on it, and a resident chunk's whole prefix
stays resident. A use of a chunk is a use of its whole prefix; it is enough to mark the deepest one, because a parent
inherits the mark of each child that is evicted. That makes a hit O(1) here, whatever its length.

The heap is lazy: an entry whose node was used meanwhile goes back with its new mark, an entry whose node may not go
now is dropped, and whoever makes a node evictable again offers it again. Each time the heap has doubled it is swept,
so that entries of nodes that are gone do not pile up.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

__all__ = ["LeafLRU", "Queueable"]


class Queueable(Protocol):
    """What the queue needs of a node."""

    tick: int
    queued: bool


N = TypeVar("N", bound=Queueable)


class LeafLRU(Generic[N]):
    """A queue of evictable leaves, least recently used first. `evictable` is asked again at the last moment."""

    def __init__(self, evictable: Callable[[N], bool]) -> None:
        self._evictable = evictable
        self._heap: list[tuple[int, int, N]] = []
        self._clock = 0
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def touch(self, node: N) -> None:
        """Mark `node` as used now."""
        self._clock += 1
        node.tick = self._clock

    def offer(self, node: N) -> None:
        """Queue `node` if it may go and is not queued yet."""
        if not node.queued and self._evictable(node):
            if len(self._heap) >= self._sweep_at:
                self._sweep()
            node.queued = True
            self._clock += 1
            heappush(self._heap, (node.tick, self._clock, node))

    def take(self) -> N | None:
        """The least recently used node that may go, out of the queue; None if there is none."""
        while self._heap:
            tick, _, node = heappop(self._heap)
            node.queued = False
            if node.tick != tick:
                self.offer(node)
            elif self._evictable(node):
                return node
        return None

    def _sweep(self) -> None:
        kept = []
        for entry in self._heap:
            node = entry[2]
            node.queued = self._evictable(node)
            if node.queued:
                kept.append(entry)
        heapify(kept)
        self._heap = kept
        self._sweep_at = max(64, 2 * len(kept))
