"""Frames in, one reply out, for any number of peers, whatever they send or fail to read."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq
import zmq.asyncio

from lmcache_server.io import zmq_server
from lmcache_server.io.zmq_server import BindError, Buffer, ZmqServer
from tests.servers import free_ports

Handler = Callable[[bytes, Sequence[Buffer]], list[Buffer]]


def echo(operation: bytes, payload: Sequence[Buffer]) -> list[Buffer]:
    return [operation, *payload]


class Peers:
    """DEALER sockets to one server in this loop."""

    def __init__(self, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._port = port

    def connect(self, **options: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(f"tcp://127.0.0.1:{self._port}")
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)


def served(handler: Handler, body: Callable[[ZmqServer, Peers], Any]) -> None:
    """Run `body` against a server with `handler`."""

    async def run() -> None:
        (port,) = free_ports(1)
        server, peers = ZmqServer("127.0.0.1", port), Peers(port)
        server.start(asyncio.get_running_loop(), handler)
        try:
            await asyncio.wait_for(body(server, peers), 30)
        finally:
            peers.close()
            server.close()

    asyncio.run(run())


async def ask(peer: zmq.asyncio.Socket, *frames: bytes) -> list[bytes]:
    await peer.send_multipart(frames)
    return list(await peer.recv_multipart())


def test_a_message_is_answered_with_its_uid_and_what_the_handler_returns() -> None:
    async def body(_: ZmqServer, peers: Peers) -> None:
        peer = peers.connect()
        assert await ask(peer, b"uid", b"op", b"payload", b"more") == [b"uid", b"op", b"payload", b"more"]
        assert await ask(peer, b"", b"op") == [b"", b"op"]
        assert await ask(peer, b"alone") == [b"alone", b""]

    served(echo, body)


def test_each_peer_gets_its_own_replies_in_its_own_order() -> None:
    async def body(_: ZmqServer, peers: Peers) -> None:
        sockets = [peers.connect() for _ in range(4)]
        for i in range(200):
            for number, socket in enumerate(sockets):
                await socket.send_multipart([b"%d" % i, b"%d" % number])
        for number, socket in enumerate(sockets):
            for i in range(200):
                assert await socket.recv_multipart() == [b"%d" % i, b"%d" % number]

    served(echo, body)


def test_a_burst_does_not_keep_the_loop_from_other_work() -> None:
    async def body(_: ZmqServer, peers: Peers) -> None:
        peer = peers.connect()
        for i in range(1000):
            await peer.send_multipart([b"%d" % i, b"op"])
        longest, last = 0.0, time.monotonic()
        for _ in range(1000):
            await peer.recv_multipart()
            await asyncio.sleep(0)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert longest < 1.0

    def slow(operation: bytes, payload: Sequence[Buffer]) -> list[Buffer]:
        time.sleep(0.001)
        return [operation]

    served(slow, body)


def test_only_one_continuation_of_a_drain_is_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_server, "_BURST", 4)  # as many are there in time on the busiest machine

    async def body(server: ZmqServer, peers: Peers) -> None:
        peer = peers.connect()
        await ask(peer, b"0", b"op")
        for i in range(500):
            await peer.send_multipart([b"%d" % i, b"op"])
        await asyncio.sleep(0.2)
        scheduled: list[Callable[[], None]] = []
        server._loop = type("Loop", (), {"call_soon": staticmethod(scheduled.append), "is_closed": lambda _: True})()
        for i in range(500):
            await peer.send_multipart([b"%d" % i, b"op"])
        time.sleep(0.2)
        for _ in range(3):
            server.drain()
        assert len(scheduled) == 1

    served(echo, body)


def test_a_reply_to_a_peer_that_is_gone_is_dropped_and_counted() -> None:
    async def body(server: ZmqServer, peers: Peers) -> None:
        peer, other = peers.connect(), peers.connect()
        await ask(peer, b"1", b"op")
        leaving.append(peer)
        await peer.send_multipart([b"2", b"op"])
        while leaving:
            await asyncio.sleep(0.01)
        assert await ask(other, b"3", b"op") == [b"3", b"op"]
        assert server.dropped_replies == 1

    leaving: list[zmq.asyncio.Socket] = []

    def handler(operation: bytes, payload: Sequence[Buffer]) -> list[Buffer]:
        if leaving:
            leaving.pop().close()
            time.sleep(0.2)  # the other end sees it
        return [operation]

    served(handler, body)


async def known_as_read(server: ZmqServer, stuck: int = 0) -> None:
    """That a reply was read is known a moment later; wait for that, for all peers but `stuck` of them."""
    while sum(not all(tracker.done for _, tracker in waiting) for waiting in server._unread.values()) > stuck:
        await asyncio.sleep(0.01)


def test_large_replies_to_a_peer_that_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_server, "_UNREAD_BYTES", 8 * 2**20)

    async def body(server: ZmqServer, peers: Peers) -> None:
        stuck, reader = peers.connect(RCVHWM=1, RCVBUF=4096), peers.connect()
        for i in range(100):
            await stuck.send_multipart([b"%d" % i, b"op"])
        for i in range(30):
            assert len((await ask(reader, b"%d" % i, b"op"))[1]) == 2**20
            await known_as_read(server, stuck=1)
        assert server.dropped_replies > 50
        dropped = server.dropped_replies
        # Whoever begins to read gets what was kept, and is served again.
        received = 100 - dropped
        for _ in range(received):
            await stuck.recv_multipart()
        assert len((await ask(stuck, b"again", b"op"))[1]) == 2**20
        assert await ask(reader, b"x", b"op")
        assert len(server._unread) <= 2

    served(lambda operation, payload: [bytes(2**20)], body)


def test_one_reply_may_be_larger_than_what_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_server, "_UNREAD_BYTES", 2**20)

    async def body(server: ZmqServer, peers: Peers) -> None:
        peer = peers.connect()
        for _ in range(3):
            assert len((await ask(peer, b"1", b"op"))[1]) == 2**22
            await known_as_read(server)

    served(lambda operation, payload: [bytes(2**22)], body)


def test_nothing_is_received_in_spite_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    server = ZmqServer("127.0.0.1", port)
    with contextlib.closing(server):
        monkeypatch.setattr(server._socket, "get", lambda _: zmq.POLLIN)
        server.drain()


def test_a_stopped_server_drains_nothing_and_may_be_closed_twice() -> None:
    (port,) = free_ports(1)
    server = ZmqServer("127.0.0.1", port)
    server.close()
    server.close()
    server.drain()


@pytest.fixture
def taken() -> Iterator[int]:
    (port,) = free_ports(1)
    server = ZmqServer("127.0.0.1", port)
    yield port
    server.close()


def test_an_address_in_use_is_one_sentence(taken: int) -> None:
    with pytest.raises(BindError, match=rf"tcp://127.0.0.1:{taken}: Address already in use; choose another"):
        ZmqServer("127.0.0.1", taken)


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1", "x" * 300, "tcp://localhost", ""])
def test_an_address_that_is_not_of_this_machine_is_one_sentence(host: str) -> None:
    (port,) = free_ports(1)
    with pytest.raises(BindError, match="cannot listen on tcp://"):
        ZmqServer(host, port)


def test_an_ipv6_address_may_be_given_as_it_is() -> None:
    async def run() -> None:
        (port,) = free_ports(1)
        server = ZmqServer("::1", port)
        server.start(asyncio.get_running_loop(), echo)
        context = zmq.asyncio.Context()
        peer = context.socket(zmq.DEALER)
        peer.ipv6 = True
        peer.connect(f"tcp://[::1]:{port}")
        assert await asyncio.wait_for(ask(peer, b"1", b"op"), 10) == [b"1", b"op"]
        context.destroy(linger=0)
        server.close()

    asyncio.run(run())
