"""Putting chunks in: reserve, copy, commit, until all of a prompt's chunks are cached.

What could not be filled is given up, never published: the attempt's session is ended however the writing ends, and that
aborts whatever is still reserved under it.
"""

import contextlib
import time

from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError, ServerRefused
from lmcache_sdk.shapes import CachedTensors
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.messages import Commit, CommittedChunks, End, Prompt, Reserve, Reserved

__all__ = ["store"]

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.25
"""Seconds between two looks at chunks that another client is writing."""
ROUNDS = 3
"""How often the server may take a reservation away before that is an error."""


def store(attachment: Attachment, geometry: ChunkGeometry, kv: CachedTensors, prompt: Prompt, timeout: float) -> bool:
    """Bring every whole chunk of `kv` into the cache; False if all were there already.

    Chunks that another client is writing are waited for. Raises LMCacheSDKError if the pool cannot hold all of them,
    saying how many it took, or if they are not there after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    pause, stored, lost = FIRST_PAUSE, 0, 0
    try:
        while True:
            request = Reserve(attachment.instance, (prompt,))
            (reserved,) = attachment.connection.request(request, timeout=_left(deadline)).results
            sealed = _fill(attachment, geometry, kv, reserved, deadline) if reserved.reservation else 0
            stored += sealed
            if reserved.full:
                raise LMCacheSDKError(_no_room(reserved, len(prompt.tokens) // 4 // geometry.tokens))
            if sealed == len(reserved.chunks) and not reserved.busy:
                return stored > 0
            lost += sealed < len(reserved.chunks)
            if lost == ROUNDS:
                raise LMCacheSDKError(f"the server took {lost} reservations away while they were being filled")
            if _left(deadline) <= pause:
                raise LMCacheSDKError(
                    f"another client is writing {reserved.busy} of these chunks and did not finish within {timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        _end(attachment, prompt)


def _fill(
    attachment: Attachment, geometry: ChunkGeometry, kv: CachedTensors, reserved: Reserved, deadline: float
) -> int:
    """Copy and commit one reservation; how many of its chunks are visible now (none, if it ran out meanwhile)."""
    slots = attachment.transfer.writable(reserved)
    geometry.split(kv, reserved.chunks, slots)
    try:
        attachment.transfer.flush(reserved, slots)
    except ServerRefused as refusal:
        if refusal.code is ErrorCode.UNKNOWN_LEASE:
            return 0
        raise
    request = Commit(attachment.instance, (CommittedChunks(reserved.reservation),))
    (committed,) = attachment.connection.request(request, timeout=_left(deadline)).results
    return len(committed.sealed)


def _end(attachment: Attachment, prompt: Prompt) -> None:
    """End the attempt; nobody waits for the answer, and without a connection the server ends it in time by itself."""
    with contextlib.suppress(LMCacheSDKError):
        attachment.connection.submit(End(attachment.instance, (prompt.session,)))


def _no_room(reserved: Reserved, total: int) -> str:
    fitted = total - reserved.full
    return (
        f"the pool has no room for {reserved.full} of {total} chunks; the first {fitted} are cached. "
        "Free or enlarge it (lmcache server --l1-size-gb), or store fewer tokens"
    )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
