"""The documents, the one command, and what is refused."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lmcache_server.io import http_api
from lmcache_server.io.http_api import HttpServer, Routes, bind, build_app
from lmcache_server.io.zmq_server import BindError
from tests.servers import free_ports

ROUTES = {
    "/", "/healthcheck", "/status", "/config", "/metrics", "/version", "/lmc_version", "/cache/clear",
    "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
}  # fmt: skip


class World:
    """What the routes answer with."""

    def __init__(self) -> None:
        self.healthy, self.cleared = True, 0
        self.routes = Routes(
            version="1.2.3",
            status=lambda: {"is_healthy": self.healthy},
            config=lambda: {"mp": {"chunk_size": 256}},
            metrics=lambda: "lmcache_mp_lookups_requests_total 3\n",
            is_healthy=lambda: self.healthy,
            clear=self.clear,
        )

    def clear(self) -> dict[str, Any]:
        self.cleared += 1
        return {"status": "ok", "freed": 1, "held": 0}


def served(world: World, body: Callable[[httpx.AsyncClient], Any]) -> None:
    """Run `body` with a client of a real server on a real port."""

    async def run() -> None:
        (port,) = free_ports(1)
        server = HttpServer(build_app(world.routes), bind("127.0.0.1", port))
        serving = asyncio.create_task(server.run())
        assert await server.started()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            await body(client)
        server.stop()
        await asyncio.wait_for(serving, 10)

    asyncio.run(run())


def test_every_document_is_where_clients_look_for_it() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.get("/")).json() == {"status": "ok", "service": "LMCache HTTP API"}
        assert (await client.get("/status")).json() == {"is_healthy": True}
        assert (await client.get("/config")).json() == {"mp": {"chunk_size": 256}}
        assert (await client.get("/version")).json() == (await client.get("/lmc_version")).json() == "1.2.3"
        metrics = await client.get("/metrics")
        assert metrics.text == "lmcache_mp_lookups_requests_total 3\n"
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")

    served(World(), body)


def test_the_health_is_a_status_code_too() -> None:
    world = World()

    async def body(client: httpx.AsyncClient) -> None:
        green = await client.get("/healthcheck")
        world.healthy = False
        red = await client.get("/healthcheck")
        assert (green.status_code, green.json()) == (200, {"status": "healthy"})
        assert (red.status_code, red.json()) == (503, {"status": "unhealthy"})

    served(world, body)


def test_clear_takes_no_body_or_the_one_that_is_known() -> None:
    world = World()

    async def body(client: httpx.AsyncClient) -> None:
        for content in (None, {}, {"tier": "l1"}, {"force": True}):
            assert (await client.post("/cache/clear", json=content)).json()["freed"] == 1
        for content in ({"tier": "l2"}, {"force": "perhaps"}, {"all": True}, [], "x"):
            assert (await client.post("/cache/clear", json=content)).status_code == 422
        assert (await client.get("/cache/clear")).status_code == 405
        assert world.cleared == 4

    served(world, body)


def test_a_body_that_is_too_long_is_refused_without_being_read_to_its_end() -> None:
    world = World()

    async def body(client: httpx.AsyncClient) -> None:
        async def endless() -> Any:
            while True:
                yield bytes(2**16)

        answer = await client.post("/cache/clear", content=bytes(2**16 + 1))
        assert answer.status_code == 413
        assert "at most 65536 bytes" in answer.json()["detail"]
        for path in ("/cache/clear", "/status", "/nothing"):
            with contextlib.suppress(httpx.TransportError):  # it may hang up on us
                assert (await client.post(path, content=endless())).status_code in (404, 405, 413)
        assert (await client.get("/healthcheck")).status_code == 200
        assert world.cleared == 0

    served(world, body)


def test_there_are_no_routes_beside_the_listed_ones() -> None:
    assert {getattr(route, "path", None) for route in build_app(World().routes).routes} == ROUTES


def test_an_address_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=rf"http://127.0.0.1:{port}: Address already in use; choose another"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "203.0.113.1", "x" * 300, "ü" * 80])
def test_an_address_that_is_not_of_this_machine_is_one_sentence(host: str) -> None:
    with pytest.raises(BindError, match="cannot listen on http://"):
        bind(host, free_ports(1)[0])


def test_whoever_waits_for_a_server_that_failed_to_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no start")

    monkeypatch.setattr(http_api._Uvicorn, "startup", fail)

    async def run() -> None:
        server = HttpServer(build_app(World().routes), bind("127.0.0.1", free_ports(1)[0]))
        serving = asyncio.create_task(server.run())
        assert not await asyncio.wait_for(server.started(), 5)
        with pytest.raises(RuntimeError, match="no start"):
            await serving

    asyncio.run(run())
