"""vLLM's KV events for what the cache server holds: each chunk that this engine could load, as a block in host memory.

    heartbeat's thread    `poll` asks the server what came and went, `withdraw` takes everything back
    scheduler's thread    `take` hands over what has arrived; vLLM's publisher numbers and sends it

Who applies the events in order knows which chunks are resident, as of the last poll. A chunk is published as one block
of the chunk's size, under its hash in the server; where a salt keeps it apart, under a hash of both. Nothing but stored
and removed blocks is published: vLLM's AllBlocksCleared would take back the engine's own blocks too, which are still
there when the server was cleared, restarted or lost.
"""

import hashlib
import logging
from collections import deque

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent

from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError, ServerRefused
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.events import ChunkEvent, ChunkEventKind, Events, EventsReply

__all__ = ["EventFeed", "block_name"]

logger = logging.getLogger(f"vllm.{__name__}")

PAGE = 256
"""Events of one question: a millisecond or two of the server."""
MOST_WAITING = 1 << 14
"""Events that may wait for the engine's next step; an idle engine takes none, so beyond it they stay in the server."""


def block_name(chunk_hash: bytes, salt: str) -> bytes:
    """The name under which a chunk is published; chunks that differ only in their salt have different ones."""
    if not salt:
        return chunk_hash
    return hashlib.blake2b(chunk_hash + salt.encode(), digest_size=len(chunk_hash)).digest()


class EventFeed:
    """What one engine publishes about one server."""

    def __init__(self) -> None:
        self._attachment: Attachment | None = None
        self._cursor: int | None = None
        self._refused = False
        self._published: dict[bytes, None] = {}
        """The names that whoever listens believes to be resident, oldest first."""
        self._waiting: deque[KVCacheEvent] = deque()

    def take(self) -> list[KVCacheEvent]:
        """What has arrived since the last call."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def poll(self, connection: ServerConnection, attachment: Attachment) -> None:
        """Ask until the server has nothing more to tell, or enough is waiting; a question that fails is asked again."""
        if attachment is not self._attachment:
            self._attachment, self._cursor, self._refused = attachment, None, False
        try:
            while not self._refused and len(self._waiting) < MOST_WAITING:
                reply: EventsReply = connection.request(Events(attachment.instance, self._cursor, PAGE))
                self._apply(reply, attachment.hello.chunk_size)
                if not reply.more:
                    return
        except ServerRefused as error:
            self._refused = True
            logger.warning("no KV events are published for this server: %s", error)
        except LMCacheSDKError as error:
            logger.debug("the KV events have to wait: %s", error)

    def withdraw(self) -> None:
        """The server cannot be reached: nothing of it can be loaded any more."""
        self._attachment = None
        self._remove_all()

    def _apply(self, reply: EventsReply, chunk_size: int) -> None:
        if reply.lost:
            self._remove_all()
        for event in reply.events:
            name = block_name(event.hash, event.salt)
            if event.kind is ChunkEventKind.CLEARED:
                self._remove_all()
            elif event.kind is ChunkEventKind.REMOVED and name in self._published:
                del self._published[name]
                self._waiting.append(BlockRemoved(block_hashes=[name], medium=MEDIUM_CPU))
            elif event.kind is ChunkEventKind.STORED and name not in self._published:
                self._published[name] = None
                self._waiting.append(_stored(event, name, chunk_size))
        self._cursor = reply.cursor

    def _remove_all(self) -> None:
        if self._published:
            # Children before parents, as they would have been evicted.
            self._waiting.append(BlockRemoved(block_hashes=list(self._published)[::-1], medium=MEDIUM_CPU))
            self._published.clear()


def _stored(event: ChunkEvent, name: bytes, chunk_size: int) -> BlockStored:
    keys = (*([event.extras.hex()] if event.extras else []), *([event.salt] if event.salt else []))
    return BlockStored(
        block_hashes=[name],
        parent_block_hash=block_name(event.parent, event.salt) if event.parent else None,
        token_ids=np.frombuffer(event.tokens, dtype="<u4").tolist(),
        block_size=chunk_size,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name=None,
        extra_keys=[keys or None],
    )
