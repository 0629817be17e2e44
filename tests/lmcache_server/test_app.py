"""The whole server in this process: built in order, seen over its two ports, stopped by a signal."""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq.asyncio

from lmcache_server import app
from lmcache_server.config import Settings
from lmcache_server.io.shm import PoolError
from lmcache_server.io.zmq_server import BindError
from lmcache_server.metrics import METRICS, PREFIX
from tests.servers import free_ports

SHM = Path("/dev/shm")
Body = Callable[[httpx.AsyncClient, Callable[..., Awaitable[Any]]], Awaitable[None]]


def settings(**changes: Any) -> Settings:
    port, http_port = free_ports(2)
    fields = {"l1_size_gb": 0.002, "chunk_size": 16, "host": "127.0.0.1", "port": port, "http_port": http_port}
    return Settings(**(fields | {"shm_name": f"app_{port}", "instance_id": "me"} | changes))


def served(chosen: Settings, body: Body) -> None:
    """Serve until `body`, which gets an HTTP client and a way to ask over ZMQ, is done; then SIGTERM."""

    async def run() -> None:
        serving = asyncio.create_task(app.serve(chosen))
        context = zmq.asyncio.Context()
        peer = context.socket(zmq.DEALER)
        peer.connect(f"tcp://127.0.0.1:{chosen.port}")

        async def ask(operation: str | int, *frames: Any) -> Any:
            await peer.send_multipart([b"uid", msgpack.packb(operation), *map(msgpack.packb, frames)])
            uid, echoed, *reply = await asyncio.wait_for(peer.recv_multipart(), 20)
            assert (uid, msgpack.unpackb(echoed)) == (b"uid", operation)
            return msgpack.unpackb(reply[0])

        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{chosen.http_port}", timeout=20) as client:
                await ask("v1/hello", {})
                await body(client, ask)
        finally:
            context.destroy(linger=0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(serving, 20)

    asyncio.run(run())
    assert not list(SHM.glob(f"*app_{chosen.port}"))


def test_it_greets_with_what_it_was_told_and_made() -> None:
    chosen = settings(worker_reap_timeout_seconds=7.0)

    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        hello = await ask("v1/hello", {})
        assert (hello["server_id"], hello["chunk_size"], hello["reap_seconds"]) == ("me", 16, 7.0)
        assert (hello["transport"], hello["shm_name"]) == ("shm", chosen.segment_name)
        assert hello["pool_bytes"] == chosen.pool_bytes
        status = (await client.get("/status")).json()
        assert (status["server_id"], status["incarnation"]) == ("me", hello["incarnation"])
        assert (await client.get("/healthcheck")).status_code == 200
        assert (await ask("v1/status", {}))["document"].startswith(b"{")

    served(chosen, body)


def test_every_metric_is_shown() -> None:
    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        lines = (await client.get("/metrics")).text.splitlines()
        shown = {line.split()[0] for line in lines if not line.startswith("#")}
        assert shown == {PREFIX + metric.name for metric in METRICS}
        assert f"{PREFIX}requests_total 1" in lines

    served(settings(), body)


def test_both_dialects_are_spoken_on_one_socket() -> None:
    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        assert await ask(24) == "OK"
        assert await ask("noop") == "OK"
        assert (await ask("v1/ping", {}))["known"]
        assert "unknown operation" in (await ask("v2/ping", {}))["error"]["message"]

    served(settings(), body)


def test_without_shared_memory_there_is_no_segment() -> None:
    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        hello = await ask("v1/hello", {})
        assert (hello["transport"], hello["shm_name"]) == ("frames", "")
        assert set(os.listdir("/dev/shm")) <= before | {f for f in os.listdir("/dev/shm") if "app_" not in f}

    before = set(os.listdir("/dev/shm"))
    served(settings(shm_name=""), body)


def test_what_a_server_keeps_is_frozen_while_it_runs() -> None:
    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        assert gc.get_freeze_count() > 10_000
        assert "freezer" in (await client.get("/status")).json()["health"]["seconds_since_heartbeat"]

    served(settings(), body)
    assert gc.get_freeze_count() == 0


def test_clear_over_http_is_the_clear_of_the_socket() -> None:
    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        answer = (await client.post("/cache/clear")).json()
        assert answer == {"status": "ok", "cleared": {"tier": "l1"}, "freed": 0, "held": 0}

    served(settings(), body)


def test_a_background_task_that_fails_turns_the_health_red_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: object) -> None:
        raise KeyError("LFU")

    monkeypatch.setattr("lmcache_server.core.l1_cache.L1Cache.evict_to_watermark", fail)
    monkeypatch.setattr(app, "TICK_SECONDS", 0.05)

    async def body(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
        while (await client.get("/healthcheck")).status_code == 200:
            await asyncio.sleep(0.1)
        assert (await ask("v1/ping", {}))["known"]
        status = (await client.get("/status")).json()
        assert status["health"]["seconds_since_heartbeat"]["leases"] >= 3 and not status["is_healthy"]
        monkeypatch.undo()
        while (await client.get("/healthcheck")).status_code != 200:
            await asyncio.sleep(0.1)

    served(settings(), body)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"host": "203.0.113.1"}, BindError),
        ({"http_host": "203.0.113.1"}, BindError),
        ({"l1_size_gb": 60000.0}, PoolError),
    ],
)
def test_what_fails_at_the_start_leaves_nothing(changes: dict[str, Any], error: type[Exception]) -> None:
    chosen = settings(**changes)
    with pytest.raises(error):
        asyncio.run(app.serve(chosen))
    assert not list(SHM.glob(f"*app_{chosen.port}"))
    # The ports are free again.
    served(settings(port=chosen.port, http_port=chosen.http_port), _nothing)


async def _nothing(client: httpx.AsyncClient, ask: Callable[..., Awaitable[Any]]) -> None:
    pass
