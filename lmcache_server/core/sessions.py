"""Which attempts of which requests are under way, oldest use first.

A session begins with the first message that names it and ends by its owner's `end`, with its owner, or after idling
too long. Using a session again makes it the youngest, so the ones that idled too long are always in front.
"""

from collections import OrderedDict

from lmcache_server.protocol.messages import SessionId

__all__ = ["SessionTable"]


class SessionTable:
    """Sessions by owner, each with the time of its last use."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._used: OrderedDict[tuple[int, SessionId], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def use(self, owner: int, session: SessionId, now: float) -> None:
        """Begin a session, or note that it is used."""
        key = (owner, session)
        self._used[key] = now
        self._used.move_to_end(key)

    def end(self, owner: int, session: SessionId) -> bool:
        """Forget a session; False if it was not there."""
        return self._used.pop((owner, session), None) is not None

    def end_owner(self, owner: int) -> None:
        """Forget every session of an owner."""
        for key in [key for key in self._used if key[0] == owner]:
            del self._used[key]

    def take_idle(self, now: float) -> list[tuple[int, SessionId]]:
        """Forget the sessions that nobody used for `ttl` seconds; which they were."""
        idle = []
        while self._used:
            key, used = next(iter(self._used.items()))
            if used + self.ttl > now:
                break
            del self._used[key]
            idle.append(key)
        return idle
