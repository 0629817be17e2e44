"""The HTTP interface: documents out, one command in. Runs in the server's own loop, on a socket that is bound
beforehand.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, ConfigDict
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmcache_server.io.zmq_server import BindError

__all__ = ["HttpServer", "Routes", "bind", "build_app"]

_MAX_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Routes:
    """What each route answers with."""

    version: str
    status: Callable[[], dict[str, Any]]
    config: Callable[[], dict[str, Any]]
    metrics: Callable[[], str]
    is_healthy: Callable[[], bool]
    clear: Callable[[], dict[str, Any]]


class ClearBody(BaseModel):
    """Body of POST /cache/clear; `force` is accepted for older clients and never frees what is in use."""

    model_config = ConfigDict(extra="forbid")
    tier: Literal["l1"] = "l1"
    force: bool = False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises BindError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BindError(
            f"cannot listen on http://{host}:{port}: {reason}; choose another --http-host or --http-port"
        ) from error
    return listener


def build_app(routes: Routes) -> FastAPI:
    """The application behind the interface."""
    app = FastAPI(title="lmcache-server", version=routes.version)

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"status": "ok", "service": "LMCache HTTP API"}

    @app.get("/healthcheck")
    async def healthcheck(response: Response) -> dict[str, str]:
        healthy = routes.is_healthy()
        response.status_code = 200 if healthy else 503
        return {"status": "healthy" if healthy else "unhealthy"}

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return routes.status()

    @app.get("/config")
    async def config() -> dict[str, Any]:
        return routes.config()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(routes.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    @app.get("/lmc_version")
    async def version() -> str:
        return routes.version

    @app.post("/cache/clear")
    async def clear(body: ClearBody | None = None) -> dict[str, Any]:
        return routes.clear()

    return app


class _LimitedBodies:
    """Refuses to read a body of more than `_MAX_BODY_BYTES`: nothing here takes a long one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        long = b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)) > _MAX_BODY_BYTES
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > _MAX_BODY_BYTES:
                raise HTTPException(413, f"a body of at most {_MAX_BODY_BYTES} bytes is read")
            return message

        async def closing(message: Message) -> None:
            # What is left of a long body would be read only to be thrown away.
            if long and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, limited, closing)


class HttpServer:
    """Serves `app` on `listener` until stopped."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._listener = listener
        config = uvicorn.Config(
            _LimitedBodies(app),
            # Named, so that what else is installed does not decide about limits and start-up time.
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        self._server = _Uvicorn(config)

    async def run(self) -> None:
        """Serve; returns after `stop`."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self.stop()

    def stop(self) -> None:
        """Finish what is under way and end `run`."""
        self._server.should_exit = True

    async def started(self) -> bool:
        """Wait until requests are answered; False if `run` ended before."""
        while not self._server.started and not self._server.should_exit:
            await asyncio.sleep(0.005)
        return self._server.started


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the composition root's business."""
        yield
