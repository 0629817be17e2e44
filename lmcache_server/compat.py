"""LMCache 0.5.6's numbered operations, translated to the same core calls that our own dialect makes.

What differs, on purpose, from the server that they were written for: every message is answered; clean-up aborts and
never publishes; locks are leases of one request; a payload is never unpickled.

    lookup            a lease under the request's id, until each reader of each shard has committed its retrieve
    prepare_retrieve  a second lease, the worker's own, so that the first one's end cannot hurt it
    prepare_store     a reservation of the worker, found again by what the key says: their commit has no handle
"""

import dataclasses
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lmcache_server.core.instances import Instance, InstanceTable, view_of
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.leases import Lease
from lmcache_server.core.records import Reading, View
from lmcache_server.protocol import messages as m
from lmcache_server.protocol import numbered
from lmcache_server.protocol.errors import ErrorCode, ProtocolError, invalid
from lmcache_server.protocol.keys import QUERY_SUFFIX
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind, slot_bytes, slot_shape
from lmcache_server.protocol.numbered import FIXED, OPERATIONS, Buffer, Key, Refusal, Registration

__all__ = ["Compat"]

log = logging.getLogger(__name__)

SCHEDULER = 0
"""Owner of what lookups hold; no registered instance has this id."""

_REMEMBERED = 4096
"""Entries kept at most for clients that never come back for them."""

_LOOKUP, _RETRIEVE, _STORE = 0, 1, 2
"""Sorts of operations of one request, each a session of its own."""

_SDK_REQUEST = re.compile(r"(store|retrieve)-[0-9a-f]{32}")
"""How LMCache's SDK names its requests. Of one plane it expects slots with a plane axis, LMCache's adapter without."""


@dataclass(slots=True)
class Lookup:
    """What one request's lookup found: `chunks` not yet told (None: told), and the lease until `readers` have read."""

    chunks: int | None
    lease: int = 0
    readers: int = 0


class _Service(Protocol):
    """What is the same in both dialects."""

    def register(self, request: m.Register) -> m.RegisterReply: ...
    def unregister(self, request: m.Unregister) -> m.UnregisterReply: ...
    def clear(self) -> m.ClearReply: ...


class Compat:
    """Answers numbered operations; `speaks` tells which messages are its own. `clock` tells the time in seconds."""

    def __init__(
        self,
        hello: m.HelloReply,
        cache: L1Cache,
        instances: InstanceTable,
        service: _Service,
        clock: Callable[[], float],
        grace_seconds: float,
    ) -> None:
        self._hello = hello
        self._cache = cache
        self._instances = instances
        self._service = service
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._ids: dict[int, int] = {}
        """Their instance id -> ours."""
        self._unknown: OrderedDict[int, None] = OrderedDict()
        self._lookups: OrderedDict[str, Lookup] = OrderedDict()
        self._stores: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._told: set[tuple[str, str]] = set()
        self._methods: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in OPERATIONS}

    def speaks(self, operation: Buffer) -> bool:
        """Whether `operation` is a number, or a name of the numbered dialect."""
        return numbered.name_of(operation) is not None

    def handle(self, operation: Buffer, frames: Sequence[Buffer]) -> list[Buffer]:
        """The reply from its operation frame on."""
        name = numbered.name_of(operation) or ""
        try:
            answer = self._answer(name, frames)
        except ProtocolError as error:
            answer = self._failure(name, error)
        except Exception:  # the boundary of one request: a fault of ours must not end the loop or go unanswered
            log.exception("a fault while answering %s of a client of LMCache", name)
            answer = self._failure(name, ProtocolError(ErrorCode.INTERNAL, "a fault of the server; see its log"))
        return numbered.reply(operation, answer)

    def _answer(self, name: str, frames: Sequence[Buffer]) -> Any:
        if name in OPERATIONS:
            return self._methods[name](*numbered.arguments(OPERATIONS[name], frames))
        _, answer = FIXED.get(name, (None, Refusal("this server does not have it")))
        if isinstance(answer, Refusal):
            raise ProtocolError(ErrorCode.UNSUPPORTED, answer)
        return answer

    def _failure(self, name: str, error: ProtocolError) -> Any:
        """What is answered instead; the reason is logged once."""
        known = name if name in OPERATIONS or name in FIXED else "an unknown operation"
        if (known, error.code) not in self._told:
            self._told.add((known, error.code))
            log.warning("refused %s of a client of LMCache: %s", known, error)
        failure = OPERATIONS[name].failure if name in OPERATIONS else numbered.RAISED
        return Refusal(error) if failure is numbered.RAISED else failure

    # Being known.

    def register_kv_cache_engine_driven_context(self, registration: Registration) -> dict[str, Any]:
        """An engine's worker or an SDK announces itself; again after a restart, or with another layout."""
        if not self._hello.shm_name:
            remedy = "this server has no shared memory, and pickled tensors are not read: start it with --shm-name"
            raise ProtocolError(ErrorCode.INCOMPATIBLE, remedy)
        if registration.num_physical_slots not in (None, self._hello.chunk_size):
            raise invalid(
                "num_physical_slots", f"chunks have {self._hello.chunk_size}; change the server's --chunk-size"
            )
        known = {instance.id for instance in self._instances}
        self._ids = {theirs: ours for theirs, ours in self._ids.items() if ours in known}
        message = self._register_message(registration)
        instance = self._instance(registration.instance_id)
        if instance is None:
            self._ids[registration.instance_id] = self._service.register(message).instance
            self._unknown.pop(registration.instance_id, None)
            instance = self._instance(registration.instance_id)
            assert instance is not None
            instance.patience = self._grace_seconds
        elif instance.register != message:
            # Its reservations stay: what it is still writing has the layout that it reserved for.
            instance.register, instance.view = message, view_of(instance.id, message, self._hello.chunk_size)
        return {"shm_name": self._hello.shm_name, "pool_size": self._hello.pool_bytes}

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> None:
        """An instance leaves; what it had not committed is aborted."""
        ours = self._ids.pop(instance_id, None)
        if ours is not None:
            self._service.unregister(m.Unregister(ours))

    def ping(self, instance_id: int | None) -> bool:
        """False once to a worker that is not registered, so that it registers again; else True."""
        if instance_id is None or instance_id in self._unknown:
            return True
        instance = self._instance(instance_id)
        if instance is None:
            self._unknown[instance_id] = None
            _forget_oldest(self._unknown)
            return False
        instance.patience = None
        return True

    # Reading.

    def lookup(self, key: Key, tp_size: Any) -> None:
        """Find and lease the longest cached prefix; the answer is fetched by query_prefetch_status."""
        self.end_session(key.request_id)
        found = Lookup(0)
        instance = self._engine(key)
        if instance is not None:
            view = dataclasses.replace(instance.view, owner=SCHEDULER)
            acquired = self._cache.acquire(view, _prompt(key, _LOOKUP), 0, True, self._clock())
            found = Lookup(acquired.chunks, acquired.lease, max(1, key.num_kv_readers) * key.world_size)
        self._lookups[key.request_id] = found
        # Those that hold something run out by themselves; then they are the oldest.
        while len(self._lookups) > _REMEMBERED and not self._held(next(iter(self._lookups.values()))):
            self._lookups.popitem(last=False)

    def query_prefetch_status(self, request_id: str) -> int:
        """The chunks that the lookup found, once; 0 if nothing was looked up."""
        found = self._lookups.get(request_id)
        if found is None or found.chunks is None:
            return 0
        chunks, found.chunks = found.chunks, None
        return chunks

    def wait_prefetch_status(self, request_id: str, timeout: Any) -> int:
        """The same; there is nothing to wait for."""
        return self.query_prefetch_status(request_id)

    def free_lookup_locks(self, key: Key, tp_size: Any) -> None:
        """Part of a lookup's lease is not needed. It is held as a whole, so it ends when none of it is needed."""
        found = self._lookups.get(key.request_id)
        lease = self._held(found) if found else None
        if found and lease and key.start <= 0 and key.end // self._hello.chunk_size >= len(lease.subject.nodes):
            self._release(found)

    def end_session(self, request_id: str) -> None:
        """Forget a request's lookup and release what it holds."""
        found = self._lookups.pop(request_id, None)
        if found is not None:
            self._release(found)

    def prepare_retrieve(self, key: Key, instance_id: int) -> dict[str, Any]:
        """Lease the range for one worker: all of it, or nothing."""
        first, last = self._chunk_range(key)
        instance, view = self._worker(key, instance_id)
        found = self._cache.acquire(view, _prompt(key, _RETRIEVE), first, True, self._clock(), counted=False)
        if found.chunks < last or first == last:
            self._cache.end(view.owner, _session(key, _RETRIEVE))
            return numbered.MISS
        return numbered.MISS | {"success": True, "context": {"slots": self._slots(key, instance, found.slots)}}

    def commit_retrieve(self, key: Key, instance_id: int) -> bool:
        """The worker has copied; False if its lease had ended before, so that the bytes may be others'."""
        _, view = self._worker(key, instance_id)
        held = self._cache.end(view.owner, _session(key, _RETRIEVE))
        found = self._lookups.get(key.request_id)
        if held and found is not None:
            found.readers -= 1
            if found.readers <= 0:
                self._release(found)
        return held

    # Writing.

    def prepare_store(self, key: Key, instance_id: int) -> dict[str, Any]:
        """Reserve what is missing of the range; nothing if what comes before the range is missing too."""
        first, _ = self._chunk_range(key)
        instance, view = self._worker(key, instance_id)
        name = _reservation_name(key, view.owner)
        if self._cache.writes.get(view.owner, self._stores.get(name, 0)) is not None:
            raise invalid("key", "it is being stored already: a commit would publish what is yet to be filled")
        reserved = self._cache.reserve(view, _prompt(key, _STORE), self._clock(), first)
        self._stores[name] = reserved.reservation
        _forget_oldest(self._stores)
        indices = [chunk - first for chunk in reserved.chunks]
        return {"context": {"slots": self._slots(key, instance, reserved.slots), "chunk_indices": indices}}

    def commit_store(self, key: Key, instance_id: int, cpu_data: bytes) -> bool:
        """Publish what was reserved; a payload means pickled tensors, which are refused unread."""
        _, view = self._worker(key, instance_id)
        reservation = self._stores.pop(_reservation_name(key, view.owner), 0)
        if cpu_data:
            self._cache.abort(view.owner, (reservation,))
            raise invalid("cpu_data", "pickled tensors are not read; let the client use shared memory")
        return self._cache.commit(view.owner, reservation, None).state is m.CommitState.SEALED

    # Administration.

    def clear(self, force: Any) -> None:
        """Forget everything; what somebody reads or writes stays theirs until they are done, forced or not."""
        self._service.clear()

    def get_chunk_size(self) -> int:
        """Tokens per chunk."""
        return self._hello.chunk_size

    # Helpers.

    def _instance(self, theirs: int) -> Instance | None:
        ours = self._ids.get(theirs)
        return self._instances.seen(ours, self._clock()) if ours is not None else None

    def _register_message(self, wanted: Registration) -> m.Register:
        """The registration in our terms; it joins the namespace of an engine of ours whose chunks have the same bytes.

        Engines that fuse keys and values into one plane may pack them by pages: equal bytes need equal pages.
        """
        kind = Kind.QUERY if wanted.model_name.endswith(QUERY_SUFFIX) else Kind.KV
        planes = 1 if wanted.use_mla else 2
        group = KernelGroup(tuple(range(wanted.num_layers)), planes, 1, wanted.hidden_dim_size, wanted.dtype_str)
        message = m.Register(
            role="worker",
            model_name=wanted.model_name,
            revision=f"pages of {wanted.block_size}" if planes == 1 else "",
            kind=kind,
            world_size=wanted.world_size,
            worker_id=None,
            layout=CacheLayout((group,)),
            block_size=wanted.block_size,
        )
        foreign = set(self._ids.values())
        for instance in self._instances:
            engine = instance.register
            if instance.id not in foreign and _same_bytes(engine, message):
                message = msgspec.structs.replace(message, layout=engine.layout, revision=engine.revision)
        return message

    def _engine(self, key: Key) -> Instance | None:
        """The newest registration that a lookup under `key` can mean."""
        foreign = set(self._ids.values())
        name = (key.model_name, key.world_size)
        found = None
        for instance in self._instances:
            if (instance.register.model_name, instance.register.world_size) == name and instance.id in foreign:
                found = instance
        return found

    def _worker(self, key: Key, instance_id: int) -> tuple[Instance, View]:
        """The registered sender of `key`, and how its shard sees a chunk."""
        instance = self._instance(instance_id)
        if instance is None:
            raise ProtocolError(ErrorCode.UNKNOWN_INSTANCE, f"{instance_id} is not registered; register again")
        register = instance.register
        if (key.model_name, key.world_size) != (register.model_name, register.world_size):
            raise invalid("model_name", f"registered was {register.model_name!r} of {register.world_size} shards")
        if key.worker_id is None or not 0 <= key.worker_id < key.world_size:
            raise invalid("worker_id", f"expected 0 to {key.world_size - 1}, got {key.worker_id}")
        return instance, dataclasses.replace(instance.view, own=range(key.worker_id, key.worker_id + 1))

    def _chunk_range(self, key: Key) -> tuple[int, int]:
        size = self._hello.chunk_size
        if key.start % size or key.end % size or not 0 <= key.start <= key.end:
            raise invalid("start", f"expected a range of whole chunks of {size}, got {key.start} to {key.end}")
        return key.start // size, key.end // size

    def _slots(self, key: Key, instance: Instance, packed: bytes) -> list[dict[str, Any]]:
        group, size = instance.register.layout.groups[0], self._hello.chunk_size
        shape, length = list(slot_shape(group, instance.register.kind, size)), slot_bytes(group, size)
        if len(shape) == 3 and _SDK_REQUEST.fullmatch(key.request_id):
            shape = [1, *shape]
        common = {"length": length, "shape": shape, "dtype": group.dtype}
        return [{"offset": slot.offset, **common} for slot in m.unpack_slots(packed)]

    def _held(self, found: Lookup) -> Lease[Reading] | None:
        return self._cache.reads.get(SCHEDULER, found.lease)

    def _release(self, found: Lookup) -> None:
        if found.lease:
            self._cache.release(SCHEDULER, (found.lease,))
            found.lease = 0


def _session(key: Key, sort: int) -> m.SessionId:
    """The session of one sort of operation on this range of this request and shard."""
    return m.SessionId(f"{key.request_id}#{key.worker_id}#{key.start}-{key.end}", sort)


def _prompt(key: Key, sort: int) -> m.Prompt:
    return m.Prompt(_session(key, sort), key.tokens, key.cache_salt)


def _reservation_name(key: Key, owner: int) -> tuple[Any, ...]:
    """What makes a commit belong to a prepare."""
    return (owner, _session(key, _STORE), key.cache_salt, hashlib.blake2b(key.tokens, digest_size=16).digest())


def _same_bytes(engine: m.Register, wanted: m.Register) -> bool:
    """Whether chunks of both have the same bytes. How wide queries are LMCache's SDK does not know; the slots say."""
    if (engine.model_name, engine.world_size, engine.kind) != (wanted.model_name, wanted.world_size, wanted.kind):
        return False
    one, other = engine.layout.groups[0], wanted.layout.groups[0]
    same = (len(one.layers), one.planes, one.hidden, one.dtype) == (
        len(other.layers), other.planes, other.hidden, other.dtype,
    )  # fmt: skip
    return len(engine.layout.groups) == 1 and (same or wanted.kind is Kind.QUERY)


def _forget_oldest(table: OrderedDict[Any, Any]) -> None:
    while len(table) > _REMEMBERED:
        table.popitem(last=False)
