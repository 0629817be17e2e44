"""Rights that end: who holds what, until when.

A lease has one owner (an instance), one session (an attempt of a request) and one handle. It ends once: by its
owner's word, with its session, with its owner, or when its time is up; whoever ends it gets it back from `take`-like
calls exactly once and undoes what it stood for. A handle of somebody else, or an ended one, is simply not there.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

__all__ = ["Lease", "LeaseTable"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Lease(Generic[T]):
    """A right of `owner` to `subject`, until `expires` (seconds)."""

    handle: int
    owner: int
    session: Hashable
    subject: T
    expires: float


class LeaseTable(Generic[T]):
    """Leases of one sort. Handles count up from 1 and are never reused."""

    def __init__(self, first_handle: int = 1) -> None:
        self._next = first_handle
        self._leases: dict[int, Lease[T]] = {}
        self._by_owner: dict[int, dict[Hashable, set[int]]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease[T]]:
        return iter(self._leases.values())

    def grant(self, owner: int, session: Hashable, subject: T, expires: float) -> Lease[T]:
        """A new lease."""
        lease = Lease(self._next, owner, session, subject, expires)
        self._next += 1
        self._enter(lease)
        self._watch(expires, lease.handle)
        return lease

    def keep(self, lease: Lease[T]) -> None:
        """Enter a lease that ended in another table, under its handle and without a time of its own."""
        self._enter(lease)

    def get(self, owner: int, handle: int) -> Lease[T] | None:
        """The lease, if it is `owner`'s and has not ended."""
        lease = self._leases.get(handle)
        return lease if lease is not None and lease.owner == owner else None

    def renew(self, owner: int, handle: int, expires: float) -> bool:
        """Move the end of a lease; False if there is no such lease."""
        lease = self.get(owner, handle)
        if lease is None:
            return False
        lease.expires = expires
        self._watch(expires, handle)
        return True

    def take(self, owner: int, handle: int) -> Lease[T] | None:
        """End one lease, if it is `owner`'s and has not ended."""
        lease = self.get(owner, handle)
        return self._end(lease) if lease is not None else None

    def take_session(self, owner: int, session: Hashable) -> list[Lease[T]]:
        """End every lease of one session."""
        handles = self._by_owner.get(owner, {}).get(session, ())
        return [self._end(self._leases[handle]) for handle in sorted(handles)]

    def take_owner(self, owner: int) -> list[Lease[T]]:
        """End every lease of one owner."""
        sessions = self._by_owner.get(owner, {})
        return [self._end(self._leases[h]) for h in sorted(h for handles in sessions.values() for h in handles)]

    def take_expired(self, now: float) -> list[Lease[T]]:
        """End every lease whose time is up, in the order of their ends."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, handle = heappop(self._deadlines)
            lease = self._leases.get(handle)
            if lease is not None and lease.expires <= deadline:
                ended.append(self._end(lease))
        return ended

    def owned_by(self, owner: int) -> bool:
        """Whether `owner` holds any lease."""
        return owner in self._by_owner

    def check_integrity(self) -> None:
        """Raise AssertionError unless the view by owner holds exactly the leases."""
        listed = {h for sessions in self._by_owner.values() for handles in sessions.values() for h in handles}
        assert listed == self._leases.keys(), f"listed by owner {len(listed)}, leases {len(self._leases)}"
        assert all(handles for sessions in self._by_owner.values() for handles in sessions.values()), (
            "an empty session stays"
        )

    def _enter(self, lease: Lease[T]) -> None:
        self._leases[lease.handle] = lease
        self._by_owner.setdefault(lease.owner, {}).setdefault(lease.session, set()).add(lease.handle)

    def _watch(self, expires: float, handle: int) -> None:
        heappush(self._deadlines, (expires, handle))
        # Most leases end long before their time; their entries must not pile up until then.
        if len(self._deadlines) > 64 + 2 * len(self._leases):
            self._deadlines = [(lease.expires, lease.handle) for lease in self._leases.values()]
            heapify(self._deadlines)

    def _end(self, lease: Lease[T]) -> Lease[T]:
        del self._leases[lease.handle]
        sessions = self._by_owner[lease.owner]
        handles = sessions[lease.session]
        handles.discard(lease.handle)
        if not handles:
            del sessions[lease.session]
        if not sessions:
            del self._by_owner[lease.owner]
        return lease
