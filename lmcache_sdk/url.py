"""Where a server is: `host:port`, `tcp://host:port` or `ipc://path`, checked before anything connects."""

import re

from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["server_url"]

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s/@:\[\]]+):(\d{1,5})")
_IPC = re.compile(r"ipc://[^\0]+")


def server_url(url: str) -> str:
    """`url` in full; raises LMCacheSDKError naming it if it cannot be the address of a server."""
    full = url if not isinstance(url, str) or "://" in url else f"tcp://{url}"
    if isinstance(full, str):
        tcp = _TCP.fullmatch(full)
        if _IPC.fullmatch(full) or (tcp and 0 < int(tcp[2]) < 65536):
            return full
    raise LMCacheSDKError(f"url: expected host:port, tcp://host:port or ipc://path, got {url!r}")
