"""Whatever is sent, there is one answer to each message, the loop lives, and memory stays flat."""

import contextlib
import pickle
import random
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from lmcache_server.protocol import messages as m
from lmcache_server.protocol.codec import encode
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.fake_engine import LAYOUT, FakeEngine, NoReply, Peer
from tests.faults.world import assert_quiet, resident_bytes
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

REPEATS = 10_000
WINDOW = 50
PROMPT = m.Prompt(m.SessionId("r"), bytes(64))


def op(name: str) -> bytes:
    packed: bytes = msgpack.packb(name)
    return packed


BAD: dict[str, list[bytes]] = {
    "a body that is no MessagePack": [op("v1/reserve"), b"\xc1\xff"],
    "a body of another type": [op("v1/acquire"), msgpack.packb([1, 2, 3])],
    "a field of another type": [op("v1/commit"), msgpack.packb({"instance": 1, "commits": [{"reservation": "x"}]})],
    "a missing field": [op("v1/release"), msgpack.packb({"instance": 1})],
    "an unknown field": [op("v1/ping"), msgpack.packb({"instances": 1})],
    "a number beyond its range": [op("v1/register"), msgpack.packb({"role": "x", "world_size": 2**63})],
    "an unknown instance": [op("v1/reserve"), encode(m.Reserve(99, (PROMPT,)))],
    "an unknown operation": [op("v1/evict"), b"\x80"],
    "an unknown number": [msgpack.packb(77), b"\x80"],
    "no body": [op("v1/end")],
    "too many frames": [op("v1/clear"), b"\x80", b"", b""],
    "frames without pieces": [op("v1/write"), encode(m.Write(99, 1, ())), bytes(100)],
}


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server("--log-level", "warning") as server:
        yield server


def ask_many(peer: Peer, frames: list[bytes], count: int) -> tuple[int, list[float]]:
    """Ask `count` times, a window at once; how many errors came back, and the seconds that each reply took, sorted."""
    errors, waits = 0, []
    for start in range(0, count, WINDOW):
        sent = []
        for i in range(WINDOW):
            peer.send(b"%d" % (start + i), *frames)
            sent.append(time.monotonic())
        for i in range(WINDOW):
            uid, operation, *reply = peer.receive(20)
            waits.append(time.monotonic() - sent[i])
            assert uid == b"%d" % (start + i)
            errors += not reply or reply[0].startswith(b"\x81\xa5error") or operation != frames[0]
    return errors, sorted(waits)


@pytest.mark.parametrize("sort", BAD)
def test_each_bad_request_gets_an_error_at_once_and_costs_no_memory(server: CacheServer, sort: str) -> None:
    with contextlib.closing(Peer(server.url)) as peer:
        ask_many(peer, BAD[sort], 1000)
        before = resident_bytes(server.pid)
        errors, waits = ask_many(peer, BAD[sort], REPEATS)
        assert errors == len(waits) == REPEATS
        # All of them on a quiet machine; another process may well take the processor for longer.
        assert waits[REPEATS * 99 // 100] < 0.1
        assert resident_bytes(server.pid) - before < 2 * 2**20
    assert server.status()["counters"]["faults"] == 0


def good_messages(instance: int) -> list[bytes]:
    return [
        encode(m.Reserve(instance, (PROMPT,))),
        encode(m.Acquire(instance, (PROMPT,))),
        encode(m.Ping(instance, (1, 2))),
        encode(m.Register("w", "m", "", Kind.KV, 1, 0, LAYOUT, 16)),
    ]


def random_frames(chance: random.Random, good: list[bytes]) -> list[bytes]:
    """Between none and eight frames: noise, truncated messages, random MessagePack, everything in the wrong place."""

    def value(depth: int = 0) -> Any:
        kinds = [
            None,
            True,
            chance.getrandbits(64),
            -chance.getrandbits(63),
            chance.random(),
            "x" * chance.randint(0, 9),
        ]
        if depth < 3:
            kinds.append([value(depth + 1) for _ in range(chance.randint(0, 4))])
            kinds.append({chance.choice(["instance", "prompts", 1, b"k"]): value(depth + 1) for _ in range(3)})
        return chance.choice(kinds)

    def frame() -> bytes:
        message = chance.choice(good)
        return chance.choice(
            [
                b"", chance.randbytes(chance.randint(1, 40)), message, message[: chance.randint(0, len(message))],
                bytes(chance.choice(message) if chance.random() < 0.1 else byte for byte in message),
                msgpack.packb(value()), op(chance.choice(list(m.OPERATIONS))), msgpack.packb(chance.randint(-5, 40)),
                struct.pack("<B", chance.randrange(256)) * chance.randint(1, 2000),
            ]
        )  # fmt: skip

    return [frame() for _ in range(chance.randint(0, 8))]


def test_well_formed_clients_are_served_through_a_storm_of_random_frames(server: CacheServer) -> None:
    stop, verified, failures = threading.Event(), [0], []

    def healthy() -> None:
        try:
            with FakeEngine(server.url) as engine:
                while not stop.is_set():
                    prompt = engine.tokens(4)
                    assert engine.store(prompt) in range(5)
                    verified[0] += engine.load(prompt)
        except BaseException as error:  # whatever it is, the test must see it
            failures.append(error)
            raise

    thread = threading.Thread(target=healthy)
    thread.start()
    try:
        with FakeEngine(server.url) as engine, contextlib.closing(Peer(server.url)) as storm:
            chance = random.Random(56)
            good = good_messages(engine.instance)
            for _ in range(3000):
                frames = random_frames(chance, good)
                if frames:
                    storm.send(*frames)
                with contextlib.suppress(NoReply):
                    while True:
                        storm.receive(0)
            assert server.get("/healthcheck") == {"status": "healthy"}
            # Each of the storm's messages was answered: what comes last comes back last.
            storm.send(b"last", op("v1/ping"), b"\x80")
            while storm.receive(20)[0] != b"last":
                pass
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert verified[0] > 40
    assert server.status()["counters"]["faults"] == 0, server.log
    assert_quiet(server)


def test_large_frames_are_answered_or_hung_up_on_and_leave_no_memory(server: CacheServer) -> None:
    before = resident_bytes(server.pid)
    with FakeEngine(server.url) as engine, contextlib.closing(Peer(server.url)) as peer:
        for frames in (
            [b"u", op("v1/hello"), bytes(64 * 2**20)],
            [b"u", op("v1/ping"), msgpack.packb({"renew": [1] * 10**6})],
            [b"u", op("v1/ping"), msgpack.packb([[[{}] * 10**5] * 9] * 3)],
            [b"u", msgpack.packb("x" * 10**7), b"\x80"],
            [b"u", op("v1/register"), msgpack.packb({"x" * 10**7: 1})],
        ):
            began = time.monotonic()
            peer.send(*frames)
            assert b"error" in peer.receive(20)[2]
            assert time.monotonic() - began < 5
        # A frame beyond the limit of the socket ends that connection and no other.
        with contextlib.closing(Peer(server.url)) as greedy:
            greedy.send(b"u", op("v1/hello"), bytes(129 * 2**20))
            with pytest.raises(NoReply):
                greedy.receive(1)
        prompt = engine.tokens(4)
        assert engine.store(prompt) == engine.load(prompt) == 4
    assert resident_bytes(server.pid) - before < 64 * 2**20
    assert_quiet(server)


class Bomb:
    """Decoding its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_no_pickle_is_ever_decoded(server: CacheServer, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "pwned"))
    with FakeEngine(server.url) as engine, contextlib.closing(Peer(server.url)) as peer:
        for operation in [*m.OPERATIONS]:
            peer.send(b"u", op(operation), bomb)
            assert b"error" in peer.receive(20)[2]
        for number in range(34):
            for frames in ([bomb], [b"\x80", bomb], [msgpack.packb(bomb)], [b"\x80", b"\x01", msgpack.packb(bomb)]):
                peer.send(b"u", msgpack.packb(number), *frames)
                peer.receive(20)
        peer.send(bomb, bomb, bomb)
        peer.receive(20)
        writing = engine.reserve(engine.tokens(1))
        engine.fill(writing)
        engine.commit(writing)
    assert not (tmp_path / "pwned").exists()
    pickle.loads(bomb)
    assert (tmp_path / "pwned").exists(), "the bomb itself must work"
    assert_quiet(server)


def test_a_client_that_does_not_read_its_replies_does_not_fill_the_memory(server: CacheServer) -> None:
    megabytes = CacheLayout((KernelGroup((0,), 2, 1, 8192, "float32"),))
    with (
        FakeEngine(server.url, frames=True, layout=megabytes) as engine,
        contextlib.closing(Peer(server.url, RCVHWM=1)) as deaf,
    ):
        prompt = engine.tokens(16)
        engine.store(prompt)
        held = engine.acquire(prompt)
        pieces = tuple(m.Piece(chunk, 0, 0, 2**20) for chunk in range(16))
        before = resident_bytes(server.pid)
        for i in range(100):
            deaf.send(b"%d" % i, op("v1/read"), encode(m.Read(engine.instance, held.lease, pieces)))
        assert engine.ping(held.lease).renewed == 1
        assert engine.read(held) == list(range(16))
        assert resident_bytes(server.pid) - before < 400 * 2**20
        assert server.status()["counters"]["dropped_replies"] > 50
    assert_quiet(server)
