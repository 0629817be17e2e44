"""The other dialect: what clients of LMCache 0.5.6 say. What it means is `compat`'s business, and nobody else's.

    request     uid | operation (number or name) | one frame per argument, by position
    reply       uid | operation                  | result; its frame is left out when the result is None

There is no error in this dialect. What cannot be done has a soft failure that the client takes for an expected outcome;
where it knows none, the reason goes into the operation's place: the client compares that with what it asked for and
raises an error that shows it, at once instead of after its time-out.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import msgspec

from lmcache_server.protocol import codec
from lmcache_server.protocol.errors import ProtocolError, invalid

__all__ = [
    "FIXED",
    "MISS",
    "OPERATIONS",
    "Key",
    "Operation",
    "Refusal",
    "Registration",
    "arguments",
    "name_of",
    "reply",
]

Buffer = bytes | memoryview

MAX_TOKENS = 1 << 21
"""Values of one frame: tokens come as a list here."""


class Key(msgspec.Struct, frozen=True, gc=False):
    """What every keyed operation sends; `tokens` are those before `end` (uint32), for what lies behind cannot matter.
    Fields that are not known are ignored, as their own server does.

    `worker_id` is nil for all shards; tokens travel as a list named `token_ids`.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    start: int
    end: int
    request_id: str
    tokens: bytes
    cache_salt: str = ""
    num_kv_readers: int = 0


class Registration(msgspec.Struct, frozen=True, gc=False):
    """An engine's worker, or an SDK; `use_mla` really says that there is one plane. Other fields are ignored."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int | None = None


class Refusal(str):
    """An answer that the client raises as an error: why not, and what to do instead."""

    __slots__ = ()


RAISED = Refusal()
"""The failure of an operation whose client knows no soft one."""

MISS: dict[str, Any] = {"success": False, "data": b"", "context": {}}


@dataclass(frozen=True, slots=True)
class Operation:
    """Its number, the types of its arguments by name (Any: not looked at), and its answer when it cannot be done."""

    number: int
    arguments: dict[str, Any] = field(default_factory=dict)
    failure: Any = None


_KEYED = {"key": Key, "instance_id": int}

OPERATIONS = {
    "lookup": Operation(8, {"key": Key, "tp_size": Any}),
    "query_prefetch_status": Operation(9, {"request_id": str}, 0),
    "wait_prefetch_status": Operation(10, {"request_id": str, "timeout": Any}, 0),
    "free_lookup_locks": Operation(12, {"key": Key, "tp_size": Any}),
    "end_session": Operation(13, {"request_id": str}),
    "register_kv_cache_engine_driven_context": Operation(14, {"registration": Registration}, RAISED),
    "unregister_kv_cache_engine_driven_context": Operation(15, {"instance_id": int}),
    "prepare_store": Operation(16, _KEYED, {"context": {"slots": [], "chunk_indices": []}}),
    "commit_store": Operation(17, {**_KEYED, "cpu_data": bytes}, False),
    "prepare_retrieve": Operation(18, _KEYED, MISS),
    "commit_retrieve": Operation(19, _KEYED, False),
    "clear": Operation(20, {"force": Any}, RAISED),
    "get_chunk_size": Operation(21, {}, RAISED),
    "ping": Operation(22, {"instance_id": int | None}, True),
}
"""What is spoken, by name."""


def _fixed(answer: Any, **numbers: int | None) -> dict[str, tuple[int | None, Any]]:
    return {name: (number, answer) for name, number in numbers.items()}


# fmt: off
FIXED = {
    **_fixed("OK", noop=24),
    **_fixed([], get_experimental=32),
    **_fixed(None, report_block_allocation=23, subscribe_kv_events=None, unregister_kv_cache=2, unregister_q_cache=4),
    **_fixed([b"", False], store_q=5, store=6, retrieve=7),
    **_fixed(Refusal("the server copies nothing out of engines; set lmcache.mp.mp_transfer_mode to engine_driven"),
             register_kv_cache=1),
    **_fixed(Refusal("query tensors are stored by this project's own connector; use it instead of LMCache's"),
             register_q_cache=3),
    **_fixed(Refusal("blend is not part of this server; start the engine without it"),
             cb_register_rope=25, cb_unregister_rope=26, cb_retrieve_pre_computed=27, cb_unified_lookup=28,
             cb_protocol_handshake=33, cb_reorder_plan=None),
    **_fixed(Refusal("servers do not talk to each other here"),
             p2p_lookup_and_lock=29, p2p_query_lookup_results=30, p2p_unlock_objects=31),
    **_fixed(Refusal("this server loads no modules"), server_module_call=None),
}
# fmt: on
"""Operations with one answer, whatever is sent: number (None: it has only a name) and answer. There are no optional
features, and a stream of events ends at once.
"""

_NAMES = {number: name for name, (number, _) in FIXED.items() if number is not None}
_NAMES |= {operation.number: name for name, operation in OPERATIONS.items()}


def name_of(operation: Buffer) -> str | None:
    """The name of an operation of this dialect, numbers that nobody has given included; None if it is of another."""
    try:
        value = codec.unpack(operation)
    except ProtocolError:
        return None
    if type(value) is int:
        return _NAMES.get(value, f"operation {value}")
    return value if isinstance(value, str) and (value in OPERATIONS or value in FIXED) else None


def arguments(operation: Operation, frames: Sequence[Buffer]) -> list[Any]:
    """The values of `frames`, each of its type; raises ProtocolError naming the first that is not."""
    kinds = operation.arguments
    if len(frames) != len(kinds):
        raise invalid("", f"expected {len(kinds)} arguments, got {len(frames)}")
    values = [codec.unpack(frame, most=MAX_TOKENS) for frame in frames]
    return [_argument(name, kind, value) for (name, kind), value in zip(kinds.items(), values, strict=True)]


def reply(operation: Buffer, answer: Any) -> list[Buffer]:
    """The frames of an answer, from the operation's on."""
    if isinstance(answer, Refusal):
        return [msgpack.packb(f"refused: {answer}")]
    return [operation] if answer is None else [operation, msgpack.packb(answer)]


def _argument(name: str, kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    if kind is Key:
        if not isinstance(value, dict):
            raise invalid(name, f"expected a map, got {type(value).__name__}")
        value["tokens"] = _packed(value.get("token_ids"), value.get("end"))
    return codec.from_map(kind, value, name)


def _packed(tokens: Any, end: Any) -> bytes:
    """The first `end` tokens as uint32 bytes."""
    if not isinstance(tokens, list) or type(end) is not int or not 0 <= end <= len(tokens):
        raise invalid("key.end", "expected at most the number of token_ids")
    try:
        return struct.pack(f"<{end}I", *tokens[:end])
    except struct.error as error:
        raise invalid("key.token_ids", f"expected uint32 numbers ({error})") from error
