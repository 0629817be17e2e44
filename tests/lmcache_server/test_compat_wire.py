"""The numbered operations as bytes: the documented exchanges, and all that is not one; without sockets and with."""

import random
import secrets
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.protocol.numbered import FIXED, OPERATIONS, Refusal
from tests.lmcache_server.numbered_world import (
    OTHER,
    SEGMENT,
    WORKER,
    Raised,
    World,
    content,
    key,
    registration,
    token_bytes,
)  # fmt: skip
from tests.servers import CacheServer, running_server

NUMBERS = {name: operation.number for name, operation in OPERATIONS.items()}
NUMBERS |= {name: number for name, (number, _) in FIXED.items() if number is not None}
NAME_ONLY = [name for name, (number, _) in FIXED.items() if number is None]


def frame(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


KEY = bytes.fromhex(
    "8aaa6d6f64656c5f6e616d65a16daa776f726c645f73697a6501a9776f726b65725f6964c0a9746f6b656e5f696473dc0010"
    "000102030405060708090a0b0c0d0e0fa5737461727400a3656e6410aa726571756573745f6964a27231aa63616368655f73616c74a0"
    "af726571756573745f636f6e66696773c0ae6e756d5f6b765f7265616465727301"
)
INSTANCE = 0x3FFF350CCC06E8BD
REGISTRATION = bytes.fromhex(
    "89ab696e7374616e63655f6964cf3fff350ccc06e8bdaa6d6f64656c5f6e616d65a674696e792f6daa776f726c645f73697a6501"
    "aa626c6f636b5f73697a6508aa6e756d5f6c617965727302af68696464656e5f64696d5f73697a6510a964747970655f737472a8"
    "62666c6f61743136a77573655f6d6c61c3b26e756d5f706879736963616c5f736c6f747310"
)
SLOTS = (
    "84a66f666673657400a66c656e677468cd0400a5736861706593021010a56474797065a862666c6f61743136"
    "84a66f6666736574cd1000a66c656e677468cd0400a5736861706593021010a56474797065a862666c6f61743136"
)


@pytest.fixture(autouse=True)
def no_faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What clients send is never a fault of the server."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelname == "ERROR"]


# The documented exchanges.


def test_the_key_of_the_tests_is_the_documented_one() -> None:
    assert frame(key(range(16), worker=None)) == KEY


def test_the_documented_exchanges_byte_for_byte() -> None:
    """One after the other, as a request goes: request frames, then what follows the uid in the reply."""
    world = World(1 << 28)
    tokens = {"model": "tiny/m", "worker": 0}
    worker_key = frame(key(range(32), **tokens))
    scheduler_key = frame(key(range(32), model="tiny/m", worker=None))
    instance = bytes.fromhex("cf3fff350ccc06e8bd")
    exchanges = [
        (["15"], "15|10"),
        (["18"], "18|a24f4b"),
        (["16", "c0"], "16|c3"),
        (["14", "c2"], "14"),
        (["0e", REGISTRATION], "0e|82a873686d5f6e616d65ba6c6d63616368655f6c315f706f6f6c5f70726f746f5f73706563"
                               "a9706f6f6c5f73697a65ce10000000"),
        (["16", instance], "16|c3"),
        (["10", worker_key, instance],
         f"10|81a7636f6e7465787482a5736c6f747392{SLOTS}ad6368756e6b5f696e6469636573920001"),
        (["11", worker_key, instance, "c400"], "11|c3"),
        (["11", worker_key, instance, "c400"], "11|c2"),
        (["10", worker_key, instance], "10|81a7636f6e7465787482a5736c6f747390ad6368756e6b5f696e646963657390"),
        (["08", scheduler_key, "01"], "08"),
        (["09", "a27231"], "09|02"),
        (["0a", "a27a7a", "cb3fb999999999999a"], "0a|00"),
        (["12", worker_key, instance], f"12|83a773756363657373c3a464617461c400a7636f6e7465787481a5736c6f747392{SLOTS}"),
        (["13", worker_key, instance], "13|c3"),
        (["0c", scheduler_key, "01"], "0c"),
        (["0d", "a27231"], "0d"),
        (["12", frame(key(range(100, 116), **tokens)), instance],
         "12|83a773756363657373c2a464617461c400a7636f6e7465787480"),
        (["17", "cd548e", "a674696e792f6d", "9183a67265715f6964a27231ad6e65775f626c6f636b5f6964739401020304"
                                            "ad6e65775f746f6b656e5f69647390"], "17"),
        (["0f", instance], "0f"),
    ]  # fmt: skip
    for request, reply in exchanges:
        frames = [part if isinstance(part, bytes) else bytes.fromhex(part) for part in request]
        assert "|".join(part.hex() for part in world.frames(*frames)) == reply, request[0]
    assert (world.held, SEGMENT.encode().hex()) == (0, "6c6d63616368655f6c315f706f6f6c5f70726f746f5f73706563")


def test_optional_features_are_none() -> None:
    assert World().ask(32) == []


def test_the_numbers_are_those_of_the_closed_table() -> None:
    assert sorted(NUMBERS.values()) == [number for number in range(1, 34) if number != 11]


def test_a_name_is_as_good_as_a_number() -> None:
    one, other = World(), World()
    for world, lookup, status in ((one, 8, 9), (other, "lookup", "query_prefetch_status")):
        world.register()
        world.store(range(32))
        world.ask(lookup, key(range(32), worker=None), 1)
        assert world.ask(status, "r1") == 2
    assert other.ask("noop") == "OK"


def test_only_numbers_and_names_of_this_dialect_are_its_own() -> None:
    compat = World().compat
    assert all(compat.speaks(frame(name)) for name in [*NUMBERS, *NAME_ONLY, *range(-2, 40), 1 << 60])
    foreign = [frame(name) for name in ("v1/hello", "", "lookups", None, 1.5, True, [8], b"lookup")]
    assert not any(compat.speaks(operation) for operation in [*foreign, b"", b"\xc1", b"\xff\xff"])


# What is not spoken.


@pytest.mark.parametrize("operation", [name for name, (_, answer) in FIXED.items() if isinstance(answer, Refusal)])
def test_what_is_not_spoken_raises_at_the_client_with_the_reason_and_is_logged_once(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    reason = str(FIXED[operation][1])
    for asked in (operation, NUMBERS.get(operation, operation)):
        with pytest.raises(Raised) as raised:
            world.ask(asked, 1, 2, 3)
        assert str(raised.value) == f"refused: {reason}"
    assert [record.getMessage() for record in caplog.records] == [
        f"refused {operation} of a client of LMCache: {reason}"
    ]


@pytest.mark.parametrize("number", [0, 11, 34, 99, -1, 1 << 40])
def test_a_number_that_nobody_gave_is_refused(number: int) -> None:
    with pytest.raises(Raised, match="does not have it"):
        World().ask(number)


def test_what_engines_ask_for_that_could_not_register_has_failed() -> None:
    world = World()
    assert world.ask(6, key(range(16)), WORKER, [[1]], b"event") == [b"", False]
    assert world.ask(7, key(range(16)), WORKER, [[1]], b"event", 0) == [b"", False]
    assert world.ask(5, key(range(16)), WORKER, [[1]], b"event") == [b"", False]
    assert [world.ask(2, WORKER), world.ask(4, WORKER)] == [None, None]


def test_a_stream_of_events_ends_at_once() -> None:
    assert World().ask("subscribe_kv_events", WORKER, "m", 0, 1024) is None


# Garbage.

VALID: dict[str, list[Any]] = {
    "lookup": [key(range(32), worker=None), 1],
    "query_prefetch_status": ["r1"],
    "wait_prefetch_status": ["r1", 0.1],
    "free_lookup_locks": [key(range(32), worker=None), 1],
    "end_session": ["r1"],
    "register_kv_cache_engine_driven_context": [registration(OTHER)],
    "unregister_kv_cache_engine_driven_context": [OTHER],
    "prepare_store": [key(range(32)), WORKER],
    "commit_store": [key(range(32)), WORKER, b""],
    "prepare_retrieve": [key(range(32)), WORKER],
    "commit_retrieve": [key(range(32)), WORKER],
    "clear": [False],
    "get_chunk_size": [],
    "ping": [WORKER],
}
GARBAGE = [
    b"", b"\xc1", b"\xff\xff", b"\x81", b"\xdd\xff\xff\xff\xff", frame(None), frame(-1), frame(1 << 63), frame(1.5),
    frame(True), frame("x"), frame("x" * 5000), frame(b"x"), frame([]), frame({}), frame([[[]]]), frame({1: 2}),
    frame({"token_ids": 1, "end": 0}), bytes.fromhex("81810102"),
]  # fmt: skip


def soft(operation: str) -> list[bytes] | None:
    """The reply of a failure, None for one that is refused."""
    failure = OPERATIONS[operation].failure
    name = frame(OPERATIONS[operation].number)
    if isinstance(failure, Refusal):
        return None
    return [name] if failure is None else [name, frame(failure)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_argument_of_another_type_is_answered_as_a_failure(operation: str) -> None:
    world = World()
    world.register()
    name = frame(OPERATIONS[operation].number)
    good = [frame(argument) for argument in VALID[operation]]
    checked = [kind is not Any for kind in OPERATIONS[operation].arguments.values()]
    for position, garbage in ((i, piece) for i in range(len(good)) for piece in GARBAGE):
        reply = world.frames(name, *good[:position], garbage, *good[position + 1 :])
        if checked[position] and not fits(operation, position, garbage):
            assert reply == soft(operation) or (soft(operation) is None and refused(reply)), (position, garbage)
        else:
            assert reply[0] == name or refused(reply)
    for arity in set(range(len(good) + 3)) - {len(good)}:
        reply = world.frames(name, *[*good, b"\xc0", b"\xc0"][:arity])
        assert reply == soft(operation) or (soft(operation) is None and refused(reply)), arity
    assert world.lookup(range(32)) == 0
    world.ask(13, "r1")
    world.ask(15, WORKER)
    assert world.held == 0


def fits(operation: str, position: int, garbage: bytes) -> bool:
    """Whether a piece of garbage is an argument of the right type after all."""
    kind = list(OPERATIONS[operation].arguments.values())[position]
    try:
        value = msgpack.unpackb(garbage, strict_map_key=False)
    except Exception:  # noqa: BLE001 - not MessagePack at all
        return False
    return type(value) in ((int, type(None)) if kind == int | None else (kind,))


def refused(reply: list[bytes]) -> bool:
    return len(reply) == 1 and msgpack.unpackb(reply[0]).startswith("refused: ")


@pytest.mark.parametrize("field", key([]))
def test_each_field_of_a_key_may_be_missing_or_of_another_type(field: str) -> None:
    world = World()
    world.register()
    good = key(range(32))
    variants = [{name: value for name, value in good.items() if name != field}]
    for value in (None, -1, 1 << 40, 1.5, True, b"x", [], {}, [1 << 32] * 32, ["a"] * 32):
        variants.append(good | {field: value})
    for variant in variants:
        for operation in (8, 12, 18, 19, 16, 13, 15):
            arguments = {13: ["r1"], 15: [WORKER]}.get(operation, [variant, WORKER])
            reply = world.frames(frame(operation), *map(frame, arguments))
            assert reply[0] == frame(operation)
            if operation == 16 and field in ("model_name", "world_size", "worker_id", "token_ids", "end", "request_id"):
                assert msgpack.unpackb(reply[1]) == {"context": {"slots": [], "chunk_indices": []}}, variant
        assert (world.held, world.used) == (0, 0)
        world.register()


def test_unknown_fields_are_ignored_and_the_order_does_not_matter() -> None:
    world = World()
    payload = dict(reversed(list((registration() | {"later": [1]}).items())))
    assert world.ask(14, payload)["shm_name"] == SEGMENT
    world.store(range(32))
    backwards = dict(reversed(list((key(range(32), worker=None) | {"later": {}}).items())))
    world.ask(8, backwards, 1)
    assert world.ask(9, "r1") == 2


def test_a_registration_without_slots_means_the_chunk() -> None:
    world = World()
    payload = registration()
    del payload["num_physical_slots"]
    assert world.ask(14, payload)["shm_name"] == SEGMENT


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


operations = st.integers(-2, 40) | st.sampled_from([*NUMBERS, *NAME_ONLY])


@given(operations, st.lists(st.binary() | values.map(frame), max_size=5))
def test_whatever_comes_has_one_answer(operation: int | str, frames: list[bytes]) -> None:
    world = World()
    world.register()
    reply = world.frames(frame(operation), *frames)
    assert reply[0] == frame(operation) or refused(reply)
    assert len(reply) <= 2
    assert world.ask(24) == "OK"


def test_a_reason_does_not_quote_at_length() -> None:
    world = World()
    reply = world.frames(frame(14), frame(registration(dtype_str="x" * 100_000)))
    assert refused(reply)
    assert len(reply[0]) < 600


# Over the socket.


class Client:
    """A DEALER that counts its messages, as their clients do."""

    def __init__(self, server: CacheServer) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        self.socket.connect(server.url)
        self.uid = 0

    def ask(self, operation: int | str, *arguments: Any) -> Any:
        self.uid += 1
        self.socket.send_multipart([frame(self.uid), frame(operation), *map(frame, arguments)])
        uid, answered, *result = self.socket.recv_multipart()
        assert uid == frame(self.uid)
        if answered != frame(operation):
            raise Raised(msgpack.unpackb(answered))
        return msgpack.unpackb(result[0]) if result else None


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def client(server: CacheServer) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.socket.close()


@pytest.mark.process
def test_bytes_go_through_the_segment(server: CacheServer, client: Client) -> None:
    place = client.ask(14, registration())
    assert place["shm_name"] == server.segment
    with open(f"/dev/shm/{place['shm_name']}", "r+b") as pool:
        context = client.ask(16, key(range(32)), WORKER)["context"]
        for i, slot in enumerate(context["slots"]):
            pool.seek(slot["offset"])
            pool.write(content("m", 0, "", range(16 * (i + 1)), slot["length"]))
            pool.flush()
        assert client.ask(17, key(range(32)), WORKER, b"") is True
        client.ask(8, key(range(32), worker=None), 1)
        assert client.ask(9, "r1") == 2
        for i, slot in enumerate(client.ask(18, key(range(32)), WORKER)["context"]["slots"]):
            pool.seek(slot["offset"])
            assert pool.read(slot["length"]) == content("m", 0, "", range(16 * (i + 1)), slot["length"])
        assert client.ask(19, key(range(32)), WORKER) is True
    client.ask(15, WORKER)
    server.quiet()


@pytest.mark.process
def test_the_uid_is_anything_and_short_messages_are_answered(server: CacheServer, client: Client) -> None:
    for uid in (b"\xff\xff", b"", b"u" * 1000):
        client.socket.send_multipart([uid, frame(24)])
        assert client.socket.recv_multipart() == [uid, frame(24), frame("OK")]
    for parts in ([b"x"], [b"x", b""], [b"", b""], [b"x", b"", b"ack"], [b"x", b"\xc1"]):
        client.socket.send_multipart(parts)
        assert len(client.socket.recv_multipart()) == 3
    assert client.ask(24) == "OK"


@pytest.mark.process
def test_random_frames_of_many_clients_are_each_answered(server: CacheServer, client: Client) -> None:
    chance = random.Random(5)
    others = [Client(server) for _ in range(4)]
    for other in others:
        for _ in range(100):
            operation = frame(chance.choice([*range(-1, 36), *NUMBERS]))
            arguments = [chance.choice([secrets.token_bytes(9), *GARBAGE]) for _ in range(chance.randrange(5))]
            other.socket.send_multipart([frame(1), operation, *arguments])
    for other in others:
        for _ in range(100):
            assert len(other.socket.recv_multipart()) in (2, 3)
        other.socket.close()
    assert client.ask(24) == "OK"
    assert server.quiet()["is_healthy"]


@pytest.mark.process
def test_a_server_without_shared_memory_says_so(client: Client) -> None:
    with running_server(shared_memory=False) as bare:
        numbered = Client(bare)
        with pytest.raises(Raised, match="start it with --shm-name"):
            numbered.ask(14, registration())
        assert numbered.ask(16, key(range(32)), WORKER) == {"context": {"slots": [], "chunk_indices": []}}
        assert "start it with --shm-name" in bare.log
        numbered.socket.close()


@pytest.mark.process
def test_after_a_restart_a_worker_is_told_once_and_nothing_of_before_is_served(client: Client) -> None:
    with running_server() as restarted:
        numbered = Client(restarted)
        numbered.ask(14, registration())
        assert numbered.ask(22, WORKER) is True
        context = numbered.ask(16, key(range(32)), WORKER)["context"]
        assert len(context["slots"]) == 2
        restarted.restart()
        assert numbered.ask(17, key(range(32)), WORKER, b"") is False
        assert [numbered.ask(22, WORKER), numbered.ask(22, WORKER)] == [False, True]
        assert numbered.ask(14, registration())["shm_name"] == restarted.segment
        numbered.ask(8, key(range(32), worker=None), 1)
        assert numbered.ask(9, "r1") == 0
        numbered.socket.close()


def test_tokens_are_packed_as_our_dialect_sends_them() -> None:
    world = World()
    world.register()
    world.store([0, 1, (1 << 32) - 1] + [5] * 13)
    ((_, root),) = world.cache.index.nodes()
    assert root.tokens == token_bytes([0, 1, (1 << 32) - 1] + [5] * 13)
