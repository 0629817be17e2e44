"""`lmcache server` as a person starts it: what cannot work is one sentence, exit code 2, and nothing was made."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_server.cli.main import main
from tests.servers import CacheServer, free_ports, running_server

pytestmark = pytest.mark.process
SHM = Path("/dev/shm")


Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """What the command says before it ends with 2; nothing is left of it."""

    def run(*flags: str) -> str:
        port, http_port = free_ports(2)
        segment = f"lmcache_l1_pool_refused_{port}"
        ports = ["--port", str(port), "--http-port", str(http_port)]
        assert main(["server", *ports, "--shm-name", segment, "--l1-size-gb", "0.01", *flags]) == 2
        output = capfd.readouterr()
        assert output.out == "" and "Traceback" not in output.err
        last = output.err.splitlines()[-1]
        assert last.startswith("lmcache server: error: ")
        assert not (SHM / segment).exists()
        return last.removeprefix("lmcache server: error: ")

    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chunk-size", "0"], "chunk-size: expected 1 to 65536 tokens, got 0"),
        (["--l1-size-gb", "60000"], "GiB of shared memory, /dev/shm has"),
        (["--l1-size-gb", "60000", "--shm-name", ""], "GiB of memory, this machine has"),
        (["--eviction-policy", "none"], "expected one of LRU"),
        (["--host", "203.0.113.1"], "cannot listen on tcp://203.0.113.1"),
        (["--http-host", "no such host"], "cannot listen on http://no such host"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(refused: Refused, flags: list[str], words: str) -> None:
    assert words in refused(*flags)


def test_a_bad_file_and_a_bad_variable_are_one_sentence(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.yaml").write_text("chunk-sise: 16\n")
    assert "unknown setting 'chunk-sise'" in refused("--config", str(tmp_path / "s.yaml"))
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "many")
    assert "LMCACHE_CHUNK_SIZE: expected int" in refused()


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_in_use_is_one_sentence(refused: Refused, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: Address already in use" in refused("--host", "127.0.0.1", flag, str(port))


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


def test_a_segment_of_a_live_server_is_not_taken(refused: Refused, server: CacheServer) -> None:
    assert "another server uses it" in refused("--shm-name", server.segment)
    assert (SHM / server.segment).exists()
    assert server.status()["is_healthy"]


def test_a_foreign_file_is_not_taken_and_stays(refused: Refused) -> None:
    path = SHM / f"lmcache_l1_pool_foreign_{os.getpid()}"
    path.write_bytes(b"precious")
    try:
        assert "choose another --shm-name or remove the file" in refused("--shm-name", path.name)
        assert path.read_bytes() == b"precious"
    finally:
        path.unlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "frames"])
def test_a_signal_ends_it_in_good_order(number: signal.Signals, shared_memory: bool) -> None:
    with running_server(shared_memory=shared_memory) as server:
        assert server.process is not None
        assert not server.segment or (SHM / server.segment).exists()
        server.process.send_signal(number)
        assert server.process.wait(10) == 0
        assert (
            "Traceback" not in server.log
            and "ready: tcp://" in server.log
            and "chunks of 16 tokens" in server.log
            and "stopping" in server.log
        )
        assert not server.segment or not (SHM / server.segment).exists()


def test_a_silent_server_prints_nothing() -> None:
    with running_server("--log-level", "silent") as server:
        server.stop()
        assert server.log == ""


def test_the_help_names_every_setting_and_an_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_server.cli.main", "server", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--l1-size-gb" in done.stdout and "example:" in done.stdout and "LMCACHE_CHUNK_SIZE" in done.stdout
