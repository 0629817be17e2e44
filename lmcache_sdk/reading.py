"""Taking cached chunks out: acquire, copy or look, verify, release. One attempt each; whoever calls decides on another.

Nothing wrong is ever handed out: a slot is checked after it was copied, and only the chunks up to the first that
changed count. The lease is kept alive while it is used and given back however the reading ends.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError, ServerRefused
from lmcache_sdk.heartbeat import Heartbeat
from lmcache_sdk.lazy import Lazy
from lmcache_sdk.shapes import CachedTensors, described, first_tokens, token_count
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.messages import Acquire, Acquired, End, Prompt

__all__ = ["CacheView", "cached_chunks", "retrieve", "view"]

FAREWELL_SECONDS = 1.0
"""How long a reader's farewell may wait for a connection."""


class CacheView(Sequence[CachedTensors]):
    """Cached chunks where they lie, in order, for the first `tokens` tokens; each is as `retrieve` returns it.

    With shared memory they are the pool itself, mapped read-only: a write to one ends this process (SIGSEGV), so clone
    what is to be changed or kept. A tensor of several shards or several kernel groups lies in several places and is
    joined, which copies.
    """

    def __init__(self, chunks: Sequence[CachedTensors], chunk_size: int) -> None:
        self.tokens = len(chunks) * chunk_size
        self._chunks = chunks

    @overload
    def __getitem__(self, index: int) -> CachedTensors: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CachedTensors]: ...
    def __getitem__(self, index: int | slice) -> CachedTensors | Sequence[CachedTensors]:
        """One chunk, or some."""
        return self._chunks[index]

    def __len__(self) -> int:
        """How many chunks are cached."""
        return len(self._chunks)

    def __repr__(self) -> str:
        shape = f" of {described(self._chunks[0])}" if self._chunks else ""
        return f"<CacheView: {self.tokens} tokens, {len(self)} chunks{shape}>"


def cached_chunks(attachment: Attachment, prompt: Prompt, timeout: float) -> int:
    """How many chunks of `prompt` are cached now; nothing is held."""
    request = Acquire(attachment.instance, (prompt,), lease=False)
    (acquired,) = attachment.connection.request(request, timeout=timeout).results
    return int(acquired.chunks)


def retrieve(
    attachment: Attachment,
    geometry: ChunkGeometry,
    heartbeat: Heartbeat,
    prompt: Prompt,
    out: CachedTensors | None,
    timeout: float,
) -> tuple[CachedTensors | None, bool]:
    """The cached prefix (None: nothing), new or in `out`, and whether all that was found could be verified."""
    with _leased(attachment, heartbeat, prompt, timeout) as acquired:
        if not acquired.chunks:
            return None, True
        tokens = acquired.chunks * geometry.tokens
        target = geometry.empty(tokens) if out is None else out
        if token_count(target) < tokens:
            expected = " and ".join(str(list(shape.of(tokens))) for shape in geometry.shapes)
            raise LMCacheSDKError(f"out: expected room for {tokens} cached tokens {expected}, got {described(target)}")
        try:
            slots = attachment.transfer.readable(acquired)
        except ServerRefused as refusal:
            if refusal.code is not ErrorCode.UNKNOWN_LEASE:
                raise
            return None, False
        geometry.join(slots, target)
        verified = attachment.transfer.verify(acquired)
    good = _leading(verified) // len(geometry.parts) * geometry.tokens
    return (first_tokens(target, good) if good else None), good == tokens


@contextmanager
def view(
    attachment: Attachment, geometry: ChunkGeometry, heartbeat: Heartbeat, prompt: Prompt, timeout: float
) -> Iterator[CacheView]:
    """The cached prefix where it lies, leased while the block runs.

    Raises LMCacheSDKError at the end of the block if a slot changed during it: what was seen may be another's.
    """
    with _leased(attachment, heartbeat, prompt, timeout) as acquired:
        slots = attachment.transfer.readable(acquired, shown=True) if acquired.chunks else []
        parts = len(geometry.parts)
        chunks = Lazy(len(slots) // parts, lambda i: geometry.chunk(slots[i * parts : (i + 1) * parts]))
        yield CacheView(chunks, geometry.tokens)
        changed = attachment.transfer.verify(acquired).count(False) if slots else 0
    if changed:
        raise LMCacheSDKError(
            f"{changed} of {len(slots)} slots were reused while they were viewed (the lease was lost): "
            "what was seen is void"
        )


@contextmanager
def _leased(attachment: Attachment, heartbeat: Heartbeat, prompt: Prompt, timeout: float) -> Iterator[Acquired]:
    try:
        request = Acquire(attachment.instance, (prompt,))
        (acquired,) = attachment.connection.request(request, timeout=timeout).results
        with heartbeat.holding(acquired.lease):
            yield acquired
    finally:
        _give_back(attachment, prompt)


def _give_back(attachment: Attachment, prompt: Prompt) -> None:
    """End the attempt, which releases its lease; nobody waits for the answer.

    What is asked after it over this connection is answered after it. What the server does not hear it does by itself,
    when the lease or this client runs out.
    """
    with contextlib.suppress(LMCacheSDKError):
        attachment.connection.submit(End(attachment.instance, (prompt.session,)), timeout=FAREWELL_SECONDS)


def _leading(verified: list[bool]) -> int:
    return verified.index(False) if False in verified else len(verified)
