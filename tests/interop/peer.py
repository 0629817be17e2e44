"""LMCache 0.5.6 as its users have it: its command line and its SDK in a process, and what a vLLM with it needs.

It is a black box here: installed by `make interop` into a venv of its own, run, and never looked into.

    with Peer(log) as peer:
        peer.call("connect", url="tcp://...")      a function of `over_there`
"""

import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-interop"
PYTHON = VENV / "bin" / "python"
ENVIRONMENT = {
    # The drop-in package of this project is called `lmcache` too: neither the working directory nor the plug-in counts.
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": "",
    "VLLM_PLUGINS": "",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}
CALL_SECONDS = 60.0


class PeerRaised(Exception):
    """What was called raised: the exception's name and text."""


def require_lmcache() -> None:
    """Skip the test, loudly, where LMCache could not be installed."""
    if not (VENV / ".installed").exists():
        pytest.skip(
            "LMCACHE 0.5.6 IS NOT INSTALLED: run `make interop`; its clients were NOT tested against this server"
        )


class Peer:
    """A Python process with LMCache's packages, until the `with` block ends."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [PYTHON, Path(__file__).with_name("over_there.py")],
                cwd=tempfile.gettempdir(),
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def call(self, name: str, *, seconds: float = CALL_SECONDS, **arguments: Any) -> Any:
        """The result of a function of `over_there`; PeerRaised if it raised, TimeoutError if it did not end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            raise TimeoutError(f"{name} did not end within {seconds} s; see {self.log}")
        line = self._process.stdout.readline()
        if not line:
            raise PeerRaised(f"the process ended during {name}; see {self.log}")
        answer = json.loads(line)
        if "raised" in answer:
            raise PeerRaised(answer["raised"])
        return answer["result"]

    def timed(self, name: str, **arguments: Any) -> tuple[Any, float]:
        """The result, or the PeerRaised itself, and the seconds that it took."""
        start = time.monotonic()
        try:
            result = self.call(name, **arguments)
        except PeerRaised as error:
            result = error
        return result, time.monotonic() - start
