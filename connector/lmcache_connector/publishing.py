"""A store, whatever is stored: slots for what is missing of some prompts, filled, published, and the attempts ended."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lmcache_connector.health import ServerLink
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_server.protocol.messages import (
    Commit,
    CommitReply,
    CommittedChunks,
    End,
    Prompt,
    Reserve,
    Reserved,
    ReserveReply,
    SessionId,
)

__all__ = ["Published", "end", "publish"]


class Published(NamedTuple):
    """What the server had reserved of one prompt, and which of those chunks are in the cache now."""

    reserved: Reserved
    sealed: frozenset[int]


def publish(
    attachment: Attachment, prompts: Sequence[Prompt], first: Sequence[int], fill: Callable[[int, Reserved], None]
) -> list[Published]:
    """Reserve what is missing of `prompts` from their chunk `first` on, have it filled, and commit it.

    `fill(i, reserved)` writes the slots of prompt i; it is not called where there is nothing to fill. Raises as
    `ServerConnection.request` does; what was reserved then is aborted with its session.
    """
    reply: ReserveReply = attachment.connection.request(Reserve(attachment.instance, tuple(prompts), tuple(first)))
    handles = []
    for i, reserved in enumerate(reply.results):
        if reserved.reservation:
            fill(i, reserved)
            handles.append(reserved.reservation)
    sealed: dict[int, frozenset[int]] = {}
    if handles:
        commit = Commit(attachment.instance, tuple(CommittedChunks(handle) for handle in handles))
        committed: CommitReply = attachment.connection.request(commit)
        sealed = {h: frozenset(r.sealed) for h, r in zip(handles, committed.results, strict=True)}
    return [Published(reserved, sealed.get(reserved.reservation, frozenset())) for reserved in reply.results]


def end(link: ServerLink, attachment: Attachment, sessions: Sequence[SessionId]) -> None:
    """These attempts are over, now: an idle engine takes no further step.

    Whatever they still reserve (nothing, unless a copy failed) is aborted with them.
    """
    try:
        attachment.connection.submit(End(attachment.instance, tuple(sessions)))
    except LMCacheSDKError as error:
        link.lost(attachment, error)
