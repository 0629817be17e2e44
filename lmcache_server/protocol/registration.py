"""Being known: what a client and a server tell each other before the first chunk, and how they part.

Nothing of it is remembered across a restart of the server: a new incarnation means that every earlier fact is void.
"""

from enum import StrEnum

from lmcache_server.protocol.codec import Many, Message
from lmcache_server.protocol.errors import invalid
from lmcache_server.protocol.layout import CacheLayout, Kind

__all__ = [
    "Hello", "HelloReply", "PROTOCOL_VERSION", "Ping", "PingReply", "ProcessId", "Register", "RegisterReply",
    "Transport", "Unregister", "UnregisterReply",
]  # fmt: skip

PROTOCOL_VERSION = 1
MAX_ROLE = 64
MAX_NAME = 1024
MAX_PARTS = 4096
"""Objects of one chunk: shards times kernel groups."""


class Transport(StrEnum):
    """How the bytes of a chunk reach a client."""

    SHM = "shm"
    FRAMES = "frames"


class Hello(Message, frozen=True):
    """Ask what this server is. The first message of a connection; it changes nothing."""

    protocol: int = PROTOCOL_VERSION


class HelloReply(Message, frozen=True):
    """What a client must know before it registers. A new `incarnation` means that every earlier fact is void.

    A client that is silent for `reap_seconds` is forgotten, a read lease that is not renewed for `read_ttl_seconds`
    ends.
    """

    protocol: int
    version: str
    server_id: str
    incarnation: int
    chunk_size: int
    hash_algorithm: str
    transport: Transport
    shm_name: str
    pool_bytes: int
    align_bytes: int
    frame_bytes: int
    reap_seconds: float
    read_ttl_seconds: float


class ProcessId(Message, frozen=True):
    """A process as its own host knows it, so that a server on the same host can tell whether it is gone."""

    pid: int
    started: int
    namespace: int


class Register(Message, frozen=True):
    """Become an instance: a worker of one shard (`worker_id`), or a client of all (None: a scheduler, an SDK)."""

    role: str
    model_name: str
    revision: str
    kind: Kind
    world_size: int
    worker_id: int | None
    layout: CacheLayout
    block_size: int
    process: ProcessId | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.role) <= MAX_ROLE:
            raise invalid("role", f"expected 1 to {MAX_ROLE} characters, got {len(self.role)}")
        if not 0 < len(self.model_name) <= MAX_NAME:
            raise invalid("model_name", f"expected 1 to {MAX_NAME} characters, got {len(self.model_name)}")
        if len(self.revision) > MAX_NAME:
            raise invalid("revision", f"expected at most {MAX_NAME} characters, got {len(self.revision)}")
        if not 1 <= self.world_size <= 1024:
            raise invalid("world_size", f"expected 1 to 1024 shards, got {self.world_size}")
        if self.worker_id is not None and not 0 <= self.worker_id < self.world_size:
            raise invalid("worker_id", f"expected 0 to {self.world_size - 1} or nil, got {self.worker_id}")
        if self.block_size < 1:
            raise invalid("block_size", f"expected a number of tokens, got {self.block_size}")
        parts = self.world_size * len(self.layout.groups)
        if parts > MAX_PARTS:
            raise invalid("world_size", f"expected at most {MAX_PARTS} parts (shards times groups), got {parts}")
        if self.kind is Kind.QUERY and any(group.planes != 1 for group in self.layout.groups):
            raise invalid("layout.groups", "expected one plane in each group of a query cache")


class RegisterReply(Message, frozen=True):
    """The issued id, the layout's fingerprint, and how the parts of a chunk look to this instance."""

    instance: int
    incarnation: int
    fingerprint: str
    part_bytes: Many[int]


class Unregister(Message, frozen=True):
    """Leave: leases are released, reservations aborted, never committed."""

    instance: int


class UnregisterReply(Message, frozen=True):
    """`known` is false if there was nothing to leave."""

    known: bool


class Ping(Message, frozen=True):
    """A sign of life; `renew` lists leases that are still in use and must not run out."""

    instance: int | None = None
    renew: Many[int] = ()


class PingReply(Message, frozen=True):
    """`known` is false when the instance must register again; `renewed` counts the leases that were still there."""

    incarnation: int
    known: bool
    renewed: int
