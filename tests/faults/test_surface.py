"""What a server started with defaults exposes."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_engine import FakeEngine
from tests.faults.world import until
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

LISTEN = "0A"


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
        inodes |= {match[1]} if match else set()
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and rest[5] in inodes:
                address, port = local.split(":")
                words = [bytes.fromhex(address)[i : i + 4][::-1] for i in range(0, len(address) // 2, 4)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_it_listens_on_the_loopback_only(server: CacheServer) -> None:
    found = listening(server.pid)
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    assert {port for _, port in found} == {server.port, server.http_port}


def test_no_route_runs_code_or_takes_more_than_it_should(server: CacheServer) -> None:
    paths = server.get("/openapi.json")["paths"]
    assert {(path, *methods) for path, methods in paths.items()} == {
        ("/", "get"), ("/healthcheck", "get"), ("/status", "get"), ("/config", "get"), ("/metrics", "get"),
        ("/version", "get"), ("/lmc_version", "get"), ("/cache/clear", "post"),
    }  # fmt: skip
    for path in ("/run_script", "/cache/clear"):
        request = urllib.request.Request(server.http_url + path, data=b"import os", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code in (404, 422)


def test_what_is_no_protocol_at_all_disturbs_neither_port(server: CacheServer) -> None:
    greetings = [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"\xff\0\0\0\0\0\0\0\x01\x7f"]
    noise = [*greetings, b"\xff" * 4096, bytes(100_000)]
    for port in (server.port, server.http_port):
        for content in noise:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                _shout(connection, content)
    with FakeEngine(server.url) as engine:
        prompt = engine.tokens(2)
        assert engine.store(prompt) == engine.load(prompt) == 2
    assert server.get("/healthcheck") == {"status": "healthy"}


def _shout(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):  # it may hang up at once
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(100)


def test_many_idle_connections_keep_nobody_out(server: CacheServer) -> None:
    ports = [server.port, server.http_port] * 150
    idle = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    try:
        with FakeEngine(server.url) as engine:
            assert engine.ping().known
        assert server.get("/healthcheck") == {"status": "healthy"}
    finally:
        for connection in idle:
            connection.close()
    until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) < 60)


def test_it_starts_without_torch_numpy_or_anything_that_phones_home() -> None:
    script = """
import sys
import lmcache_server.app, lmcache_server.cli.main, lmcache_server.cli.server
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "vllm", "requests", "opentelemetry", "sentry_sdk", "transformers"}
