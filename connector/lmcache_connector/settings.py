"""The user's part of the configuration: every `lmcache.*` key of `kv_connector_extra_config`, read once.

`KEYS` is the whole list. A key is honoured, or accepted as long as it asks for what happens anyway, or refused with a
sentence that names the key, its value and what to do; nothing is ignored in silence. Keys of other connectors (without
the `lmcache.` prefix) are none of our business.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.url import server_url

__all__ = ["KEYS", "MAX_TIMEOUT", "Settings", "read_settings"]

PREFIX = "lmcache."
MAX_TIMEOUT = 2.0
"""The longest that a hook of the engine may wait for one answer, however generous `mq_timeout` is: a server that takes
longer is treated as away."""

MAX_CONCURRENCY = 64
"""More loads at a time than this only share the same memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. Times in seconds."""

    url: str = "tcp://localhost:5555"
    """Where the server is."""
    timeout: float = MAX_TIMEOUT
    """How long any request may wait for the server's answer."""
    heartbeat_interval: float = 2.0
    """Between two signs of life; it bounds how long a restarted server goes unnoticed."""
    save_decode_cache: bool = False
    """Whether chunks with generated tokens are stored too."""
    load_async: bool = True
    """Whether loads run beside the forward passes of other requests, instead of before the next one."""
    load_timeout: float = 10.0
    """How long a load may take, its wait for others included; what is not there by then is computed."""
    load_concurrency: int = 2
    """How many loads run at the same time."""
    transfer_queries: bool = False
    """Whether the queries of prompts are captured and stored too."""
    ring_depth: int = 2
    """How many of the engine's largest steps the ring for captured queries has room for."""
    ring_blocks: int | None = None
    """Blocks of that ring, instead of `ring_depth`."""


def read_settings(extra_config: Mapping[str, Any]) -> Settings:
    """The settings in `extra_config`; raises ValueError naming the first key that cannot be honoured."""
    values: dict[str, Any] = {}
    for key, value in extra_config.items():
        if not key.startswith(PREFIX):
            continue
        if key not in KEYS:
            raise ValueError(f"{key}: unknown key; {_suggestion(key)}")
        values[key] = KEYS[key](key, value)
    _check_spellings(values)
    chosen = {field: values[key] for key, field in FIELDS.items() if key in values}
    return Settings(url=_url(values), **chosen)


def _check_spellings(values: Mapping[str, Any]) -> None:
    """Two keys that are the same setting must agree."""
    first: dict[str, str] = {}
    for key in values:
        other = first.setdefault(FIELDS.get(key, key), key)
        if values[other] != values[key]:
            raise ValueError(f"{key}: {values[key]!r}, but {other}: {values[other]!r}; they are the same, remove one")


def _url(values: Mapping[str, Any]) -> str:
    host = values.get("lmcache.mp.host", "tcp://localhost")
    port = values.get("lmcache.mp.port", 5555)
    url = values.get("lmcache.mp.server_urls") or f"{host}:{port}"
    try:
        return server_url(url)
    except LMCacheSDKError as error:
        raise ValueError(f"lmcache.mp.host: {host!r} and lmcache.mp.port {port} are no address ({error})") from None


def _suggestion(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(KEYS)}"


# --- one reader per sort of value: (key, value) -> value, or ValueError ---------------------------------------------

Reader = Callable[[str, Any], Any]


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key}: expected a host name or address, got {value!r}")
    return value.strip().rstrip("/")


def _port(key: str, value: Any) -> int:
    port = _number(key, value)
    if not 0 < port < 65536 or not port.is_integer():
        raise ValueError(f"{key}: expected a port from 1 to 65535, got {value!r}")
    return int(port)


def _seconds(key: str, value: Any) -> float:
    seconds = _number(key, value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{key}: expected a number of seconds above 0, got {value!r}")
    return seconds


def _count(key: str, value: Any) -> int:
    count = _number(key, value)
    if not 1 <= count < math.inf or not count.is_integer():
        raise ValueError(f"{key}: expected a whole number from 1, got {value!r}")
    return int(count)


def _count_or_none(key: str, value: Any) -> int | None:
    return None if value is None else _count(key, value)


def _concurrency(key: str, value: Any) -> int:
    count = _count(key, value)
    if count > MAX_CONCURRENCY:
        raise ValueError(f"{key}: expected a whole number from 1 to {MAX_CONCURRENCY}, got {value!r}")
    return count


def _timeout(key: str, value: Any) -> float:
    return min(_seconds(key, value), MAX_TIMEOUT)


def _number(key: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: expected a number, got {value!r}") from None


def _boolean(key: str, value: Any) -> bool:
    plain = _plain(value)
    if plain not in (True, False):
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return bool(plain)


def _json_boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false (a JSON boolean), got {value!r}")
    return value


def _one_server(key: str, value: Any) -> str:
    urls = value.split(",") if isinstance(value, str) else value
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise ValueError(f"{key}: expected the address of one server, got {value!r}")
    if len(urls) > 1:
        raise ValueError(f"{key}: {len(urls)} servers are not supported yet; run one server per node and name it here")
    return str(urls[0]).strip()


def _only(*accepted: Any, why: str) -> Reader:
    """A key that changes nothing: its `accepted` values say what happens anyway, any other is refused with `why`."""

    def read(key: str, value: Any) -> None:
        if _plain(value) not in [_plain(one) for one in accepted]:
            raise ValueError(f"{key}: {value!r} is not supported ({why}); remove the key or set it to {accepted[0]!r}")

    return read


def _plain(value: Any) -> Any:
    """`value` with the usual spellings of a boolean or a number made equal."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in ("true", "yes", "on"):
        return True
    if text in ("false", "no", "off"):
        return False
    try:
        return float(text)
    except ValueError:
        return text


FIELDS = {
    "lmcache.mp.mq_timeout": "timeout",
    "lmcache.mp.heartbeat_interval": "heartbeat_interval",
    "lmcache.mp.save_decode_cache": "save_decode_cache",
    "lmcache.mp.load_async": "load_async",
    "lmcache.mp.load_timeout": "load_timeout",
    "lmcache.mp.load_concurrency": "load_concurrency",
    "lmcache.mp.transfer_intermediate_tensors": "transfer_queries",
    "lmcache.mp.q.ring_depth": "ring_depth",
    "lmcache.q.ring_depth": "ring_depth",
    "lmcache.mp.q.ring_blocks": "ring_blocks",
    "lmcache.q.ring_blocks": "ring_blocks",
}
"""The keys that are a field of `Settings` as they are; some have two spellings."""

_LAZY = "stores happen as soon as a chunk is computed"
_AUTOSTART = "start the server yourself: `lmcache server`"

KEYS: dict[str, Reader] = {
    "lmcache.mp.host": _text,
    "lmcache.mp.port": _port,
    "lmcache.mp.server_urls": _one_server,
    "lmcache.mp.mq_timeout": _timeout,
    "lmcache.mp.heartbeat_interval": _seconds,
    "lmcache.mp.save_decode_cache": _json_boolean,
    "lmcache.mp.load_async": _json_boolean,
    "lmcache.mp.load_timeout": _seconds,
    "lmcache.mp.load_concurrency": _concurrency,
    "lmcache.mp.nonblocking_lookup_status": _only(True, why="a lookup never blocks the scheduler"),
    "lmcache.mp.mp_transfer_mode": _only("auto", "engine_driven", why="the engine copies"),
    "lmcache.mp.isolated_ipc": _only(False, why="a server that cannot share memory says so itself"),
    "lmcache.mp.use_vmm_api": _only(False, why="the engine's memory is never mapped by the server"),
    "lmcache.mp.hash_algorithm": _only("blake3", why="the server alone hashes, KV events have its hashes"),
    "lmcache.mp.eager_prefetch": _only(False, why="lookups happen when a request is scheduled"),
    "lmcache.mp.lazy_offload": _only(False, why=_LAZY),
    "lmcache.mp.lazy_offload_policy": _only("EVICTION_AWARE", why=_LAZY),
    "lmcache.mp.lazy_offload_horizon_steps": _only(2.5, why=_LAZY),
    "lmcache.mp.lazy_offload_max_drain_per_step": _only(64, why=_LAZY),
    "lmcache.mp.lazy_offload_max_deferral_seconds": _only(0, why=_LAZY),
    "lmcache.mp.lazy_offload_threshold": _only(100, why=_LAZY),
    "lmcache.mp.lazy_offload_select_count": _only(10, why=_LAZY),
    "lmcache.mp.transfer_intermediate_tensors": _boolean,
    "lmcache.q.ring_depth": _count,
    "lmcache.q.ring_blocks": _count_or_none,
    "lmcache.mp.q.ring_depth": _count,
    "lmcache.mp.q.ring_blocks": _count_or_none,
    "lmcache.mp.autostart": _only(False, why=_AUTOSTART),
    "lmcache.mp.autostart.server_args": _only("", why=_AUTOSTART),
    "lmcache.mp.autostart.wait_timeout": _only(90, why=_AUTOSTART),
}
"""Every key that we know, and what reads its value."""
