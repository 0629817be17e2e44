"""The way to the server: there is an `Attachment`, or there is none and the engine computes without a cache.

A thread sends signs of life over a connection of its own, so a long copy delays none. It notices that the server is
away, was restarted (another incarnation) or forgot us, and makes a new attachment when there is a server to attach to;
nobody else waits for that. If KV events are published, it asks for them too. Whoever moves data reads `attachment` once
per operation and uses that one, and says `lost` when it does not answer: from then on nobody asks the server anything
until the thread has heard from it.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.events import EventFeed
from lmcache_connector.settings import Settings
from lmcache_sdk.attachment import Attachment, attach
from lmcache_sdk.errors import LMCacheSDKError, ServerRefused, ServerUnavailable
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.layout import Kind, fingerprint
from lmcache_server.protocol.messages import Ping, PingReply

__all__ = ["Attach", "ServerLink", "attacher"]

logger = logging.getLogger(f"vllm.{__name__}")

Attach = Callable[[ServerConnection], Attachment]
"""Registers over a connection. Raises LMCacheSDKError; ValueError if this engine and that server do not fit."""

AWAY_SECONDS = 0.5
"""Between two looks at a server that is away."""


def attacher(config: ConnectorConfig, role: str, worker_id: int | None) -> Attach:
    """What registers one half of the connector: the scheduler (`worker_id` None: it sees all shards) or a worker."""

    def attach_half(connection: ServerConnection) -> Attachment:
        attachment = attach(
            connection,
            role=role,
            model_name=config.model_name,
            revision=config.revision,
            kind=Kind.KV,
            world_size=config.shape.shards,
            worker_id=worker_id,
            layout=config.shape.layout,
            block_size=config.shape.groups[0].block_size,
        )
        _warn_of_short_windows(config, attachment.hello.chunk_size)
        logger.info(
            "%s of model %s, revision %s, layout %s, world size %d",
            *(role, config.model_name, config.revision, fingerprint(config.shape.layout), config.shape.shards),
        )
        return attachment

    return attach_half


def _warn_of_short_windows(config: ConnectorConfig, chunk_size: int) -> None:
    """Blocks behind a window are given up at each step, so a chunk longer than it may lose some before it is whole."""
    window = min((group.window for group in config.shape.layout.groups if group.window), default=chunk_size)
    if window < chunk_size:
        logger.warning(
            "chunks of %d tokens are longer than this model's sliding window of %d: where a prompt is computed in "
            "several steps, its cached prefix may end early; start the server with --chunk-size %d",
            chunk_size, window, window,
        )  # fmt: skip


class ServerLink:
    """Keeps one attachment of one half of the connector alive."""

    def __init__(
        self,
        settings: Settings,
        attach: Attach,
        leases: Callable[[], Sequence[int]] = tuple,
        feed: EventFeed | None = None,
    ) -> None:
        """`leases` tells which leases are in use and must not run out; `feed` is kept up to date."""
        self.attachment: Attachment | None = None
        self.url = settings.url
        self._settings = settings
        self._attach = attach
        self._leases = leases
        self._feed = feed
        self._data = ServerConnection(settings.url, timeout=settings.timeout, patient=False)
        self._pulse = ServerConnection(settings.url, timeout=settings.timeout)
        self._registered: Attachment | None = None
        """The last attachment: taken up again if the server was only slow."""
        self._complaint = ""
        self._change = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lmcache-heartbeat", daemon=True)

    def start(self) -> None:
        """Attach if the server is there, and keep looking after it from now on.

        Raises ValueError if server and engine do not fit; a server that is away is only logged.
        """
        try:
            self._reattach()
        except ServerUnavailable as error:
            self._complain(f"computing without a cache until there is a server: {error}")
        except (LMCacheSDKError, ValueError) as error:
            self.close()
            raise ValueError(f"the cache server at {self.url} cannot be used: {error}") from error
        self._thread.start()

    def lost(self, attachment: Attachment, error: LMCacheSDKError) -> None:
        """`attachment` failed with `error`: nobody uses it until the server has been heard from.

        A refusal of one request does not count, unless the server does not know us any more.
        """
        if isinstance(error, ServerRefused) and error.code is not ErrorCode.UNKNOWN_INSTANCE:
            logger.warning("%s", error)
            return
        with self._change:
            if self.attachment is not attachment:
                return
            self.attachment = None
        self._complain(f"computing without a cache: {error}")
        if isinstance(error, ServerUnavailable | ServerRefused):
            self._wake.set()  # what else can be wrong a sign of life does not mend: it waits for the next one

    def close(self) -> None:
        """Leave the server and end the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._pulse.close()
        attachment, self.attachment = self.attachment, None
        if attachment is None:
            self._data.close()  # ends an attempt to attach that may be under way
        if self._thread.is_alive():
            self._thread.join()
        if attachment is not None:
            attachment.detach()
        self._data.close()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._settings.heartbeat_interval if self.attachment is not None else AWAY_SECONDS)
            self._wake.clear()
            if self._closing:
                return
            try:
                self._beat()
            except (LMCacheSDKError, ValueError) as error:
                if not self._closing:
                    self._complain(f"computing without a cache: {error}")
            except Exception:  # the boundary of the thread: without it a fault here would end all recovery in silence
                logger.exception("a fault of the heartbeat; it goes on")

    def _beat(self) -> None:
        """Hear from the server, and attach to it if we are not."""
        registered = self._registered
        if registered is not None:
            try:
                ping = Ping(registered.instance, tuple(self._leases()))
                reply: PingReply = self._pulse.request(ping)
            except LMCacheSDKError:
                self._withdraw(registered)
                raise
            if reply.known and reply.incarnation == registered.incarnation:
                self._publish(registered)
                self._follow(registered)
                return
            self._withdraw(registered)
            self._registered = None
            registered.transfer.close()
            logger.info("the server at %s was restarted or has forgotten this engine: registering again", self.url)
        self._reattach()

    def _reattach(self) -> None:
        attachment = self._attach(self._data)
        self._registered = attachment
        self._publish(attachment)
        self._follow(attachment)

    def _follow(self, attachment: Attachment) -> None:
        if self._feed is not None:
            self._feed.poll(self._pulse, attachment)

    def _publish(self, attachment: Attachment) -> None:
        with self._change:
            if self.attachment is attachment:
                return
            self.attachment = attachment
        self._complaint = ""
        logger.info("using the cache server at %s (%s)", self.url, attachment.hello.transport.value)

    def _withdraw(self, attachment: Attachment) -> None:
        if self._feed is not None:
            self._feed.withdraw()
        with self._change:
            if self.attachment is attachment:
                self.attachment = None

    def _complain(self, text: str) -> None:
        """Log once per absence, whatever else goes wrong meanwhile."""
        if not self._complaint:
            logger.warning("%s", text)
        self._complaint = text
