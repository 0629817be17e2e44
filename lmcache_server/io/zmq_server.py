"""The ROUTER socket in the asyncio loop: parts in, one reply out. Knows frames, not what they mean.

The socket's file descriptor is edge-triggered: readable means that something changed, so the socket is drained until
it has nothing more, and looked at again after each send, which may have consumed the edge. A drain that goes on for
long lets the loop breathe.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

__all__ = ["BindError", "Buffer", "Handler", "ZmqServer"]

log = logging.getLogger(__name__)
Buffer = bytes | memoryview
Handler = Callable[[bytes, Sequence[Buffer]], list[Buffer]]

_BURST = 64
_MAX_MESSAGE_BYTES = 128 * 2**20
_LARGE = 64 * 2**10


class BindError(Exception):
    """The address cannot be listened on: one sentence."""


class ZmqServer:
    """Listens on `tcp://host:port` from the start; answers once it is given a handler."""

    def __init__(self, host: str, port: int) -> None:
        self.dropped_replies = 0
        self._handler: Handler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise BindError(
                f"cannot listen on tcp://{host}:{port}: {error.strerror}; choose another --host or --port"
            ) from error

    def start(self, loop: asyncio.AbstractEventLoop, handler: Handler) -> None:
        """Answer every message in `loop`: its uid, then what `handler(operation, payload frames)` returns."""
        self._loop, self._handler = loop, handler
        loop.add_reader(self._socket.fileno(), self.drain)
        loop.call_soon(self.drain)

    def drain(self) -> None:
        """Answer what is waiting; what a burst leaves over is answered in the loop's next round."""
        for _ in range(_BURST):
            if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK, copy=True))
        if self._loop is not None:
            self._loop.call_soon(self.drain)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if not self._socket.closed:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()

    def _answer(self, parts: list[bytes]) -> None:
        assert self._handler is not None
        identity, *message = parts
        uid, operation, *payload = [*message, b"", b""][: max(2, len(message))]
        reply = self._handler(operation, payload)
        try:
            self._socket.send_multipart([identity, uid, *reply], zmq.NOBLOCK, copy=_small(reply))
        except zmq.ZMQError as error:
            # The peer is gone, or does not read: its own deadline tells it.
            self.dropped_replies += 1
            log.debug("a reply of %r was dropped: %s", operation[:40], error)


def _small(frames: Sequence[Buffer]) -> bool:
    return all(len(frame) < _LARGE for frame in frames)
