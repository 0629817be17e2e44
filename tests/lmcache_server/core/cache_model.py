"""What must be true of the cache whatever several clients do, kept as a model beside it.

The model knows three things of its own: the memory (who wrote what into which unit, late writers included), what was
published and not seen to go, and who holds what. The cache may take away only by rules that are checked here: a chunk
goes with the chunk that it builds on, with a clear, or by eviction, which is counted and never touches what is held.

A client writes only into slots that it was given, but it may be slow: it writes on until it knows that it lost them.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_server.core.memory_obj import State
from lmcache_server.protocol.messages import CommitState, Reserved, SlotRef
from tests.lmcache_server.core.small_cache import READ_TTL, WRITE_TTL, SmallCache, slots

Chunk = tuple[str, str]
"""Salt, and the text up to the chunk's end."""

PROMPTS = ["a", "ab", "abc", "abcd", "abx", "abxy", "z"]
SECONDS = [1.0, READ_TTL / 2, READ_TTL, WRITE_TTL]
WEIGHTS = {
    "reserve": 4, "store": 4, "write": 4, "commit": 4, "abort": 2, "meddle": 1, "acquire": 6, "renew": 1, "release": 3,
    "end": 1, "leave": 1, "wait": 1, "clear": 0.3, "evict": 1,
}  # fmt: skip

STALE = ("stale", "", -1)


@dataclass
class Writer:
    """A reservation as its owner sees it, until it knows that it is over."""

    owner: int
    handle: int
    name: str
    chunks: dict[int, Chunk]
    slots: dict[tuple[int, int], SlotRef]
    expires: float
    filled: set[int] = field(default_factory=set)
    lost: bool = False
    orphans: set[int] = field(default_factory=set)
    """Chunks that went with the chunk that they build on."""


@dataclass
class Reader:
    """A read lease as its holder sees it."""

    owner: int
    handle: int
    name: str
    chunks: list[Chunk]
    ranks: list[int]
    slots: list[SlotRef]
    expires: float
    cleared: bool = False
    """Whether what it holds is out of reach for others, who may store the same again."""


class CacheModel:
    """Clients 0 (all shards) to 3 and one cache. Each method is a step; one that breaks a rule fails an assertion."""

    def __init__(self, pool: int, ranks: int) -> None:
        self.cache = SmallCache(pool, ranks=ranks, watermark=0.7, ratio=0.3)
        self.memory = [STALE] * pool
        self.visible: dict[Chunk, set[int]] = {}
        self.writers: dict[int, Writer] = {}
        self.readers: dict[int, Reader] = {}
        self.owners = {client: client for client in range(4)}
        """The instance of each client; one that was forgotten registers again."""

    # Writing.

    def reserve(self, client: int, text: str, name: str, salt: str) -> Writer | None:
        owner, before = self.owners[client], self.cache.l1.counters.evicted_chunks
        reserved = self.cache.reserve(owner, text, name, salt)
        self._went(evicted=self.cache.l1.counters.evicted_chunks - before)
        assert reserved.resident <= len(text) and reserved.busy + reserved.full + len(reserved.chunks) <= len(text)
        if reserved.full:
            self._assert_full(owner, salt, text)
        assert bool(reserved.reservation) == bool(reserved.chunks)
        if not reserved.reservation:
            return None
        assert reserved.reservation not in self.writers
        chunks = {i: (salt, text[: i + 1]) for i in reserved.chunks}
        given = self._by_part(reserved, owner, chunks)
        expires = self.cache.now + WRITE_TTL
        writer = Writer(owner, reserved.reservation, name, chunks, given, expires)
        for slot in given.values():
            self.memory[slot.offset] = STALE
        self.writers[writer.handle] = writer
        self._check()
        return writer

    def write(self, writer: Writer, chunks: Iterable[int]) -> None:
        for (i, rank), slot in writer.slots.items():
            if i in chunks:
                self.memory[slot.offset] = (*writer.chunks[i], rank)
                writer.filled.add(i)
        self._check()

    def commit(self, writer: Writer) -> None:
        """Publish what is written."""
        everything = writer.filled == set(writer.chunks)
        committed = self.cache.commit(writer.owner, writer.handle, None if everything else tuple(writer.filled))
        del self.writers[writer.handle]
        sealed, rejected = set(committed.sealed), set(committed.rejected)
        assert sealed <= writer.filled and not sealed & rejected and sealed | rejected == set(writer.chunks)
        assert (committed.state is CommitState.SEALED) == (not rejected)
        assert (committed.state is CommitState.LOST) == writer.lost
        assert not sealed & writer.orphans and not (sealed and writer.lost)
        for i in sealed:
            self.visible.setdefault(writer.chunks[i], set()).update(rank for j, rank in writer.slots if j == i)
        self._went(below={writer.chunks[i] for i in rejected})

    def store(self, client: int, text: str, name: str, salt: str) -> None:
        writer = self.reserve(client, text, name, salt)
        if writer is not None:
            self.write(writer, writer.chunks)
            self.commit(writer)

    def abort(self, writer: Writer) -> None:
        assert self.cache.abort(writer.owner, writer.handle) or writer.lost
        self._over([writer])

    def meddle(self, client: int, writer: Writer) -> None:
        """Somebody speaks for another's reservation: nothing changes."""
        other = self.owners[client]
        if other != writer.owner:
            assert self.cache.commit(other, writer.handle).state is CommitState.LOST
            assert self.cache.abort(other, writer.handle) == 0
            self._went()

    # Reading.

    def acquire(self, client: int, text: str, name: str, salt: str, first: int, lease: bool) -> None:
        owner = self.owners[client]
        acquired = self.cache.acquire(owner, text, name, first=first, lease=lease, salt=salt)
        assert acquired.chunks == self._hit(salt, text)
        if lease:
            self._unread(lambda reader: (reader.owner, reader.name) == (owner, name))
        held = [(salt, text[: i + 1]) for i in range(first, acquired.chunks)]
        assert bool(acquired.lease) == (lease and bool(held))
        if acquired.lease:
            assert acquired.lease not in self.readers
            ranks, expires = list(self.cache.view(owner).own), self.cache.now + READ_TTL
            reader = Reader(owner, acquired.lease, name, held, ranks, slots(acquired), expires)
            self.readers[reader.handle] = reader
        self._went()

    def renew(self, reader: Reader) -> None:
        assert self.cache.renew(reader.owner, reader.handle) == 1
        reader.expires = self.cache.now + READ_TTL
        self._went()

    def release(self, client: int, reader: Reader) -> None:
        """Its owner releases it twice; somebody else tries before."""
        if self.owners[client] != reader.owner:
            assert self.cache.release(self.owners[client], reader.handle) == 0
            self._check()
        assert self.cache.release(reader.owner, reader.handle, reader.handle) == 1
        del self.readers[reader.handle]
        self._went()

    # Ends.

    def end(self, client: int, name: str) -> None:
        owner = self.owners[client]
        self.cache.end(owner, name)
        self._unread(lambda reader: (reader.owner, reader.name) == (owner, name))
        self._over([w for w in self.writers.values() if (w.owner, w.name) == (owner, name)])

    def leave(self, client: int, may_still_write: bool) -> None:
        """A client goes, or is given up; it comes back under another id, for the same shard."""
        owner = self.owners[client]
        self.cache.leave(owner, may_still_write=may_still_write)
        self._unread(lambda reader: reader.owner == owner)
        theirs = [writer for writer in self.writers.values() if writer.owner == owner]
        if may_still_write:
            self._lose(theirs)
        else:
            self._over(theirs)
        if owner:
            self.owners[client] = max(self.owners.values()) + 2
            self.owners[client] += (self.owners[client] - owner) % 2

    def wait(self, seconds: float) -> None:
        self.cache.wait(seconds)
        self._unread(lambda reader: reader.expires <= self.cache.now)
        self._lose([writer for writer in self.writers.values() if writer.expires <= self.cache.now])

    def clear(self) -> None:
        self.cache.clear()
        for writer in self.writers.values():
            writer.lost = True
        for reader in self.readers.values():
            reader.cleared = True
        self._went(below={(salt, "") for salt, _ in self.visible})
        assert not self.visible

    def evict(self, most: int) -> None:
        evicted = self.cache.evict_to_watermark(most)
        assert evicted <= most
        self._went(evicted=evicted)

    def finish(self) -> None:
        """Idle longer than the longest lease, let late writers answer, then look for what is left."""
        self.wait(READ_TTL + WRITE_TTL)
        assert (len(self.cache.l1.reads), len(self.cache.l1.writes)) == (0, 0)
        for writer in list(self.writers.values()):
            self.abort(writer)
        self.cache.assert_quiet()
        self.clear()
        self.cache.assert_quiet()
        assert self.cache.used == 0

    # What must be true.

    def _check(self) -> None:
        for reader in self.readers.values():
            wanted = [(*chunk, rank) for chunk in reader.chunks for rank in reader.ranks]
            assert [self.memory[slot.offset] for slot in reader.slots] == wanted, "a reader sees other bytes"
            assert all(self.cache.generations[slot.offset] == slot.generation for slot in reader.slots)
        mine = [slot.offset for writer in self.writers.values() for slot in writer.slots.values()]
        assert len(set(mine)) == len(mine), "two writers may write into one slot"
        for _, node in self.cache.l1.index.nodes():
            assert all(not above.empty for above in node.path()), "a chunk stands on nothing"

    def _went(self, *, below: Iterable[Chunk] = (), evicted: int = 0) -> None:
        """What went since the last look went at or below one of `below`, or is one of `evicted` evicted chunks."""
        self._note_orphans(below)
        now = self._resident()
        for chunk, ranks in now.items():
            assert ranks <= self.visible.get(chunk, set()), f"{chunk} {ranks} was never published"
        for chunk in self.visible:
            if self.visible[chunk] == now.get(chunk) or _is_below(chunk, below):
                continue
            assert chunk not in now, f"a part of {chunk} went"
            evicted -= 1
            assert evicted >= 0, f"{chunk} went without a reason"
            held = [reader for reader in self.readers.values() if not reader.cleared]
            assert not any(chunk in reader.chunks for reader in held), f"{chunk} was held"
            assert all(chunk != writing for writing, _ in self._being_written()), f"{chunk} was being written"
        assert evicted == 0, f"{evicted} evictions were counted that did not happen"
        self.visible = now
        self._check()

    def _note_orphans(self, below: Iterable[Chunk]) -> None:
        for writer in self.writers.values():
            lease = self.cache.l1.writes.get(writer.owner, writer.handle)
            if lease is None or writer.lost:
                assert writer.lost, f"{writer} lost its reservation without a reason"
                continue
            for i, _, taken in lease.subject.entries:
                if any(obj.state is State.QUARANTINED for _, obj in taken) and i not in writer.orphans:
                    assert _is_below(writer.chunks[i], below), f"{writer} lost chunk {i} without a reason"
                    writer.orphans.add(i)

    def _resident(self) -> dict[Chunk, set[int]]:
        """What lookups can reach: sealed parts by chunk."""
        found: dict[Chunk, set[int]] = {}
        for (_, salt), node in self.cache.l1.index.nodes():
            sealed = {p for p, part in enumerate(node.parts) if part is not None and part.state is State.SEALED}
            if sealed:
                found[salt, self.cache.text(node)] = sealed
        return found

    def _hit(self, salt: str, text: str) -> int:
        complete = set(range(self.cache.ranks))
        n = 0
        while n < len(text) and self.visible.get((salt, text[: n + 1])) == complete:
            n += 1
        return n

    def _by_part(self, reserved: Reserved, owner: int, chunks: dict[int, Chunk]) -> dict[tuple[int, int], SlotRef]:
        """The slots by chunk and rank: the own ranks that nobody has published and nobody is writing."""
        busy = self._being_written()
        places = [(i, rank) for i in chunks for rank in self.cache.view(owner).own]
        given = dict(zip(places, slots(reserved), strict=True))
        for (i, rank), slot in given.items():
            wanted = rank not in self.visible.get(chunks[i], set()) and (chunks[i], rank) not in busy
            assert wanted == (slot != SlotRef(0, 0)), f"{slot} for chunk {i}, rank {rank}"
        return {place: slot for place, slot in given.items() if slot != SlotRef(0, 0)}

    def _being_written(self) -> set[tuple[Chunk, int]]:
        """Chunk and rank of every reserved object that may still be published."""
        writers = [writer for writer in self.writers.values() if not writer.lost]
        return {(w.chunks[i], rank) for w in writers for i, rank in w.slots if i not in w.orphans}

    def _assert_full(self, owner: int, salt: str, text: str) -> None:
        """No room was left: neither free, nor in anything that might go except this prompt's own beginning."""
        own = {(salt, text[: i + 1]) for i in range(len(text))}
        assert self.cache.l1.allocator.size - self.cache.used < len(self.cache.view(owner).own)
        for (_, s), node in self.cache.l1.index.nodes():
            assert not self.cache.l1.is_evictable(node) or (s, self.cache.text(node)) in own

    def _unread(self, over: object) -> None:
        assert callable(over)
        self.readers = {handle: reader for handle, reader in self.readers.items() if not over(reader)}

    def _over(self, writers: list[Writer]) -> None:
        for writer in writers:
            del self.writers[writer.handle]
        self._went(below=_chunks_of(writers))

    def _lose(self, writers: list[Writer]) -> None:
        for writer in writers:
            writer.lost = True
        self._went(below=_chunks_of(writers))


def _chunks_of(writers: list[Writer]) -> set[Chunk]:
    return {chunk for writer in writers for chunk in writer.chunks.values()}


def _is_below(chunk: Chunk, heads: Iterable[Chunk]) -> bool:
    return any(chunk[0] == salt and chunk[1].startswith(text) for salt, text in heads)


def random_step(model: CacheModel, chance: random.Random) -> None:
    """Any client does anything."""
    (step,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
    client, text, name = chance.randrange(4), chance.choice(PROMPTS), chance.choice("qr")
    salt = chance.choice(["", "", "", "s"])
    writer = chance.choice([*model.writers.values(), None])
    reader = chance.choice([*model.readers.values(), None])
    if step in ("reserve", "store"):
        getattr(model, step)(client, text, name, salt)
    elif step == "write" and writer:
        model.write(writer, {i for i in writer.chunks if chance.random() < 0.8})
    elif step in ("commit", "abort") and writer:
        getattr(model, step)(writer)
    elif step == "meddle" and writer:
        model.meddle(client, writer)
    elif step == "acquire":
        model.acquire(client, text, name, salt, chance.choice([0, 0, 1, 2]), chance.random() < 0.8)
    elif step == "renew" and reader:
        model.renew(reader)
    elif step == "release" and reader:
        model.release(client, reader)
    elif step == "end":
        model.end(client, name)
    elif step == "leave":
        model.leave(client, chance.random() < 0.5)
    elif step == "wait":
        model.wait(chance.choice(SECONDS))
    elif step == "clear":
        model.clear()
    elif step == "evict":
        model.evict(chance.randint(1, 3))
