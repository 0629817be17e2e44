"""A process with LMCache's packages, a server, and two engines registered with it in our own dialect."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmcache_sdk.attachment import attach
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.interop.peer import Peer, require_lmcache
from tests.servers import CacheServer, running_server

CHUNK = 16
LAYERS, HEADS, HEAD_SIZE = 3, 2, 8


@pytest.fixture(scope="session", autouse=True)
def lmcache_is_installed() -> None:
    require_lmcache()


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with Peer(tmp_path_factory.mktemp("peer") / "peer.log") as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.fixture(scope="module", params=["two planes", "one plane"])
def model(request: pytest.FixtureRequest, server: CacheServer) -> Iterator[str]:
    """A model whose engine is registered; its name says how many planes its cache has."""
    with registered(server, request.param, 2 if request.param == "two planes" else 1):
        yield request.param


@contextmanager
def registered(
    server: CacheServer, model: str, planes: int = 2, kind: Kind = Kind.KV, heads: int = HEADS
) -> Iterator[None]:  # fmt: skip
    """An engine's worker is registered until the block ends."""
    connection = ServerConnection(server.url)
    layout = CacheLayout((KernelGroup(tuple(range(LAYERS)), planes, heads, HEAD_SIZE, "bfloat16"),))
    worker = attach(
        connection, role="worker", model_name=model, revision="", kind=kind, world_size=1, worker_id=0, layout=layout,
        block_size=8,
    )  # fmt: skip
    yield
    worker.detach()
    connection.close()
