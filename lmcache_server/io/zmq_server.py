"""The ROUTER socket in the asyncio loop: parts in, one reply out. Knows frames, not what they mean.

The socket's file descriptor is edge-triggered: readable means that something changed, so the socket is drained until
it has nothing more, and looked at again after each send, which may have consumed the edge. A drain that goes on for
long lets the loop breathe.

Memory is bounded: a peer that sends faster than it is answered is held back by TCP, and large replies to a peer that
does not read them are dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import zmq

__all__ = ["BindError", "Buffer", "Handler", "ZmqServer"]

log = logging.getLogger(__name__)
Buffer = bytes | memoryview
Handler = Callable[[bytes, Sequence[Buffer]], list[Buffer]]

# As enums they would cost more than the calls that they are used in.
_EVENTS, _POLLIN, _NOBLOCK, _MORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_BURST = 64
_MAX_FRAME_BYTES = 128 * 2**20
_WAITING_MESSAGES = 64
"""Messages per peer that wait here to be answered."""
_LARGE = 64 * 2**10
_UNREAD_BYTES = 256 * 2**20
"""Large replies per peer that wait to be read by it."""


class BindError(Exception):
    """The address cannot be listened on: one sentence."""


class ZmqServer:
    """Listens on `tcp://host:port` from the start; answers once it is given a handler."""

    def __init__(self, host: str, port: int) -> None:
        self.dropped_replies = 0
        self._handler: Handler | None = None
        self._scheduled = False
        self._unread: dict[bytes, deque[tuple[int, zmq.MessageTracker]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        # Else pyzmq would copy a small last frame of a large reply, and call it delivered at once.
        self._socket.copy_threshold = 0
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise BindError(
                f"cannot listen on tcp://{host}:{port}: {zmq.strerror(error.errno or 0)}; "
                "choose another --host or --port"
            ) from error

    def start(self, loop: asyncio.AbstractEventLoop, handler: Handler) -> None:
        """Answer every message in `loop`: its uid, then what `handler(operation, payload frames)` returns."""
        self._loop, self._handler = loop, handler
        loop.add_reader(self._socket.fileno(), self.drain)
        loop.call_soon(self.drain)

    def drain(self) -> None:
        """Answer what is waiting; what a burst leaves over is answered in the loop's next round."""
        for _ in range(_BURST):
            if self._socket.closed or not cast(int, self._socket.get(_EVENTS)) & _POLLIN:
                return
            try:
                frames = [self._socket.recv(_NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_NOBLOCK, copy=False))
            except zmq.Again:
                return
            self._answer(frames)
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_on)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if not self._socket.closed:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()

    def _drain_on(self) -> None:
        self._scheduled = False
        self.drain()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        assert self._handler is not None
        identity, *message = frames
        uid, operation, *payload = [*map(_taken, message), b"", b""][: max(2, len(message))]
        reply = [uid, *self._handler(bytes(operation), payload)]
        size = sum(map(len, reply))
        try:
            if size < _LARGE:
                send = self._socket.send
                send(identity, _MORE)
                for part in reply[:-1]:
                    send(part, _MORE)
                send(reply[-1], _NOBLOCK)
            else:
                self._send_large(identity.bytes, reply, size)
        except zmq.ZMQError as error:
            # The peer is gone, or does not read: its own deadline tells it.
            self.dropped_replies += 1
            log.debug("a reply of %r was dropped: %s", operation[:40], error)

    def _send_large(self, identity: bytes, reply: Sequence[Buffer], size: int) -> None:
        """Send large frames without a copy; raises ZMQError (EAGAIN) while too much waits for this peer already."""
        for peer, waiting in list(self._unread.items()):
            while waiting and waiting[0][1].done:
                waiting.popleft()
            if not waiting:
                del self._unread[peer]
        waiting = self._unread.get(identity, deque())
        if waiting and size + sum(unread for unread, _ in waiting) > _UNREAD_BYTES:
            raise zmq.Again(zmq.EAGAIN)
        for part in (identity, *reply[:-1]):
            self._socket.send(part, zmq.NOBLOCK | zmq.SNDMORE, copy=len(part) < _LARGE)
        tracker = self._socket.send(reply[-1], zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        waiting.append((size, tracker))
        self._unread[identity] = waiting


def _taken(frame: zmq.Frame) -> Buffer:
    """What a frame holds; a large one is not copied."""
    return frame.bytes if len(frame) < _LARGE else frame.buffer
