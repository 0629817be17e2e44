"""The table of operations, and the checks that messages make of themselves."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.protocol import messages as m
from lmcache_server.protocol.codec import Message
from lmcache_server.protocol.errors import ErrorCode, ProtocolError

PROMPT = m.Prompt(m.SessionId("r"), bytes(8))


def test_every_operation_has_a_request_and_a_reply_of_its_own() -> None:
    classes = [cls for pair in m.OPERATIONS.values() for cls in pair]
    assert len(set(classes)) == len(classes) == 32
    assert all(name == "v1/" + request.__name__.lower() for name, (request, _) in m.OPERATIONS.items())
    assert all(reply.__name__ == request.__name__ + "Reply" for request, reply in m.OPERATIONS.values())


def test_messages_are_frozen_and_listed() -> None:
    classes = [value for value in vars(m).values() if isinstance(value, type) and issubclass(value, Message)]
    assert {cls.__name__ for cls in classes if cls is not Message} <= set(m.__all__)
    for cls in classes:
        assert cls.__struct_config__.frozen and cls.__struct_config__.forbid_unknown_fields, cls.__name__


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": bytes(7)}, "tokens"),
        ({"salt": "x" * 129}, "salt"),
        ({"salt": "a@b"}, "salt"),
        ({"salt": "a/b"}, "salt"),
        ({"salt": "a\\b"}, "salt"),
        ({"salt": "a\0b"}, "salt"),
        ({"extras": {-1: b""}}, "extras"),
        ({"extras": {0: bytes(2**16 + 1)}}, "extras"),
    ],
)
def test_an_impossible_prompt_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        msgspec.structs.replace(PROMPT, **change)
    assert (raised.value.code, raised.value.field) == (ErrorCode.INVALID, field)


def test_a_salt_may_be_any_other_text() -> None:
    for salt in ("", "tenant-1", "ünïcode", "x" * 128, " "):
        m.check_salt(salt)


def test_the_id_of_a_request_is_at_most_4096_characters() -> None:
    m.SessionId("x" * 4096)
    with pytest.raises(ProtocolError, match="request_id"):
        m.SessionId("x" * 4097)


def test_first_goes_with_the_prompts_one_by_one() -> None:
    for first in ((1, 2), (-1,)):
        with pytest.raises(ProtocolError, match="first"):
            m.Acquire(1, (PROMPT,), first)
    assert m.Acquire(1, (PROMPT,)).first == ()


def test_two_prompts_of_one_session_cannot_both_be_leased() -> None:
    with pytest.raises(ProtocolError, match="a session of its own"):
        m.Acquire(1, (PROMPT, PROMPT))
    assert len(m.Acquire(1, (PROMPT, PROMPT), lease=False).prompts) == 2
    assert len(m.Reserve(1, (PROMPT, PROMPT)).prompts) == 2


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=8))
def test_slots_come_back_as_they_were_packed(slots: list[tuple[int, int]]) -> None:
    packed = b"".join(m.pack_slot(*slot) for slot in slots)
    assert len(packed) == 16 * len(slots)
    assert m.unpack_slots(packed) == [m.SlotRef(*slot) for slot in slots]


def test_slots_travel_as_little_endian_pairs() -> None:
    assert m.pack_slot(4096, 1) == struct.pack("<QQ", 4096, 1)
    with pytest.raises(ProtocolError, match="multiple of 16"):
        m.unpack_slots(bytes(17))


def test_a_refusal_is_raised_as_what_it_says() -> None:
    error = m.Refusal(ErrorCode.INVALID, "expected an int", "port").raised()
    assert (error.code, error.message, error.field) == (ErrorCode.INVALID, "expected an int", "port")
