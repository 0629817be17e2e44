"""Being registered with a server, for as long as a context lives.

A server restarts, or forgets a client that it did not hear of; then everything that was told under the old instance is
void. `Registrar` says so to nobody: it registers again, in the same layout, and what was being done is done again.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from lmcache_sdk.attachment import Attachment, attach
from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.discovery import Discovery, Engine, discover
from lmcache_sdk.errors import ConnectionLost, LMCacheSDKError, ServerRefused, ServerUnavailable
from lmcache_sdk.heartbeat import Heartbeat
from lmcache_sdk.transport import ServerConnection
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.messages import Ping

__all__ = ["Registrar", "Registration"]

logger = logging.getLogger(__name__)

SLOWEST_BEAT, QUICKEST_BEAT = 30.0, 0.02
"""Seconds between two signs of life, at most and at least."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registration:
    """What one registration rests on; replaced as a whole, never changed."""

    engine: Engine
    geometry: ChunkGeometry
    attachment: Attachment
    heartbeat: Heartbeat


class Registrar:
    """Registers for one kind of cache of one model, beats, and registers again when that is needed."""

    def __init__(self, kind: LMCacheSDKCacheKind, url: str, http_url: str, model_name: str, timeout: float) -> None:
        """Register; raises LMCacheSDKError if that cannot be done within `timeout` seconds."""
        self._kind = kind
        self._http_url = http_url
        self._model_name = model_name
        self._timeout = timeout
        self._renewing = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._away = False
        self._registration: Registration | None = None
        self._connection = ServerConnection(url, timeout)
        try:
            self.register()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = repr(self._registration.attachment.transfer) if self._registration and not self._closed else "closed"
        return f"{self._connection.url}, {state}"

    def register(self) -> None:
        """Learn the layout that the engine registered, and register with it; an earlier registration ends."""
        deadline = time.monotonic() + self._timeout
        found = discover(self._http_url, self._model_name, self._kind, self._timeout)
        geometry = ChunkGeometry.of(found.engine.layout, found.chunk_size, found.engine.world_size)
        attachment = self._attach(found.engine, max(0.001, deadline - time.monotonic()))
        self._check_one_server(found, attachment)
        previous = self._registration
        heartbeat = previous.heartbeat if previous else self._start_beating(attachment)
        self._registration = Registration(found.engine, geometry, attachment, heartbeat)
        if previous:
            previous.attachment.detach()

    def current(self) -> Registration:
        """The registration now. Raises LMCacheSDKError after `close`."""
        if self._closed or self._registration is None:
            raise LMCacheSDKError(f"this context for {self._model_name!r} is closed; connect again")
        return self._registration

    def attempt(self, work: Callable[[Registration], T]) -> T:
        """`work`, done again once if the connection broke under it, and once if the registration was void."""
        registration = self.current()
        broke = renewed = False
        while True:
            try:
                return work(registration)
            except ConnectionLost:
                if broke:
                    raise
                broke = True
            except ServerRefused as refusal:
                if refusal.code is not ErrorCode.UNKNOWN_INSTANCE or renewed:
                    raise
                renewed = True
                registration = self._renewed(registration)

    def close(self) -> None:
        """Unregister and let go of threads, sockets and shared memory. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        registration = self._registration
        if registration:
            registration.heartbeat.stop()
            registration.attachment.detach()
        self._connection.close()
        if registration:
            registration.heartbeat.join()

    def _attach(self, engine: Engine, timeout: float) -> Attachment:
        return attach(
            self._connection,
            role="sdk",
            model_name=engine.model_name,
            revision=engine.revision,
            kind=engine.kind,
            world_size=engine.world_size,
            worker_id=None,
            layout=engine.layout,
            block_size=engine.block_size,
            timeout=timeout,
        )

    def _check_one_server(self, found: Discovery, attachment: Attachment) -> None:
        hello = attachment.hello
        if (hello.server_id, hello.chunk_size) != (found.server_id, found.chunk_size):
            attachment.detach()
            raise LMCacheSDKError(
                f"{self._connection.url} is server {hello.server_id} with chunks of {hello.chunk_size} tokens, but "
                f"{self._http_url} is server {found.server_id} with chunks of {found.chunk_size}: "
                "url and http_url must be the two ports of one server"
            )

    def _renewed(self, void: Registration) -> Registration:
        """A registration in place of one that the server does not know (any more)."""
        if not self._renewing.acquire(timeout=self._timeout):
            raise ServerUnavailable("another thread's registration", self._connection.url, self._timeout)
        try:
            current = self.current()
            if current is not void:
                return current
            attachment = self._attach(void.engine, self._timeout)
            if attachment.hello.chunk_size != void.geometry.tokens:
                attachment.detach()
                raise LMCacheSDKError(
                    f"{self._connection.url} restarted with chunks of {attachment.hello.chunk_size} tokens instead of "
                    f"{void.geometry.tokens}: connect again"
                )
            logger.info("registered again with %s", self._connection.url)
            self._registration = replace(void, attachment=attachment)
            return self._registration
        finally:
            self._renewing.release()

    def _start_beating(self, attachment: Attachment) -> Heartbeat:
        """Often enough for the server to know that this client lives, and that its leases are in use."""
        hello = attachment.hello
        seconds = min(hello.reap_seconds / 4, hello.read_ttl_seconds / 3, SLOWEST_BEAT)
        return Heartbeat("lmcache-sdk-heartbeat", self._beat, max(seconds, QUICKEST_BEAT))

    def _beat(self, held: tuple[int, ...]) -> None:
        try:
            registration = self.current()
            attachment = registration.attachment
            reply = self._connection.request(Ping(attachment.instance, held))
            if not reply.known or reply.incarnation != attachment.incarnation:
                self._renewed(registration)
            self._away = False
        except LMCacheSDKError as error:
            if not self._away and not self._closed:
                logger.warning("the server gave no sign of life: %s", error)
            self._away = True
