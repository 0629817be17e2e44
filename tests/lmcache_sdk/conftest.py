"""Servers with and without shared memory, a registered engine, and a context for its cache."""

from collections.abc import Iterator

import pytest

import lmcache_sdk
from lmcache_sdk.attachment import Attachment
from tests.lmcache_sdk.fake_engine import registered_engine
from tests.servers import CacheServer, running_server


@pytest.fixture(scope="session", params=["shm", "frames"])
def server(request: pytest.FixtureRequest) -> Iterator[CacheServer]:
    """One server for many tests, each of which uses a model name of its own; everything runs on both transports."""
    with running_server("--l1-read-ttl-seconds", "1", shared_memory=request.param == "shm") as running:
        yield running


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A model name that no other test uses."""
    return f"model of {request.node.nodeid}"


@pytest.fixture
def engine(server: CacheServer, model: str) -> Iterator[Attachment]:
    """A registered engine worker."""
    with registered_engine(server, model) as attachment:
        yield attachment


@pytest.fixture
def context(server: CacheServer, engine: Attachment, model: str) -> Iterator[lmcache_sdk.LMCacheSDKContext]:
    """A context for the engine's cache, on a server that is quiet afterwards."""
    with lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as connected:
        yield connected
    server.quiet()
