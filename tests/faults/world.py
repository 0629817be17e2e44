"""What the tests of faults share: a server with short times, clients as processes of their own, and quiescence.

A test is named after the kind of fault, not after the system that had it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tests.servers import CacheServer

ROOT = Path(__file__).parents[2]
READ_TTL, WRITE_TTL, SESSION_TTL, REAP = 1.0, 1.0, 1.0, 3.0
TICK = 0.5
SHORT_TIMES = (
    "--l1-read-ttl-seconds", str(READ_TTL), "--l1-write-ttl-seconds", str(WRITE_TTL),
    "--session-ttl-seconds", str(SESSION_TTL), "--worker-reap-timeout-seconds", str(REAP),
)  # fmt: skip

_PRELUDE = """
import os, sys, time
from tests.fake_engine import *
from lmcache_server.protocol import messages as m
say = lambda *words: print(*words, flush=True)
hear = lambda: sys.stdin.readline().strip()
tokens = lambda chunks, seed: bytes(((i // 64) * 7 + i + seed) % 251 for i in range(chunks * 64))
engine = FakeEngine(sys.argv[1])
"""


def assert_quiet(server: CacheServer, seconds: float = READ_TTL + SESSION_TTL + REAP + 5) -> None:
    """After idling longer than the longest lease nothing is held, and what is used is what is resident: cleared, it is
    nothing.
    """
    server.quiet(seconds)
    request = urllib.request.Request(server.http_url + "/cache/clear", method="POST")
    urllib.request.urlopen(request, timeout=10).close()
    status = server.status()
    assert status["storage_manager"]["l1_usage"][0] == 0, status["storage_manager"]
    assert status["storage_manager"]["l1_manager"]["total_object_count"] == 0
    assert status["is_healthy"] and status["counters"]["faults"] == 0, server.log


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` returns, once it is true."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return result


class Child:
    """A client in a process of its own, running `script` with `engine`, `tokens`, `say` and `hear`."""

    def __init__(self, script: str, url: str, **options: Any) -> None:
        environment = {**os.environ, **options.pop("env", {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + script, url], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options,
        )  # fmt: skip
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def line(self, timeout: float = 40.0) -> str:
        """The next line that it says."""
        try:
            return self._lines.get(timeout=timeout)
        except Empty:
            raise AssertionError(
                f"the client said nothing for {timeout} s (it ended with {self.process.poll()})"
            ) from None

    def rest(self) -> list[str]:
        """What it has said until now and nobody has read."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def tell(self, words: str = "") -> None:
        """Let it hear a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """A signal, to this process alone."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, whatever its state."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())


@contextmanager
def child(script: str, url: str, **options: Any) -> Iterator[Child]:
    """A client process that is gone afterwards."""
    process = Child(script, url, **options)
    try:
        yield process
    finally:
        process.end()


def tokens(chunks: int, seed: int) -> bytes:
    """The same tokens here and in a child."""
    return bytes(((i // 64) * 7 + i + seed) % 251 for i in range(chunks * 64))


def resident_bytes(pid: int) -> int:
    """Private memory of a process: resident, without what it shares."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])) * 1024


def segment_bytes(server: CacheServer) -> int:
    """Pages that the server's segment has taken."""
    return (Path("/dev/shm") / server.segment).stat().st_blocks * 512
