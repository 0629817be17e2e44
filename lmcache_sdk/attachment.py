"""Being known to a server: hello, map the pool, register; and leave again.

An `Attachment` is a fact about one incarnation of one server. When the server restarts, or forgets a silent client, the
attachment is void (requests under its instance are refused with UNKNOWN_INSTANCE) and a new one is made; nothing here
is mended in place.
"""

import logging
import os
import time
from dataclasses import dataclass

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shm import PoolForbidden, SharedPool
from lmcache_sdk.transfer import FrameTransfer, SharedMemoryTransfer, Transfer
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.codec import to_map
from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.layout import CacheLayout, Kind, fingerprint, slot_bytes
from lmcache_server.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    ProcessId,
    Register,
    RegisterReply,
    Transport,
    Unregister,
)

__all__ = ["Attachment", "attach", "this_process"]

logger = logging.getLogger(__name__)

RESTARTS = 3
"""How often the server may restart under one `attach`."""
LEAVE_SECONDS = 2.0
"""How long a client that leaves waits for the server to notice; the server reaps the silent anyway."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One registered instance, and the way its bytes travel."""

    connection: ServerConnection
    hello: HelloReply
    instance: int
    incarnation: int
    fingerprint: str
    model_name: str
    revision: str
    layout: CacheLayout
    kind: Kind
    worker_id: int | None
    world_size: int
    transfer: Transfer

    def detach(self) -> None:
        """Unregister (leases are released, reservations aborted) and unmap. Safe to call twice, or without a server."""
        try:
            self.connection.request(Unregister(self.instance), timeout=min(LEAVE_SECONDS, self.connection.timeout))
        except LMCacheSDKError as error:
            logger.debug("leaving %s without its answer: %s", self.connection.url, error)
        self.transfer.close()


def attach(
    connection: ServerConnection,
    *,
    role: str,
    model_name: str,
    revision: str,
    kind: Kind,
    world_size: int,
    worker_id: int | None,
    layout: CacheLayout,
    block_size: int,
    timeout: float | None = None,
) -> Attachment:
    """Register with the server of `connection` and make its pool usable.

    `worker_id` None sees the parts of all shards, a number those of its own. Raises ServerUnavailable after `timeout`
    seconds without an answer, ServerRefused if the server does not take the registration, LMCacheSDKError if its
    answers or its shared memory do not fit.
    """
    try:
        register = Register(role, model_name, revision, kind, world_size, worker_id, layout, block_size, this_process())
    except ProtocolError as error:
        raise LMCacheSDKError(f"cannot register: {error}") from error
    deadline = time.monotonic() + (connection.timeout if timeout is None else timeout)
    for _ in range(RESTARTS):
        hello = _hello(connection, deadline - time.monotonic())
        pool = _map_pool(hello)
        reply: RegisterReply = connection.request(register, timeout=deadline - time.monotonic())
        if reply.incarnation == hello.incarnation:
            return _attached(connection, hello, register, reply, pool)
    raise LMCacheSDKError(f"{connection.url} restarted {RESTARTS} times while this client registered")


def this_process() -> ProcessId:
    """This process, as its host knows it."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    return ProcessId(os.getpid(), int(after_name[19]), os.stat("/proc/self/ns/pid").st_ino)


def _hello(connection: ServerConnection, timeout: float) -> HelloReply:
    hello: HelloReply = connection.request(Hello(), timeout=timeout)
    if hello.protocol != PROTOCOL_VERSION:
        raise LMCacheSDKError(
            f"{connection.url} (version {hello.version}) speaks protocol {hello.protocol}, "
            f"this client {PROTOCOL_VERSION}: install the same version on both sides"
        )
    if hello.chunk_size < 1 or hello.frame_bytes < 1 or not (hello.reap_seconds > 0 and hello.read_ttl_seconds > 0):
        raise LMCacheSDKError(f"{connection.url} told impossible facts about itself: {to_map(hello)}")
    return hello


def _map_pool(hello: HelloReply) -> SharedPool | None:
    """The pool, or None where bytes travel as frames."""
    if hello.transport is not Transport.SHM:
        return None
    try:
        return SharedPool.attach(hello.shm_name, hello.pool_bytes, hello.align_bytes)
    except PoolForbidden as error:
        logger.warning("bytes travel as frames, which is slower: %s", error)
        return None


def _attached(
    connection: ServerConnection,
    hello: HelloReply,
    register: Register,
    reply: RegisterReply,
    pool: SharedPool | None,
) -> Attachment:
    transfer: Transfer
    if pool is not None:
        transfer = SharedMemoryTransfer(pool, reply.part_bytes)
    else:
        transfer = FrameTransfer(connection, reply.instance, reply.part_bytes, hello.frame_bytes)
    attachment = Attachment(
        connection=connection,
        hello=hello,
        instance=reply.instance,
        incarnation=reply.incarnation,
        fingerprint=reply.fingerprint,
        model_name=register.model_name,
        revision=register.revision,
        layout=register.layout,
        kind=register.kind,
        worker_id=register.worker_id,
        world_size=register.world_size,
        transfer=transfer,
    )
    shards = register.world_size if register.worker_id is None else 1
    parts = tuple(slot_bytes(group, hello.chunk_size) for group in register.layout.groups) * shards
    if reply.fingerprint != fingerprint(register.layout) or reply.part_bytes != parts:
        attachment.detach()
        raise LMCacheSDKError(
            f"{connection.url} lays a chunk out as parts of {list(reply.part_bytes)} bytes, "
            f"this client as {list(parts)}: install the same version on both sides"
        )
    return attachment
