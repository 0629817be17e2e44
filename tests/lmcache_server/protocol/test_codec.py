"""Typed messages come back as they were, and whatever does not fit is refused by name."""

import types
import typing
from enum import StrEnum

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_server.protocol.codec import MAX_ARRAY, MAX_VALUES, Message, decode, encode, from_map, to_map, unpack
from lmcache_server.protocol.errors import ErrorCode, ProtocolError
from lmcache_server.protocol.events import MAX_EVENTS, Events
from lmcache_server.protocol.layout import ITEM_BYTES, CacheLayout, KernelGroup, Kind
from lmcache_server.protocol.messages import (
    OPERATIONS,
    Acquire,
    AcquireReply,
    Commit,
    CommitReply,
    CommitState,
    Committed,
    HelloReply,
    Ping,
    Prompt,
    Refusal,
    Register,
    Reserve,
    Reserved,
    ReserveReply,
    SessionId,
    Write,
)

INT64 = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(max_size=12)
GROUPS = st.builds(
    KernelGroup,
    layers=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(tuple),
    planes=st.just(1),
    heads=st.integers(1, 1 << 20),
    head_size=st.integers(1, 1 << 20),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    window=st.integers(0, 2**63),
)
CHECKED = {
    KernelGroup: GROUPS,
    CacheLayout: st.builds(CacheLayout, st.lists(GROUPS, min_size=1, max_size=3).map(tuple), TEXT),
    Prompt: st.builds(
        Prompt,
        st.builds(SessionId, TEXT, INT64),
        st.binary(max_size=8).map(lambda half: half * 4),
        st.text("abc-_é", max_size=8),
        st.dictionaries(st.integers(0, 2**40), st.binary(max_size=8), max_size=3),
    ),
    Register: st.builds(
        Register,
        st.text(min_size=1, max_size=9),
        st.text(min_size=1, max_size=9),
        TEXT,
        st.sampled_from(Kind),
        st.just(3),
        st.one_of(st.none(), st.integers(0, 2)),
        st.builds(CacheLayout, st.lists(GROUPS, min_size=1, max_size=3).map(tuple)),
        st.integers(1, 4096),
    ),
    Reserve: st.builds(
        lambda prompt, first: Reserve(7, (prompt,), (first,)),
        st.deferred(lambda: CHECKED[Prompt]),
        st.integers(0, 9),
    ),
    Acquire: st.builds(
        lambda prompt, first: Acquire(7, (prompt,), (first,)),
        st.deferred(lambda: CHECKED[Prompt]),
        st.integers(0, 9),
    ),
    Events: st.builds(Events, INT64, st.none() | INT64, st.integers(1, MAX_EVENTS)),
}
"""How to build what checks its own fields; every other message is built from its annotations."""


def strategy(annotation: typing.Any) -> st.SearchStrategy[typing.Any]:
    if annotation in CHECKED:
        return CHECKED[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return st.none() | strategy(inner)
    if isinstance(annotation, type) and issubclass(annotation, Message):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{name: strategy(hint) for name, hint in hints.items()})
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return st.sampled_from(annotation)
    scalars: dict[typing.Any, st.SearchStrategy[typing.Any]] = {
        int: INT64,
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: TEXT,
        bytes: st.binary(max_size=12),
    }
    return scalars[annotation]


MESSAGES = [cls for pair in OPERATIONS.values() for cls in pair] + [Refusal]
VALUES = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | TEXT | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT | INT64 | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_comes_back_as_it_was_sent(cls: type, data: st.DataObject) -> None:
    message = data.draw(strategy(cls))
    assert decode(cls, encode(message)) == message
    assert decode(cls, memoryview(encode(message))) == message
    assert from_map(cls, to_map(message)) == message


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.binary(max_size=64))
def test_random_bytes_raise_nothing_but_a_protocol_error(cls: type, data: bytes) -> None:
    try:
        decode(cls, data)
    except ProtocolError as error:
        assert error.code is ErrorCode.INVALID


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), VALUES)
def test_random_values_raise_nothing_but_a_protocol_error(cls: type, value: object) -> None:
    try:
        decode(cls, msgpack.packb(value))
    except ProtocolError as error:
        assert error.code is ErrorCode.INVALID


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_one_random_field_raises_nothing_but_a_protocol_error_that_names_it(cls: type, data: st.DataObject) -> None:
    good = to_map(data.draw(strategy(cls)))
    if not good:
        return
    name = data.draw(st.sampled_from(sorted(good)))
    try:
        decode(cls, msgpack.packb(good | {name: data.draw(VALUES)}))
    except ProtocolError as error:
        assert error.field
        if cls not in CHECKED:
            assert error.field.partition(".")[0].partition("[")[0] == name


PROMPT = {"session": {"request_id": "r"}, "tokens": b"abcd"}
GROUP = {"layers": [0], "planes": 2, "heads": 1, "head_size": 8, "dtype": "float32"}
REGISTER = {
    "role": "worker", "model_name": "m", "revision": "", "kind": "kv", "world_size": 1, "worker_id": 0,
    "layout": {"groups": [GROUP]}, "block_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "wire", "field", "words"),
    [
        (Reserve, {"instance": 1, "prompts": [PROMPT, PROMPT, PROMPT | {"tokens": 7}]}, "prompts[2].tokens", "bytes"),
        (Reserve, {"instance": 1, "prompts": [PROMPT | {"tokens": b"abc"}]}, "prompts[0].tokens", "multiple of 4"),
        (Reserve, {"instance": 1, "prompts": [PROMPT | {"salt": "a/b"}]}, "prompts[0].salt", "without @"),
        (Reserve, {"instance": 1, "prompts": [PROMPT | {"session": {}}]}, "prompts[0].session.request_id", "missing"),
        (Reserve, {"instance": 1, "prompts": [PROMPT | {"extras": {"a": b""}}]}, "prompts[0].extras", "int"),
        (Reserve, {"instance": 1, "prompts": [PROMPT | {"extras": {4: 4}}]}, "prompts[0].extras[...]", "bytes"),
        (Reserve, {"instance": True, "prompts": []}, "instance", "expected int, got bool"),
        (Reserve, {"instance": 1.0, "prompts": []}, "instance", "expected int, got float"),
        (Reserve, {"instance": 1, "prompts": {}}, "prompts", "expected array, got object"),
        (Reserve, {"instance": 1, "prompts": [], "more": 1}, "more", "unknown field; known are instance, prompts"),
        (Reserve, {"instance": 1, "prompts": [], 7: 1}, "", "expected str, got int as a key"),
        (Reserve, {"prompts": []}, "instance", "missing"),
        (Reserve, [], "", "expected object, got array"),
        (Ping, {"renew": [1, 2, "3"]}, "renew[2]", "expected int, got str"),
        (Commit, {"instance": 1, "commits": [{"reservation": 1, "filled": [0, None]}]}, "commits[0].filled[1]", "int"),
        (Write, {"instance": 1, "reservation": 1, "pieces": [{"chunk": 0}]}, "pieces[0].part", "missing"),
        (Register, REGISTER | {"kind": "x"}, "kind", "expected one of kv, query, got 'x'"),
        (Register, REGISTER | {"kind": []}, "kind", "expected str, got array"),
        (Register, REGISTER | {"layout": {"groups": [GROUP | {"layers": []}]}}, "layout.groups[0].layers", "1 to"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_path_of_the_first_bad_field(cls: type, wire: object, field: str, words: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(cls, msgpack.packb(wire))
    assert (raised.value.code, raised.value.field) == (ErrorCode.INVALID, field)
    assert words in raised.value.message


def test_an_integer_is_taken_for_a_float_and_a_default_for_what_is_missing() -> None:
    reply = {name: 1 for name, kind in typing.get_type_hints(HelloReply).items() if kind in (int, float)}
    words = {"version": "1", "server_id": "s", "hash_algorithm": "h", "transport": "shm", "shm_name": "n"}
    assert decode(HelloReply, msgpack.packb(reply | words)).reap_seconds == 1.0
    assert decode(Ping, msgpack.packb({})) == Ping(None, ())


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="a byte that MessagePack never uses"),
        pytest.param(b"\x81\xa1", id="cut off"),
        pytest.param(b"\x80\x80", id="two values"),
        pytest.param(b"\xa2\xff\xff", id="a string that is not UTF-8"),
        pytest.param(b"\x81\x91\x01\x02", id="an array as a key"),
        pytest.param(b"\x91" * 5000 + b"\xc0", id="deeply nested"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array that claims four billion values"),
        pytest.param(b"\xc7\x05\xff\x00\x00\x00\x00\x00", id="a timestamp of a wrong size"),
    ],
)
def test_what_is_not_one_value_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError, match="not one MessagePack value"):
        unpack(wire)


def test_a_message_with_too_many_values_is_refused_before_it_is_decoded() -> None:
    longest = MAX_ARRAY * [1]
    assert len(decode(Ping, msgpack.packb({"renew": longest})).renew) == MAX_ARRAY
    with pytest.raises(ProtocolError, match=f"renew: expected array of length <= {MAX_ARRAY}"):
        decode(Ping, msgpack.packb({"renew": [*longest, 1]}))
    arrays = MAX_VALUES // MAX_ARRAY + 1
    commits = [{"reservation": 1, "filled": longest}] * arrays
    with pytest.raises(ProtocolError, match=f"more than {MAX_VALUES} values"):
        decode(Commit, msgpack.packb({"instance": 1, "commits": commits}))
    assert len(decode(Commit, msgpack.packb({"instance": 1, "commits": commits[2:]})).commits) == arrays - 2
    for values in ([longest] * arrays, [[{}] * MAX_ARRAY] * arrays):
        with pytest.raises(ProtocolError, match=f"more than {MAX_VALUES} values"):
            unpack(msgpack.packb(values))
    assert len(unpack(msgpack.packb([longest] * arrays), most=1 << 30)) == arrays


def containers(kind: typing.Any) -> typing.Iterator[typing.Any]:
    """The arrays and maps that a field of type `kind` may hold, at any depth, as they are annotated."""
    if isinstance(kind, type) and issubclass(kind, Message):
        for inner in typing.get_type_hints(kind, include_extras=True).values():
            yield from containers(inner)
        return
    limited = typing.get_origin(kind) is typing.Annotated
    bare = typing.get_args(kind)[0] if limited else kind
    if typing.get_origin(bare) in (tuple, dict):
        yield kind
    for inner in typing.get_args(bare):
        yield from containers(inner)


@pytest.mark.parametrize("request_type", [request for request, _ in OPERATIONS.values()], ids=lambda cls: cls.__name__)
def test_nothing_that_a_server_is_sent_holds_an_array_or_a_map_without_a_limit(request_type: type[Message]) -> None:
    for kind in containers(request_type):
        assert typing.get_origin(kind) is typing.Annotated, f"{request_type.__name__}: {kind}"
        assert kind.__metadata__[0].max_length == MAX_ARRAY


def test_a_map_with_too_many_values_is_refused() -> None:
    prompt = {"session": {"request_id": "r"}, "tokens": b"", "extras": dict.fromkeys(range(MAX_ARRAY + 1), b"")}
    with pytest.raises(ProtocolError, match=rf"prompts\[0\].extras: expected object of length <= {MAX_ARRAY}"):
        decode(Acquire, msgpack.packb({"instance": 1, "prompts": [prompt]}))


def test_a_reply_is_as_long_as_it_has_to_be() -> None:
    chunks = tuple(range(MAX_VALUES + 1))
    reply = ReserveReply((Reserved(1, chunks, b"", 0, 0, 0),))
    assert decode(ReserveReply, encode(reply), counted=False) == reply
    committed = CommitReply((Committed(CommitState.PARTIAL, chunks, chunks),))
    assert decode(CommitReply, encode(committed), counted=False) == committed


def test_tokens_are_no_values_and_a_long_prompt_is_a_message() -> None:
    prompt = Prompt(SessionId("r"), bytes(4 * MAX_VALUES))
    assert decode(Acquire, encode(Acquire(1, (prompt, prompt), lease=False))).prompts == (prompt, prompt)


@pytest.mark.parametrize("huge", ["x" * 10**6, b"x" * 10**6], ids=["str", "bytes"])
def test_a_refusal_stays_short_whatever_was_sent(huge: object) -> None:
    for wire in ({huge: 1}, REGISTER | {"kind": huge}, REGISTER | {huge: 1}):
        with pytest.raises(ProtocolError) as raised:
            decode(Register, msgpack.packb(wire))
        assert len(str(raised.value)) < 400


def test_the_replies_of_the_three_outcomes_survive_the_wire() -> None:
    for wire in ({"results": []}, {"results": [{"state": "lost", "sealed": [], "rejected": [1]}]}):
        assert to_map(decode(CommitReply, msgpack.packb(wire))) == wire
    assert decode(AcquireReply, msgpack.packb({"results": [{"chunks": 1}]})).results[0].slots == b""
