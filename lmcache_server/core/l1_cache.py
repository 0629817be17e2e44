"""The pool as one thing: index, allocator, eviction and leases joined.

Each public method is one decision, complete when it returns. What it promises, and `integrity.check` verifies:

* visible means committed by the owner of the current reservation; time and clean-up abort, they never publish;
* a leased chunk and its whole prefix stay where they are until the lease ends;
* bytes that a silent writer may still touch are quarantined: neither visible nor reused, until it answers or is gone;
* a store that fits in what is evictable succeeds; free + used = pool.

A read lease holds a reference on the objects of its deepest chunk only: eviction takes leaves first, so that
protects all of it.
"""

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter, itemgetter

from lmcache_server.core.allocator import Allocator
from lmcache_server.core.eviction import LeafLRU
from lmcache_server.core.index import PrefixIndex
from lmcache_server.core.journal import Journal
from lmcache_server.core.leases import Lease, LeaseTable
from lmcache_server.core.memory_obj import Event, MemoryObj, State, put_in_order
from lmcache_server.core.records import ChunkNode, Counters, Entry, GenerationTable, Limits, Reading, Reservation, View
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.messages import Acquired, CommitState, Committed, Prompt, Reserved, SessionId

__all__ = ["L1Cache"]

_SLOT = attrgetter("slot")
"""In the place of a part that is not to be filled."""


class L1Cache:
    """The pool's contents. `generations` has one entry per alignment unit of the pool and is kept current for
    readers.
    """

    def __init__(
        self, hasher: ChunkHasher, limits: Limits, generations: GenerationTable, *, framed: bool = False,
        first_generation: int = 1,
    ) -> None:  # fmt: skip
        """With `framed`, bytes come as frames only, so what did not arrive whole is never published. Generations count
        up from `first_generation`, which is at least 1.
        """
        self._framed = framed
        self.hasher = hasher
        self.limits = limits
        self.allocator = Allocator(limits.pool_bytes, limits.align_bytes)
        self.counters = Counters()
        self.index: PrefixIndex[MemoryObj] = PrefixIndex(hasher)
        self.journal = Journal(self.index)
        self.reads: LeaseTable[Reading] = LeaseTable()
        self.writes: LeaseTable[Reservation] = LeaseTable()
        self.lost: LeaseTable[Reservation] = LeaseTable()
        """Reservations whose writer has not answered; they end by its word or its end, never by time."""
        self.quarantined_bytes = 0
        self.objects = 0
        self.generations = generations
        self._generation = first_generation - 1
        self._evict_down_to: float = self.allocator.size
        self._lru: LeafLRU[ChunkNode] = LeafLRU(self.is_evictable)

    # Reading.

    def acquire(
        self, view: View, prompt: Prompt, first: int, lease: bool, now: float, *, counted: bool = True
    ) -> Acquired:
        """The longest cached prefix of `prompt`; with `lease`, held from chunk `first` on.

        An earlier lease of the same session ends: a question asked twice does not hold twice. With `counted` false it
        is not a lookup but the reading of what an earlier one found.
        """
        nodes = self.index.hit((view.namespace, prompt.salt), prompt.tokens, prompt.extras)
        if counted:
            self.counters.lookups += 1
            self.counters.requested_tokens += len(prompt.tokens) // 4
            self.counters.hit_tokens += len(nodes) * self.hasher.chunk_size
        if not lease:
            return Acquired(len(nodes))
        for earlier in self.reads.take_session(view.owner, prompt.session):
            self._unhold(earlier)
        held = nodes[first:]
        if not held:
            return Acquired(len(nodes))
        self._lru.touch(held[-1])
        for part in held[-1].parts:
            assert part is not None
            part.refs += 1
        reading = Reading(held, view.own)
        granted = self.reads.grant(view.owner, prompt.session, reading, now + self.limits.read_ttl)
        return Acquired(len(nodes), granted.handle, reading.slots())

    def release(self, owner: int, handles: Iterable[int]) -> int:
        """End read leases of `owner`; how many there were."""
        released = 0
        for handle in handles:
            lease = self.reads.take(owner, handle)
            if lease is None:
                self.counters.stray_releases += 1
            else:
                self._unhold(lease)
                released += 1
        return released

    def renew(self, owner: int, handles: Iterable[int], now: float) -> int:
        """Restart the time of leases that are still in use; how many there were."""
        reads = [self.reads.renew(owner, handle, now + self.limits.read_ttl) for handle in handles]
        return sum(reads)

    # Writing.

    def reserve(self, view: View, prompt: Prompt, now: float, first: int = 0) -> Reserved:
        """Slots for the own parts of `prompt`'s chunks that nobody has or is writing, as many leading ones as fit.

        Chunks before `first` are not to be written: if one is missing, nothing can be stored behind it.
        """
        entries: list[Entry] = []
        resident = busy = full = 0
        total = self.hasher.count(prompt.tokens)
        walked = 0
        walk = self.index.walk((view.namespace, prompt.salt), len(view.part_bytes), prompt.tokens, prompt.extras)
        for i, node in walk:
            walked = i + 1
            if not node.missing:
                resident += resident == i
                continue
            absent = [p for p in view.own if node.parts[p] is None]
            if absent and i < first:
                if node.empty:  # the walk made it, and nobody will fill it
                    self._unlink(node)
                full = total - i
                break
            if absent:
                taken = self._allocate_parts(node, absent, view.part_bytes)
                if taken is None:
                    full = total - i
                    break
                entries.append((i, node, taken))
            elif all(part is not None and part.state is State.SEALED for part in (node.parts[p] for p in view.own)):
                resident += resident == i
            else:
                busy += 1
        if not full:
            full = total - walked
        self.counters.reserved_chunks += len(entries)
        self.counters.refused_chunks += full
        if not entries:
            return Reserved(0, (), b"", resident, busy, full)
        put_in_order([obj for _, _, taken in entries for _, obj in taken])
        reservation = Reservation(view, entries, self._framed)
        lease = self.writes.grant(view.owner, prompt.session, reservation, now + self.limits.write_ttl)
        chunks = tuple(i for i, _, _ in entries)
        return Reserved(lease.handle, chunks, reservation.slots(), resident, busy, full)

    def commit(self, owner: int, handle: int, filled: tuple[int, ...] | None) -> Committed:
        """Publish the `filled` chunks of a reservation (None: all), free the others at once."""
        lease = self.writes.take(owner, handle)
        if lease is None:
            return Committed(CommitState.LOST, (), self._answer(self.lost.take(owner, handle)))
        if not self.index.attached(lease.subject.entries[0][1]):
            self._abort(lease.subject)
            return Committed(CommitState.LOST, (), tuple(i for i, _, _ in lease.subject.entries))
        sealed, rejected = [], []
        wanted = None if filled is None else set(filled)
        for i, node, taken in lease.subject.entries:
            if (wanted is None or i in wanted) and self._seal(node, taken, lease.subject.framed):
                sealed.append(i)
            else:
                self._give_up(node, taken)
                rejected.append(i)
        self.counters.committed_chunks += len(sealed)
        self.counters.aborted_chunks += len(rejected)
        return Committed(CommitState.PARTIAL if rejected else CommitState.SEALED, tuple(sealed), tuple(rejected))

    def abort(self, owner: int, handles: Iterable[int]) -> int:
        """Give reservations of `owner` up; how many there were."""
        aborted = 0
        for handle in handles:
            lease = self.writes.take(owner, handle)
            if lease is not None:
                self._abort(lease.subject)
                aborted += 1
            else:
                self._answer(self.lost.take(owner, handle))
        return aborted

    def reserved_object(self, owner: int, handle: int, chunk: int, part: int) -> MemoryObj | None:
        """The object that a reservation holds for its owner's part number `part` of chunk `chunk`."""
        lease = self.writes.get(owner, handle)
        if lease is None:
            return None
        entries = lease.subject.entries
        position = bisect_left(entries, chunk, key=itemgetter(0))
        if position == len(entries) or entries[position][0] != chunk:
            return None
        lease.subject.framed = True
        wanted = lease.subject.view.own.start + part
        return next((obj for p, obj in entries[position][2] if p == wanted and obj.state is State.RESERVED), None)

    def leased_object(self, owner: int, handle: int, chunk: int, part: int) -> MemoryObj | None:
        """The object that a read lease covers for its owner's part number `part` of its chunk number `chunk`."""
        lease = self.reads.get(owner, handle)
        if lease is None or not (0 <= chunk < len(lease.subject.nodes) and 0 <= part < len(lease.subject.own)):
            return None
        return lease.subject.nodes[chunk].parts[lease.subject.own[part]]

    # Ends.

    def end(self, owner: int, session: SessionId) -> bool:
        """One attempt is over: its read leases end, its reservations are aborted. False if it held nothing."""
        reads, writes = self.reads.take_session(owner, session), self.writes.take_session(owner, session)
        for read in reads:
            self._unhold(read)
        for write in writes:
            self._abort(write.subject)
        for lost in self.lost.take_session(owner, session):
            self._answer(lost)
        return bool(reads or writes)

    def leave(self, owner: int, *, may_still_write: bool) -> None:
        """An instance is gone; if its process may still be running, what it was writing to is quarantined, else
        freed.
        """
        self.journal.leave(owner)
        for read in self.reads.take_owner(owner):
            self._unhold(read)
        for write in self.writes.take_owner(owner):
            if may_still_write:
                self._lose(write)
            else:
                self._abort(write.subject)
        if not may_still_write:
            for lost in self.lost.take_owner(owner):
                self._answer(lost)

    def expire(self, now: float) -> None:
        """End what has outlived its time: reads are unheld, reservations lost."""
        for read in self.reads.take_expired(now):
            self.counters.expired_reads += 1
            self._unhold(read)
        for write in self.writes.take_expired(now):
            self._lose(write)

    def evict_to_watermark(self, most: int = 4096) -> int:
        """If use is at or above the watermark, evict `ratio` of the pool, at most `most` chunks per call; the chunks
        evicted.
        """
        used, size = self.allocator.used, self.allocator.size
        if used >= self.limits.watermark * size:
            self._evict_down_to = used - self.limits.ratio * size
        evicted = 0
        while self.allocator.used > self._evict_down_to and evicted < most and self._evict_one():
            evicted += 1
        if evicted < most:
            self._evict_down_to = size
        return evicted

    def clear(self) -> tuple[int, int]:
        """Forget everything. (objects freed now, objects that are freed when their readers and writers are done)"""
        before = self.objects
        for root in self.index.detach_all():
            for node in reversed(root.subtree()[1:]):
                self._prune(node)
        self._lru = LeafLRU(self.is_evictable)
        self.journal.cleared()
        self.counters.cleared_objects += before - self.objects
        return before - self.objects, self.objects

    # Objects.

    def _allocate_parts(
        self, node: ChunkNode, absent: list[int], part_bytes: tuple[int, ...]
    ) -> list[tuple[int, MemoryObj]] | None:
        """Reserve the absent parts of one chunk, all or none."""
        node.writers += 1
        taken: list[tuple[int, MemoryObj]] = []
        for p in absent:
            obj = self._allocate(part_bytes[p])
            if obj is None:
                self._give_up(node, taken)
                return None
            node.parts[p] = obj
            taken.append((p, obj))
        return taken

    def _allocate(self, length: int) -> MemoryObj | None:
        if length > self.allocator.size:
            return None
        offset = self.allocator.allocate(length)
        while offset is None:
            if not self._evict_one():
                return None
            offset = self.allocator.allocate(length)
        self._generation += 1
        self.generations[offset // self.limits.align_bytes] = self._generation
        self.objects += 1
        return MemoryObj(offset, length, self._generation)

    def _free(self, obj: MemoryObj, event: Event) -> None:
        obj.apply(event)
        if obj.state is State.QUARANTINED:
            self.quarantined_bytes += obj.length
            return
        if event is Event.ANSWER:
            self.quarantined_bytes -= obj.length
        self.generations[obj.offset // self.limits.align_bytes] = 0
        self.allocator.free(obj.offset)
        self.objects -= 1

    # Nodes.

    def is_evictable(self, node: ChunkNode) -> bool:
        """Whether `node` may go now: a leaf with objects that nobody reads or writes."""
        if node.children or node.writers:
            return False
        held = False
        resident = False
        for part in node.parts:
            if part is not None:
                resident = True
                held = held or part.refs > 0
        return resident and not held

    def _evict_one(self) -> bool:
        node = self._lru.take()
        if node is None:
            return False
        self._drop(node)
        self.counters.evicted_chunks += 1
        return True

    def _drop(self, node: ChunkNode) -> None:
        """Free a leaf's objects and take it out of its tree; its parent may be the next to go."""
        self.journal.removed(node)
        for p, part in enumerate(node.parts):
            if part is not None:
                self._free(part, Event.DROP)
                node.parts[p] = None
        self._unlink(node)

    def _unlink(self, node: ChunkNode) -> None:
        parent = node.parent
        assert parent is not None
        self.index.remove(node)
        if parent.parent is not None and self.index.attached(node):
            parent.tick = max(parent.tick, node.tick)
            self._lru.offer(parent)

    def _prune(self, node: ChunkNode | None) -> None:
        """Free a node of a cleared tree, and its ancestors, as far up as nobody needs them any more."""
        while node is not None and self.index.linked(node) and not node.children and not node.writers:
            if any(part is not None and part.refs for part in node.parts):
                return
            self._drop(node)
            node = node.parent

    def _settle(self, node: ChunkNode) -> None:
        """A reader or writer of `node` is done: it may be evictable now, or have no reason to stay."""
        if self.index.attached(node):
            self._lru.offer(node)
        else:
            self._prune(node)

    def _unhold(self, lease: Lease[Reading]) -> None:
        node = lease.subject.nodes[-1]
        for part in node.parts:
            assert part is not None
            part.refs -= 1
        self._settle(node)

    # Reservations.

    def _seal(self, node: ChunkNode, taken: list[tuple[int, MemoryObj]], framed: bool) -> bool:
        for _, obj in taken:
            if obj.state is not State.RESERVED or (framed and obj.written != obj.length):
                return False
        for _, obj in taken:
            obj.apply(Event.COMMIT)
            node.missing -= 1
        if not node.missing:
            node.slots = b"".join(map(_SLOT, node.parts))
        node.writers -= 1
        self.journal.stored(node)
        self._lru.touch(node)
        self._lru.offer(node)
        return True

    def _give_up(self, node: ChunkNode, taken: list[tuple[int, MemoryObj]], event: Event = Event.ABORT) -> None:
        """Undo the reservation of one chunk; what was built on an empty chunk goes with it."""
        node.writers -= 1
        for p, obj in taken:
            if obj.state is State.QUARANTINED:
                if event is not Event.LOSE:
                    self._free(obj, Event.ANSWER)
                continue
            node.parts[p] = None
            self._free(obj, event)
        if not self.index.linked(node):
            return
        if node.empty:
            self._drop_subtree(node)
        else:
            self._settle(node)

    def _drop_subtree(self, node: ChunkNode) -> None:
        for below in reversed(node.subtree()):
            self.journal.removed(below)
            for p, part in enumerate(below.parts):
                if part is not None:
                    self._free(part, Event.LOSE if part.state is State.RESERVED else Event.DROP)
                    below.parts[p] = None
            below.missing = len(below.parts)
            self._unlink(below)
        if not self.index.attached(node):
            self._prune(node.parent)

    def _abort(self, reservation: Reservation) -> None:
        self.counters.aborted_chunks += len(reservation.entries)
        for _, node, taken in reversed(reservation.entries):
            self._give_up(node, taken)

    def _lose(self, lease: Lease[Reservation]) -> None:
        self.counters.lost_chunks += len(lease.subject.entries)
        # Frames of a lost reservation are refused; only who writes into the pool itself may write on.
        if not self._framed:
            self.lost.keep(lease)
        for _, node, taken in reversed(lease.subject.entries):
            self._give_up(node, taken, Event.ABORT if self._framed else Event.LOSE)

    def _answer(self, lease: Lease[Reservation] | None) -> tuple[int, ...]:
        """The owner of a lost reservation spoke: its slots are safe to reuse. The chunks that it will not publish."""
        if lease is None:
            return ()
        for _, _, taken in lease.subject.entries:
            for _, obj in taken:
                self._free(obj, Event.ANSWER)
        return tuple(i for i, _, _ in lease.subject.entries)
