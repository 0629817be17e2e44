"""Who is registered, how each sees a chunk, and when it was last heard of.

Ids are random and issued here, so two clients can never announce the same one. Whether a silent instance's process
still runs is for `io` to find out; this file only says who is silent.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from lmcache_server.core.records import View
from lmcache_server.protocol.keys import Namespace
from lmcache_server.protocol.layout import fingerprint, slot_bytes
from lmcache_server.protocol.messages import Register

__all__ = ["Instance", "InstanceTable", "view_of"]


@dataclass(slots=True, eq=False)
class Instance:
    """One registered client."""

    id: int
    register: Register
    view: View
    last_seen: float
    patience: float | None = None
    """Seconds of silence that are granted; None: what the server grants to all."""


def view_of(owner: int, register: Register, chunk_size: int) -> View:
    """How the client that sent `register` sees a chunk: shard-major parts, its own shard's or all."""
    layout = register.layout
    groups = tuple(slot_bytes(group, chunk_size) for group in layout.groups)
    namespace = Namespace(
        register.model_name, register.revision, register.kind, fingerprint(layout), register.world_size
    )
    if register.worker_id is None:
        own = range(register.world_size * len(groups))
    else:
        own = range(register.worker_id * len(groups), (register.worker_id + 1) * len(groups))
    return View(owner, namespace, groups * register.world_size, own)


class InstanceTable:
    """Registered clients by id."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._instances: dict[int, Instance] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def register(self, register: Register, now: float) -> Instance:
        """A new instance, under an id that nobody has had."""
        owner = secrets.randbits(62) + 1
        instance = Instance(owner, register, view_of(owner, register, self._chunk_size), now)
        self._instances[owner] = instance
        return instance

    def seen(self, owner: int, now: float) -> Instance | None:
        """The instance, noted as alive; None if it is not registered."""
        instance = self._instances.get(owner)
        if instance is not None:
            instance.last_seen = now
        return instance

    def remove(self, owner: int) -> Instance | None:
        """Forget an instance; None if it was not there."""
        return self._instances.pop(owner, None)

    def silent(self, now: float, patience: float) -> list[Instance]:
        """Instances not heard of for `patience` seconds, or as long as each of them was granted."""
        return [i for i in self._instances.values() if now - i.last_seen > (i.patience or patience)]
