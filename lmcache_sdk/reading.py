"""Taking cached chunks out: acquire, copy or look, verify, release. One attempt each; whoever calls decides on another.

Nothing wrong is ever handed out: a slot is checked after it was copied, and only the chunks up to the first that
changed count. The lease is kept alive while it is used and given back however the reading ends.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import torch

from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError, ServerRefused
from lmcache_sdk.heartbeat import Heartbeat
from lmcache_sdk.lazy import Lazy
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.messages import Acquire, Acquired, End, Prompt

__all__ = ["CacheView", "cached_chunks", "retrieve", "view"]

FAREWELL_SECONDS = 1.0
"""How long a reader's farewell may wait for a connection."""


class CacheView(Sequence[torch.Tensor]):
    """Cached chunks where they lie: tensors [planes, L, chunk, D] in order, for the first `tokens` tokens.

    With shared memory they are the pool itself: look, do not write, and do not keep them. A cache in several shards is
    joined, which copies.
    """

    def __init__(self, chunks: Sequence[torch.Tensor], chunk_size: int) -> None:
        self.tokens = len(chunks) * chunk_size
        self._chunks = chunks

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        """One chunk, or some."""
        return self._chunks[index]

    def __len__(self) -> int:
        """How many chunks are cached."""
        return len(self._chunks)

    def __repr__(self) -> str:
        shape = f" of {list(self._chunks[0].shape)}" if self._chunks else ""
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
    out: torch.Tensor | None,
    timeout: float,
) -> tuple[torch.Tensor | None, bool]:
    """The cached prefix (None: nothing), new or in `out`, and whether all that was found could be verified."""
    with _leased(attachment, heartbeat, prompt, timeout) as acquired:
        if not acquired.chunks:
            return None, True
        tokens = acquired.chunks * geometry.tokens
        target = geometry.empty(tokens) if out is None else out
        if target.shape[2] < tokens:
            expected = list(geometry.shape(tokens))
            raise LMCacheSDKError(f"out: expected room for {tokens} cached tokens {expected}, got {list(target.shape)}")
        try:
            slots = attachment.transfer.readable(acquired)
        except ServerRefused as refusal:
            if refusal.code is not ErrorCode.UNKNOWN_LEASE:
                raise
            return None, False
        geometry.join(slots, target)
        verified = attachment.transfer.verify(acquired)
    good = _leading(verified) // geometry.shards * geometry.tokens
    return (target.narrow(2, 0, good) if good else None), good == tokens


@contextmanager
def view(
    attachment: Attachment, geometry: ChunkGeometry, heartbeat: Heartbeat, prompt: Prompt, timeout: float
) -> Iterator[CacheView]:
    """The cached prefix where it lies, leased while the block runs.

    Raises LMCacheSDKError at the end of the block if a slot changed during it: what was seen may be another's.
    """
    with _leased(attachment, heartbeat, prompt, timeout) as acquired:
        slots = attachment.transfer.readable(acquired) if acquired.chunks else []
        shards = geometry.shards
        chunks = Lazy(len(slots) // shards, lambda i: _joined(geometry, slots[i * shards : (i + 1) * shards]))
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


def _joined(geometry: ChunkGeometry, slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """One chunk out of its shards."""
    shards = [geometry.view(slot) for slot in slots]
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=3)


def _leading(verified: list[bool]) -> int:
    return verified.index(False) if False in verified else len(verified)
