"""Typed messages <-> MessagePack maps.

A message is a frozen dataclass; its wire form is a map from field name to value. Decoding checks every type, refuses
unknown and missing fields, and names the path of the first thing that is wrong (`requests[2].tokens`). The decoder of a
class is built once, from its annotations, so that a message costs one call per field. How many values one message may
hold is limited, so that no sender can keep the receiver busy for long.

    int, float, bool, str, bytes    as they are (an int is accepted for a float, a bool never for an int)
    StrEnum                         its value
    tuple[T, ...]                   array
    dict[K, V]                      map
    T | None                        T or nil
    dataclass                       map
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Hashable
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

import msgpack

from lmcache_server.protocol.errors import ProtocolError, invalid

__all__ = ["MAX_ARRAY", "MAX_VALUES", "decode", "encode", "from_map", "to_map", "unpack"]

MAX_ARRAY = 1 << 17
"""Values of one array or map of a message; tokens and slots are bytes and do not count."""
MAX_VALUES = 1 << 20
"""Values of all arrays and maps of a message together."""

_PLAIN = frozenset({int, bytes, str, float, bool, type(None)})
"""What goes on the wire as it is."""

M = TypeVar("M")
Decoder = Callable[[Any, str], Any]


def encode(message: Any) -> bytes:
    """The wire form of `message`, a dataclass instance."""
    return typing.cast(bytes, msgpack.packb(to_map(message)))


def decode(cls: type[M], data: bytes | memoryview) -> M:
    """The message of type `cls` in `data`; raises ProtocolError(INVALID) naming the field that does not fit."""
    return from_map(cls, unpack(data))


def unpack(data: bytes | memoryview, *, longest: int = MAX_ARRAY, most: int = MAX_VALUES) -> Any:
    """The one MessagePack value in `data`; raises ProtocolError(INVALID) if it is none, or has too many values."""
    room = most

    def count(values: Any) -> Any:
        nonlocal room
        room -= len(values)
        if room < 0:
            raise ValueError(f"it holds more than {most} values")
        return values

    longest = min(longest, len(data))
    # Each value takes a byte at least: a message of no more bytes than values that it may hold need not be counted.
    hook = count if len(data) > most else None
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, list_hook=hook, object_hook=hook, max_array_len=longest, max_map_len=longest
        )
    # A map whose key is an array or a map is a TypeError of the decoder.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise invalid("", f"the payload is not one MessagePack value that can be a message ({reason})") from error


def from_map(cls: type[M], value: Any, path: str = "") -> M:
    """The message of type `cls` whose wire map is `value`; raises ProtocolError(INVALID) as `decode` does."""
    return typing.cast(M, _decoder(typing.cast(Hashable, cls))(value, path))


def to_map(value: Any) -> Any:
    """`value` with every dataclass in it turned into the map that goes on the wire."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, StrEnum):
        return value
    if kind is tuple or kind is list:
        return [item if type(item) in _PLAIN else to_map(item) for item in value]
    if kind is dict:
        return {key: item if type(item) in _PLAIN else to_map(item) for key, item in value.items()}
    fields = {}
    for name in _field_names(typing.cast(Hashable, kind)):
        item = getattr(value, name)
        fields[name] = item if type(item) in _PLAIN else to_map(item)
    return fields


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def _decoder(annotation: Any) -> Decoder:
    if dataclasses.is_dataclass(annotation):
        return _dataclass_decoder(typing.cast(type, annotation))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return _tuple_decoder(arguments[0])
    if origin is dict:
        return _dict_decoder(_decoder(arguments[0]), _decoder(arguments[1]))
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        some = _decoder(inner)
        return lambda value, path: None if value is None else some(value, path)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum_decoder(annotation)
    return _scalar_decoder(annotation)


def _scalar_decoder(kind: type) -> Decoder:
    if kind is float:
        return _decode_float

    def decode_scalar(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise invalid(path, f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return decode_scalar


def _decode_float(value: Any, path: str) -> float:
    if type(value) not in (float, int):
        raise invalid(path, f"expected float, got {type(value).__name__}")
    return float(value)


def _enum_decoder(kind: type[StrEnum]) -> Decoder:
    def decode_enum(value: Any, path: str) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise invalid(path, f"expected one of {allowed}, got {_shown(value)}") from None

    return decode_enum


def _tuple_decoder(annotation: Any) -> Decoder:
    item = _decoder(annotation)
    plain = {annotation} if annotation in (int, str, bytes) else set()

    def decode_tuple(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise invalid(path, f"expected array, got {type(value).__name__}")
        if plain and plain.issuperset(map(type, value)):
            return tuple(value)
        return tuple([item(element, f"{path}[{i}]") for i, element in enumerate(value)])

    return decode_tuple


def _dict_decoder(key: Decoder, item: Decoder) -> Decoder:
    def decode_dict(value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise invalid(path, f"expected map, got {type(value).__name__}")
        return {key(name, path): item(element, f"{path}[{name!r}]") for name, element in value.items()}

    return decode_dict


def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    decoders = {field.name: (hints[field.name], _decoder(hints[field.name])) for field in dataclasses.fields(cls)}
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def decode_dataclass(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise invalid(path, f"expected map, got {type(value).__name__}")
        prefix = f"{path}." if path else ""
        arguments = {}
        for name, item in value.items():
            known = decoders.get(name)
            if known is None:
                raise invalid(prefix + _shown(name).strip("'"), f"unknown field; known are {', '.join(decoders)}")
            kind, decoder = known
            arguments[name] = item if type(item) is kind else decoder(item, prefix + name)
        if not required <= arguments.keys():
            raise invalid(f"{prefix}{min(required - arguments.keys())}", "missing")
        try:
            return cls(**arguments)
        except ProtocolError as error:
            raise ProtocolError(error.code, error.message, prefix + error.field) from None

    return decode_dataclass


def _shown(value: Any) -> str:
    """`value` as it may stand in an error: never longer than a line."""
    if isinstance(value, (str, bytes)):
        return repr(value[:40])
    return repr(value) if isinstance(value, (int, float)) or value is None else type(value).__name__
