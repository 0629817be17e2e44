"""What the numbered operations do: a server without sockets, asked in frames, its clock a number."""

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_server.protocol import messages as m
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from lmcache_server.protocol.numbered import Key
from tests.lmcache_server.numbered_world import (
    CHUNK,
    GRACE,
    OTHER,
    READ_TTL,
    REAP,
    SEGMENT,
    WORKER,
    WRITE_TTL,
    Raised,
    World,
    content,
    key,
    token_bytes,
)  # fmt: skip

NOTHING = {"slots": [], "chunk_indices": []}
A, B = range(32), range(1000, 1032)
SLOT = 4096
"""Bytes of the pool that one chunk takes."""


@pytest.fixture
def world() -> World:
    """One registered worker of one shard."""
    world = World()
    world.register()
    return world


@pytest.fixture(autouse=True)
def no_faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What clients send is never a fault of the server."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelname == "ERROR"]


# Being known.


def test_a_registration_is_told_where_the_pool_is() -> None:
    assert World().register() == {"shm_name": SEGMENT, "pool_size": 1 << 20}


def test_registering_again_changes_nothing_that_is_under_way(world: World) -> None:
    context = world.prepare_store(A)
    assert world.register() == {"shm_name": SEGMENT, "pool_size": 1 << 20}
    world.fill(context, A)
    assert world.commit_store(A) is True
    assert world.lookup(A) == 2
    assert len(world.instances) == 1


def test_a_new_layout_takes_over_and_what_was_reserved_keeps_the_old_one(world: World) -> None:
    world.register(OTHER)
    context = world.prepare_store(A)
    world.register(hidden_dim_size=32)
    assert world.prepare_store(B)["slots"][0]["shape"] == [2, 16, 32]
    world.fill(context, A)
    assert world.commit_store(A) is True
    assert world.retrieve(A, OTHER), "the layout that it was reserved for"
    assert not world.retrieve(A, WORKER), "other bytes than its own"


def test_a_worker_that_is_not_registered_is_told_so_once(world: World) -> None:
    assert [world.ask(22, OTHER) for _ in range(3)] == [False, True, True]
    world.register(OTHER)
    assert [world.ask(22, OTHER) for _ in range(2)] == [True, True]
    world.ask(15, OTHER)
    assert [world.ask(22, OTHER) for _ in range(2)] == [False, True]


def test_a_scheduler_is_always_welcome() -> None:
    assert World().ask(22, None) is True


def test_who_never_pings_is_given_an_hour_and_who_pinged_two_minutes(world: World) -> None:
    world.register(OTHER)
    assert world.ask(22, OTHER) is True
    world.tick(REAP + 1)
    assert len(world.instances) == 1
    assert world.ask(22, OTHER) is False, "reaped, and to be told"
    world.tick(GRACE)
    assert len(world.instances) == 0


def test_forgotten_instances_leave_nothing_behind() -> None:
    world = World()
    for i in range(20):
        world.register(i)
        world.ask(22, i)
        world.tick(REAP + 1)
    world.register(20)
    assert len(world.compat._ids) == 1


@pytest.mark.parametrize("leave", ["unregister", "silence"])
def test_who_leaves_publishes_nothing(world: World, leave: str) -> None:
    world.register(OTHER)
    world.prepare_store(A)
    world.prepare_retrieve(A)
    if leave == "unregister":
        assert world.ask(15, WORKER) is None
    else:
        world.ask(22, WORKER)
        world.tick(REAP + 1)
    assert world.lookup(A) == 0
    assert (world.held, world.used) == (0, 0)


def test_leaving_twice_or_without_being_known_is_fine(world: World) -> None:
    assert [world.ask(15, WORKER), world.ask(15, WORKER), world.ask(15, 7)] == [None, None, None]


def test_who_is_not_registered_gets_what_its_client_takes_for_a_miss(world: World) -> None:
    world.store(A)
    assert world.prepare_store(B, OTHER) == NOTHING
    assert world.commit_store(B, OTHER) is False
    assert world.prepare_retrieve(A, OTHER)["success"] is False
    assert world.commit_retrieve(A, OTHER) is False
    assert world.held == 0


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"num_physical_slots": 32}, "--chunk-size"),
        ({"num_physical_slots": 0}, "--chunk-size"),
        ({"dtype_str": "float64"}, "bfloat16"),
        ({"num_layers": 0}, "layer"),
        ({"hidden_dim_size": -1}, "head_size"),
        ({"world_size": 0}, "world_size"),
        ({"use_mla": 1}, "use_mla"),
        ({"block_size": None}, "block_size"),
        ({"hidden_dim_size": 1 << 19}, "--l1-size-gb"),
    ],
)
def test_a_registration_that_cannot_work_is_refused_with_its_remedy(wrong: dict[str, Any], remedy: str) -> None:
    world = World()
    with pytest.raises(Raised, match=remedy):
        world.register(**wrong)
    assert len(world.instances) == 0


def test_without_shared_memory_nobody_registers_and_nothing_is_promised() -> None:
    world = World(shm="")
    with pytest.raises(Raised, match="--shm-name"):
        world.register()
    assert world.lookup(A) == 0
    assert world.prepare_store(A) == NOTHING


# Lookups.


def test_a_hit_is_told_once_in_chunks(world: World) -> None:
    world.store(A)
    assert world.lookup(A) == 2
    assert world.ask(9, "r1") == 0
    assert world.ask(10, "r1", 0.1) == 0
    assert world.ask(9, "nobody") == 0


def test_a_lookup_counts_whole_chunks_from_the_first_token_on(world: World) -> None:
    world.store(range(48))
    assert world.lookup(range(48), start=16) == 3, "the start does not matter"
    assert world.lookup(range(48), end=47) == 2
    assert world.lookup(range(100), end=33) == 2
    assert world.lookup(range(100), end=100) == 3, "the longest prefix"
    assert world.lookup([0, 2, *range(2, 48)]) == 0


def test_a_lookup_beyond_its_tokens_finds_nothing(world: World) -> None:
    world.store(A)
    assert world.lookup(A, end=48) == 0


def test_a_lookup_for_what_nobody_registered_finds_nothing(world: World) -> None:
    world.store(A)
    assert world.lookup(A, model="other") == 0
    assert world.lookup(A, world=2) == 0
    assert world.held == 0


def test_a_hit_needs_every_shard() -> None:
    world = World()
    for rank, instance in enumerate((WORKER, OTHER)):
        world.register(instance, world_size=2)
        assert world.lookup(A, world=2) == 0
        assert world.store(A, instance, worker=rank, world=2) is True
    assert world.lookup(A, world=2) == 2
    assert world.retrieve(A, WORKER, worker=0, world=2)
    assert world.held == 1, "the other shard has not read"
    assert world.retrieve(A, OTHER, worker=1, world=2)
    assert world.held == 0


def test_a_lookup_is_held_until_each_of_its_readers_has_read() -> None:
    world = World()
    for instance in (1, 2, 3):
        world.register(instance)
    world.store(A, 1)
    assert world.lookup(A, readers=3) == 2
    for instance in (1, 2, 3):
        assert world.held == 1
        assert world.retrieve(A, instance, readers=3)
    assert world.held == 0


def test_a_second_lookup_of_a_request_takes_the_place_of_the_first(world: World) -> None:
    world.store(A)
    world.store(B)
    for _ in range(5):
        assert world.ask(8, key(A, worker=None), 1) is None
    assert world.held == 1
    assert world.lookup(B) == 2
    assert world.held == 1
    assert world.lookup(range(2000, 2064)) == 0
    assert world.held == 0


def test_a_request_id_that_comes_back_with_other_tokens_means_the_other_tokens(world: World) -> None:
    world.store(range(64))
    assert world.lookup(range(64)) == 4
    assert world.lookup(B) == 0
    world.store(B)
    assert world.retrieve(B)
    assert world.lookup(range(48), request="r1") == 3


def test_the_end_of_a_session_releases_what_it_found_and_the_bytes_stay(world: World) -> None:
    world.store(A)
    assert world.lookup(A) == 2
    assert world.ask(13, "r1") is None
    assert world.held == 0
    assert world.retrieve(A)
    assert world.ask(13, "r1") is None
    assert world.ask(13, "nobody") is None


def test_an_end_before_the_answer_was_fetched_leaves_nothing_to_fetch(world: World) -> None:
    world.store(A)
    world.ask(8, key(A, worker=None), 1)
    world.ask(13, "r1")
    assert world.ask(9, "r1") == 0
    assert world.held == 0


def test_freeing_all_of_a_lookup_ends_its_lease_and_freeing_a_part_does_not(world: World) -> None:
    world.store(range(48))
    assert world.lookup(range(48)) == 3
    for start, end in ((0, 16), (16, 48), (32, 32), (48, 0), (0, 47)):
        world.ask(12, key(range(48), worker=None, start=start, end=end), 1)
        assert world.held == 1, (start, end)
    world.ask(12, key(range(48), worker=None, start=0, end=48), 1)
    assert world.held == 0
    world.ask(12, key(range(48), worker=None, start=0, end=48), 1)
    world.ask(12, key(B, worker=None, request="nobody"), 1)


def test_what_one_request_frees_another_still_holds() -> None:
    world = World(4 * SLOT)
    world.register()
    world.store(A)
    assert [world.lookup(A, request) for request in "xy"] == [2, 2]
    for _ in range(3):
        world.ask(12, key(range(64), worker=None, request="x", end=64), 1)
    world.ask(13, "x")
    prepared = world.prepare_retrieve(A, request="y")
    for i in range(10):
        world.store(range(3000 + 100 * i, 3064 + 100 * i))
    world.read(prepared, A, request="y")
    assert world.commit_retrieve(A, request="y") is True
    assert world.held == 0


def test_a_request_may_wait_longer_than_its_lease(world: World) -> None:
    world.store(A)
    assert world.lookup(A) == 2
    world.ask(22, WORKER)
    for _ in range(10):
        world.tick(READ_TTL / 5)
        world.ask(22, WORKER)
    assert world.held == 0
    assert world.retrieve(A)


def test_a_request_that_waited_too_long_under_pressure_misses() -> None:
    world = World(4 * SLOT)
    world.register()
    world.store(A)
    assert world.lookup(A) == 2
    world.tick(READ_TTL + 1)
    assert world.store(range(3000, 3064)) is True
    assert not world.retrieve(A)
    assert world.held == 0


def test_requests_that_never_come_back_are_forgotten(world: World) -> None:
    world.store(A)
    for i in range(5000):
        world.compat.lookup(Key("m", 1, None, 0, 16, f"absent {i}", token_bytes(B[:16])), 1)
    assert len(world.compat._lookups) <= 4096
    for i in range(50):
        world.lookup(A, f"held {i}")
    assert world.held == 50, "what is held is not forgotten"
    world.tick(READ_TTL + 1)
    assert world.held == 0


# Retrieves.


def test_a_retrieve_may_begin_in_the_middle(world: World) -> None:
    world.store(range(64))
    assert world.retrieve(range(64), start=16, end=48)
    assert world.retrieve(range(100), start=0, end=64)


@pytest.mark.parametrize(
    "fields",
    [
        {"start": 8}, {"end": 31}, {"start": 32, "end": 16}, {"start": -16}, {"start": 32, "end": 32},
        {"worker": None}, {"worker": 1}, {"worker": -1}, {"model": "other"}, {"world": 2}, {"salt": "a/b"},
        {"salt": "other"}, {"end": 48}, {"request": "r" * 5000},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_retrieved_is_a_miss(world: World, fields: dict[str, Any]) -> None:
    world.store(A)
    tokens = range(48) if fields.get("end") == 48 else A
    assert not world.retrieve(tokens, **fields)
    assert world.held == 0


def test_two_retrieves_of_one_request_do_not_end_each_other() -> None:
    world = World(4 * SLOT)
    world.register()
    world.store(range(64))
    first = world.prepare_retrieve(range(64), end=32)
    second = world.prepare_retrieve(range(64), start=32)
    assert world.commit_retrieve(range(64), end=32) is True
    world.read(first, range(64), end=32)
    assert world.held == 1
    assert world.store(range(3000, 3032)) is False, "everything is held"
    world.read(second, range(64), start=32)
    assert world.commit_retrieve(range(64), start=32) is True


def test_a_copy_that_outlived_its_lease_is_not_called_a_success(world: World) -> None:
    world.store(A)
    world.prepare_retrieve(A)
    world.tick(READ_TTL + 1)
    assert world.commit_retrieve(A) is False


def test_a_retrieve_is_not_counted_as_a_lookup(world: World) -> None:
    world.store(A)
    world.lookup(range(40))
    world.retrieve(A)
    counters = world.cache.counters
    assert (counters.lookups, counters.requested_tokens, counters.hit_tokens) == (1, 32, 32)


# Stores.


def test_stores_of_one_prompt_step_by_step(world: World) -> None:
    for start, end in ((0, 16), (16, 48), (48, 64)):
        context = world.prepare_store(range(70), start=start, end=end)
        assert context["chunk_indices"] == list(range((end - start) // CHUNK))
        world.fill(context, range(70), start=start, end=end)
        assert world.commit_store(range(70), start=start, end=end) is True
    assert world.lookup(range(70)) == 4
    assert world.retrieve(range(70))


def test_only_what_is_missing_is_asked_for(world: World) -> None:
    world.store(A)
    context = world.prepare_store(range(64), request="r2")
    assert context["chunk_indices"] == [2, 3]
    world.ask(15, WORKER)


def test_what_is_cached_already_is_not_stored_again(world: World) -> None:
    assert world.store(A) is True
    assert world.prepare_store(A, request="r2") == NOTHING
    assert world.commit_store(A, request="r2") is False
    assert world.store(range(40, 40)) is False, "an empty range"


def test_nothing_is_stored_behind_a_gap_and_nothing_evicted_for_it() -> None:
    world = World(4 * SLOT)
    world.register()
    world.store(range(2000, 2064))
    assert world.prepare_store(range(48), start=32, end=48) == NOTHING
    assert world.lookup(range(2000, 2064)) == 4
    assert world.cache.index.size == 4


def test_behind_what_another_shard_has_yet_to_store_it_goes_on() -> None:
    world = World()
    world.register(WORKER, world_size=2)
    world.register(OTHER, world_size=2)
    assert world.store(range(48), WORKER, worker=0, world=2, end=16) is True
    assert world.store(range(48), WORKER, worker=0, world=2, start=16) is True
    assert world.prepare_store(range(48), OTHER, worker=1, world=2, start=16) == NOTHING
    assert world.store(range(48), OTHER, worker=1, world=2) is True
    assert world.lookup(range(48), world=2) == 3


def test_a_commit_belongs_to_its_own_prepare(world: World) -> None:
    context = world.prepare_store(A, request="r1")
    assert world.prepare_store(A, request="r2") == NOTHING
    assert world.commit_store(A, request="r2") is False, "it has prepared nothing"
    assert world.prepare_store(A, request="r1") == NOTHING, "under way"
    assert world.lookup(A) == 0
    world.fill(context, A)
    assert world.commit_store(A, request="r1") is True
    assert world.commit_store(A, request="r1") is False
    assert world.retrieve(A)


def test_a_second_prepare_cannot_have_the_first_one_published() -> None:
    world = World(4 * SLOT)
    world.register()
    world.store(range(2000, 2048))
    world.lookup(range(2000, 2048), request="held")
    first = world.prepare_store(A)
    assert first["chunk_indices"] == [0], "there is room for one"
    world.ask(13, "held")
    assert world.prepare_store(A) == NOTHING, "else this commit would publish what the other has yet to fill"
    world.fill(first, A)
    assert world.commit_store(A) is True
    assert world.lookup(A) == 1


def test_a_store_makes_room_by_itself_and_takes_what_fits() -> None:
    world = World(4 * SLOT)
    world.register()
    for i in range(5):
        assert world.store(range(1000 * i, 1000 * i + 64)) is True
    assert world.prepare_store(range(9000, 9096))["chunk_indices"] == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [{"start": 8}, {"end": 31}, {"worker": None}, {"worker": 1}, {"model": "other"}])
def test_what_cannot_be_stored_is_answered_as_cached(world: World, fields: dict[str, Any]) -> None:
    assert world.prepare_store(A, **fields) == NOTHING
    assert world.commit_store(A, **fields) is False
    assert (world.held, world.used) == (0, 0)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickled_payload_is_refused_unread(world: World, tmp_path: Any) -> None:
    trap = tmp_path / "trap"
    world.prepare_store(A)
    assert world.commit_store(A, data=pickle.dumps([Bomb(str(trap))])) is False
    assert not trap.exists()
    assert (world.held, world.used) == (0, 0)
    assert world.store(A) is True, "the chunks are free for the next one"


def test_a_store_that_took_too_long_is_lost(world: World) -> None:
    world.prepare_store(A)
    world.tick(WRITE_TTL + 1)
    assert world.lookup(A) == 0
    assert world.commit_store(A) is False
    assert (world.held, world.used) == (0, 0)


# Administration.


@pytest.mark.parametrize("force", [False, True])
def test_clear_forgets_and_leaves_running_copies_alone(world: World, force: bool) -> None:
    world.store(A)
    world.lookup(A)
    reading = world.prepare_retrieve(A)
    writing = world.prepare_store(B)
    assert world.ask(20, force) is None
    assert world.lookup(A, request="r2") == 0
    world.fill(writing, B)
    world.read(reading, A)
    assert world.commit_store(B) is False
    assert world.commit_retrieve(A) is True
    world.ask(13, "r1")
    assert (world.held, world.used) == (0, 0)
    assert not world.retrieve(A), "the lookup's promise ended with the clear"


# One namespace.


def test_salts_share_nothing(world: World) -> None:
    world.store(A, salt="one")
    assert [world.lookup(A, salt=salt) for salt in ("one", "two", "")] == [2, 0, 0]
    assert world.retrieve(A, salt="one")


def test_one_plane_of_other_pages_is_another_cache() -> None:
    world = World()
    world.register(WORKER, block_size=8)
    world.store(A)
    world.register(OTHER, block_size=16)
    assert world.lookup(A) == 0
    assert not world.retrieve(A, OTHER)


def test_two_planes_of_other_pages_are_the_same_cache() -> None:
    world = World()
    world.register(WORKER, block_size=8, use_mla=False)
    world.store(A)
    world.register(OTHER, block_size=16, use_mla=False)
    assert world.lookup(A) == 2
    assert world.prepare_retrieve(A, OTHER)["context"]["slots"][0]["shape"] == [2, 2, 16, 16]
    assert world.commit_retrieve(A, OTHER) is True


def test_slots_of_one_plane_have_a_plane_axis_for_their_sdk_only(world: World) -> None:
    for request, shape in (
        ("store-" + "0f" * 16, [1, 2, 16, 16]),
        ("store-" + "0f" * 15, [2, 16, 16]),
        ("store-" + "0f" * 17, [2, 16, 16]),
    ):
        assert world.prepare_store(range(16), request=request)["slots"][0]["shape"] == shape
        assert world.commit_store(range(16), request=request) is True
        world.ask(20, False)
    world.store(A)
    answer = world.prepare_retrieve(A, request="retrieve-" + "ab" * 16)
    assert [slot["shape"] for slot in answer["context"]["slots"]] == [[1, 2, 16, 16]] * 2


def engine(world: World, planes: int = 2, kind: Kind = Kind.KV, model: str = "m", heads: int = 2) -> int:
    """An engine's worker of our own dialect: 16 elements as heads of 8, unless there are more of them."""
    layout = CacheLayout((KernelGroup((0, 1), planes, heads, 8, "bfloat16"),))
    reply = world.service.register(m.Register("worker", model, "abc", kind, 1, 0, layout, 4))
    return reply.instance


def test_what_an_engine_of_our_dialect_stored_is_found_by_numbers() -> None:
    world = World()
    instance = engine(world)
    world.register(use_mla=False)
    prompt = m.Prompt(m.SessionId("r"), token_bytes(A))
    (reserved,) = world.service.reserve(m.Reserve(instance, (prompt,))).results
    for i, slot in enumerate(m.unpack_slots(reserved.slots)):
        world.pool[slot.offset : slot.offset + 2048] = content("m", 0, "", range(16 * (i + 1)), 2048)
    world.service.commit(m.Commit(instance, (m.CommittedChunks(reserved.reservation),)))
    assert world.lookup(A) == 2
    assert world.retrieve(A)


def test_what_was_stored_by_numbers_is_found_by_an_engine_of_our_dialect() -> None:
    world = World()
    instance = engine(world)
    world.register(use_mla=False)
    assert world.store(A) is True
    prompt = m.Prompt(m.SessionId("r"), token_bytes(A))
    (acquired,) = world.service.acquire(m.Acquire(instance, (prompt,))).results
    assert acquired.chunks == 2
    for i, slot in enumerate(m.unpack_slots(acquired.slots)):
        assert world.pool[slot.offset : slot.offset + 2048] == content("m", 0, "", range(16 * (i + 1)), 2048)


@pytest.mark.parametrize("other", [{"planes": 1}, {"heads": 4}, {"model": "n"}])
def test_engines_whose_chunks_have_other_bytes_are_not_joined(other: dict[str, Any]) -> None:
    world = World()
    instance = engine(world, **other)
    world.register(use_mla=False)
    world.store(A)
    (acquired,) = world.service.acquire(m.Acquire(instance, (m.Prompt(m.SessionId("r"), token_bytes(A)),))).results
    assert acquired.chunks == 0


def test_queries_are_found_although_their_sdk_does_not_know_how_wide_they_are() -> None:
    world = World()
    instance = engine(world, planes=1, kind=Kind.QUERY, model="m##query", heads=8)
    world.register(model_name="m##query", hidden_dim_size=8)
    prompt = m.Prompt(m.SessionId("r"), token_bytes(A))
    (reserved,) = world.service.reserve(m.Reserve(instance, (prompt,))).results
    world.service.commit(m.Commit(instance, (m.CommittedChunks(reserved.reservation),)))
    assert world.lookup(A, model="m##query") == 2
    slots = world.prepare_retrieve(A, model="m##query")["context"]["slots"]
    assert [slot["shape"] for slot in slots] == [[1, 2, 16, 64]] * 2


def test_lookups_mean_the_newest_registration_of_a_name() -> None:
    world = World()
    world.register(WORKER, hidden_dim_size=16)
    world.store(A)
    assert world.lookup(A) == 2
    world.register(OTHER, hidden_dim_size=32)
    assert world.lookup(A) == 0
    world.ask(15, OTHER)
    assert world.lookup(A) == 2
    engine(world)
    assert world.lookup(A) == 2, "an engine of our dialect asks in our dialect"
