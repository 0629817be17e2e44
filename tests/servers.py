"""Real `lmcache server` processes for tests: started on free ports, told apart by their segments, stopped by their pid.

A server that was started here is gone when its `with` block ends, and so is its shared memory; that is asserted,
because a test that leaves something behind is a failure.
"""

import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["CacheServer", "free_ports", "running_server"]

START_SECONDS = 30.0
STOP_SECONDS = 15.0
HOLDINGS = ("active_sessions", "read_leases", "reservations", "quarantined_bytes")
"""Numbers of /status that are 0 when nobody is in the middle of anything."""
SHM_ROOT = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_numbers = itertools.count()


class CacheServer:
    """One server process and where it is. `flags` are given to `lmcache server` as they are."""

    def __init__(self, *flags: str, shared_memory: bool = True) -> None:
        self.port, self.http_port = free_ports(2)
        self.segment = f"lmcache_l1_pool_test_{os.getpid()}_{next(_numbers)}" if shared_memory else ""
        self.flags = flags
        self.process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="lmcache-server-", suffix=".log")  # noqa: SIM115

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def http_url(self) -> str:
        """Where the HTTP interface is."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        """The process to signal."""
        assert self.process is not None, "the server was not started"
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return Path(self._log.name).read_text()

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        command = [
            sys.executable, "-m", "lmcache_server.cli.main", "server", "--l1-size-gb", "0.0625", "--chunk-size", "16",
            "--port", str(self.port), "--http-port", str(self.http_port), "--shm-name", self.segment, *self.flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, preexec_fn=_end_with_parent)
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log}")
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server was not healthy after {START_SECONDS} s:\n{self.log}")
            time.sleep(0.01)

    def get(self, path: str) -> Any:
        """The JSON document at `path` of the HTTP interface."""
        with urllib.request.urlopen(self.http_url + path, timeout=10) as response:
            return json.load(response)

    def status(self) -> dict[str, Any]:
        """The document of GET /status."""
        document: dict[str, Any] = self.get("/status")
        return document

    def kill(self) -> None:
        """End it without a chance to clean up; its segment stays, as after a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """Ask it to end, and check that it does so in good order."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(STOP_SECONDS)
            assert code == 0, f"the server ended with {code}:\n{self.log}"
            left_behind = bool(self.segment) and (SHM_ROOT / self.segment).exists()
            assert not left_behind, f"/dev/shm/{self.segment} was left behind"

    def restart(self) -> None:
        """Kill it and start another one in its place, at the same address."""
        self.kill()
        self.start()

    def quiet(self, seconds: float = 5.0) -> dict[str, Any]:
        """The status once nothing is held any more; asserts that this is so within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            held = {name: status[name] for name in HOLDINGS}
            if not any(held.values()):
                return status
            assert time.monotonic() < deadline, f"still held after {seconds} s: {held}"
            time.sleep(0.01)

    def _healthy(self) -> bool:
        try:
            return bool(self.get("/healthcheck")["status"] == "healthy")
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def _clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if self.segment:
            (SHM_ROOT / self.segment).unlink(missing_ok=True)
        self._log.close()


@contextmanager
def running_server(*flags: str, shared_memory: bool = True) -> Iterator[CacheServer]:
    """A healthy server with a pool of 64 MiB and chunks of 16 tokens, unless `flags` say otherwise."""
    server = CacheServer(*flags, shared_memory=shared_memory)
    try:
        server.start()
        yield server
        server.stop()
    finally:
        server._clean_up()


def _end_with_parent() -> None:
    """In the child: be terminated when the test process ends, however it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
