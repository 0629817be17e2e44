"""Typed messages <-> MessagePack maps.

A message is a frozen dataclass; its wire form is a map from field name to value. Decoding checks every type, refuses
unknown and missing fields, and names the path of what is wrong (`requests[2].tokens`); the path is put together while
the error climbs, so that nothing else pays for it. The decoder of a class is built once, from its annotations. How many
values one message may hold is limited, so that no sender can keep the receiver busy for long.

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
Decoder = Callable[[Any], Any]
_ABSENT = object()


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
    """The message of type `cls` whose wire map is `value`; raises ProtocolError(INVALID) as `decode` does, for fields
    under `path`.
    """
    try:
        return typing.cast(M, _decoder(typing.cast(Hashable, cls))(value))
    except ProtocolError as error:
        raise _within(path, error) from None


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
        return lambda value: None if value is None else some(value)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum_decoder(annotation)
    return _scalar_decoder(annotation)


def _scalar_decoder(kind: type) -> Decoder:
    if kind is float:
        return _decode_float

    def decode_scalar(value: Any) -> Any:
        if type(value) is not kind:
            raise _unexpected(kind.__name__, value)
        return value

    return decode_scalar


def _decode_float(value: Any) -> float:
    if type(value) not in (float, int):
        raise _unexpected("float", value)
    return float(value)


def _enum_decoder(kind: type[StrEnum]) -> Decoder:
    def decode_enum(value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise invalid("", f"expected one of {allowed}, got {_shown(value)}") from None

    return decode_enum


def _tuple_decoder(annotation: Any) -> Decoder:
    item = _decoder(annotation)
    plain = {annotation} if annotation in (int, str, bytes) else set()

    def decode_tuple(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _unexpected("array", value)
        if plain and plain.issuperset(map(type, value)):
            return tuple(value)
        decoded: list[Any] = []
        try:
            for element in value:
                decoded.append(item(element))
        except ProtocolError as error:
            raise _within(f"[{len(decoded)}]", error) from None
        return tuple(decoded)

    return decode_tuple


def _dict_decoder(key: Decoder, item: Decoder) -> Decoder:
    def decode_dict(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _unexpected("map", value)
        decoded = {}
        for name, element in value.items():
            known = key(name)
            try:
                decoded[known] = item(element)
            except ProtocolError as error:
                raise _within(f"[{name!r}]", error) from None
        return decoded

    return decode_dict


def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    defaults = {field.name: _default(field) for field in dataclasses.fields(cls)}
    fields = [(name, hints[name], _decoder(hints[name]), default) for name, default in defaults.items()]
    known = frozenset(defaults)
    required = {name for name, default in defaults.items() if default is None}

    def decode_dataclass(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _unexpected("map", value)
        if not known.issuperset(value):
            unknown = next(name for name in value if name not in known)
            raise invalid(_shown(unknown).strip("'"), f"unknown field; known are {', '.join(defaults)}")
        arguments = []
        name = ""
        try:
            for name, kind, decoder, default in fields:
                item = value.get(name, _ABSENT)
                if type(item) is not kind:
                    if item is not _ABSENT:
                        item = decoder(item)
                    elif default is not None:
                        item = default()
                    else:
                        name = ""
                        raise invalid(min(required - value.keys()), "missing")
                arguments.append(item)
        except ProtocolError as error:
            raise _within(name, error) from None
        return cls(*arguments)

    return decode_dataclass


def _default(field: "dataclasses.Field[Any]") -> Callable[[], Any] | None:
    """What makes the value of `field` where it is absent; None if it must not be."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None if field.default is dataclasses.MISSING else lambda: field.default


def _within(step: str, error: ProtocolError) -> ProtocolError:
    """The same error, of a field under `step`."""
    joint = "." if step and error.field and not error.field.startswith("[") else ""
    return ProtocolError(error.code, error.message, f"{step}{joint}{error.field}")


def _unexpected(expected: str, value: Any) -> ProtocolError:
    return invalid("", f"expected {expected}, got {type(value).__name__}")


def _shown(value: Any) -> str:
    """`value` as it may stand in an error: never longer than a line."""
    if isinstance(value, (str, bytes)):
        return repr(value[:40])
    return repr(value) if isinstance(value, (int, float)) or value is None else type(value).__name__
