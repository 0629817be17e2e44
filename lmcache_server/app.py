"""The composition root: everything is built here, in order, and stopped in reverse.

    settings -> sockets -> pool -> core -> service -> tasks

Sockets come first: what cannot be listened on is found out before any memory is created.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import signal
import time
from collections.abc import Sequence

from lmcache_server import __version__
from lmcache_server.compat import Compat
from lmcache_server.config import SHM_PREFIX, Settings
from lmcache_server.core.instances import InstanceTable
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.records import Limits
from lmcache_server.core.sessions import SessionTable
from lmcache_server.io import http_api
from lmcache_server.io.freezer import Freezer
from lmcache_server.io.process import process_gone
from lmcache_server.io.shm import Pool, create_private_pool, create_shared_pool, progress_bar, reclaim_orphans
from lmcache_server.io.ticker import Ticker
from lmcache_server.io.zmq_server import Buffer, Handler, ZmqServer
from lmcache_server.metrics import render
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.messages import PROTOCOL_VERSION, HelloReply, Transport
from lmcache_server.service import Service
from lmcache_server.status import Status

__all__ = ["serve"]

log = logging.getLogger(__name__)

ALIGN_BYTES = 4096
FRAME_BYTES = 16 * 2**20
TICK_SECONDS = 0.5


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises BindError or PoolError before anything is left behind."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    with contextlib.ExitStack() as stack:
        listener = http_api.bind(settings.http_host, settings.http_port)
        stack.callback(listener.close)
        zmq_server = ZmqServer(settings.host, settings.port)
        stack.callback(zmq_server.close)
        pool = _create_pool(settings)
        stack.callback(pool.close)
        ticker = Ticker(time.monotonic)
        service, compat, status, freezer = _build(settings, pool, ticker, zmq_server)
        http = http_api.HttpServer(http_api.build_app(_routes(status, service)), listener)
        zmq_server.start(loop, _dialects(service, compat))
        ticker.every(TICK_SECONDS, "leases", lambda: service.tick(process_gone))
        # Reading the socket is driven by its descriptor; this only makes sure that no edge was missed.
        ticker.every(TICK_SECONDS, "socket", zmq_server.drain)
        ticker.every(TICK_SECONDS, "freezer", freezer.tick)
        serving = asyncio.create_task(http.run(), name="http")
        stack.callback(freezer.thaw)
        freezer.freeze()
        if await http.started():
            log.info(
                "ready: tcp://%s:%d, http://%s:%d; a pool of %.2f GiB in %s, chunks of %d tokens",
                *(settings.host, settings.port, settings.http_host, settings.http_port, settings.l1_size_gb),
                *(settings.segment_name or "no shared memory", settings.chunk_size),
            )
        stop = asyncio.create_task(stopping.wait(), name="signals")
        await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping")
        stop.cancel()
        http.stop()
        await serving
        await ticker.stop()


def _build(
    settings: Settings, pool: Pool, ticker: Ticker, zmq_server: ZmqServer
) -> tuple[Service, Compat, Status, Freezer]:
    hasher = ChunkHasher(settings.chunk_size, settings.hash_algorithm)
    limits = Limits(
        settings.pool_bytes,
        ALIGN_BYTES,
        settings.eviction_trigger_watermark,
        settings.eviction_ratio,
        settings.l1_read_ttl_seconds,
        settings.l1_write_ttl_seconds,
    )
    hello = _hello(settings, pool)
    # Generations that no other server hands out: its slots never fit a pool of the same name.
    cache = L1Cache(hasher, limits, pool.generations, framed=not pool.name, first_generation=hello.incarnation)
    instances, sessions = InstanceTable(settings.chunk_size), SessionTable(settings.session_ttl_seconds)
    service = Service(
        hello, cache, instances, sessions, pool.data, lambda: json.dumps(status.status()).encode(), time.monotonic
    )

    def traffic() -> dict[str, int]:
        return dataclasses.asdict(service.traffic) | {"dropped_replies": zmq_server.dropped_replies}

    status = Status(settings, hello, cache, instances, sessions, ticker.health, traffic)
    grace = settings.worker_registration_grace_seconds
    compat = Compat(hello, cache, instances, service, time.monotonic, grace)
    return service, compat, status, Freezer(lambda: cache.counters.reserved_chunks)


def _dialects(service: Service, compat: Compat) -> Handler:
    """Two dialects on one socket: numbers and their names are LMCache's, all else is ours."""

    def answer(operation: bytes, frames: Sequence[Buffer]) -> list[Buffer]:
        if not service.speaks(operation) and compat.speaks(operation):
            return compat.handle(operation, frames)
        return [operation, *service.handle(operation, frames)]

    return answer


def _hello(settings: Settings, pool: Pool) -> HelloReply:
    return HelloReply(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        server_id=settings.instance_id,
        incarnation=secrets.randbits(62) + 1,
        chunk_size=settings.chunk_size,
        hash_algorithm=settings.hash_algorithm,
        transport=Transport.SHM if pool.name else Transport.FRAMES,
        shm_name=pool.name,
        pool_bytes=settings.pool_bytes,
        align_bytes=ALIGN_BYTES,
        frame_bytes=FRAME_BYTES,
        reap_seconds=settings.worker_reap_timeout_seconds,
        read_ttl_seconds=settings.l1_read_ttl_seconds,
    )


def _routes(status: Status, service: Service) -> http_api.Routes:
    def clear() -> dict[str, object]:
        cleared = service.clear()
        return {"status": "ok", "cleared": {"tier": "l1"}, "freed": cleared.freed, "held": cleared.held}

    return http_api.Routes(
        version=__version__,
        status=status.status,
        config=status.config,
        metrics=lambda: render(status.numbers()),
        is_healthy=lambda: bool(status.health()["is_healthy"]),
        clear=clear,
    )


def _create_pool(settings: Settings) -> Pool:
    progress = None if settings.l1_use_lazy else progress_bar(f"taking {settings.l1_size_gb:g} GiB of memory")
    if not settings.segment_name:
        return create_private_pool(settings.pool_bytes, ALIGN_BYTES, progress)
    for name in reclaim_orphans(SHM_PREFIX):
        log.warning("removed shared memory %s: the server that made it is gone", name)
    return create_shared_pool(settings.segment_name, settings.pool_bytes, ALIGN_BYTES, settings.segment_mode, progress)
