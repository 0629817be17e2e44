"""A web server that sends exactly the bytes that a test gives it, at the pace that the test gives it."""

import json
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

__all__ = ["HttpDouble", "ok"]


def ok(value: Any) -> bytes:
    """A complete answer that carries `value` as JSON."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class HttpDouble:
    """Answers each path with its bytes; several pieces one by one, `pause` seconds apart. None: never answers."""

    def __init__(self, answers: dict[str, bytes | Iterable[bytes] | None], pause: float = 0.0) -> None:
        self.answers = answers
        self._pause = pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> "HttpDouble":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        self._listener.settimeout(0.02)
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            with connection, suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        request = connection.recv(65536).decode()
        answer = self.answers[request.split()[1]]
        pieces = [answer] if isinstance(answer, bytes) else answer
        if pieces is None:
            self._stopping.wait(10)
            return
        for piece in pieces:
            connection.sendall(piece)
            if self._stopping.is_set():
                return
            time.sleep(self._pause)
