"""Which attempts of which requests are under way, oldest use first.

A session begins with the first message that names it and ends by its owner's `end`, with its owner, or after idling
too long. Using a session again makes it the youngest, so the ones that idled too long are always in front. What a
session holds has leases with times of their own; forgetting a session releases nothing.
"""

from collections import OrderedDict

from lmcache_server.protocol.messages import SessionId

__all__ = ["SessionTable"]


MAX_SESSIONS = 1 << 16
"""Far more than engines run at once; clients that end nothing push their own oldest ones out."""


class SessionTable:
    """Sessions by owner, each with the time of its last use; the oldest are forgotten when there are too many."""

    def __init__(self, ttl: float, most: int = MAX_SESSIONS) -> None:
        self.ttl = ttl
        self._most = most
        self._used: OrderedDict[tuple[int, SessionId], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def use(self, owner: int, session: SessionId, now: float) -> None:
        """Begin a session, or note that it is used."""
        key = (owner, session)
        self._used[key] = now
        self._used.move_to_end(key)
        if len(self._used) > self._most:
            self._used.popitem(last=False)

    def end(self, owner: int, session: SessionId) -> bool:
        """Forget a session; False if it was not there."""
        return self._used.pop((owner, session), None) is not None

    def end_owner(self, owner: int) -> None:
        """Forget every session of an owner."""
        for key in [key for key in self._used if key[0] == owner]:
            del self._used[key]

    def forget_idle(self, now: float) -> int:
        """Forget the sessions that nobody used for `ttl` seconds; how many there were."""
        before = len(self._used)
        while self._used and next(iter(self._used.values())) + self.ttl <= now:
            self._used.popitem(last=False)
        return before - len(self._used)
