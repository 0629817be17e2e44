"""From tokens to chunks to chained hashes to `CacheEngineKey`.

    hash(i) = H(hash(i - 1) | tokens of chunk i as uint32 little-endian | extras of chunk i)        hash(-1) = H(seed)

The first two parts have a fixed length, so the input of H is unambiguous. `extras` are tagged bytes for what shapes the
KV beside the tokens (a LoRA adapter, a media item); the chain carries them into every later chunk. Only whole chunks
have a hash. Nothing here depends on the process: no seed from the environment, no object identity; tests pin the
values.

Whoever takes a hit compares the tokens too (see core.index): a collision may cost a miss and never serves wrong KV.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import blake3
import msgpack
import xxhash

from lmcache_server.protocol.layout import Kind

__all__ = ["HASH_ALGORITHMS", "QUERY_SUFFIX", "TOKEN_BYTES", "CacheEngineKey", "ChunkHasher", "Namespace"]

TOKEN_BYTES = 4
"""A token id on the wire and in a hash: uint32, little-endian."""

QUERY_SUFFIX = "##query"
"""What the model name of a query cache ends with."""

_SEED = b"lmcache chunk chain 1"


def _blake3(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASH_ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "xxh3_128": xxhash.xxh3_128_digest,
    "blake3": _blake3,
    "sha256": _sha256,
}
"""Name -> function from bytes to digest; the first is the default, the others are cryptographic."""


class ChunkHasher:
    """Cuts tokens into chunks and chains their hashes."""

    def __init__(self, chunk_size: int, algorithm: str = "xxh3_128") -> None:
        self.chunk_size = chunk_size
        self.chunk_bytes = chunk_size * TOKEN_BYTES
        self.algorithm = algorithm
        self.digest = HASH_ALGORITHMS[algorithm]
        self.root = self.digest(_SEED)

    def count(self, tokens: bytes) -> int:
        """How many whole chunks `tokens` (uint32 bytes) holds."""
        return len(tokens) // self.chunk_bytes

    def chain(self, parent: bytes, chunk: bytes, extras: bytes = b"") -> bytes:
        """The hash of one chunk after `parent`."""
        return self.digest(parent + chunk + extras)

    def hashes(self, tokens: bytes, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
        """The hash of each whole chunk of `tokens`; `extras` maps a chunk's index to its extra bytes."""
        extras = extras or {}
        parent, result = self.root, []
        for i in range(self.count(tokens)):
            parent = self.chain(parent, tokens[i * self.chunk_bytes : (i + 1) * self.chunk_bytes], extras.get(i, b""))
            result.append(parent)
        return result


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal before tokens are even compared: the model, as it computes and as it is laid out.

    `revision` says which weights (and whatever else of the configuration shapes the KV), `layout` is the layout's
    fingerprint, `world_size` the number of shards that each chunk is cut into.
    """

    model_name: str
    revision: str
    kind: Kind
    layout: str
    world_size: int


@dataclass(frozen=True, slots=True)
class CacheEngineKey:
    """Identity of one cached chunk of one shard. Equal keys mean equal bytes."""

    namespace: Namespace
    worker_id: int
    group: int
    cache_salt: str
    chunk_hash: bytes

    def encode(self) -> bytes:
        """An injective encoding, the same in every process: a MessagePack array of typed fields."""
        n = self.namespace
        fields = [1, n.model_name, n.revision, str(n.kind), n.layout, n.world_size]
        return bytes(msgpack.packb([*fields, self.worker_id, self.group, self.cache_salt, self.chunk_hash]))
