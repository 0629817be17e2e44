"""The demo as a person runs it: once to the end, once interrupted, once with a server that cannot start."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHM_ROOT = Path("/dev/shm")

pytestmark = [pytest.mark.vllm, pytest.mark.process]


class Demo:
    """A demo under way; what it says on stderr is read line by line."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "demo.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.said = ""

    def wait_for(self, text: str) -> str:
        """The line of stderr that has `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if text in line:
                return line
        raise AssertionError(f"the demo ended before it said {text!r}:\n{self.said}")

    def finish(self, seconds: float) -> tuple[int, str]:
        """Its exit code and its stdout."""
        try:
            output, rest = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            output, rest = self.process.communicate(timeout=60)
        self.said += rest
        return self.process.returncode, output

    def leaves_nothing(self, port: str) -> bool:
        """Soon after its end: a child that was starting just then hears of it a moment later."""
        deadline = time.monotonic() + 20.0
        while not self._left_nothing(port):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _left_nothing(self, port: str) -> bool:
        """No segment of its own, and no process that knows its server's port."""
        named = f'"lmcache.mp.port": {port}'.encode(), f"--port\0{port}\0".encode()
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = command.read_bytes()
            except OSError:
                continue
            if any(name in line for name in named):
                return False
        return not list(SHM_ROOT.glob(f"*demo_{self.process.pid}*"))


def server_port(line: str) -> str:
    found = re.search(r"lmcache server on port (\d+)", line)
    assert found, line
    return found[1]


@pytest.mark.timeout(360)
def test_the_demo_shows_hits_and_an_edited_cache_and_ends_with_one_json_line() -> None:
    demo = Demo()
    port = server_port(demo.wait_for("starting lmcache server"))
    code, output = demo.finish(300)
    assert code == 0, demo.said
    facts = json.loads(output.splitlines()[-1])
    assert facts["external_equals_local"] is True
    assert facts["edit_served"] is True
    assert facts["plain_client_unaffected"] is True
    assert facts["cached_tokens"] == facts["kept_tokens"] + facts["dropped_tokens"]
    assert facts["kept_tokens"] == facts["dropped_tokens"] > 0
    # Times are told, not judged: the machine may be busy with something else.
    assert all(facts[f"{step}_ttft_ms"] > 0 for step in ("cold", "local_hit", "external_hit", "edited"))
    assert facts["seconds"] > 0
    assert demo.leaves_nothing(port), demo.said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_what_it_started(number: signal.Signals) -> None:
    demo = Demo()
    port = server_port(demo.wait_for("starting lmcache server"))
    demo.wait_for("starting vLLM")
    demo.process.send_signal(number)
    code, output = demo.finish(60)
    assert code == 128 + number, demo.said
    assert output == ""
    assert demo.leaves_nothing(port), demo.said


@pytest.mark.timeout(60)
def test_a_demo_whose_server_cannot_start_says_why_and_fails() -> None:
    demo = Demo({"LMCACHE_EVICTION_RATIO": "2"})
    code, output = demo.finish(50)
    assert code == 1
    assert output == ""
    assert "failed: lmcache server ended with code 2" in demo.said
    assert "eviction" in demo.said.partition("failed:")[2]
