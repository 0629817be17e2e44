"""What one cached chunk looks like in memory: the canonical layout, independent of any engine's paging.

    KV      [2, L, T, D]    keys, then values
    MLA     [L, T, D]       one latent plane
    QUERY   [1, L, T, D]

L layers of the group, T tokens of the chunk, D = heads * head_size, head-major; contiguous, native byte order.
A chunk of a model with several kernel groups is several objects, one per group. `fingerprint` names a layout: two
engines share cached chunks only if theirs are equal.
"""

import hashlib
from enum import StrEnum

import msgpack

from lmcache_server.protocol.codec import Many, Message
from lmcache_server.protocol.errors import invalid

__all__ = [
    "CANONICAL_VERSION",
    "CacheLayout",
    "ITEM_BYTES",
    "KernelGroup",
    "Kind",
    "fingerprint",
    "slot_bytes",
    "slot_shape",
]

CANONICAL_VERSION = 1
"""Raised when the byte layout of a chunk changes, so that older bytes are never read as newer ones."""

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes per element of each dtype that a layout may name (torch's names)."""

MAX_LAYERS = 4096
MAX_GROUPS = 256
MAX_QUANTISATION = 1024
MAX_WIDTH = 1 << 20
"""Heads, and elements per head."""


class Kind(StrEnum):
    """Which tensors of a model are cached."""

    KV = "kv"
    QUERY = "query"


class KernelGroup(Message, frozen=True):
    """Layers that share one shape of cache: `layers` are indices into the model, `window` in tokens (0: full
    attention).
    """

    layers: Many[int]
    planes: int
    heads: int
    head_size: int
    dtype: str
    window: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise invalid("layers", f"expected 1 to {MAX_LAYERS} layer indices, got {len(self.layers)}")
        if len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise invalid("layers", f"expected distinct layer indices from 0, got {list(self.layers[:40])}")
        if self.planes not in (1, 2):
            raise invalid("planes", f"expected 2 (keys and values) or 1 (one latent or query plane), got {self.planes}")
        for name, width in (("heads", self.heads), ("head_size", self.head_size)):
            if not 1 <= width <= MAX_WIDTH:
                raise invalid(name, f"expected 1 to {MAX_WIDTH}, got {width}")
        if self.dtype not in ITEM_BYTES:
            raise invalid("dtype", f"expected one of {', '.join(ITEM_BYTES)}, got {self.dtype[:40]!r}")
        if self.window < 0:
            raise invalid("window", f"expected 0 (full attention) or a number of tokens, got {self.window}")

    @property
    def hidden(self) -> int:
        """D: elements per token, layer and plane."""
        return self.heads * self.head_size


class CacheLayout(Message, frozen=True):
    """The cache of one shard of a model: its kernel groups, and how the values are quantised ("" if they are not)."""

    groups: Many[KernelGroup]
    quantisation: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= MAX_GROUPS:
            raise invalid("groups", f"expected 1 to {MAX_GROUPS} kernel groups, got {len(self.groups)}")
        if len(self.quantisation) > MAX_QUANTISATION:
            raise invalid(
                "quantisation", f"expected at most {MAX_QUANTISATION} characters, got {len(self.quantisation)}"
            )


def fingerprint(layout: CacheLayout) -> str:
    """32 hex digits that name the layout (BLAKE2b-128 of its fields, canonical version included)."""
    fields = [
        CANONICAL_VERSION,
        layout.quantisation,
        [[list(g.layers), g.planes, g.heads, g.head_size, g.dtype, g.window] for g in layout.groups],
    ]
    return hashlib.blake2b(msgpack.packb(fields), digest_size=16).hexdigest()


def slot_shape(group: KernelGroup, kind: Kind, tokens: int) -> tuple[int, ...]:
    """The canonical shape of `tokens` tokens of one group."""
    plane = (len(group.layers), tokens, group.hidden)
    if kind is Kind.QUERY:
        return (1, *plane)
    return (2, *plane) if group.planes == 2 else plane


def slot_bytes(group: KernelGroup, tokens: int) -> int:
    """Bytes of `tokens` tokens of one group."""
    return group.planes * len(group.layers) * tokens * group.hidden * ITEM_BYTES[group.dtype]
