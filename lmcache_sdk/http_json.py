"""One JSON document over HTTP, within a deadline that covers everything: connecting, headers, and a body that drips."""

import http.client
import io
import json
import socket
import ssl
import time
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from lmcache_sdk.errors import LMCacheSDKError, ServerUnavailable

__all__ = ["fetch_json"]

MAX_BYTES = 64 * 2**20
"""More than any status document; a body that never ends stops here."""


def fetch_json(http_url: str, path: str, timeout: float) -> dict[str, Any]:
    """The JSON object at `http_url` + `path`.

    Raises ServerUnavailable at once if nobody listens there, and if it is not here in full after `timeout` seconds;
    LMCacheSDKError if it is anything else.
    """
    target = _target(http_url)
    url = f"{target.scheme}://{target.netloc}{target.path.rstrip('/')}{path}"
    deadline = time.monotonic() + timeout
    try:
        with _connect(target, deadline) as connection:
            body = _get(connection, urlsplit(url), deadline)
    except TimeoutError as error:
        raise ServerUnavailable(f"GET {path}", http_url, timeout) from error
    except ConnectionRefusedError as error:
        detail = "nobody listens there (is `lmcache server` running, with that --http-port?)"
        raise ServerUnavailable(f"GET {path}", http_url, 0.0, detail) from error
    except OSError as error:
        waited = timeout - (deadline - time.monotonic())
        raise ServerUnavailable(f"GET {path}", http_url, waited, str(error) or type(error).__name__) from error
    except (http.client.HTTPException, _Unfit) as error:
        raise LMCacheSDKError(f"GET {url}: {error}") from error
    return _object(url, body)


class _Unfit(Exception):
    """A well-formed answer that is not the document."""


class _UntilDeadline(io.RawIOBase):
    """A socket's bytes, each read of it ending at the deadline at the latest."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._deadline))
        return self._connection.recv_into(buffer)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What http.client asks of a socket."""
        return io.BufferedReader(self)


def _target(http_url: str) -> SplitResult:
    try:
        target = urlsplit(http_url if "://" in http_url else f"http://{http_url}")
        if target.scheme in ("http", "https") and target.hostname and (target.port is None or target.port > 0):
            return target
    except (ValueError, TypeError):
        pass
    raise LMCacheSDKError(f"http_url: expected http://host:port, got {http_url!r}")


def _connect(target: SplitResult, deadline: float) -> socket.socket:
    port = target.port or (443 if target.scheme == "https" else 80)
    connection = socket.create_connection((cast(str, target.hostname), port), timeout=_left(deadline))
    if target.scheme == "http":
        return connection
    try:
        connection.settimeout(_left(deadline))
        return ssl.create_default_context().wrap_socket(connection, server_hostname=target.hostname)
    except BaseException:
        connection.close()
        raise


def _get(connection: socket.socket, url: SplitResult, deadline: float) -> bytes:
    connection.settimeout(_left(deadline))
    request = f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    connection.sendall(request.encode("ascii", "backslashreplace"))
    response = http.client.HTTPResponse(cast(socket.socket, _UntilDeadline(connection, deadline)))
    response.begin()
    if response.status != 200:
        raise _Unfit(f"expected 200, got {response.status} {response.reason}")
    body = response.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise _Unfit(f"the body is longer than {MAX_BYTES} bytes")
    if response.length:
        raise _Unfit(f"the body ends {response.length} bytes early")
    return body


def _object(url: str, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise LMCacheSDKError(f"GET {url}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise LMCacheSDKError(f"GET {url}: expected a JSON object, got {type(value).__name__}")
    return value


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
