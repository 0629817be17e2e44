"""Child processes that end when they must, at the latest with their parent: each in a group of its own, its output in a
file shown on failure."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

LOG_LINES = 40
"""Lines of a child's log that go into the error when it fails."""

END_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that is told to end when the thread that started it ends, however that ends. A parent that is killed,
or interrupted between the start of a child and the moment that it knows of it, would leave it behind otherwise. (Not by
`preexec_fn`: an interrupt that arrives while Python forks in that way is lost.)"""


class ProcessFailed(RuntimeError):
    """A child ended, or was not ready in time; the message has the end of its log."""


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ChildProcess:
    """A command that runs until `stop`, or until the `with` block ends."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet."""
        return self._process.poll() is None

    def wait_until_answers(self, url: str, seconds: float) -> None:
        """Return when `url` answers 200; raise ProcessFailed if the command ends first or `seconds` pass."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.running:
                raise ProcessFailed(f"{self.name} ended with code {self._process.returncode}\n{self.tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2.0).status_code == 200:
                    return
            time.sleep(0.05)
        raise ProcessFailed(f"{self.name} did not answer at {url} within {seconds:.0f} s\n{self.tail()}")

    def stop(self, grace: float = 20.0) -> int:
        """Ask the command to end, then end what is left of its group; returns the command's exit code."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._end_group(grace)

    def kill(self) -> None:
        """End the command at once, without a chance to clean up."""
        self._process.kill()
        self._process.wait()
        self._end_group(0.0)

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- the end of {self.log} ---", *lines[-LOG_LINES:]])

    def _end_group(self, grace: float) -> None:
        # The group outlives its leader while the leader's own children clean up after themselves.
        deadline = time.monotonic() + grace
        while self.group() and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def group(self) -> list[int]:
        """The processes of this command's group that have not ended."""
        members = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # pid (name) state parent group ...; the name may hold anything, a parenthesis too.
                state, _, group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
                if int(group) == self.pid and state != "Z":
                    members.append(int(path.parent.name))
        return members
