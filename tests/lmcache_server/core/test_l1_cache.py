"""The decisions of the cache, walked through by hand."""

import dataclasses
import gc

import pytest

from lmcache_server.core.index import Node, Root
from lmcache_server.core.leases import Lease
from lmcache_server.core.memory_obj import MemoryObj
from lmcache_server.core.records import Counters, Reading, Reservation
from lmcache_server.protocol.keys import HASH_ALGORITHMS
from lmcache_server.protocol.messages import CommitState, SlotRef
from tests.lmcache_server.core.small_cache import READ_TTL, WRITE_TTL, SmallCache, offsets, slots

# Publishing.


def test_a_chunk_is_visible_once_its_writer_commits_and_not_before() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abc")
    assert (reserved.chunks, reserved.resident, reserved.busy, reserved.full) == ((0, 1, 2), 0, 0, 0)
    assert cache.hit("abc") == 0
    committed = cache.commit(1, reserved.reservation)
    assert (committed.state, committed.sealed, committed.rejected) == (CommitState.SEALED, (0, 1, 2), ())
    assert cache.hit("abcd") == 3
    cache.assert_quiet()


def test_time_alone_never_publishes() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abc")
    cache.wait(WRITE_TTL - 1)
    assert cache.l1.quarantined_bytes == 0
    cache.wait(1)
    assert cache.hit("abc") == 0
    assert cache.l1.quarantined_bytes == 3
    late = cache.commit(1, reserved.reservation)
    assert (late.state, late.sealed, late.rejected) == (CommitState.LOST, (), (0, 1, 2))
    assert cache.hit("abc") == 0
    cache.assert_quiet()


def test_a_late_commit_changes_nothing_for_whoever_stored_the_chunk_meanwhile() -> None:
    cache = SmallCache()
    first = cache.reserve(1, "abc")
    cache.wait(WRITE_TTL)
    second = cache.reserve(2, "abc")
    assert second.chunks == (0, 1, 2)
    assert not set(offsets(first)) & set(offsets(second))
    cache.commit(2, second.reservation)
    assert cache.commit(1, first.reservation).state is CommitState.LOST
    assert offsets(cache.acquire(3, "abc")) == offsets(second)


def test_nobody_can_commit_or_abort_anothers_reservation() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abc")
    assert cache.commit(2, reserved.reservation).state is CommitState.LOST
    assert cache.abort(2, reserved.reservation) == 0
    assert cache.hit("abc") == 0
    assert cache.commit(1, reserved.reservation).state is CommitState.SEALED


def test_a_reservation_is_committed_once() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abc")
    cache.commit(1, reserved.reservation)
    again = cache.commit(1, reserved.reservation)
    assert (again.state, again.rejected) == (CommitState.LOST, ())
    assert cache.hit("abc") == 3


def test_what_is_not_filled_is_freed_at_once_with_all_that_follows_it() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abcd")
    committed = cache.commit(1, reserved.reservation, (0, 2, 9))
    assert (committed.state, committed.sealed, committed.rejected) == (CommitState.PARTIAL, (0,), (1, 2, 3))
    assert (cache.hit("abcd"), cache.used) == (1, 1)
    cache.assert_quiet()


def test_an_aborted_chunk_takes_with_it_what_others_built_on_it() -> None:
    cache = SmallCache()
    head = cache.reserve(1, "ab")
    tail = cache.reserve(2, "abcd")
    assert (tail.chunks, tail.busy) == ((2, 3), 2)
    cache.commit(2, tail.reservation)
    assert cache.hit("abcd") == 0
    cache.abort(1, head.reservation)
    assert cache.used == 0
    cache.assert_quiet()


def test_a_writer_whose_chunk_went_with_its_parent_keeps_its_bytes_to_itself_until_it_answers() -> None:
    cache = SmallCache(pool=4)
    head, tail = cache.reserve(1, "ab"), cache.reserve(2, "abcd")
    cache.abort(1, head.reservation)
    assert cache.l1.quarantined_bytes == 2
    assert len(cache.reserve(1, "wxyz").chunks) == 2
    committed = cache.commit(2, tail.reservation)
    assert (committed.state, committed.rejected) == (CommitState.PARTIAL, (2, 3))
    assert cache.l1.quarantined_bytes == 0


def test_a_hit_that_waits_for_an_earlier_writer_begins_when_that_one_commits() -> None:
    cache = SmallCache()
    head, tail = cache.reserve(1, "ab"), cache.reserve(2, "abcd")
    cache.commit(2, tail.reservation)
    cache.commit(1, head.reservation)
    assert cache.hit("abcd") == 4


def test_a_store_answers_what_is_there_already_what_is_busy_and_what_does_not_fit() -> None:
    cache = SmallCache(pool=5)
    cache.store(1, "ab")
    busy = cache.reserve(1, "abc")
    assert (busy.chunks, busy.resident) == ((2,), 2)
    held = cache.acquire(1, "ab")
    reserved = cache.reserve(2, "abcdefg")
    assert (reserved.chunks, reserved.resident, reserved.busy, reserved.full) == ((3, 4), 2, 1, 2)
    assert held.lease
    nothing = cache.reserve(3, "ab")
    assert (nothing.reservation, nothing.chunks, nothing.resident) == (0, (), 2)


def test_each_own_part_of_a_reserved_chunk_has_a_slot_and_what_is_there_already_an_empty_one() -> None:
    cache = SmallCache(pool=16, ranks=2)
    cache.store(1, "ab")  # shard 0 of two chunks
    busy = cache.reserve(2, "a")  # shard 1 of the first is being written
    both = cache.reserve(0, "abc")
    assert (both.chunks, both.busy) == ((1, 2), 1)
    given = slots(both)
    assert len(given) == 4
    assert given[0] == SlotRef(0, 0)
    assert all(slot.generation for slot in given[1:])
    cache.commit(0, both.reservation)
    assert cache.hit("abc") == 0
    cache.commit(2, busy.reservation)
    assert cache.hit("abc") == 3
    cache.assert_quiet()


def test_slots_of_one_server_do_not_verify_in_the_pool_of_another() -> None:
    caches = [SmallCache(first_generation=first) for first in (7 << 40, 9 << 50)]
    given = [slots(cache.reserve(1, "abcd")) for cache in caches]
    for ours, theirs in (caches, given[::-1]), (caches[::-1], given):
        assert all(ours[0].generations[slot.offset] != slot.generation for slot in theirs[0])
    assert [slot.generation for slot in given[0]] == [(7 << 40) + i for i in range(4)]


# Reading.


def test_a_lease_shows_the_slots_from_the_first_chunk_that_was_asked_for() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abc")
    cache.commit(1, reserved.reservation)
    all_of_it, rest = cache.acquire(1, "abc"), cache.acquire(1, "abc", first=1)
    assert slots(all_of_it) == slots(reserved)
    assert (rest.chunks, slots(rest)) == (3, slots(reserved)[1:])
    none = cache.acquire(1, "abc", first=3)
    assert (none.chunks, none.lease, none.slots) == (3, 0, b"")


def test_a_question_without_a_lease_holds_nothing() -> None:
    cache = SmallCache(pool=3)
    cache.store(1, "abc")
    assert cache.acquire(1, "abc", lease=False).chunks == 3
    assert len(cache.l1.reads) == 0
    assert cache.store(1, "xyz") == (0, 1, 2)


def test_leased_chunks_and_all_before_them_stay_under_any_pressure() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "abcd")
    lease = cache.acquire(2, "abc", first=2)
    assert cache.store(1, "wxyz") == (0,)
    assert cache.hit("abcd") == 3
    assert slots(cache.acquire(2, "abc", "other"))[2:] == slots(lease)


def test_a_released_chunk_may_go() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "abcd")
    lease = cache.acquire(2, "abcd")
    assert cache.store(1, "wxyz") == ()
    assert cache.release(2, lease.lease) == 1
    assert cache.store(1, "wxyz") == (0, 1, 2, 3)
    cache.assert_quiet()


def test_releasing_twice_or_anothers_lease_changes_nothing_and_is_counted() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "abcd")
    mine, theirs = cache.acquire(1, "abcd"), cache.acquire(2, "abcd")
    assert [cache.release(1, mine.lease) for _ in range(3)] == [1, 0, 0]
    assert cache.release(1, theirs.lease, 999) == 0
    assert cache.l1.counters.stray_releases == 4
    assert cache.store(1, "wxyz") == ()


def test_a_second_question_of_a_session_replaces_its_lease() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "abcd")
    first = cache.acquire(1, "abcd")
    second = cache.acquire(1, "ab")
    assert len(cache.l1.reads) == 1
    assert cache.release(1, first.lease) == 0
    assert cache.store(2, "wx") == (0, 1)
    assert cache.release(1, second.lease) == 1


def test_a_lease_ends_with_its_time_unless_it_is_renewed() -> None:
    cache = SmallCache()
    cache.store(1, "a")
    kept, dropped = cache.acquire(1, "a", "kept"), cache.acquire(1, "a", "dropped")
    cache.wait(READ_TTL - 1)
    assert cache.renew(1, kept.lease) == 1
    assert cache.renew(2, dropped.lease) == 0
    cache.wait(1)
    assert [lease.handle for lease in cache.l1.reads] == [kept.lease]
    cache.wait(READ_TTL)
    cache.assert_quiet()
    assert cache.l1.counters.expired_reads == 2


def test_what_one_attempt_holds_ends_with_it_and_not_with_another_attempt() -> None:
    cache = SmallCache()
    cache.store(1, "ab")
    cache.acquire(1, "ab", "one")
    kept = cache.acquire(1, "ab", "two")
    cache.reserve(1, "abc", "one")
    assert [cache.end(1, "one"), cache.end(1, "one"), cache.end(2, "two")] == [True, False, False]
    assert [lease.handle for lease in cache.l1.reads] == [kept.lease]
    assert (len(cache.l1.writes), cache.used) == (0, 2)


# Memory that somebody may still write to.


@pytest.mark.parametrize("word", ["commit", "abort", "end", "leave"])
def test_a_lost_slot_is_reused_after_its_writers_word_and_not_before(word: str) -> None:
    cache = SmallCache(pool=3)
    lost = cache.reserve(1, "abc")
    cache.wait(WRITE_TTL)
    assert cache.reserve(2, "xyz").chunks == ()
    answers = {
        "commit": lambda: cache.commit(1, lost.reservation),
        "abort": lambda: cache.abort(1, lost.reservation),
        "end": lambda: cache.end(1),
        "leave": lambda: cache.leave(1),
    }
    answers[word]()
    cache.assert_quiet()
    assert cache.store(2, "xyz") == (0, 1, 2)


def test_only_the_writer_can_answer_for_what_it_lost() -> None:
    cache = SmallCache(pool=3)
    lost = cache.reserve(1, "abc")
    cache.wait(WRITE_TTL)
    cache.commit(2, lost.reservation)
    cache.abort(2, lost.reservation)
    cache.end(2)
    cache.leave(2)
    assert cache.l1.quarantined_bytes == 3


def test_what_a_vanished_client_may_still_write_to_waits_until_it_is_gone() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "ab")
    cache.acquire(1, "ab")
    cache.reserve(1, "abcd")
    cache.leave(1, may_still_write=True)
    assert (len(cache.l1.reads), cache.l1.quarantined_bytes) == (0, 2)
    assert cache.store(2, "wxyz") == (0, 1)
    cache.leave(1)
    cache.assert_quiet()


def test_a_client_that_is_gone_leaves_nothing() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "ab")
    cache.acquire(1, "ab")
    cache.reserve(1, "abcd")
    cache.leave(1)
    cache.assert_quiet()
    assert cache.hit("ab") == 2


def test_the_generation_of_a_slot_says_which_object_is_in_it() -> None:
    cache = SmallCache(pool=1)
    cache.store(1, "a")
    (old,) = slots(cache.acquire(1, "a"))
    assert cache.generations[old.offset] == old.generation > 0
    cache.end(1)
    cache.store(1, "b")
    (new,) = slots(cache.acquire(1, "b"))
    assert new.offset == old.offset and new.generation != old.generation
    cache.end(1)
    cache.clear()
    assert cache.generations[old.offset] == 0


# Eviction.


def test_the_last_chunk_of_a_prompt_goes_before_its_first() -> None:
    cache = SmallCache(pool=6)
    for cut in (2, 4, 6):
        cache.store(1, "abcdef"[:cut])
    cache.store(1, "xy")
    assert cache.hit("abcdef") == 4


def test_the_prompt_that_was_used_least_recently_goes_first() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "ab")
    cache.store(1, "cd")
    cache.end(1)
    cache.acquire(1, "ab")
    cache.end(1)
    cache.store(1, "xy")
    assert (cache.hit("ab"), cache.hit("cd"), cache.hit("xy")) == (2, 0, 2)


def test_a_use_of_a_prefix_protects_it_longer_than_what_follows() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "ab")
    cache.store(1, "xy")
    cache.acquire(1, "a")
    cache.end(1)
    cache.store(1, "123")
    assert (cache.hit("ab"), cache.hit("xy")) == (1, 0)


def test_what_is_left_of_a_prompt_is_as_recently_used_as_what_went() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "ab")
    cache.store(1, "x")
    cache.acquire(1, "ab")
    cache.end(1)
    # While somebody writes behind x, only b may go.
    writing = cache.reserve(2, "xy")
    cache.store(1, "m")
    assert (cache.hit("ab"), cache.hit("x")) == (1, 1)
    cache.abort(2, writing.reservation)
    cache.store(1, "no")
    assert (cache.hit("ab"), cache.hit("x")) == (1, 0)


def test_a_store_evicts_as_much_as_it_needs_and_no_more() -> None:
    cache = SmallCache(pool=28)
    cache.store(1, "abcdefghijklmnopqr")
    cache.end(1)
    assert len(cache.store(1, "ABCDEFGHIJK")) == 11
    assert (cache.hit("abcdefghijklmnopqr"), cache.used) == (17, 28)


def test_a_full_pool_hands_out_what_it_evicts_in_rising_order() -> None:
    cache = SmallCache(pool=12)
    cache.store(1, "abcdef")
    cache.end(1)
    cache.store(1, "uvwxyz")
    cache.end(1)
    reserved = cache.reserve(1, "ABCD")
    assert offsets(reserved) == sorted(offsets(reserved))
    assert cache.hit("abcdef") == 2, "the last ones went first"
    cache.commit(1, reserved.reservation)
    assert offsets(cache.acquire(2, "ABCD")) == offsets(reserved)
    for slot in slots(reserved):
        assert cache.l1.generations[slot.offset] == slot.generation, "places and generations went together"


def test_a_store_does_not_evict_its_own_beginning() -> None:
    cache = SmallCache(pool=3)
    cache.store(1, "ab")
    reserved = cache.reserve(1, "abcdef")
    assert (reserved.chunks, reserved.resident, reserved.full) == ((2,), 2, 3)
    cache.commit(1, reserved.reservation)
    assert cache.hit("abcdef") == 3


def test_a_prompt_larger_than_the_pool_gets_as_many_leading_chunks_as_fit() -> None:
    cache = SmallCache(pool=3)
    reserved = cache.reserve(1, "abcdef")
    assert (reserved.chunks, reserved.full) == ((0, 1, 2), 3)


def test_a_chunk_larger_than_the_pool_evicts_nothing() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "abcd")
    cache.part = 5
    assert cache.reserve(1, "x").full == 1
    assert cache.hit("abcd") == 4


def test_room_is_made_ahead_of_demand_at_the_watermark_and_not_below() -> None:
    cache = SmallCache(pool=10, watermark=0.8, ratio=0.3)
    cache.store(1, "abcdefg")
    assert (cache.evict_to_watermark(), cache.used) == (0, 7)
    cache.store(1, "abcdefgh")
    assert (cache.evict_to_watermark(), cache.used) == (3, 5)
    assert cache.hit("abcdefgh") == 5
    assert cache.evict_to_watermark() == 0


def test_room_is_made_in_portions_that_do_not_hold_up_the_loop() -> None:
    cache = SmallCache(pool=10, watermark=0.8, ratio=0.5)
    cache.store(1, "abcdefgh")
    assert [cache.evict_to_watermark(most=2) for _ in range(4)] == [2, 2, 1, 0]
    assert cache.used == 3


def test_what_is_held_is_not_evicted_ahead_of_demand() -> None:
    cache = SmallCache(pool=4, watermark=0.5, ratio=1.0)
    cache.store(1, "abcd")
    cache.acquire(1, "abc")
    assert (cache.evict_to_watermark(), cache.hit("abcd")) == (1, 3)


# Clearing.


def test_clear_forgets_what_nobody_holds_at_once() -> None:
    cache = SmallCache()
    cache.store(1, "abcd")
    assert cache.clear() == (4, 0)
    assert (cache.hit("abcd"), cache.used) == (0, 0)
    cache.assert_quiet()


def test_clear_leaves_a_reader_its_bytes_until_it_is_done() -> None:
    cache = SmallCache()
    cache.store(1, "abcd")
    lease = cache.acquire(2, "ab")
    assert cache.clear() == (2, 2)
    assert cache.hit("ab") == 0
    assert [cache.generations[slot.offset] for slot in slots(lease)] == [slot.generation for slot in slots(lease)]
    cache.release(2, lease.lease)
    cache.assert_quiet()
    assert cache.used == 0


def test_clear_loses_what_is_being_written_and_the_writer_is_told() -> None:
    cache = SmallCache()
    reserved = cache.reserve(1, "abc")
    assert cache.clear() == (0, 3)
    assert cache.store(2, "abc") == (0, 1, 2)
    committed = cache.commit(1, reserved.reservation)
    assert (committed.state, committed.rejected) == (CommitState.LOST, (0, 1, 2))
    assert cache.used == 3
    cache.assert_quiet()


def test_clear_and_then_time_leave_nothing_behind() -> None:
    cache = SmallCache()
    cache.store(1, "ab")
    cache.acquire(1, "ab")
    cache.reserve(1, "abcd", "w")
    cache.clear()
    cache.wait(WRITE_TTL)
    assert (len(cache.l1.reads), len(cache.l1.writes)) == (0, 0)
    cache.leave(1)
    assert cache.used == 0
    cache.assert_quiet()


# Shards.


def test_a_chunk_is_a_hit_when_every_shard_has_committed_it() -> None:
    cache = SmallCache(ranks=2)
    cache.store(1, "ab")
    assert cache.hit("ab") == 0
    assert cache.store(2, "a") == (0,)
    assert cache.hit("ab") == 1


def test_each_shard_sees_its_own_slots_and_a_client_of_all_sees_all() -> None:
    cache = SmallCache(ranks=2)
    mine, theirs = cache.reserve(1, "ab"), cache.reserve(2, "ab")
    cache.commit(1, mine.reservation)
    cache.commit(2, theirs.reservation)
    assert slots(cache.acquire(1, "ab")) == slots(mine)
    assert slots(cache.acquire(4, "ab")) == slots(theirs)
    interleaved = [slot for pair in zip(slots(mine), slots(theirs), strict=True) for slot in pair]
    assert slots(cache.acquire(0, "ab")) == interleaved


def test_one_shard_that_gives_up_does_not_take_the_others_bytes() -> None:
    cache = SmallCache(ranks=2)
    cache.store(1, "ab")
    cache.abort(2, cache.reserve(2, "ab").reservation)
    assert (cache.used, cache.hit("ab")) == (2, 0)
    assert cache.store(2, "ab") == (0, 1)
    assert cache.hit("ab") == 2


def test_only_leading_chunks_count_as_resident() -> None:
    cache = SmallCache(ranks=2)
    cache.store(1, "abc")
    reserved = cache.reserve(2, "abc")
    cache.commit(2, reserved.reservation, (1,))  # shard 1 of the second chunk alone: it is complete, the first is not
    again = cache.reserve(2, "abc")
    assert (again.resident, again.chunks, again.busy) == (0, (0, 2), 0)
    assert cache.reserve(1, "abcd").resident == 3


def test_a_lease_of_one_shard_protects_the_whole_chunk() -> None:
    cache = SmallCache(pool=4, ranks=2)
    cache.store(0, "ab")
    cache.acquire(1, "ab")
    assert cache.store(0, "xy") == ()
    assert cache.hit("ab") == 2


def test_all_parts_of_a_chunk_are_reserved_or_none() -> None:
    cache = SmallCache(pool=5, ranks=2)
    reserved = cache.reserve(0, "abc")
    assert (reserved.chunks, reserved.full, cache.used) == ((0, 1), 1, 4)


# Identity.


def test_salts_and_namespaces_share_nothing() -> None:
    cache = SmallCache()
    cache.store(1, "ab", salt="tenant")
    assert (cache.hit("ab", "tenant"), cache.hit("ab"), cache.hit("ab", "other")) == (2, 0, 0)
    cache.namespace = dataclasses.replace(cache.namespace, revision="2")
    assert cache.hit("ab", "tenant") == 0


def test_a_forged_hash_is_a_miss_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HASH_ALGORITHMS, "constant", lambda _: b"same")
    cache = SmallCache(algorithm="constant")
    cache.store(1, "a")
    assert cache.hit("b") == 0
    reserved = cache.reserve(1, "b")
    assert (reserved.reservation, reserved.resident, reserved.full) == (0, 0, 1)
    assert cache.hit("a") == 1


# Bytes that travel as frames.


def test_an_object_is_found_by_the_reservation_that_holds_it_and_by_no_other() -> None:
    cache = SmallCache(ranks=2)
    reserved = cache.reserve(2, "ab")
    found = cache.l1.reserved_object(2, reserved.reservation, 1, 0)
    assert found is not None and found.offset == offsets(reserved)[1]
    for owner, handle, chunk, part in (
        (1, reserved.reservation, 1, 0),
        (2, reserved.reservation + 1, 1, 0),
        (2, reserved.reservation, 2, 0),
        (2, reserved.reservation, -1, 0),
        (2, reserved.reservation, 1, 1),
        (2, reserved.reservation, 1, -1),
    ):
        assert cache.l1.reserved_object(owner, handle, chunk, part) is None


def test_a_leased_object_is_found_by_the_lease_that_covers_it_and_by_no_other() -> None:
    cache = SmallCache(ranks=2)
    cache.store(0, "abc")
    lease = cache.acquire(2, "abc", first=1)
    found = cache.l1.leased_object(2, lease.lease, 1, 0)
    assert found is not None and found.offset == offsets(lease)[1]
    for owner, handle, chunk, part in (
        (1, lease.lease, 1, 0),
        (2, lease.lease + 1, 1, 0),
        (2, lease.lease, 2, 0),
        (2, lease.lease, -1, 0),
        (2, lease.lease, 1, 1),
        (2, lease.lease, 1, -1),
    ):
        assert cache.l1.leased_object(owner, handle, chunk, part) is None


def test_an_object_whose_bytes_did_not_all_arrive_is_not_published() -> None:
    cache = SmallCache(part=2, pool=8)
    reserved = cache.reserve(1, "ab")
    for chunk, written in ((0, 2), (1, 1)):
        obj = cache.l1.reserved_object(1, reserved.reservation, chunk, 0)
        assert obj is not None
        obj.written = written
    assert cache.commit(1, reserved.reservation).sealed == (0,)


def test_where_bytes_come_as_frames_only_nothing_is_published_without_one() -> None:
    cache = SmallCache(framed=True)
    reserved = cache.reserve(1, "ab")
    assert cache.commit(1, reserved.reservation).sealed == ()
    cache.assert_quiet()


def test_where_bytes_come_as_frames_only_a_lost_slot_is_free_at_once() -> None:
    cache = SmallCache(framed=True)
    reserved = cache.reserve(1, "ab")
    cache.wait(WRITE_TTL)
    cache.assert_quiet()
    assert cache.l1.counters.lost_chunks == 2
    assert cache.l1.reserved_object(1, reserved.reservation, 0, 0) is None
    assert cache.commit(1, reserved.reservation).state is CommitState.LOST


# Counting.


def things_in_memory() -> int:
    return sum(type(thing) in (Node, Root, MemoryObj, Lease, Reading, Reservation) for thing in gc.get_objects())


def test_what_is_let_go_of_goes_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()  # the server freezes what is kept: a cycle in it would stay for ever
    try:
        before = things_in_memory()
        cache = SmallCache(pool=8)
        for turn in range(4):
            cache.store(1, "abcd", salt=f"{turn}")  # evicts
            held = cache.acquire(1, "abcd", salt=f"{turn}")
            writing = cache.reserve(1, "abcxy", "writer", salt=f"{turn}")
            cache.reserve(1, "efgh", "lost", salt=f"{turn}")
            cache.leave(2)
            assert things_in_memory() > before
            cache.clear()
            cache.release(1, held.lease)
            cache.commit(1, writing.reservation)
            cache.wait(WRITE_TTL + 1)
            cache.leave(1)
            cache.l1.index.prune_roots()
        cache.assert_quiet()
        assert things_in_memory() == before
    finally:
        gc.enable()


def test_a_scripted_workload_decides_every_counter_exactly() -> None:
    cache = SmallCache(pool=4)
    cache.store(1, "abcd")
    cache.acquire(1, "abxx")
    cache.release(1, 1)
    cache.release(1, 1)
    cache.reserve(1, "vwxyz")
    cache.wait(WRITE_TTL)
    cache.end(1)
    cache.abort(1, cache.reserve(1, "s").reservation)
    cache.store(1, "s")
    cache.acquire(1, "s")
    cache.wait(READ_TTL)
    cache.clear()
    assert cache.l1.counters == Counters(
        lookups=2, requested_tokens=5, hit_tokens=3, reserved_chunks=10, committed_chunks=5, aborted_chunks=1,
        lost_chunks=4, refused_chunks=1, evicted_chunks=4, cleared_objects=1, expired_reads=1, stray_releases=1,
    )  # fmt: skip
