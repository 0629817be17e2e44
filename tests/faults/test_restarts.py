"""Servers that are killed, come back, or cannot start; clients that were silent meanwhile."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_server.protocol.errors import ErrorCode, ProtocolError
from lmcache_server.protocol.messages import Acquire, Piece, Read, Release
from tests.fake_engine import FakeEngine, this_process
from tests.faults.world import REAP, SHORT_TIMES, assert_quiet, tokens, until
from tests.servers import CacheServer, free_ports, running_server

pytestmark = pytest.mark.process
SHM = Path("/dev/shm")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server(*SHORT_TIMES) as server:
        yield server


def command(port: object, http_port: object, *flags: object) -> list[str]:
    return [
        sys.executable, "-m", "lmcache_server.cli.main", "server", "--l1-size-gb", "0.01", "--chunk-size", "16",
        "--port", str(port), "--http-port", str(http_port), *map(str, flags),
    ]  # fmt: skip


def test_a_killed_server_comes_back_empty_under_a_new_incarnation_and_is_never_read_as_the_old_one(
    server: CacheServer,
) -> None:
    prompt = tokens(4, seed=0)
    with FakeEngine(server.url) as engine:
        for _ in range(3):
            assert (engine.store(prompt), engine.load(prompt)) == (4, 4)
            held, before = engine.acquire(prompt), engine.hello
            inode = (SHM / server.segment).stat().st_ino
            server.restart()
            for message in (Acquire(engine.instance, ()), Release(engine.instance, (held.lease,))):
                with pytest.raises(ProtocolError) as refused:
                    engine.ask(message)
                assert refused.value.code is ErrorCode.UNKNOWN_INSTANCE
            assert not engine.ping().known
            assert engine.ping().incarnation != before.incarnation
            assert (SHM / server.segment).stat().st_ino != inode
            engine.register()
            assert engine.hello.server_id != before.server_id
            assert engine.hit(prompt) == 0
    assert_quiet(server)
    assert [path.name for path in SHM.glob(server.segment + "*")] == [server.segment]


def test_an_abandoned_segment_is_reclaimed_by_the_next_server_of_any_name(server: CacheServer) -> None:
    server.kill()
    try:
        with running_server() as other:
            assert not (SHM / server.segment).exists()
            server.start()
            _assert_apart(server, other)
    finally:
        if server.process is None or server.process.poll() is not None:
            server.start()


def test_a_silent_client_is_told_that_it_is_not_registered_and_registers_again(server: CacheServer) -> None:
    prompt = tokens(2, seed=1)
    with FakeEngine(server.url) as silent, FakeEngine(server.url) as alive:
        silent.store(prompt)
        until(lambda: alive.ping().known and server.status()["worker_liveness"]["tracked_instances"] == 1, REAP + 5)
        assert alive.load(prompt) == 2
        began = time.monotonic()
        with pytest.raises(ProtocolError) as refused:
            silent.load(prompt)
        assert refused.value.code is ErrorCode.UNKNOWN_INSTANCE and time.monotonic() - began < 2
        silent.register()
        assert silent.load(prompt) == 2
    assert_quiet(server)


def test_clients_that_say_they_are_the_same_process_are_kept_apart(server: CacheServer) -> None:
    same = this_process()
    with FakeEngine(server.url, process=same) as one, FakeEngine(server.url, process=same) as other:
        assert one.instance != other.instance
        prompt = one.tokens(2)
        one.store(prompt)
        held = one.acquire(prompt, session="same")
        assert other.acquire(prompt, session="same").lease != held.lease
        other.end(held.session)
        assert one.read(held) == [0, 1]
        with pytest.raises(ProtocolError) as refused:
            other.ask(Read(other.instance, held.lease, (Piece(0, 0, 0, 1),)))
        assert refused.value.code is ErrorCode.UNKNOWN_LEASE
        assert one.release(held) == 1
    assert_quiet(server)


def _assert_apart(server: CacheServer, other: CacheServer) -> None:
    """Two servers of one host serve their own clients only."""
    with FakeEngine(server.url) as here, FakeEngine(other.url) as there:
        prompt = tokens(2, seed=2)
        here.store(prompt)
        assert (here.hit(prompt), there.hit(prompt)) == (2, 0)
        with pytest.raises(ProtocolError):
            there.ask(Acquire(here.instance, ()))


def test_a_second_server_under_the_same_address_fails_loudly(server: CacheServer) -> None:
    for ports in ((server.port, free_ports(1)[0]), (free_ports(1)[0], server.http_port)):
        refused = subprocess.run(command(*ports), capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2 and "Address already in use" in refused.stderr
        assert not (SHM / f"lmcache_l1_pool_{ports[0]}").exists()


def test_the_transport_in_use_is_told_and_never_downgraded_in_silence(server: CacheServer) -> None:
    port, http_port = free_ports(2)
    foreign = SHM / f"lmcache_l1_pool_taken_{port}"
    foreign.write_bytes(b"not a pool")
    try:
        for flags in (["--shm-name", foreign.name], ["--l1-size-gb", "60000"]):
            refused = subprocess.run(command(port, http_port, *flags), capture_output=True, text=True, timeout=60)
            assert refused.returncode == 2 and "/dev/shm" in refused.stderr
            assert foreign.read_bytes() == b"not a pool"
    finally:
        foreign.unlink()
    assert server.status()["transport"] == "shm"


def test_a_server_that_is_killed_while_it_takes_its_pages_leaves_nothing() -> None:
    port, http_port = free_ports(2)
    name = f"lmcache_l1_pool_eager_{port}"
    eager = subprocess.Popen(
        command(port, http_port, "--l1-size-gb", "2", "--no-l1-use-lazy", "--shm-name", name), stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _shared_memory_of(eager.pid) > 64 * 2**20, 30)
    finally:
        eager.send_signal(signal.SIGKILL)
        eager.wait()
    assert not (SHM / name).exists()


def _shared_memory_of(pid: int) -> int:
    """Bytes of unnamed or named shared memory that a process has open."""
    total = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd).startswith("/dev/shm/"):
                total += fd.stat().st_blocks * 512
    return total


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_user_may_map_the_pool_if_its_mode_says_so_and_else_uses_frames(server: CacheServer) -> None:
    def nobody(url: str, *groups: int) -> str:
        arguments = [sys.executable, "-c", _AS_NOBODY_CLIENT, url, *map(str, groups)]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert nobody(server.url, os.getgid()) == "refused"
    with running_server("--shm-mode", "0660") as shared:
        assert nobody(shared.url) == "refused"
        assert nobody(shared.url, os.getgid()) == "mapped"
        assert_quiet(shared)


_AS_NOBODY_CLIENT = """
import os, sys
from tests.fake_engine import FakeEngine
os.setgroups(list(map(int, sys.argv[2:]))); os.setgid(65534); os.setuid(65534)
try:
    engine, found = FakeEngine(sys.argv[1]), "mapped"
except PermissionError:
    engine, found = FakeEngine(sys.argv[1], frames=True), "refused"
with engine:
    prompt = engine.tokens(2)
    assert engine.store(prompt) == engine.load(prompt) == 2
print(found)
"""

_AS_NOBODY_SERVER = """
import encodings.idna, os, sys, uvloop
import lmcache_server.app, uvicorn.lifespan.off, uvicorn.protocols.http.h11_impl
from lmcache_server.cli.main import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""
"""The interpreter itself may lie where nobody can read it, so everything is imported before."""


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_server_of_another_user_serves_and_leaves_foreign_segments_alone() -> None:
    port, http_port = free_ports(2)

    def as_nobody(*arguments: object) -> list[str]:
        python, _, _, *rest = command(*arguments)
        return [python, "-c", _AS_NOBODY_SERVER, *rest]

    mine = SHM / f"lmcache_l1_pool_root_{port}"
    mine.write_bytes(b"not theirs")
    mine.chmod(0o600)
    theirs = subprocess.Popen(as_nobody(port, http_port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until(lambda: _listens(port), 40)
        with FakeEngine(f"tcp://127.0.0.1:{port}") as engine:
            prompt = engine.tokens(2)
            assert engine.store(prompt) == engine.load(prompt) == 2
        assert mine.exists()
        other = as_nobody(*free_ports(2), "--shm-name", mine.name)
        refused = subprocess.run(other, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2 and mine.name in refused.stderr and "Traceback" not in refused.stderr
    finally:
        theirs.terminate()
        output = theirs.communicate(timeout=20)[0]
        mine.unlink()
    assert theirs.returncode == 0, output
    assert not (SHM / f"lmcache_l1_pool_{port}").exists()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
