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
from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict

from lmcache_server.io.zmq_server import BindError

__all__ = ["HttpServer", "Routes", "bind", "build_app"]


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
    except OSError as error:
        raise BindError(
            f"cannot listen on http://{host}:{port}: {error.strerror}; choose another --http-host or --http-port"
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


class HttpServer:
    """Serves `app` on `listener` until stopped."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._listener = listener
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        self._server = _Uvicorn(config)

    async def run(self) -> None:
        """Serve; returns after `stop`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Finish what is under way and end `run`."""
        self._server.should_exit = True

    async def started(self) -> None:
        """Wait until requests are answered."""
        while not self._server.started and not self._server.should_exit:
            await asyncio.sleep(0.005)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the composition root's business."""
        yield
