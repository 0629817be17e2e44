"""An unmodified LMCache 0.5.6 server as a process, until the block ends.

Standard library only: this runs in this project's environment and in the peer's own.
"""

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

START_SECONDS = 60.0
_libc = ctypes.CDLL(None)


class PeerServer(NamedTuple):
    """Where it is, and the seconds from its start until it was healthy."""

    port: int
    http: int
    pid: int
    started: float

    def clear(self) -> None:
        """Empty it. It does not evict on demand: a store into a full pool would be dropped."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", data=b"{}", method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30):
            pass


@contextmanager
def peer_serving(gib: float, python: Path, environment: Mapping[str, str]) -> Iterator[PeerServer]:
    """A server whose pool of `gib` GiB is in memory from the start, with the peer's `python`."""
    port, http = _free_port(), _free_port()
    command = [str(python.parent / "lmcache"), "server", "--l1-size-gb", f"{gib:.3f}"]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--no-l1-use-lazy"]
    command += ["--shm-name", f"peer_{os.getpid()}_{port}", "--port", str(port), "--http-port", str(http)]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd="/", env={**os.environ, **environment}, preexec_fn=_end_with_parent
        )
        try:
            while not _answers(f"http://127.0.0.1:{http}/healthcheck"):
                if process.poll() is not None or time.perf_counter() > begin + START_SECONDS:
                    log.seek(0)
                    raise SystemExit(f"LMCache's server is not healthy:\n{log.read().decode()[-2000:]}")
                time.sleep(0.01)
            yield PeerServer(port, http, process.pid, time.perf_counter() - begin)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _end_with_parent() -> None:
    _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
