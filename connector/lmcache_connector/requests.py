"""What the scheduler half knows of the requests that are under way: plain records, changed by it alone."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_connector.identity import PromptIdentity
from lmcache_connector.opt_out import OptOut
from lmcache_connector.tracker import PackedTokens, StoreTracker
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.transport import PendingReply
from lmcache_server.protocol.messages import Acquired, SessionId

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Loading", "Lookup", "RequestState"]


@dataclass(slots=True, eq=False)
class Lookup:
    """One question to the server: the answer that is under way, or the answer."""

    attachment: Attachment
    session: SessionId
    pending: PendingReply
    tokens: int
    """How many it asked for."""
    asked: float
    """When, on the monotonic clock."""
    answer: Acquired | None = None


@dataclass(slots=True, eq=False)
class Loading:
    """A load that the workers have not reported yet."""

    attachment: Attachment
    lease: int
    blocks: frozenset[int]
    missing: frozenset[int] = frozenset()
    """Those that a worker could not fill."""
    sessions: tuple[SessionId, ...] = ()
    """What ends with the load, if the request did not outlive it."""


@dataclass(slots=True, eq=False)
class RequestState:
    """What is known about one request; without an `identity` the cache is not used for it."""

    request: "Request"
    identity: PromptIdentity | None
    opt_out: OptOut
    packed: PackedTokens = field(default_factory=PackedTokens)
    store: StoreTracker = field(default_factory=StoreTracker)
    lookup: Lookup | None = None
    local: int = 0
    """The engine's own hit, as of the last question."""
    attempts: int = 0
    attachment: Attachment | None = None
    """The one that the attempts, and what is stored, belong to."""
    failed: bool = False
    """A load went wrong: this request is computed, whatever the cache has."""
    outdated: bool = False
    """A part of its KV is older than the last reset, so none of it is stored."""
