"""A server to measure, and a worker registered with it, so that the SDK finds a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_sdk.attachment import Attachment, attach
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.servers import CacheServer, running_server

MODEL = "benchmark/model"


@contextmanager
def serving(gib: float, chunk_size: int = 256, *flags: str, shared_memory: bool = True) -> Iterator[CacheServer]:
    """A server with a pool of `gib` GiB; flags as of `lmcache server`."""
    settings = ("--l1-size-gb", str(gib), "--chunk-size", str(chunk_size), "--log-level", "silent", *flags)
    with running_server(*settings, shared_memory=shared_memory) as server:
        yield server


@contextmanager
def engine(
    server: CacheServer, layers: int, heads: int, head_size: int, dtype: str = "bfloat16"
) -> Iterator[Attachment]:
    """A worker of `MODEL` with that layout."""
    connection = ServerConnection(server.url)
    group = KernelGroup(tuple(range(layers)), 2, heads, head_size, dtype)
    worker = attach(
        connection, role="worker", model_name=MODEL, revision="", kind=Kind.KV, world_size=1, worker_id=0,
        layout=CacheLayout((group,)), block_size=16,
    )  # fmt: skip
    try:
        yield worker
    finally:
        worker.detach()
        connection.close()
