"""What a server says about itself and its engines, checked field by field before anything relies on it.

An engine registers the layout of its cache; whoever wants to read or write that cache learns it from here, never from
the model's name. A document that does not fit is refused with the path of the first field that is wrong.
"""

import time
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.http_json import fetch_json
from lmcache_server.protocol.codec import from_map, to_map
from lmcache_server.protocol.errors import ProtocolError, invalid
from lmcache_server.protocol.layout import CacheLayout, Kind

__all__ = ["Discovery", "Engine", "discover"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Engine:
    """One registered engine worker, as /status tells of it."""

    model_name: str
    revision: str
    kind: Kind
    world_size: int
    block_size: int
    layout: CacheLayout

    def __post_init__(self) -> None:
        for name in ("world_size", "block_size"):
            if getattr(self, name) < 1:
                raise invalid(name, f"expected at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Discovery:
    """The server that answers at an HTTP address, and the engine whose cache is meant."""

    server_id: str
    chunk_size: int
    engine: Engine


def discover(http_url: str, model_name: str, kind: LMCacheSDKCacheKind, timeout: float) -> Discovery:
    """The server at `http_url` and the engine that caches `kind` of `model_name`.

    Raises ServerUnavailable after `timeout` seconds, LMCacheSDKError if a document does not fit, if no engine has
    registered such a cache (naming those that have), or if several have and differ.
    """
    deadline = time.monotonic() + timeout
    config = fetch_json(http_url, "/config", timeout)
    status = fetch_json(http_url, "/status", max(0.001, deadline - time.monotonic()))
    chunk_size = _field(config, "mp.chunk_size", int, f"{http_url}/config")
    if chunk_size < 1:
        raise LMCacheSDKError(f"{http_url}/config: impossible chunk_size {chunk_size}")
    source = f"{http_url}/status"
    server_id = _field(status, "server_id", str, source)
    engines = _field(status, "cache_context_meta", dict, source)
    return Discovery(server_id, chunk_size, _engine(engines, model_name, kind, source))


def _field(document: dict[str, Any], path: str, kind: type[T], source: str) -> T:
    """The value at a dotted path, which must be a `kind`."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if type(value) is not kind:
        found = "nothing" if value is None else type(value).__name__
        raise LMCacheSDKError(f"{source}: {path}: expected {kind.__name__}, got {found}; is this a cache server?")
    return value


def _entry(entry: dict[str, Any], source: str) -> Engine:
    """What one entry of /status says of an engine; its other fields are none of our business."""
    try:
        return from_map(Engine, entry)
    except ProtocolError as error:
        raise LMCacheSDKError(f"{source}.{error}") from error


def _engine(entries: dict[str, Any], model_name: str, kind: LMCacheSDKCacheKind, source: str) -> Engine:
    cached_name = kind.cached_name(model_name)
    names = {key: entry.get("model_name") if isinstance(entry, dict) else None for key, entry in entries.items()}
    engines = [
        _entry(entries[key], f"{source}: cache_context_meta[{key}]")
        for key, name in names.items()
        if name == cached_name and entries[key].get("kind", kind.value.value) == kind.value.value
    ]
    if not engines:
        raise LMCacheSDKError(_none_registered(model_name, kind, sorted({str(n) for n in names.values()}), source))
    for other in engines[1:]:
        difference = _difference(_identity(engines[0]), _identity(other))
        if difference:
            raise LMCacheSDKError(
                f"{source}: engines of {cached_name!r} differ in {difference}; give them different served model names"
            )
    return engines[0]


def _none_registered(model_name: str, kind: LMCacheSDKCacheKind, names: list[str], source: str) -> str:
    if kind is LMCacheSDKCacheKind.QUERY and model_name in names:
        return (
            f"{source}: the engine of {model_name!r} caches no queries; start it with "
            '"lmcache.mp.transfer_intermediate_tensors": true in kv_connector_extra_config'
        )
    known = ", ".join(names) if names else "none"
    return f"{source}: no engine has registered {model_name!r}; registered models: {known}"


def _identity(engine: Engine) -> dict[str, Any]:
    """What must be equal for engines to share a cache."""
    return {"revision": engine.revision, "world_size": engine.world_size, "layout": to_map(engine.layout)}


def _difference(one: Any, other: Any, path: str = "") -> str:
    """The first field in which two documents differ, with both values; empty if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        inner = [_difference(one.get(k), other.get(k), f"{path}.{k}" if path else k) for k in one]
        return next(filter(None, inner), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        inner = [_difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True))]
        return next(filter(None, inner), "")
    return "" if one == other else f"{path} ({one!r} and {other!r})"
