"""A cache small enough to follow by hand: a chunk is one token, an object is one unit of the pool, time is a number.

    cache = SmallCache(pool=4)
    cache.store(1, "abc")            owner 1 reserves and commits the chunks a, b, c
    cache.acquire(2, "abcd").chunks  3

Prompts are strings, a character a token. With `ranks` = 2, owners 1, 3, .. are shard 0 and 2, 4, .. are shard 1; owner
0 sees both. Every call ends with an integrity check.
"""

from array import array
from collections.abc import Callable
from functools import wraps
from typing import Any

from lmcache_server.core.integrity import check_integrity
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.records import ChunkNode, Limits, View
from lmcache_server.protocol.keys import ChunkHasher, Namespace
from lmcache_server.protocol.layout import Kind
from lmcache_server.protocol.messages import Acquired, Committed, Prompt, Reserved, SessionId, SlotRef, unpack_slots

READ_TTL, WRITE_TTL = 30.0, 50.0


def checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: "SmallCache", *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        check_integrity(self.l1)
        return result

    return call


def session(name: str) -> SessionId:
    return SessionId(name)


def slots(message: Acquired | Reserved) -> list[SlotRef]:
    return unpack_slots(message.slots)


def offsets(message: Acquired | Reserved) -> list[int]:
    return [slot.offset for slot in slots(message)]


class SmallCache:
    def __init__(
        self, pool: int = 8, *, ranks: int = 1, part: int = 1, watermark: float = 1.0, ratio: float = 0.5,
        framed: bool = False, algorithm: str = "xxh3_128", first_generation: int = 1,
    ) -> None:  # fmt: skip
        self.ranks, self.part, self.now = ranks, part, 0.0
        self.namespace = Namespace("m", "", Kind.KV, "layout", ranks)
        limits = Limits(pool, 1, watermark, ratio, READ_TTL, WRITE_TTL)
        self.generations = array("Q", bytes(8 * pool))
        hasher = ChunkHasher(1, algorithm)
        self.l1 = L1Cache(hasher, limits, self.generations, framed=framed, first_generation=first_generation)

    @property
    def used(self) -> int:
        return self.l1.allocator.used

    def view(self, owner: int) -> View:
        own = range(self.ranks) if owner == 0 else range((owner - 1) % self.ranks, (owner - 1) % self.ranks + 1)
        return View(owner, self.namespace, (self.part,) * self.ranks, own)

    def prompt(self, text: str, name: str, salt: str = "") -> Prompt:
        return Prompt(session(name), b"".join(ord(c).to_bytes(4, "little") for c in text), salt)

    @checked
    def reserve(self, owner: int, text: str, name: str = "r", salt: str = "") -> Reserved:
        return self.l1.reserve(self.view(owner), self.prompt(text, name, salt), self.now)

    @checked
    def commit(self, owner: int, reservation: int, filled: tuple[int, ...] | None = None) -> Committed:
        return self.l1.commit(owner, reservation, filled)

    @checked
    def abort(self, owner: int, *reservations: int) -> int:
        return self.l1.abort(owner, reservations)

    @checked
    def store(self, owner: int, text: str, name: str = "r", salt: str = "") -> tuple[int, ...]:
        reserved = self.reserve(owner, text, name, salt)
        return self.commit(owner, reserved.reservation).sealed if reserved.reservation else ()

    @checked
    def acquire(
        self, owner: int, text: str, name: str = "r", *, first: int = 0, lease: bool = True, salt: str = ""
    ) -> Acquired:
        return self.l1.acquire(self.view(owner), self.prompt(text, name, salt), first, lease, self.now)

    @staticmethod
    def text(node: ChunkNode) -> str:
        """The text up to the end of a chunk."""
        return "".join(chr(int.from_bytes(above.tokens, "little")) for above in node.path())

    def hit(self, text: str, salt: str = "") -> int:
        """How many chunks of `text` are visible."""
        return int(self.acquire(0, text, lease=False, salt=salt).chunks)

    @checked
    def release(self, owner: int, *leases: int) -> int:
        return self.l1.release(owner, leases)

    @checked
    def renew(self, owner: int, *leases: int) -> int:
        return self.l1.renew(owner, leases, self.now)

    @checked
    def end(self, owner: int, name: str = "r") -> bool:
        return self.l1.end(owner, session(name))

    @checked
    def leave(self, owner: int, *, may_still_write: bool = False) -> None:
        self.l1.leave(owner, may_still_write=may_still_write)

    @checked
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.l1.expire(self.now)

    @checked
    def clear(self) -> tuple[int, int]:
        return self.l1.clear()

    @checked
    def evict_to_watermark(self, most: int = 4096) -> int:
        return self.l1.evict_to_watermark(most)

    def assert_quiet(self) -> None:
        """Nothing is held and nothing is leaked: what is used is what is resident."""
        check_integrity(self.l1)
        assert (len(self.l1.reads), len(self.l1.writes), len(self.l1.lost), self.l1.quarantined_bytes) == (0, 0, 0, 0)
        resident = [part for _, node in self.l1.index.nodes() for part in node.parts if part is not None]
        assert self.used == sum(part.length for part in resident)
        assert sum(generation > 0 for generation in self.generations) == len(resident) == self.l1.objects
