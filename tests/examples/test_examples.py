"""Each example runs to its end, where its own assertions hold.

One is run as a person runs it, with a server and an engine of its own. The others are run in this process on one engine
for all of them: what `start` would have started.
"""

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import _demo_setup
import pytest
from _demo_setup import CACHE, Setup, start

EXAMPLES = Path(__file__).parents[2] / "examples"
SHM_ROOT = Path("/dev/shm")

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(420)]


class SharedSetup(Setup):
    """A setup that its users do not stop."""

    def stop(self) -> None:
        """Leave it running for the next example."""


@pytest.fixture(scope="module")
def running() -> Iterator[Setup]:
    handler = signal.getsignal(signal.SIGTERM)
    setup = start("test_examples", queries=True)  # for the one example that needs them
    yield setup
    setup.stop()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def shared(running: Setup, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """What the next `start` answers: the running engine and server, with nothing cached."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    running.clear()
    setup = SharedSetup(**{name: getattr(running, name) for name in ("model", "engine", "url", "http_url")})
    monkeypatch.setattr(_demo_setup, "start", lambda name, **options: setup)
    return setup


def run(name: str) -> dict[str, object]:
    """The example's names after it ran."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_a_batch_drops_half_of_its_tokens_and_draws_a_plot(shared: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    picture = CACHE / "token_dropping.png"
    picture.unlink(missing_ok=True)
    names = run("token_dropping")
    assert names["half_tokens"] == 8 * 4 * 256
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.splitlines()
    assert any(line.startswith("all KV") and " 16384 " in line for line in table)
    assert any(line.startswith("half of it") and " 8192 " in line for line in table)


def test_snapkv_keeps_more_of_the_attention_than_others(shared: Setup) -> None:
    shares = run("snapkv")["shares"]
    assert isinstance(shares, dict)
    assert sorted(shares) == ["KeyDiff", "SnapKV", "random chunks", "sinks and recent"]


def test_follow_up_questions_are_answered_on_an_edited_context(shared: Setup) -> None:
    names = run("follow_up")
    assert names["kept"] == 2048


def started(name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def assert_nothing_is_left(name: str, pid: int, said: str) -> None:
    """No segment, no server and no engine of the example, soon after its end."""
    found = re.search(r"lmcache server on port (\d+)", said)
    assert found, said
    own = f"{name}_{pid}".encode(), f'"lmcache.mp.port": {found[1]}'.encode()
    deadline = time.monotonic() + 20
    while True:
        left = [f"/dev/shm/{path.name}" for path in SHM_ROOT.glob(f"*{name}_{pid}*")]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_bytes()
                left += [command.decode()] * any(mark in command for mark in own)
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_an_example_runs_as_a_file_with_a_server_and_an_engine_of_its_own() -> None:
    example = started("basic_check")
    output, _ = example.communicate(timeout=400)
    assert example.returncode == 0, output
    assert "all three have the same logprobs, bit for bit" in output
    assert_nothing_is_left("basic_check", example.pid, output)


@pytest.mark.parametrize("delay", [0.0, 2.0], ids=["at once", "while they start"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_example_that_is_interrupted_stops_what_it_started(number: signal.Signals, delay: float) -> None:
    example = started("basic_check")
    assert example.stdout is not None
    said = example.stdout.readline()
    time.sleep(delay)
    example.send_signal(number)
    output, _ = example.communicate(timeout=60)
    assert example.returncode in (128 + number, -number), output
    assert_nothing_is_left("basic_check", example.pid, said)
