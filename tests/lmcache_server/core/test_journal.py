"""Whoever applies the events in order knows exactly what is resident; whoever does not ask costs nothing."""

import random
from dataclasses import dataclass, field

import pytest

from lmcache_server.core import journal
from lmcache_server.protocol.events import ChunkEvent, ChunkEventKind, EventsReply
from lmcache_server.protocol.keys import Namespace
from lmcache_server.protocol.layout import Kind
from tests.lmcache_server.core.cache_model import CacheModel, random_step
from tests.lmcache_server.core.small_cache import SmallCache

Chunk = tuple[str, bytes]


@dataclass(eq=False)
class Follower:
    """A reader of the events, and what it knows from them."""

    cache: SmallCache
    owner: int = 1000
    cursor: int | None = None
    resident: dict[Chunk, ChunkEvent] = field(default_factory=dict)
    lost: int = 0

    def ask(self, limit: int = 1024) -> EventsReply:
        return self.cache.l1.journal.read(self.owner, self.cache.namespace, self.cursor, limit)

    def take(self, reply: EventsReply) -> None:
        self.cursor = reply.cursor
        if reply.lost:
            self.lost += 1
            self.resident.clear()
        for event in reply.events:
            if event.kind is ChunkEventKind.CLEARED:
                self.resident.clear()
            elif event.kind is ChunkEventKind.STORED:
                self.resident[event.salt, event.hash] = event
            else:
                self.resident.pop((event.salt, event.hash), None)

    def catch_up(self, limit: int = 1024) -> list[ChunkEvent]:
        """Read to the end; the events."""
        events: list[ChunkEvent] = []
        while True:
            reply = self.ask(limit)
            self.take(reply)
            events += reply.events
            if not reply.more:
                return events


def resident(cache: SmallCache) -> set[Chunk]:
    """The complete chunks that lookups can reach."""
    return {(key[1], node.hash) for key, node in cache.l1.index.nodes() if not node.missing}  # type: ignore[index]


@pytest.fixture
def cache() -> SmallCache:
    return SmallCache()


@pytest.mark.parametrize("block", range(4))
def test_the_events_rebuild_what_is_resident_whatever_happens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers come late, read in small pages, fall behind, and lose replies."""
    lost = 0
    for seed in range(block * 50, block * 50 + 50):
        chance = random.Random(seed)
        monkeypatch.setattr(journal, "MOST", chance.choice([3, 8, 1000]))
        model = CacheModel(chance.randint(2, 10), chance.randint(1, 2))
        followers = [Follower(model.cache, owner) for owner in (1000, 1001)]
        for _ in range(100):
            random_step(model, chance)
            follower = chance.choice(followers)
            if chance.random() < 0.5:
                reply = follower.ask(chance.randint(1, 4))
                if chance.random() < 0.8:
                    follower.take(reply)
            if chance.random() < 0.1:
                follower.catch_up(chance.randint(1, 4))
                assert set(follower.resident) == resident(model.cache)
        for follower in followers:
            follower.catch_up()
            assert set(follower.resident) == resident(model.cache)
            lost += follower.lost
    assert lost > 100, "the walks are to make followers start over"


def test_an_event_says_what_the_chunk_holds_and_what_it_follows(cache: SmallCache) -> None:
    follower = Follower(cache)
    follower.catch_up()
    cache.store(1, "ab", salt="s")
    first, second = follower.catch_up()
    hashes = cache.l1.hasher.hashes(cache.prompt("ab", "r").tokens)
    assert first == ChunkEvent(ChunkEventKind.STORED, hashes[0], "s", b"", b"a\0\0\0", b"")
    assert second == ChunkEvent(ChunkEventKind.STORED, hashes[1], "s", hashes[0], b"b\0\0\0", b"")


def test_a_chunk_is_stored_with_its_last_part_and_removed_once() -> None:
    cache = SmallCache(2, ranks=2)
    follower = Follower(cache)
    follower.catch_up()
    cache.store(1, "a")
    assert follower.catch_up() == []
    cache.store(2, "a")
    assert [event.kind for event in follower.catch_up()] == [ChunkEventKind.STORED]
    cache.store(1, "b")
    assert [event.kind for event in follower.catch_up()] == [ChunkEventKind.REMOVED]


def test_a_clear_is_one_event(cache: SmallCache) -> None:
    cache.store(1, "abc")
    follower = Follower(cache)
    assert len(follower.catch_up()) == 3
    held = cache.acquire(1, "abc")
    cache.clear()
    cache.release(1, held.lease)
    assert follower.catch_up() == [ChunkEvent(ChunkEventKind.CLEARED)]


def test_nothing_is_noted_for_a_namespace_that_nobody_follows(cache: SmallCache) -> None:
    cache.store(1, "abc")
    assert len(cache.l1.journal) == 0
    cache.l1.journal.read(1000, Namespace("other", "", Kind.KV, "layout", 1), None, 10)
    cache.store(1, "xyz")
    assert len(cache.l1.journal) == 0


def test_a_log_ends_with_its_last_follower(cache: SmallCache) -> None:
    followers = [Follower(cache, owner) for owner in (1000, 1001)]
    for follower in followers:
        follower.catch_up()
    cache.store(1, "abc")
    assert (len(cache.l1.journal), cache.l1.journal.followers) == (3, 2)
    cache.leave(1000)
    assert (len(cache.l1.journal), cache.l1.journal.followers) == (3, 1)
    cache.leave(1001)
    assert (len(cache.l1.journal), cache.l1.journal.followers) == (0, 0)
    cache.store(1, "x")
    assert len(cache.l1.journal) == 0


def test_what_all_followers_have_is_let_go_and_what_one_has_not_is_kept(cache: SmallCache) -> None:
    quick, slow = Follower(cache, 1000), Follower(cache, 1001)
    quick.catch_up()
    slow.catch_up()
    cache.store(1, "abc")
    quick.catch_up()
    quick.catch_up()
    assert len(cache.l1.journal) == 3
    slow.catch_up()
    slow.catch_up()
    assert len(cache.l1.journal) == 0


def test_a_follower_that_falls_too_far_behind_starts_over_and_the_log_stays_short(
    cache: SmallCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MOST", 4)
    follower = Follower(cache)
    follower.catch_up()
    for text in ("abc", "def"):
        cache.store(1, text)
    assert (len(cache.l1.journal), cache.l1.journal.overflowed) == (4, 2)
    follower.catch_up()
    assert follower.lost == 2
    assert set(follower.resident) == resident(cache)


def test_pages_of_the_beginning_are_as_short_as_asked_for_and_tell_each_chunk_once() -> None:
    cache = SmallCache(50)
    for letter in "abcdefghij":
        cache.store(1, letter + "xyz")
    follower = Follower(cache)
    sizes, names = [], []
    while True:
        reply = follower.ask(7)
        follower.take(reply)
        sizes.append(len(reply.events))
        names += [event.hash for event in reply.events]
        if not reply.more:
            break
    assert sizes == [7, 7, 7, 7, 7, 5, 0]
    assert len(set(names)) == len(names) == 40


@pytest.mark.parametrize("cursor", [-1, -99, 1, 99])
def test_a_cursor_that_nobody_was_given_starts_over(cache: SmallCache, cursor: int) -> None:
    cache.store(1, "abc")
    follower = Follower(cache)
    follower.catch_up()
    follower.cursor = cursor
    assert follower.ask().lost
