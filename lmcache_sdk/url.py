"""Where a server is: `host:port`, `tcp://host:port` or `ipc://path`, checked before anything connects."""

from urllib.parse import urlsplit

from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["server_url"]


def server_url(url: str) -> str:
    """`url` as ZMQ wants it; raises LMCacheSDKError naming it if it cannot be the address of a server."""
    if not isinstance(url, str):
        raise _bad(url)
    full = url if "://" in url else f"tcp://{url}"
    scheme, _, rest = full.partition("://")
    if scheme == "ipc" and rest and "\0" not in rest:
        return full
    if scheme != "tcp" or not _is_host_and_port(rest):
        raise _bad(url)
    return full


def _is_host_and_port(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return False
    return bool(parts.hostname) and parts.netloc == text and "@" not in text and bool(port) and not text.isspace()


def _bad(url: object) -> LMCacheSDKError:
    return LMCacheSDKError(f"url: expected host:port, tcp://host:port or ipc://path, got {url!r}")
