"""A small OpenAI-style engine over real HTTP: it answers `/v1/completions` with what a test scripts, event by event."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["DONE", "SseEngine", "token"]

DONE = b"data: [DONE]\n\n"

Script = Callable[["SseEngine", dict[str, Any]], Iterator[bytes]]


def token(token_id: int, text: str | None = None) -> bytes:
    """The event of one generated token, as vLLM words it."""
    text = f"<{token_id}>" if text is None else text
    choice = {"index": 0, "text": text, "logprobs": {"tokens": [f"token_id:{token_id}"]}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


class SseEngine:
    """Answers every POST with the pieces of `script`, or with `status` and `body` if that is not 200.

    A script that raises `BrokenPipeError` cuts the connection in the middle of its answer.
    """

    def __init__(self, script: Script | None = None, *, status: int = 200, body: bytes = b"") -> None:
        self.script, self.status, self.body = script, status, body
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.stopping = threading.Event()
        self.connections = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                engine.connections += 1
                super().setup()

            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.requests.append((self.path, dict(self.headers), sent))
                self.send_response(engine.status)
                if engine.script is None:
                    self.send_header("Content-Length", str(len(engine.body)))
                    self.end_headers()
                    self.wfile.write(engine.body)
                    return
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for piece in engine.script(engine, sent):
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                except ConnectionError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> "SseEngine":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
