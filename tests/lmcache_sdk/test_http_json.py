import itertools
import time
from collections.abc import Iterable

import pytest

from lmcache_sdk import http_json
from lmcache_sdk.errors import LMCacheSDKError, ServerUnavailable
from lmcache_sdk.http_json import fetch_json
from tests.lmcache_sdk.http_double import HttpDouble, ok
from tests.servers import free_ports


def fetch(answer: bytes | Iterable[bytes] | None, timeout: float = 5.0, pause: float = 0.0) -> dict[str, object]:
    with HttpDouble({"/status": answer}, pause) as double:
        return fetch_json(double.url, "/status", timeout)


def test_a_document_is_fetched() -> None:
    assert fetch(ok({"a": [1, 2]})) == {"a": [1, 2]}


def test_chunked_and_unmeasured_bodies_are_read_too() -> None:
    chunked = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\n3\r\n: 1\r\n1\r\n}\r\n0\r\n\r\n'
    assert fetch(chunked) == {"a": 1}
    assert fetch(b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}') == {"a": 1}


def test_a_base_path_and_a_missing_scheme_are_understood() -> None:
    with HttpDouble({"/cache/status": ok({}), "/status": ok({"bare": 1})}) as double:
        assert fetch_json(double.url + "/cache/", "/status", 5) == {}
        assert fetch_json(double.url.removeprefix("http://"), "/status", 5) == {"bare": 1}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", "expected 200, got 500"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", "expected 200, got 302"),
        (ok([1, 2]), "expected a JSON object, got list"),
        (ok(None), "expected a JSON object, got NoneType"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "not JSON"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "not JSON"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe", "not JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "ends 98 bytes early"),
        (b"not http at all\r\n\r\n", "not http"),
        (b"", "closed connection"),
    ],
)
def test_what_is_no_document_is_an_error_with_the_reason(answer: bytes, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        fetch(answer)


def test_a_server_that_hangs_is_given_up_at_the_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(ServerUnavailable, match=r"no answer to GET /status from http://127.* within 0\.3 s"):
        fetch(None, timeout=0.3)
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize(
    "start",
    [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "],
)
def test_an_answer_that_drips_is_given_up_at_the_deadline(start: bytes) -> None:
    begun = time.monotonic()
    with pytest.raises(ServerUnavailable, match="GET /status"):
        fetch(itertools.chain([start], itertools.repeat(b"x")), timeout=0.4, pause=0.05)
    assert time.monotonic() - begun < 1.5


def test_a_body_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "MAX_BYTES", 1000)
    with pytest.raises(LMCacheSDKError, match="longer than 1000 bytes"):
        fetch(itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b"x" * 100)))


def test_nobody_at_the_address_is_a_server_unavailable() -> None:
    with pytest.raises(ServerUnavailable, match=r"from http://127.0.0.1:\d+: nobody listens there .*--http-port"):
        fetch_json(f"http://127.0.0.1:{free_ports(1)[0]}", "/status", 5)


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "http://host:0", "http://h:port", "http://host:70000", 8])
def test_what_cannot_be_an_address_is_refused_by_name(url: object) -> None:
    with pytest.raises(LMCacheSDKError, match="http_url: expected http://host:port, got"):
        fetch_json(url, "/status", 1)  # type: ignore[arg-type]
