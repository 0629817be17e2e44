"""Typed messages <-> MessagePack maps.

A message is a frozen `Message`; its wire form is a map from field name to value. msgspec does the work, in compiled
code: it checks every type, refuses unknown and missing fields, and knows the path of what is wrong. How many values one
message may hold is limited, so that no sender can keep the receiver busy for long.

    int, float, bool, str, bytes    as they are (an int is accepted for a float, a bool never for an int)
    StrEnum                         its value
    Many[T], tuple[T, ...]          array; Many is limited, for what a server is sent
    Extras                          map, limited too
    T | None                        T or nil
    Message                         map
"""

import re
import typing
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar

import msgpack
import msgspec

from lmcache_server.protocol.errors import ProtocolError, invalid

__all__ = ["MAX_ARRAY", "MAX_VALUES", "Extras", "Many", "Message", "decode", "encode", "from_map", "to_map", "unpack"]

MAX_ARRAY = 1 << 17
"""Values of one array of a message; tokens and slots are bytes and do not count."""
MAX_VALUES = 1 << 20
"""Values of all arrays and maps of a message together."""

M = TypeVar("M")
T = TypeVar("T")

Many = typing.Annotated[tuple[T, ...], msgspec.Meta(max_length=MAX_ARRAY)]
"""An array of a message: `Many[int]` is a tuple of integers."""
Extras = typing.Annotated[dict[int, bytes], msgspec.Meta(max_length=MAX_ARRAY)]
"""A map of a message."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What travels, or a part of it. It refers to nothing that could refer back, so no garbage collector looks at it.

    A `__post_init__` that raises ProtocolError names the field below its own.
    """


def encode(message: Message) -> bytes:
    """The wire form of `message`."""
    return _ENCODER.encode(message)


def decode(cls: type[M], data: bytes | memoryview, *, counted: bool = True) -> M:
    """The message of type `cls` in `data`; raises ProtocolError(INVALID) naming the field that does not fit.

    `counted` is false for what one asked for: a reply is as long as it has to be.
    """
    if counted and len(data) > MAX_VALUES:
        unpack(data)  # counts its values: each takes a byte at least, so that a shorter one need not be counted
    try:
        return typing.cast(M, _decoder(typing.cast(Hashable, cls)).decode(data))
    except msgspec.ValidationError as error:
        raise _refusal(cls, error, "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_value(error) from error


def unpack(data: bytes | memoryview, *, most: int = MAX_VALUES) -> Any:
    """The one MessagePack value in `data`; raises ProtocolError(INVALID) if it is none, or has too many values."""
    room = most

    def count(values: Any) -> Any:
        nonlocal room
        room -= len(values)
        if room < 0:
            raise ValueError(f"it holds more than {most} values")
        return values

    longest = min(most, len(data))
    hook = count if len(data) > most else None
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, list_hook=hook, object_hook=hook, max_array_len=longest, max_map_len=longest
        )
    # A map whose key is an array or a map is a TypeError of the decoder.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise _no_value(error) from error


def from_map(cls: type[M], value: Any, path: str = "") -> M:
    """The message of type `cls` whose wire map is `value`; raises ProtocolError(INVALID) as `decode` does, for fields
    under `path`.
    """
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise _refusal(cls, error, path) from None


def to_map(message: Message) -> Any:
    """The map that `message` is on the wire."""
    return unpack(encode(message))


_ENCODER = msgspec.msgpack.Encoder()


@cache
def _decoder(cls: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(cls)


_MISSING, _UNKNOWN = "Object missing required field ", "Object contains unknown field "
_VALUE = "Invalid enum value "


def _refusal(cls: Any, error: msgspec.ValidationError, root: str) -> ProtocolError:
    """What msgspec found wrong, in our words. Its sentence may hold a name of megabytes, so no pattern is searched."""
    said, found, where = str(error).rpartition(" - at `")
    if not found:
        said, where = where, ""
    inner = where.removeprefix("key` in `").removeprefix("$").removesuffix("`")
    path = (root + inner).removeprefix(".")
    cause = error.__cause__
    if isinstance(cause, ProtocolError):
        return ProtocolError(cause.code, cause.message, _under(path, cause.field))
    if said.startswith(_MISSING):
        return invalid(_under(path, _named(said, _MISSING)), "missing")
    if said.startswith(_UNKNOWN):
        known = ", ".join(_kind_at(cls, inner).__struct_fields__)
        return invalid(_under(path, _named(said, _UNKNOWN)), f"unknown field; known are {known}")
    if said.startswith(_VALUE):
        return invalid(path, f"expected one of {', '.join(_kind_at(cls, inner))}, got {said[len(_VALUE) :][:40]}")
    in_key = " as a key" if where.startswith("key`") else ""
    return invalid(path, f"{said[:1].lower()}{said[1:]}".replace("`", "") + in_key)


def _kind_at(cls: Any, path: str) -> Any:
    """What stands at `path` in a `cls`: a message or a closed list of words."""
    for name in re.findall(r"\.(\w+)", path):
        cls = typing.get_type_hints(cls)[name]
        while arguments := typing.get_args(cls):
            cls = arguments[0]
    return cls


def _named(said: str, beginning: str) -> str:
    """The field that msgspec names after `beginning`."""
    return said[len(beginning) :][:40].strip("`")


def _under(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field and not field.startswith("[") else path + field


def _no_value(error: Exception) -> ProtocolError:
    reason = str(error) or type(error).__name__
    return invalid("", f"the payload is not one MessagePack value that can be a message ({reason})")
