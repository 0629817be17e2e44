"""What the server can be told, each setting once: unit, default, reason.

A setting is a flag (`--l1-size-gb 8`), an environment variable (`LMCACHE_L1_SIZE_GB=8`) or a line of the YAML file
that `--config` names (`l1-size-gb: 8`); the flag wins over the variable, the variable over the file. This is the
only place that reads the environment. Whatever is unknown or impossible is refused with one sentence, before
anything is created.
"""

import argparse
import dataclasses
import math
import typing
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from lmcache_server.protocol.keys import HASH_ALGORITHMS

__all__ = ["SHM_PREFIX", "Settings", "SettingsError", "add_flags", "load"]

GIB = 2**30
PAGE = 4096
SHM_PREFIX = "lmcache_l1_pool_"
T = TypeVar("T")


class SettingsError(Exception):
    """A setting that is unknown or impossible: one sentence that names it, its value and what would be right."""


def _setting(default: T, text: str, choices: Sequence[str] = ()) -> T:
    field: T = dataclasses.field(default=default, metadata={"text": text, "choices": tuple(choices)})
    return field


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one server, checked."""

    l1_size_gb: float = _setting(4.0, "size of the pool in GiB")
    eviction_policy: str = _setting("LRU", "what goes first when the pool is full", ["LRU"])
    chunk_size: int = _setting(
        256, "tokens per chunk, the unit of caching; a multiple of the engine's block size or its divisor"
    )
    host: str = _setting("localhost", "address that clients connect to")
    port: int = _setting(5555, "port that clients connect to")
    http_host: str = _setting("127.0.0.1", "address of the HTTP interface")
    http_port: int = _setting(8080, "port of the HTTP interface")
    shm_name: str = _setting(
        "auto",
        f"name of the shared-memory segment, with {SHM_PREFIX} put before it; auto: the port; "
        "empty: no shared memory, bytes travel as frames",
    )
    shm_mode: str = _setting(
        "0600", "octal mode of the segment; 0660 lets clients of the server's group in", ["0600", "0660", "0666"]
    )
    l1_use_lazy: bool = _setting(
        True, "take pages of the pool at first use (--no-l1-use-lazy: all of them at the start)"
    )
    supported_transfer_mode: str = _setting(
        "auto", "who copies; here always the client, into and out of the pool", ["auto", "engine_driven"]
    )
    eviction_trigger_watermark: float = _setting(
        0.8, "share of the pool in use at which eviction starts ahead of demand"
    )
    eviction_ratio: float = _setting(0.2, "share of the pool that such an eviction frees")
    l1_write_ttl_seconds: float = _setting(600.0, "seconds until an uncommitted reservation is lost")
    l1_read_ttl_seconds: float = _setting(300.0, "seconds until a read lease that nobody renews ends")
    session_ttl_seconds: float = _setting(600.0, "seconds of idling until a request that nobody ended is forgotten")
    worker_reap_timeout_seconds: float = _setting(120.0, "seconds of silence until an instance is forgotten")
    worker_registration_grace_seconds: float = _setting(
        3600.0, "the same for clients of LMCache that never ping, as its SDK does not"
    )
    hash_algorithm: str = _setting(
        "xxh3_128", "how chunks are hashed (hits compare the tokens too)", list(HASH_ALGORITHMS)
    )
    instance_id: str = _setting("", "name of this server in logs and /status; empty: a random one")
    enable: str = _setting(
        "transfer_query", "optional features; query caches need nothing, so theirs is always on", ["transfer_query"]
    )
    log_level: str = _setting("info", "least severe log line to print", ["debug", "info", "warning", "error", "silent"])

    @property
    def pool_bytes(self) -> int:
        """Size of the pool in bytes, whole pages."""
        return int(self.l1_size_gb * GIB) // PAGE * PAGE

    @property
    def segment_name(self) -> str:
        """Full name of the shared-memory segment, empty without one."""
        name = str(self.port) if self.shm_name == "auto" else self.shm_name.strip("/")
        return name if not name or name.startswith(SHM_PREFIX) else SHM_PREFIX + name

    @property
    def segment_mode(self) -> int:
        """Permission bits of the segment."""
        return int(self.shm_mode, 8)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag per setting, and --config."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, named as the flags without the dashes")
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        shown = f"{field.metadata['text']} (default: {_shown(field.default)})"
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=shown)
        else:
            choices = field.metadata["choices"]
            metavar = "{" + ",".join(choices) + "}" if choices else typing.cast(type, field.type).__name__.upper()
            parser.add_argument(flag, default=None, metavar=metavar, help=shown)


def load(flags: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """The settings that flags, environment and file make together; raises SettingsError."""
    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    if flags.config:
        for name, value in _read_file(flags.config).items():
            key = str(name).replace("-", "_")
            if key not in fields:
                raise SettingsError(
                    f"{flags.config}: unknown setting {name!r}; `lmcache server --help` lists the known ones"
                )
            values[key] = _converted(fields[key], value, f"{flags.config}: {name}")
    for key, field in fields.items():
        variable = "LMCACHE_" + key.upper()
        if variable in environment:
            values[key] = _converted(field, environment[variable], variable)
        given = getattr(flags, key)
        if given is not None:
            values[key] = _converted(field, given, "--" + key.replace("_", "-"))
    if not values.get("instance_id"):
        values["instance_id"] = str(uuid.uuid4())
    settings = Settings(**values)
    _check(settings)
    return settings


def _shown(default: Any) -> str:
    return (
        {True: "on", False: "off", "": "empty"}.get(default, str(default))
        if isinstance(default, (bool, str))
        else str(default)
    )


def _read_file(path: str) -> dict[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise SettingsError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"--config {path}: not YAML ({' '.join(str(error).split())})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path}: expected lines of `name: value`, got a {type(content).__name__}")
    return content


def _converted(field: "dataclasses.Field[Any]", value: Any, source: str) -> Any:
    kind, choices = typing.cast(type, field.type), field.metadata["choices"]
    if kind is bool:
        return _as_bool(value, source)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise SettingsError(f"{source}: expected {kind.__name__}, got {value!r}")
    try:
        result = kind(value)
    except (ValueError, OverflowError):
        raise SettingsError(f"{source}: expected {kind.__name__}, got {value!r}") from None
    if kind is int and isinstance(value, float):
        raise SettingsError(f"{source}: expected a whole number, got {value!r}")
    if choices and result not in choices:
        # YAML reads 0660 as an octal number.
        hint = "" if isinstance(value, str) else "; put it in quotes"
        raise SettingsError(f"{source}: expected one of {', '.join(choices)}, got {value!r}{hint}")
    return result


def _as_bool(value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    result = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }.get(str(value).lower())
    if result is None:
        raise SettingsError(f"{source}: expected true or false, got {value!r}")
    return result


def _check(settings: Settings) -> None:
    def refuse(name: str, expected: str) -> None:
        raise SettingsError(f"{name.replace('_', '-')}: expected {expected}, got {getattr(settings, name)!r}")

    if not (0 < settings.l1_size_gb <= 65536 and settings.pool_bytes >= 2**20):
        refuse("l1_size_gb", "a pool of at least 1 MiB (0.001) and at most 65536 GiB")
    if not 1 <= settings.chunk_size <= 65536:
        refuse("chunk_size", "1 to 65536 tokens")
    for name in ("port", "http_port"):
        if not 1 <= getattr(settings, name) <= 65535:
            refuse(name, "a port from 1 to 65535")
    if settings.port == settings.http_port:
        refuse("http_port", f"another port than --port ({settings.port})")
    for name in ("eviction_trigger_watermark", "eviction_ratio"):
        if not 0 < getattr(settings, name) <= 1:
            refuse(name, "a share above 0 and at most 1")
    for name in (
        "l1_write_ttl_seconds",
        "l1_read_ttl_seconds",
        "session_ttl_seconds",
        "worker_reap_timeout_seconds",
        "worker_registration_grace_seconds",
    ):
        if not 0 < getattr(settings, name) < math.inf:
            refuse(name, "a number of seconds above 0")
    segment = settings.segment_name.encode(errors="surrogateescape")
    if b"/" in segment or len(segment) > 200 or b"\0" in segment:
        refuse("shm_name", f"at most {200 - len(SHM_PREFIX)} bytes without /")
