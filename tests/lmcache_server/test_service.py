"""One reply per message, whatever it was, and what each message does."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_server.core.instances import InstanceTable
from lmcache_server.core.integrity import check_integrity
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.records import Limits
from lmcache_server.core.sessions import SessionTable
from lmcache_server.protocol import codec
from lmcache_server.protocol import messages as m
from lmcache_server.protocol.errors import ErrorCode, ProtocolError
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind, fingerprint
from lmcache_server.service import MAX_INSTANCES, Service

CHUNK, PART = 4, 4 * 8
LAYOUT = CacheLayout((KernelGroup((0,), 1, 1, 8, "uint8"),))
PROCESS = m.ProcessId(1, 2, 3)
OPERATION = {request: name for name, (request, _) in m.OPERATIONS.items()}
READ_TTL, WRITE_TTL, SESSION_TTL, REAP = 30.0, 50.0, 60.0, 100.0


class Bench:
    """A service without a socket: `ask` sends a message through its bytes, `now` is the time."""

    def __init__(self, *, pool: int = 8 * PART, frames: bool = False) -> None:
        self.now = 0.0
        self.memory = bytearray(b"\xa5" * pool)
        self.hello = m.HelloReply(
            1, "0", "server", 7, CHUNK, "xxh3_128", m.Transport.FRAMES if frames else m.Transport.SHM, "", pool, PART,
            4 * PART, REAP, READ_TTL,
        )  # fmt: skip
        limits = Limits(pool, PART, 1.0, 0.5, READ_TTL, WRITE_TTL)
        self.cache = L1Cache(ChunkHasher(CHUNK), limits, array("Q", bytes(8 * (pool // PART))), framed=frames)
        self.instances, self.sessions = InstanceTable(CHUNK), SessionTable(SESSION_TTL)
        self.service = Service(
            self.hello, self.cache, self.instances, self.sessions, memoryview(self.memory), lambda: b"{}",
            lambda: self.now,
        )  # fmt: skip

    def ask_frames(self, message: Any, frames: Sequence[bytes] = ()) -> tuple[Any, list[Any]]:
        name = OPERATION[type(message)]
        reply, *raw = self.service.handle(msgpack.packb(name), [codec.encode(message), *frames])
        check_integrity(self.cache)
        value = msgpack.unpackb(reply)
        if value.keys() == {"error"}:
            raise codec.from_map(m.Refusal, value["error"]).raised()
        return codec.from_map(m.OPERATIONS[name][1], value), raw

    def ask(self, message: Any, frames: Sequence[bytes] = ()) -> Any:
        return self.ask_frames(message, frames)[0]

    def register(self, **changes: Any) -> int:
        fields: dict[str, Any] = {
            "role": "worker", "model_name": "m", "revision": "", "kind": Kind.KV, "world_size": 1, "worker_id": 0,
            "layout": LAYOUT, "block_size": 4, "process": None,
        }  # fmt: skip
        return int(self.ask(m.Register(**(fields | changes))).instance)

    def reserve(self, instance: int, text: str, name: str = "r") -> m.Reserved:
        return self.ask(m.Reserve(instance, (prompt(text, name),))).results[0]

    def store(self, instance: int, text: str, name: str = "r") -> m.Committed:
        reserved = self.reserve(instance, text, name)
        pieces = tuple(m.Piece(chunk, 0, 0, PART) for chunk in reserved.chunks)
        self.ask(m.Write(instance, reserved.reservation, pieces), [body(text, p.chunk) for p in pieces])
        return self.ask(m.Commit(instance, (m.CommittedChunks(reserved.reservation),))).results[0]

    def acquire(self, instance: int, text: str, name: str = "r", lease: bool = True) -> m.Acquired:
        return self.ask(m.Acquire(instance, (prompt(text, name),), lease=lease)).results[0]

    def tick(self, seconds: float = 0.0, gone: object = None) -> None:
        self.now += seconds
        self.service.tick(lambda process: gone)  # type: ignore[arg-type, return-value]
        check_integrity(self.cache)


def prompt(text: str, name: str = "r") -> m.Prompt:
    """One chunk per character."""
    return m.Prompt(m.SessionId(name), b"".join(ord(c).to_bytes(4, "little") * CHUNK for c in text))


def body(text: str, chunk: int) -> bytes:
    return text[: chunk + 1].encode().ljust(PART, b".")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def refusal(bench: Bench, message: Any, frames: Sequence[bytes] = ()) -> ProtocolError:
    with pytest.raises(ProtocolError) as raised:
        bench.ask(message, frames)
    return raised.value


# Being known.


def test_a_greeting_tells_what_the_server_is(bench: Bench) -> None:
    assert bench.ask(m.Hello()) == bench.hello


def test_another_version_of_the_protocol_is_told_both_versions(bench: Bench) -> None:
    error = refusal(bench, m.Hello(2))
    assert (error.code, error.field) == (ErrorCode.INCOMPATIBLE, "protocol")
    assert "protocol 1, the client 2" in error.message


def test_a_registration_is_answered_with_an_id_and_the_bytes_of_each_part(bench: Bench) -> None:
    groups = CacheLayout((*LAYOUT.groups, KernelGroup((1, 2), 2, 1, 2, "float16")))
    register = m.Register("worker", "m", "", Kind.KV, 2, 1, groups, 4)
    reply = bench.ask(register)
    assert reply.part_bytes == (PART, 2 * 2 * CHUNK * 2 * 2)
    assert (reply.incarnation, reply.fingerprint) == (7, fingerprint(groups))
    assert bench.ask(register).instance != reply.instance


def test_a_chunk_that_could_never_fit_is_refused_at_registration() -> None:
    error = refusal(Bench(pool=PART // 2), m.Register("w", "m", "", Kind.KV, 1, 0, LAYOUT, 4))
    assert (error.code, error.field) == (ErrorCode.INCOMPATIBLE, "layout.groups")
    assert "--l1-size-gb larger" in error.message


def test_registrations_are_bounded(bench: Bench) -> None:
    for _ in range(MAX_INSTANCES):
        bench.service.register(m.Register("w", "m", "", Kind.KV, 1, 0, LAYOUT, 4))
    assert refusal(bench, m.Register("w", "m", "", Kind.KV, 1, 0, LAYOUT, 4)).code is ErrorCode.INCOMPATIBLE
    assert len(bench.instances) == MAX_INSTANCES


@pytest.mark.parametrize(
    "message",
    [
        m.Acquire(99, (prompt("a"),)),
        m.Release(99, (1,)),
        m.Reserve(99, (prompt("a"),)),
        m.Commit(99, (m.CommittedChunks(1),)),
        m.Abort(99, (1,)),
        m.End(99, (m.SessionId("r"),)),
        m.Write(99, 1, ()),
        m.Read(99, 1, ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_whoever_is_not_registered_is_told_to_register(bench: Bench, message: Any) -> None:
    error = refusal(bench, message)
    assert (error.code, error.field) == (ErrorCode.UNKNOWN_INSTANCE, "instance")
    assert "register again" in error.message


def test_a_ping_tells_whether_one_is_known_and_renews_leases(bench: Bench) -> None:
    me = bench.register()
    bench.store(me, "ab")
    lease = bench.acquire(me, "ab").lease
    assert bench.ask(m.Ping()) == m.PingReply(7, True, 0)
    assert bench.ask(m.Ping(99, (lease,))) == m.PingReply(7, False, 0)
    for _ in range(5):
        bench.tick(READ_TTL - 1)
        assert bench.ask(m.Ping(me, (lease, 99))) == m.PingReply(7, True, 1)
    bench.tick(READ_TTL)
    assert bench.ask(m.Ping(me, (lease,))).renewed == 0


def test_whoever_leaves_leaves_nothing(bench: Bench) -> None:
    me = bench.register()
    bench.store(me, "a")
    bench.acquire(me, "a")
    bench.reserve(me, "abc")
    assert [bench.ask(m.Unregister(me)).known for _ in range(2)] == [True, False]
    assert (len(bench.cache.reads), len(bench.cache.writes), len(bench.sessions), bench.cache.objects) == (0, 0, 0, 1)


# Reading and writing.


def test_what_is_written_as_frames_comes_back_as_frames(bench: Bench) -> None:
    me = bench.register()
    assert bench.store(me, "abc").sealed == (0, 1, 2)
    acquired = bench.acquire(me, "abcd")
    assert acquired.chunks == 3
    pieces = (m.Piece(2, 0, 0, PART), m.Piece(0, 0, 1, 3))
    reply, frames = bench.ask_frames(m.Read(me, acquired.lease, pieces))
    assert (reply.length, frames) == (PART + 3, [body("abc", 2), b"..."])
    assert (bench.service.traffic.bytes_written, bench.service.traffic.bytes_read) == (3 * PART, PART + 3)


def test_frames_that_wait_to_be_sent_are_not_changed_by_what_is_stored_meanwhile(bench: Bench) -> None:
    me = bench.register()
    bench.store(me, "a")
    _, (frame,) = bench.ask_frames(m.Read(me, bench.acquire(me, "a").lease, (m.Piece(0, 0, 0, PART),)))
    bench.memory[:] = bytes(len(bench.memory))
    assert bytes(frame) == body("a", 0)


def test_several_prompts_are_answered_in_their_order(bench: Bench) -> None:
    me = bench.register()
    bench.store(me, "ab")
    reply = bench.ask(m.Acquire(me, (prompt("x", "1"), prompt("ab", "2"), prompt("a", "3")), (0, 1, 0)))
    assert [(r.chunks, bool(r.lease), len(r.slots)) for r in reply.results] == [
        (0, False, 0),
        (2, True, 16),
        (1, True, 16),
    ]
    assert len(bench.sessions) == 4


def test_pieces_may_come_in_several_messages_in_their_order(bench: Bench) -> None:
    me = bench.register()
    reserved = bench.reserve(me, "a")
    for offset in (0, 16):
        piece = m.Piece(0, 0, offset, 16)
        bench.ask(m.Write(me, reserved.reservation, (piece,)), [body("a", 0)[offset : offset + 16]])
    assert bench.ask(m.Commit(me, (m.CommittedChunks(reserved.reservation),))).results[0].sealed == (0,)


@pytest.mark.parametrize(
    ("piece", "frame"),
    [
        (m.Piece(0, 0, 1, 4), b"abcd"),
        (m.Piece(0, 0, -1, 4), b"abcd"),
        (m.Piece(0, 0, 0, 5), b"abcd"),
        (m.Piece(0, 0, 0, -4), b"abcd"),
        (m.Piece(0, 0, 0, PART + 1), bytes(PART + 1)),
    ],
)
def test_a_piece_that_is_out_of_place_is_refused_and_writes_nothing(bench: Bench, piece: m.Piece, frame: bytes) -> None:
    me = bench.register()
    reserved = bench.reserve(me, "ab")
    error = refusal(bench, m.Write(me, reserved.reservation, (piece,)), [frame])
    assert (error.code, error.field) == (ErrorCode.INVALID, "pieces[0]")
    assert set(bench.memory) == {0xA5}


@pytest.mark.parametrize(
    "piece", [m.Piece(2, 0, 0, 4), m.Piece(-1, 0, 0, 4), m.Piece(0, 1, 0, 4), m.Piece(0, -1, 0, 4)]
)
def test_a_piece_of_nothing_is_refused(bench: Bench, piece: m.Piece) -> None:
    me = bench.register()
    reserved = bench.reserve(me, "ab")
    assert refusal(bench, m.Write(me, reserved.reservation, (piece,)), [b"abcd"]).code is ErrorCode.UNKNOWN_LEASE
    assert refusal(bench, m.Write(me, 999, (piece,)), [b"abcd"]).code is ErrorCode.UNKNOWN_LEASE
    bench.store(me, "xy")
    lease = bench.acquire(me, "xy").lease
    assert refusal(bench, m.Read(me, lease, (piece,))).code is ErrorCode.UNKNOWN_LEASE
    assert refusal(bench, m.Read(me, 999, (piece,))).code is ErrorCode.UNKNOWN_LEASE


@pytest.mark.parametrize(
    "pieces",
    [
        (m.Piece(0, 0, PART, 1),),
        (m.Piece(0, 0, -1, 2),),
        (m.Piece(0, 0, 5, -1),),
        (m.Piece(0, 0, 0, 2**62), m.Piece(0, 0, 0, -(2**62))),
        (m.Piece(0, 0, 0, PART),) * 5,
    ],
)
def test_a_read_outside_of_its_object_or_too_large_is_refused(bench: Bench, pieces: tuple[m.Piece, ...]) -> None:
    me = bench.register()
    bench.store(me, "a")
    lease = bench.acquire(me, "a").lease
    error = refusal(bench, m.Read(me, lease, pieces))
    assert error.code is ErrorCode.INVALID and error.field.startswith("pieces")


def test_frames_and_pieces_must_be_as_many(bench: Bench) -> None:
    me = bench.register()
    reserved = bench.reserve(me, "a")
    error = refusal(bench, m.Write(me, reserved.reservation, (m.Piece(0, 0, 0, 4),)))
    assert (error.field, error.message) == ("pieces", "1 pieces announced, 0 frames came")


def test_another_instance_can_neither_read_nor_write_under_ones_handles(bench: Bench) -> None:
    me, other = bench.register(), bench.register()
    bench.store(me, "a")
    lease, reserved = bench.acquire(me, "a").lease, bench.reserve(me, "ab")
    piece = m.Piece(0, 0, 0, 4)
    assert refusal(bench, m.Read(other, lease, (piece,))).code is ErrorCode.UNKNOWN_LEASE
    assert refusal(bench, m.Write(other, reserved.reservation, (piece,)), [b"abcd"]).code is ErrorCode.UNKNOWN_LEASE
    assert bench.ask(m.Release(other, (lease,))).released == 0
    assert bench.ask(m.Abort(other, (reserved.reservation,))).aborted == 0


def test_an_attempt_ends_once_with_what_it_holds(bench: Bench) -> None:
    me = bench.register()
    bench.store(me, "a", "one")
    bench.acquire(me, "a", "one")
    bench.reserve(me, "ab", "one")
    bench.acquire(me, "a", "two")
    assert [bench.ask(m.End(me, (m.SessionId("one"), m.SessionId("none")))).ended for _ in range(2)] == [1, 0]
    assert (len(bench.cache.reads), len(bench.cache.writes), len(bench.sessions)) == (1, 0, 1)


def test_a_question_without_a_lease_begins_no_session(bench: Bench) -> None:
    bench.acquire(bench.register(), "a", lease=False)
    assert len(bench.sessions) == 0


def test_the_events_of_ones_own_namespace_are_followed_until_one_leaves(bench: Bench) -> None:
    me, other = bench.register(), bench.register(model_name="other")
    bench.store(me, "a")
    bench.store(other, "xyz")
    first = bench.ask(m.Events(me))
    assert ([event.tokens[:1] for event in first.events], first.lost) == ([b"a"], True)
    bench.store(me, "ab")
    following = bench.ask(m.Events(me, first.cursor))
    assert ([event.tokens[:1] for event in following.events], following.lost) == ([b"b"], False)
    assert bench.cache.journal.followers == 1
    bench.ask(m.Unregister(me))
    assert bench.cache.journal.followers == 0
    assert refusal(bench, m.Events(me, following.cursor)).code is ErrorCode.UNKNOWN_INSTANCE


def test_clear_and_status_answer_anybody(bench: Bench) -> None:
    bench.store(bench.register(), "abc")
    assert bench.ask(m.Clear()) == m.ClearReply(3, 0)
    assert bench.ask(m.Status()) == m.StatusReply(b"{}")


# Refusals.


OPERATIONS = st.sampled_from([msgpack.packb(name) for name in m.OPERATIONS]) | st.binary(max_size=9)
FRAMES = st.lists(st.binary(max_size=20) | st.sampled_from([codec.encode(m.Hello()), b"\x80"]), max_size=3)


@settings(max_examples=300)
@given(st.lists(st.tuples(OPERATIONS, FRAMES), min_size=1, max_size=8))
def test_any_frames_get_one_reply_and_no_fault(messages: list[tuple[bytes, list[bytes]]]) -> None:
    bench = Bench()
    for operation, frames in messages:
        reply = bench.service.handle(operation, frames)
        assert isinstance(msgpack.unpackb(reply[0]), dict)
    assert bench.service.traffic.faults == 0
    assert bench.service.traffic.requests == len(messages)


@pytest.mark.parametrize(
    ("operation", "code", "words"),
    [
        (b"", ErrorCode.INVALID, "not one MessagePack value"),
        (b"\xc1", ErrorCode.INVALID, "not one MessagePack value"),
        (b"\x81\x91\x01\x01", ErrorCode.INVALID, "not one MessagePack value"),
        (msgpack.packb("v1/nothing"), ErrorCode.UNKNOWN_OPERATION, "known are v1/hello"),
        (msgpack.packb("x" * 10**6), ErrorCode.UNKNOWN_OPERATION, "known are"),
        (msgpack.packb(["v1/hello"] * 10**5), ErrorCode.UNKNOWN_OPERATION, "got list"),
        (msgpack.packb(1.5), ErrorCode.UNKNOWN_OPERATION, "got float"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_operation_that_is_none_is_refused(bench: Bench, operation: bytes, code: ErrorCode, words: str) -> None:
    (reply,) = bench.service.handle(operation, [b"\x80"])
    error = msgpack.unpackb(reply)["error"]
    assert (error["code"], error["field"]) == (code, "operation")
    assert words in error["message"] and len(error["message"]) < 400


def test_a_missing_message_and_frames_too_many_are_refused(bench: Bench) -> None:
    for frames, words in (([], "missing"), ([codec.encode(m.Hello()), b"", b""], "takes no raw frames, 2 came")):
        (reply,) = bench.service.handle(msgpack.packb("v1/hello"), frames)
        assert words in msgpack.unpackb(reply)["error"]["message"]
    assert (bench.service.traffic.requests, bench.service.traffic.refusals) == (2, 2)


def test_an_operation_is_known_however_its_name_is_written(bench: Bench) -> None:
    usual, longer = msgpack.packb("v1/ping"), b"\xd9\x07v1/ping"
    assert bench.service.speaks(usual) and not bench.service.speaks(msgpack.packb("v1/pong"))
    replies = {bytes(bench.service.handle(name, [codec.encode(m.Ping())])[0]) for name in (usual, longer)}
    assert replies == {codec.encode(m.PingReply(bench.hello.incarnation, True, 0))}


def test_a_fault_of_the_server_is_answered_counted_and_logged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench.cache, "clear", lambda: 1 // 0)
    error = refusal(bench, m.Clear())
    assert (error.code, bench.service.traffic.faults) == (ErrorCode.INTERNAL, 1)
    assert "ZeroDivisionError" in caplog.text
    assert bench.ask(m.Hello()) == bench.hello


def test_a_prompt_beyond_all_measure_is_refused_by_its_place() -> None:
    bench = Bench()
    me = bench.register()
    huge = m.Prompt(m.SessionId("huge"), bytes((1 << 20) * CHUNK * 4 + 4))
    for request in (m.Acquire(me, (prompt("a"), huge)), m.Reserve(me, (prompt("a"), huge))):
        assert refusal(bench, request).field == "prompts[1].tokens"


# Time.


def test_time_ends_leases_loses_reservations_and_forgets_sessions(bench: Bench) -> None:
    me = bench.register()
    bench.store(me, "a")
    bench.acquire(me, "a")
    bench.reserve(me, "ab", "w")
    bench.tick(WRITE_TTL)
    assert (len(bench.cache.reads), len(bench.cache.writes), len(bench.cache.lost)) == (0, 0, 1)
    bench.tick(SESSION_TTL - WRITE_TTL)
    assert len(bench.sessions) == 0


def test_an_idle_session_is_forgotten_without_freeing_what_is_being_written_or_read() -> None:
    bench = Bench()
    me = bench.register()
    bench.sessions.ttl = 1.0
    reserved = bench.reserve(me, "ab")
    bench.ask(m.Commit(me, (m.CommittedChunks(reserved.reservation),)))
    lease = bench.acquire(me, "ab").lease
    bench.reserve(me, "abc", "w")
    bench.tick(2.0)
    assert len(bench.sessions) == 0
    assert (len(bench.cache.writes), [held.handle for held in bench.cache.reads]) == (1, [lease])
    bench.tick(WRITE_TTL)
    assert bench.cache.quarantined_bytes == PART
    assert bench.ask(m.End(me, (m.SessionId("w"),))).ended == 0
    assert bench.cache.quarantined_bytes == 0


def test_an_instance_whose_process_ended_is_forgotten_at_once(bench: Bench) -> None:
    me, other = bench.register(process=PROCESS), bench.register()
    bench.reserve(me, "ab")
    bench.tick(gone=False)
    assert len(bench.instances) == 2
    bench.tick(gone=True)
    assert [instance.id for instance in bench.instances] == [other]
    assert (bench.cache.objects, len(bench.sessions)) == (0, 0)


def test_many_instances_of_one_process_cost_one_look_at_it(bench: Bench) -> None:
    looks: list[m.ProcessId] = []
    for _ in range(50):
        bench.register(process=PROCESS)
    bench.service.tick(lambda process: bool(looks.append(process)))
    assert looks == [PROCESS]


@pytest.mark.parametrize(("process", "gone"), [(None, None), (PROCESS, None)], ids=["unnamed", "out of sight"])
def test_a_silent_instance_that_cannot_be_seen_is_forgotten_with_all_it_holds(
    bench: Bench, process: m.ProcessId | None, gone: bool | None
) -> None:
    me = bench.register(process=process)
    bench.tick(REAP, gone)
    assert len(bench.instances) == 1
    bench.reserve(me, "ab")
    bench.now += REAP + 1
    bench.tick(0, gone)
    assert len(bench.instances) == 0
    assert bench.cache.objects == 0
    assert refusal(bench, m.Release(me, ())).code is ErrorCode.UNKNOWN_INSTANCE


def test_a_sign_of_life_keeps_an_instance(bench: Bench) -> None:
    me = bench.register()
    for _ in range(3):
        bench.tick(REAP)
        assert bench.ask(m.Ping(me)).known
    bench.tick(REAP + 1)
    assert not bench.ask(m.Ping(me)).known


def stopped_writer(bench: Bench) -> tuple[int, m.Reserved]:
    """An instance that was forgotten while its process lives, with a reservation."""
    me = bench.register(process=PROCESS)
    reserved = bench.reserve(me, "ab")
    bench.tick(REAP + 1, gone=False)
    assert (len(bench.instances), bench.cache.quarantined_bytes) == (0, 2 * PART)
    bench.tick(0, gone=False)
    return me, reserved


def test_what_a_stopped_process_was_writing_to_is_kept_from_others_until_the_process_ends(bench: Bench) -> None:
    stopped_writer(bench)
    assert len(bench.reserve(bench.register(), "12345678").chunks) == 6
    bench.tick(gone=True)
    assert bench.cache.quarantined_bytes == 0


@pytest.mark.parametrize("word", ["commit", "abort", "end", "unregister"])
def test_a_stopped_process_that_goes_on_may_answer_for_what_it_lost(bench: Bench, word: str) -> None:
    me, reserved = stopped_writer(bench)
    answers = {
        "commit": m.Commit(me, (m.CommittedChunks(reserved.reservation),)),
        "abort": m.Abort(me, (reserved.reservation,)),
        "end": m.End(me, (m.SessionId("r"),)),
        "unregister": m.Unregister(me),
    }
    reply = bench.ask(answers[word])
    if word == "commit":
        assert reply.results[0].state is m.CommitState.LOST
    assert bench.cache.quarantined_bytes == 0
    assert bench.acquire(bench.register(), "ab").chunks == 0
    assert refusal(bench, m.Reserve(me, ())).code is ErrorCode.UNKNOWN_INSTANCE
    bench.tick(gone=False)
    assert refusal(bench, answers["abort"]).code is ErrorCode.UNKNOWN_INSTANCE


def test_only_what_was_lost_is_remembered_of_a_forgotten_instance(bench: Bench) -> None:
    bench.register(process=PROCESS)
    bench.tick(REAP + 1, gone=False)
    assert bench.service._lingering == {}


def test_tenants_that_hold_nothing_leave_no_tree(bench: Bench) -> None:
    me = bench.register()
    for tenant in range(20):
        bench.ask(m.Reserve(me, (m.Prompt(m.SessionId("r"), b"", f"tenant {tenant}"),)))
    bench.tick()
    assert bench.cache.index._roots == {}


def test_room_is_made_ahead_of_demand(bench: Bench) -> None:
    bench.store(bench.register(), "abcdefgh")
    bench.tick()
    assert bench.cache.allocator.used == 4 * PART


# Questions.


def test_a_question_about_a_prompt_is_answered_by_length_and_reason() -> None:
    bench = Bench()
    instance = bench.register()
    bench.store(instance, "ab")
    assert bench.ask(m.Explain(instance, prompt("abc"))) == m.ExplainReply(2, m.Stop.END, (), ())
    other = bench.register(revision="2")
    assert [each.revision for each in bench.ask(m.Explain(other, prompt("abc"))).elsewhere] == [""]
    with pytest.raises(ProtocolError) as caught:
        bench.ask(m.Explain(5, prompt("a")))
    assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
