"""LMCache 0.5.6's numbered operations, translated to the same core calls that our own dialect makes. Nothing else
knows them.

What differs, on purpose, from the server that they were written for: every message is answered; clean-up aborts and
never publishes; locks are leases of one request; a payload is never unpickled. An expected failure is told in the
form that those clients take for one (nothing to store, no hit, not committed). An operation that is not spoken here
is answered under another operation's name, which their client raises as an error at once instead of waiting for its
time-out.

    lookup            a lease under the request's id, until each reader of each shard has committed its retrieve
    prepare_store     a reservation of the worker, found again by what the key says: their commit has no handle
    prepare_retrieve  a second lease, the worker's own, so that the first one's end cannot hurt it
"""

import dataclasses
import logging
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from lmcache_server.core.instances import Instance, InstanceTable, view_of
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.protocol import codec
from lmcache_server.protocol import messages as m
from lmcache_server.protocol.errors import ProtocolError, invalid
from lmcache_server.protocol.keys import QUERY_SUFFIX
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind, slot_bytes, slot_shape

__all__ = ["Compat"]

log = logging.getLogger(__name__)
Buffer = bytes | memoryview
Reply = list[Buffer]

SCHEDULER = 0
"""Owner of what lookups hold; no registered instance has this id."""

_REMEMBERED = 4096
"""Entries kept at most for clients that never come back for them."""

_MAX_TOKENS = 1 << 21
"""Values of one frame: tokens come as a list here."""

_LOOKUP, _RETRIEVE, _STORE = 0, 1, 2
"""Sorts of operations of one request, each a session of its own."""

_DRIVEN = "the server copies nothing out of engines; set lmcache.mp.mp_transfer_mode to engine_driven"
_REMEDIES = {
    1: _DRIVEN,
    3: "query tensors are stored by this project's own connector",
    **dict.fromkeys((25, 26, 27, 28, 33), "blend is not part of this server"),
    **dict.fromkeys((29, 30, 31), "servers do not talk to each other"),
}
_UNSPOKEN_NAMES = {
    "register_kv_cache": 1,
    "register_q_cache": 3,
    "cb_register_rope": 25,
    "cb_unregister_rope": 26,
    "cb_retrieve_pre_computed": 27,
    "cb_unified_lookup": 28,
    "p2p_lookup_and_lock": 29,
    "p2p_query_lookup_results": 30,
    "p2p_unlock_objects": 31,
    "cb_protocol_handshake": 33,
}
_FAILURES: dict[int, Any] = {
    5: [b"", False],
    6: [b"", False],
    7: [b"", False],
    9: 0,
    10: 0,
    16: {"context": {"slots": [], "chunk_indices": []}},
    17: False,
    18: {"success": False, "data": b"", "context": {}},
    19: False,
    22: True,
}
"""What an operation answers when it cannot do what it was asked; the others answer nothing either way."""


class _Key:
    """What every keyed operation sends, with its tokens packed; raises if a field is missing or of another type."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.model_name: str = fields["model_name"]
        self.world_size = int(fields["world_size"])
        self.worker_id: int | None = fields["worker_id"]
        self.start = int(fields["start"])
        self.end = int(fields["end"])
        self.request_id: str = fields["request_id"]
        self.cache_salt: str = fields.get("cache_salt", "")
        self.num_kv_readers = int(fields.get("num_kv_readers", 0))
        tokens = fields["token_ids"]
        if not isinstance(self.request_id, str) or self.end > len(tokens):
            raise invalid("end", f"expected at most the {len(tokens)} tokens of the request, got {self.end}")
        # What lies behind the end of the range cannot matter to it.
        self._tokens = struct.pack(f"<{self.end}I", *tokens[: self.end])

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes a commit belong to a prepare; the request's id is not part of it."""
        return (self.model_name, self.world_size, self.worker_id, self._tokens, self.start, self.end, self.cache_salt)

    def session(self, attempt: int) -> m.SessionId:
        """The session of one sort of operation of this request and shard."""
        return m.SessionId(f"{self.request_id}#{self.worker_id}", attempt)

    def prompt(self, attempt: int) -> m.Prompt:
        """The tokens up to the end of the range."""
        return m.Prompt(self.session(attempt), self._tokens, self.cache_salt)


@dataclass(frozen=True, slots=True)
class Registration:
    """Payload of register_kv_cache_engine_driven_context; `use_mla` really says that there is one plane."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int | None = None


@dataclass(slots=True)
class Lookup:
    """What one request's lookup found: `chunks` not yet told (None: told), and the lease until `readers` have read."""

    chunks: int | None
    lease: int
    readers: int


class _Unspoken(Exception):
    """An operation, or a form of one, that is not spoken here; the text says what to set instead."""


class _Refused(ValueError):
    """A request that cannot be served; the text says why."""


class Compat:
    """Answers numbered operations; `speaks` tells which messages are its own. `clear` is what the operation clear
    does.
    """

    def __init__(
        self,
        hello: m.HelloReply,
        cache: L1Cache,
        instances: InstanceTable,
        clock: Callable[[], float],
        clear: Callable[[], Any],
        grace_seconds: float,
    ) -> None:
        self._hello = hello
        self._cache = cache
        self._instances = instances
        self._clock = clock
        self._clear = clear
        self._grace_seconds = grace_seconds
        self._ids: dict[int, int] = {}
        self._unknown: OrderedDict[int, None] = OrderedDict()
        self._lookups: OrderedDict[str, Lookup] = OrderedDict()
        self._stores: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._told: set[str] = set()
        methods: dict[int, tuple[str, Callable[..., Any]]] = {
            2: ("unregister_kv_cache", lambda _: None),
            4: ("unregister_q_cache", lambda _: None),
            5: ("store_q", lambda _key, _instance, _blocks, event: [event, False]),
            6: ("store", lambda _key, _instance, _blocks, event: [event, False]),
            7: ("retrieve", lambda _key, _instance, _blocks, event, _skip: [event, False]),
            8: ("lookup", self.lookup),
            9: ("query_prefetch_status", self.query_prefetch_status),
            10: ("wait_prefetch_status", lambda request_id, _timeout: self.query_prefetch_status(request_id)),
            12: ("free_lookup_locks", self.free_lookup_locks),
            13: ("end_session", self.end_session),
            14: ("register_kv_cache_engine_driven_context", self.register),
            15: ("unregister_kv_cache_engine_driven_context", self.unregister),
            16: ("prepare_store", self.prepare_store),
            17: ("commit_store", self.commit_store),
            18: ("prepare_retrieve", self.prepare_retrieve),
            19: ("commit_retrieve", self.commit_retrieve),
            20: ("clear", lambda _force: self._clear() and None),
            21: ("get_chunk_size", lambda: self._hello.chunk_size),
            22: ("ping", self.ping),
            23: ("report_block_allocation", lambda _instance, _model, _records: None),
            24: ("noop", lambda: "OK"),
            32: ("get_experimental", list),
        }
        self._methods = {number: method for number, (_, method) in methods.items()}
        self._numbers = {name: number for number, (name, _) in methods.items()} | _UNSPOKEN_NAMES
        self._names = {number: name for name, number in self._numbers.items()}

    def speaks(self, operation: Buffer) -> bool:
        """Whether `operation` is a number, or a name of the numbered dialect."""
        try:
            name = _unpacked(operation)
        except ProtocolError:
            return False
        return isinstance(name, int) or (isinstance(name, str) and name in self._numbers)

    def handle(self, operation: Buffer, frames: Sequence[Buffer]) -> Reply:
        """The reply from its operation frame on; a result of None is told by leaving its frame out."""
        name = _unpacked(operation)
        number = self._numbers.get(name, -1) if isinstance(name, str) else int(name)
        shown = self._names.get(number, "an unknown operation")
        try:
            method = self._methods.get(number)
            if method is None:
                raise _Unspoken(_REMEDIES.get(number, "this server does not have it"))
            result = method(*[_unpacked(frame) for frame in frames])
        except _Unspoken as error:
            self._say_once(shown, f"{shown} is not spoken here: {error}")
            return [msgpack.packb("unsupported" if shown == "noop" else "noop")]
        except Exception as error:  # noqa: BLE001 - the boundary of one request: untyped maps come in, and must be answered
            self._say_once(f"{shown} {type(error).__name__}", f"{shown} was refused: {error!r}")
            result = _FAILURES.get(number)
        return [bytes(operation)] if result is None else [bytes(operation), msgpack.packb(result)]

    # Being known.

    def register(self, payload: dict[str, Any]) -> dict[str, Any]:
        """An engine's worker or an SDK announces itself; again, after a restart or with another layout."""
        wanted = _record(Registration, payload)
        if wanted.num_physical_slots not in (None, self._hello.chunk_size):
            raise _Unspoken(f"chunks of {wanted.num_physical_slots} slots; start the server with that --chunk-size")
        self.unregister(wanted.instance_id)
        instance = self._instances.register(self._register_message(wanted), self._clock())
        instance.patience = self._grace_seconds
        self._ids[wanted.instance_id] = instance.id
        self._unknown.pop(wanted.instance_id, None)
        log.info("registered %d for an LMCache client: model %s", instance.id, wanted.model_name)
        if not self._hello.shm_name:
            self._say_once("pickle", "an LMCache client needs shared memory to store or retrieve: set --shm-name")
        return {"shm_name": self._hello.shm_name, "pool_size": self._hello.pool_bytes if self._hello.shm_name else 0}

    def unregister(self, instance_id: int) -> None:
        """An instance leaves; what it had not committed is aborted."""
        owner = self._ids.pop(instance_id, None)
        if owner is not None:
            self._instances.remove(owner)
            self._cache.leave(owner, may_still_write=False)

    def ping(self, instance_id: int | None) -> bool:
        """False once to a worker that is not registered, so that it registers again; else True."""
        if instance_id is None or instance_id in self._unknown:
            return True
        instance = self._instance(instance_id)
        if instance is None:
            self._unknown[instance_id] = None
            if len(self._unknown) > _REMEMBERED:
                self._unknown.popitem(last=False)
            return False
        instance.patience = None
        return True

    # Reading.

    def lookup(self, fields: dict[str, Any], _tp_size: int) -> None:
        """Find and lease the longest cached prefix; the answer is fetched by query_prefetch_status."""
        key = _Key(fields)
        self.end_session(key.request_id)
        register = self._engine(key)
        if register is None:
            self._remember(key.request_id, Lookup(0, 0, 0))
            return
        view = view_of(SCHEDULER, dataclasses.replace(register, worker_id=None), self._hello.chunk_size)
        found = self._cache.acquire(view, key.prompt(_LOOKUP), 0, True, self._clock())
        readers = max(1, key.num_kv_readers) * key.world_size
        self._remember(key.request_id, Lookup(found.chunks, found.lease, readers))

    def query_prefetch_status(self, request_id: str) -> int:
        """The chunks that the lookup found, once; 0 if nothing was looked up."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.chunks is None:
            return 0
        chunks, lookup.chunks = lookup.chunks, None
        return chunks

    def free_lookup_locks(self, fields: dict[str, Any], _tp_size: int) -> None:
        """Part of a lookup's lease is not needed. It is held as a whole, so it ends when its end is not needed."""
        key = _Key(fields)
        lookup = self._lookups.get(key.request_id)
        if lookup is not None and key.start == 0 and lookup.lease:
            lease = self._cache.reads.get(SCHEDULER, lookup.lease)
            if lease is not None and key.end // self._hello.chunk_size >= len(lease.subject.nodes):
                self._release(lookup)

    def end_session(self, request_id: str) -> None:
        """Forget a request's lookup and release what it holds."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            self._release(lookup)

    def prepare_retrieve(self, fields: dict[str, Any], instance_id: int) -> dict[str, Any]:
        """Lease the range for one worker: all of it, or nothing."""
        key = _Key(fields)
        first, last = self._chunk_range(key)
        view, register = self._worker_view(key, instance_id)
        found = self._cache.acquire(view, key.prompt(_RETRIEVE), first, True, self._clock())
        if found.chunks < last or not self._hello.shm_name or first == last:
            self._cache.end(view.owner, key.session(_RETRIEVE))
            return dict(_FAILURES[18])
        return {"success": True, "data": b"", "context": {"slots": self._slots(register, found.slots)}}

    def commit_retrieve(self, fields: dict[str, Any], instance_id: int) -> bool:
        """The worker has copied; False if its lease had ended before, so that the bytes may be others'."""
        key = _Key(fields)
        view, _ = self._worker_view(key, instance_id)
        held = self._cache.end(view.owner, key.session(_RETRIEVE))
        lookup = self._lookups.get(key.request_id)
        if held and lookup is not None:
            lookup.readers -= 1
            if lookup.readers <= 0:
                self._release(lookup)
        return held

    # Writing.

    def prepare_store(self, fields: dict[str, Any], instance_id: int) -> dict[str, Any]:
        """Reserve what is missing of the range; nothing if what comes before the range is missing too."""
        key = _Key(fields)
        first, _ = self._chunk_range(key)
        view, register = self._worker_view(key, instance_id)
        if not self._hello.shm_name:
            return {"context": {}}
        reserved = self._cache.reserve(view, key.prompt(_STORE), self._clock())
        if reserved.chunks and reserved.chunks[0] < first:
            self._cache.abort(view.owner, (reserved.reservation,))
            return dict(_FAILURES[16])
        if reserved.reservation:
            self._stores[(view.owner, *key.identity)] = reserved.reservation
            self._forget_oldest_stores()
        slots = self._slots(register, reserved.slots)
        return {"context": {"slots": slots, "chunk_indices": [chunk - first for chunk in reserved.chunks]}}

    def commit_store(self, fields: dict[str, Any], instance_id: int, cpu_data: bytes) -> bool:
        """Publish what was reserved; a payload means pickled tensors, which are refused unread."""
        key = _Key(fields)
        view, _ = self._worker_view(key, instance_id)
        reservation = self._stores.pop((view.owner, *key.identity), 0)
        if cpu_data:
            self._cache.abort(view.owner, (reservation,))
            raise _Refused("pickled tensors are not read; use shared memory (--shm-name) on server and client")
        if not reservation:
            return False
        return self._cache.commit(view.owner, reservation, None).state is m.CommitState.SEALED

    # Helpers.

    def _instance(self, instance_id: int) -> Instance | None:
        owner = self._ids.get(instance_id)
        instance = self._instances.seen(owner, self._clock()) if owner is not None else None
        if instance is None:
            self._ids.pop(instance_id, None)
        return instance

    def _register_message(self, wanted: Registration) -> m.Register:
        """The registration in our terms; it joins the namespace of an engine whose chunks have the same bytes."""
        kind = Kind.QUERY if wanted.model_name.endswith(QUERY_SUFFIX) else Kind.KV
        planes = 1 if wanted.use_mla else 2
        group = KernelGroup(tuple(range(wanted.num_layers)), planes, 1, wanted.hidden_dim_size, wanted.dtype_str)
        layout, revision = CacheLayout((group,)), ""
        for instance in self._instances:
            other = instance.register
            if (other.model_name, other.world_size, other.kind) == (wanted.model_name, wanted.world_size, kind):
                (theirs, *more) = other.layout.groups
                if not more and _same_bytes(theirs, group):
                    layout, revision = other.layout, other.revision
        return m.Register(
            "worker", wanted.model_name, revision, kind, wanted.world_size, None, layout, wanted.block_size
        )

    def _engine(self, key: "_Key") -> m.Register | None:
        """The newest registration that a lookup under `key` can mean."""
        found = None
        for instance in self._instances:
            register = instance.register
            if (register.model_name, register.world_size) == (key.model_name, key.world_size):
                found = register
        return found

    def _worker_view(self, key: "_Key", instance_id: int) -> tuple[Any, m.Register]:
        instance = self._instance(instance_id)
        if instance is None:
            raise invalid("instance_id", f"{instance_id} is not registered; register again")
        if key.worker_id is None:
            raise invalid("worker_id", "expected a shard, got nil")
        register = dataclasses.replace(instance.register, worker_id=key.worker_id)
        return view_of(instance.id, register, self._hello.chunk_size), register

    def _chunk_range(self, key: "_Key") -> tuple[int, int]:
        size = self._hello.chunk_size
        if key.start % size or key.end % size or not 0 <= key.start <= key.end:
            raise invalid("start", f"expected a range of whole chunks of {size}, got {key.start}..{key.end}")
        return key.start // size, key.end // size

    def _slots(self, register: m.Register, packed: bytes) -> list[dict[str, Any]]:
        group, size = register.layout.groups[0], self._hello.chunk_size
        shape, length = list(slot_shape(group, register.kind, size)), slot_bytes(group, size)
        return [
            {"offset": slot.offset, "length": length, "shape": shape, "dtype": group.dtype}
            for slot in m.unpack_slots(packed)
        ]

    def _release(self, lookup: Lookup) -> None:
        if lookup.lease:
            self._cache.release(SCHEDULER, (lookup.lease,))
            lookup.lease = 0

    def _remember(self, request_id: str, lookup: Lookup) -> None:
        self._lookups[request_id] = lookup
        while len(self._lookups) > _REMEMBERED and not self._holds(next(iter(self._lookups.values()))):
            self._lookups.popitem(last=False)

    def _holds(self, lookup: Lookup) -> bool:
        return bool(lookup.lease) and self._cache.reads.get(SCHEDULER, lookup.lease) is not None

    def _forget_oldest_stores(self) -> None:
        while len(self._stores) > _REMEMBERED:
            self._stores.popitem(last=False)

    def _say_once(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            log.warning("a client of LMCache: %s", text)


def _unpacked(frame: Buffer) -> Any:
    return codec.unpack(frame, longest=_MAX_TOKENS, most=_MAX_TOKENS)


def _record(cls: type[Registration], payload: dict[str, Any]) -> Registration:
    """`payload` as a record; fields that are not known are ignored, as their own server does."""
    known = {field.name for field in dataclasses.fields(cls)}
    return codec.from_map(cls, {name: value for name, value in payload.items() if name in known})


def _same_bytes(one: KernelGroup, other: KernelGroup) -> bool:
    return (len(one.layers), one.planes, one.hidden, one.dtype) == (
        len(other.layers), other.planes, other.hidden, other.dtype,
    )  # fmt: skip
