"""A server without sockets, and clients of LMCache 0.5.6 that talk to it in frames: core, service and compat as `app`
joins them, a pool that is a bytearray, and a clock that is a number.

    world = World()
    world.register(WORKER)
    world.store(range(32), WORKER)               prepare, fill the slots, commit; the commit's answer
    world.lookup(range(32))                      lookup, then its status
    world.retrieve(range(32), WORKER)            prepare, copy, commit; the bytes, checked, or None

The bytes of a chunk say whose they are: model, shard, salt and every token up to its end. Every question ends with an
integrity check.
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable
from typing import Any

import msgpack

from lmcache_server.compat import Compat
from lmcache_server.core.instances import InstanceTable
from lmcache_server.core.integrity import check_integrity
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.records import Limits
from lmcache_server.core.sessions import SessionTable
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.messages import PROTOCOL_VERSION, HelloReply, Transport
from lmcache_server.service import Service

CHUNK = 16
SEGMENT = "lmcache_l1_pool_proto_spec"
READ_TTL, WRITE_TTL, REAP, GRACE = 300.0, 600.0, 120.0, 3600.0
WORKER, OTHER = (1 << 62) + 5, (1 << 62) + 6


class Raised(Exception):
    """What the client would raise: the reply is of another operation than the request."""


def content(model: str, worker: int, salt: str, tokens: Iterable[int], length: int) -> bytes:
    """The bytes of the chunk that ends with `tokens`."""
    seed = json.dumps([model, worker, salt, list(tokens)]).encode()
    return hashlib.shake_128(seed).digest(length)


class World:
    """A server of `pool` bytes, and the client side of its numbered operations."""

    def __init__(self, pool: int = 1 << 20, *, shm: str = SEGMENT) -> None:
        self.now = 0.0
        self.pool = bytearray(b"\xa5" * pool)
        hello = HelloReply(
            protocol=PROTOCOL_VERSION, version="0", server_id="s", incarnation=1, chunk_size=CHUNK,
            hash_algorithm="xxh3_128", transport=Transport.SHM if shm else Transport.FRAMES, shm_name=shm,
            pool_bytes=pool, align_bytes=4096, frame_bytes=1 << 20, reap_seconds=REAP, read_ttl_seconds=READ_TTL,
        )  # fmt: skip
        limits = Limits(pool, 4096, 1.0, 0.2, READ_TTL, WRITE_TTL)
        self.cache = L1Cache(ChunkHasher(CHUNK), limits, array("Q", bytes(8 * (pool // 4096))), framed=not shm)
        self.instances = InstanceTable(CHUNK)
        clock = lambda: self.now  # noqa: E731
        self.service = Service(
            hello, self.cache, self.instances, SessionTable(600.0), memoryview(self.pool), lambda: b"{}", clock
        )
        self.compat = Compat(hello, self.cache, self.instances, self.service, clock, GRACE)

    # Frames.

    def frames(self, operation: bytes, *arguments: bytes) -> list[bytes]:
        """The reply's frames, from its operation on."""
        assert self.compat.speaks(operation), operation
        reply = [bytes(frame) for frame in self.compat.handle(operation, arguments)]
        check_integrity(self.cache)
        return reply

    def ask(self, operation: int | str, *arguments: Any) -> Any:
        """The decoded answer, None for one without a frame; raises Raised where the client would."""
        asked = msgpack.packb(operation)
        answered, *result = self.frames(asked, *(msgpack.packb(argument) for argument in arguments))
        if answered != asked:
            assert not result
            raise Raised(msgpack.unpackb(answered))
        assert len(result) <= 1
        return msgpack.unpackb(result[0]) if result else None

    # What clients do.

    def register(self, instance: int = WORKER, **facts: Any) -> Any:
        """Two layers of 16 elements, bfloat16, one plane, unless `facts` say otherwise."""
        return self.ask(14, registration(instance, **facts))

    def prepare_store(self, tokens: Iterable[int], instance: int = WORKER, **fields: Any) -> dict[str, Any]:
        context: dict[str, Any] = self.ask(16, key(tokens, **fields), instance)["context"]
        return context

    def fill(self, context: dict[str, Any], tokens: Iterable[int], **fields: Any) -> None:
        """Write the slots of a prepare."""
        wanted = key(tokens, **fields)
        for slot, index in zip(context["slots"], context["chunk_indices"], strict=True):
            end = wanted["start"] + (index + 1) * CHUNK
            self.pool[slot["offset"] : slot["offset"] + slot["length"]] = _content(wanted, end, slot["length"])

    def commit_store(self, tokens: Iterable[int], instance: int = WORKER, data: bytes = b"", **fields: Any) -> Any:
        return self.ask(17, key(tokens, **fields), instance, data)

    def store(self, tokens: Iterable[int], instance: int = WORKER, **fields: Any) -> Any:
        context = self.prepare_store(tokens, instance, **fields)
        self.fill(context, tokens, **fields)
        return self.commit_store(tokens, instance, **fields)

    def lookup(self, tokens: Iterable[int], request: str = "r1", **fields: Any) -> Any:
        """The chunks of the hit."""
        assert self.ask(8, key(tokens, **{"worker": None, **fields}, request=request), 1) is None
        return self.ask(9, request)

    def prepare_retrieve(self, tokens: Iterable[int], instance: int = WORKER, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(18, key(tokens, **fields), instance)
        return answer

    def read(self, answer: dict[str, Any], tokens: Iterable[int], **fields: Any) -> None:
        """Check the bytes of the slots of a prepared retrieve."""
        wanted = key(tokens, **fields)
        slots = answer["context"]["slots"]
        assert len(slots) == (wanted["end"] - wanted["start"]) // CHUNK
        for i, slot in enumerate(slots):
            found = bytes(self.pool[slot["offset"] : slot["offset"] + slot["length"]])
            end = wanted["start"] + (i + 1) * CHUNK
            assert found == _content(wanted, end, slot["length"]), f"chunk {i} holds foreign bytes"

    def commit_retrieve(self, tokens: Iterable[int], instance: int = WORKER, **fields: Any) -> Any:
        return self.ask(19, key(tokens, **fields), instance)

    def retrieve(self, tokens: Iterable[int], instance: int = WORKER, **fields: Any) -> bool:
        """Whether the range could be read; checks its bytes."""
        answer = self.prepare_retrieve(tokens, instance, **fields)
        if not answer["success"]:
            assert answer == {"success": False, "data": b"", "context": {}}
            return False
        self.read(answer, tokens, **fields)
        assert self.commit_retrieve(tokens, instance, **fields) is True
        return True

    # The state.

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, and do what time brings."""
        self.now += seconds
        self.service.tick(lambda process: None)
        check_integrity(self.cache)

    @property
    def held(self) -> int:
        """Read leases and reservations."""
        return len(self.cache.reads) + len(self.cache.writes) + len(self.cache.lost)

    @property
    def used(self) -> int:
        """Bytes of the pool in use."""
        return self.cache.allocator.used


def registration(instance: int = WORKER, **facts: Any) -> dict[str, Any]:
    """The payload of a registration."""
    return {
        "instance_id": instance, "model_name": "m", "world_size": 1, "block_size": 8, "num_layers": 2,
        "hidden_dim_size": 16, "dtype_str": "bfloat16", "use_mla": True, "num_physical_slots": CHUNK, **facts,
    }  # fmt: skip


def key(
    tokens: Iterable[int], *, worker: int | None = 0, start: int = 0, end: int | None = None, request: str = "r1",
    model: str = "m", world: int = 1, salt: str = "", readers: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """A key as their clients send it; `end` is that of the last whole chunk."""
    tokens = list(tokens)
    return {
        "model_name": model, "world_size": world, "worker_id": worker, "token_ids": tokens, "start": start,
        "end": len(tokens) // CHUNK * CHUNK if end is None else end, "request_id": request, "cache_salt": salt,
        "request_configs": None, "num_kv_readers": readers,
    }  # fmt: skip


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as our own dialect sends them."""
    tokens = list(tokens)
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _content(wanted: dict[str, Any], end: int, length: int) -> bytes:
    return content(
        wanted["model_name"], wanted["worker_id"], wanted["cache_salt"], wanted["token_ids"][:end], length
    )  # fmt: skip
