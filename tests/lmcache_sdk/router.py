"""A real ROUTER socket that answers as a test wants it to: the other end of the client's socket, and no server."""

import threading
from collections.abc import Callable

import msgpack
import zmq

from lmcache_server.protocol.codec import decode, encode
from lmcache_server.protocol.messages import OPERATIONS, Hello, HelloReply, Transport

__all__ = ["Answer", "Router", "hello_reply"]

Answer = Callable[[str, bytes, list[bytes]], list[list[bytes]]]
"""(operation, message, raw frames) -> the replies to send now, each as frames after uid and operation; usually one."""


class Router:
    """Serves in a thread until stopped; `received` are the operations that arrived, in order."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.received: list[str] = []
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if port:
            self._socket.bind(f"tcp://127.0.0.1:{port}")
        self.port = port or self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.url = f"tcp://127.0.0.1:{self.port}"
        self._held: list[list[bytes]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="router double")
        self._thread.start()

    def __enter__(self) -> "Router":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the socket, which breaks every connection."""
        self._stopping.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(10):
                continue
            identity, uid, name, message, *raw = self._socket.recv_multipart()
            operation = msgpack.unpackb(name)
            self.received.append(operation)
            for frames in self._answer(operation, message, raw):
                self._socket.send_multipart([identity, uid, name, *frames])


def hello_reply(message: bytes) -> HelloReply:
    """An answer to hello that carries the request's own number, so that a test can tell answers apart."""
    number = decode(Hello, message).protocol
    frames = Transport.FRAMES
    return HelloReply(number, "double", "double", 1, 16, "xxh3_128", frames, "", 4096, 4096, 1024, 60.0, 300.0)


def answer_hello(operation: str, message: bytes, _: list[bytes]) -> list[list[bytes]]:
    """Each hello answered at once."""
    assert OPERATIONS[operation][0] is Hello, operation
    return [[encode(hello_reply(message))]]
