"""Frames of LMCache's dialect, without a server behind them. The bytes of whole exchanges are in `test_compat_wire`."""

from typing import Any

import msgpack
import pytest

from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.numbered import FIXED, OPERATIONS, Key, Refusal, Registration, arguments, name_of, reply


def frame(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


KEY = {
    "model_name": "m", "world_size": 2, "worker_id": None, "token_ids": [1, 2, 3, 1 << 31], "start": 0, "end": 3,
    "request_id": "r",
}  # fmt: skip


def test_a_key_holds_the_tokens_before_its_end_and_defaults_for_the_rest() -> None:
    key, count = arguments(OPERATIONS["lookup"], [frame(KEY), frame(1)])
    assert key == Key("m", 2, None, 0, 3, "r", b"\x01\0\0\0\x02\0\0\0\x03\0\0\0", "", 0)
    assert count == 1
    (longer, _) = arguments(OPERATIONS["lookup"], [frame({**KEY, "end": 4}), frame(1)])
    assert longer.tokens == key.tokens + b"\0\0\0\x80"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"end": 5}, "key.end"),
        ({"end": -1}, "key.end"),
        ({"token_ids": b"\0\0\0\0"}, "key.end"),
        ({"token_ids": [1, -2, 3]}, "key.token_ids"),
        ({"token_ids": [1, 2.5, 3]}, "key.token_ids"),
        ({"token_ids": [1, 2, 1 << 32]}, "key.token_ids"),
        ({"world_size": True}, "key.world_size"),
        ({"cache_salt": None}, "key.cache_salt"),
        ({"request_id": 5}, "key.request_id"),
    ],
)
def test_a_bad_field_of_a_key_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        arguments(OPERATIONS["lookup"], [frame({**KEY, **change}), frame(1)])
    assert refused.value.field == named


@pytest.mark.parametrize("field", ["model_name", "world_size", "worker_id", "start", "request_id"])
def test_a_missing_field_of_a_key_is_named(field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        arguments(OPERATIONS["lookup"], [frame({name: v for name, v in KEY.items() if name != field}), frame(1)])


def test_a_registration_may_leave_its_slots_out_and_hold_more_than_is_known() -> None:
    fields = {
        "instance_id": 7, "model_name": "m", "world_size": 1, "block_size": 8, "num_layers": 2, "hidden_dim_size": 16,
        "dtype_str": "float16", "use_mla": True, "later": [],
    }  # fmt: skip
    (registration,) = arguments(OPERATIONS["register_kv_cache_engine_driven_context"], [frame(fields)])
    assert registration == Registration(7, "m", 1, 8, 2, 16, "float16", True, None)


def test_the_number_of_arguments_must_fit() -> None:
    with pytest.raises(ProtocolError, match="expected 1 arguments, got 0"):
        arguments(OPERATIONS["end_session"], [])


def test_names_of_numbers_names_and_neither() -> None:
    assert [name_of(frame(value)) for value in (8, "lookup", 11)] == ["lookup", "lookup", "operation 11"]
    assert [name_of(frame(value)) for value in ("v1/hello", True, 8.0, None)] == [None] * 4
    assert name_of(b"\xc1") is None


def test_an_answer_of_none_has_no_frame_and_a_refusal_takes_the_operations_place() -> None:
    assert reply(b"\x08", None) == [b"\x08"]
    assert reply(b"\x08", 0) == [b"\x08", b"\x00"]
    assert reply(b"\x08", Refusal("why")) == [frame("refused: why")]


def test_no_operation_is_spoken_and_fixed_and_no_number_is_given_twice() -> None:
    assert not OPERATIONS.keys() & FIXED.keys()
    numbers = [operation.number for operation in OPERATIONS.values()]
    numbers += [number for number, _ in FIXED.values() if number is not None]
    assert len(numbers) == len(set(numbers))
