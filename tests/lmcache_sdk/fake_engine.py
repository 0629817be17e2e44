"""An engine's half of the conversation, as a connector's worker would hold it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmcache_sdk.attachment import Attachment, attach
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.servers import CacheServer

TINY = KernelGroup(layers=(0, 1, 2), planes=2, heads=2, head_size=8, dtype="float32")


@contextmanager
def registered_engine(
    server: CacheServer,
    model: str,
    *groups: KernelGroup,
    kind: Kind = Kind.KV,
    world_size: int = 1,
    worker_id: int | None = 0,
    revision: str = "r1",
) -> Iterator[Attachment]:
    """A worker that registered `groups` (none given: TINY) for `model`, as an engine's connector does."""
    with ServerConnection(server.url, timeout=10) as connection:
        attachment = attach(
            connection,
            role="worker",
            model_name=model,
            revision=revision,
            kind=kind,
            world_size=world_size,
            worker_id=worker_id,
            layout=CacheLayout(groups or (TINY,)),
            block_size=16,
        )
        yield attachment
        attachment.detach()


def random_kv(tokens: int, group: KernelGroup = TINY, shards: int = 1) -> torch.Tensor:
    """Random values in the shape that contexts use."""
    shape = (group.planes, len(group.layers), tokens, group.hidden * shards)
    return torch.randn(shape).to(getattr(torch, group.dtype))
