"""One method per request message: check it, ask the core, say what came out.

`handle` is the only entry: it takes an operation and its frames and returns the frames of exactly one reply,
whatever it was given. Everything runs in the loop's thread; bytes of chunks pass through here only for clients that
cannot map the pool.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from lmcache_server.core.explain import explain
from lmcache_server.core.instances import Instance, InstanceTable
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.sessions import SessionTable
from lmcache_server.protocol import codec
from lmcache_server.protocol import messages as m
from lmcache_server.protocol.errors import ErrorCode, ProtocolError, invalid
from lmcache_server.protocol.layout import slot_bytes

__all__ = ["Buffer", "Service"]

log = logging.getLogger(__name__)
Buffer = bytes | memoryview

MAX_INSTANCES = 4096
MAX_CHUNKS = 1 << 20
"""Chunks of one prompt; more is a mistake of the sender."""


_NAMES = {msgpack.packb(name): name for name in m.OPERATIONS}
"""Operations as they are written on the wire; only what is not found here has to be read."""


@dataclass(slots=True)
class Traffic:
    """Requests and refusals since the start."""

    requests: int = 0
    refusals: int = 0
    faults: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Service:
    """Answers the operations of our own dialect. `document` makes the status document, `clock` tells the time in
    seconds.
    """

    def __init__(
        self,
        hello: m.HelloReply,
        cache: L1Cache,
        instances: InstanceTable,
        sessions: SessionTable,
        pool: memoryview,
        document: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.traffic = Traffic()
        self._hello = hello
        self._cache = cache
        self._instances = instances
        self._sessions = sessions
        self._pool = pool
        self._document = document
        self._clock = clock
        self._lingering: dict[int, m.ProcessId] = {}
        """Reaped instances whose process still runs: what they were writing to stays quarantined."""
        self._methods: dict[str, Callable[[Any, Sequence[Buffer]], tuple[Any, Sequence[Buffer]]]] = {
            "v1/hello": self._plain(self.hello),
            "v1/register": self._plain(self.register),
            "v1/unregister": self._plain(self.unregister),
            "v1/ping": self._plain(self.ping),
            "v1/acquire": self._plain(self.acquire),
            "v1/release": self._plain(self.release),
            "v1/reserve": self._plain(self.reserve),
            "v1/commit": self._plain(self.commit),
            "v1/abort": self._plain(self.abort),
            "v1/end": self._plain(self.end),
            "v1/explain": self._plain(self.explain),
            "v1/events": self._plain(self.events),
            "v1/clear": self._plain(self.clear),
            "v1/status": self._plain(self.status),
            "v1/write": self.write,
            "v1/read": self.read,
        }

    @staticmethod
    def speaks(operation: bytes) -> bool:
        """Whether `operation` is one of this dialect, written in the usual way."""
        return operation in _NAMES

    def handle(self, operation: bytes, frames: Sequence[Buffer]) -> list[Buffer]:
        """The reply's frames after uid and operation: the message, then raw frames if there are any."""
        self.traffic.requests += 1
        try:
            name = _NAMES.get(operation) or _operation_name(operation)
            request = m.OPERATIONS.get(name)
            if request is None:
                known = ", ".join(m.OPERATIONS)
                raise ProtocolError(
                    ErrorCode.UNKNOWN_OPERATION, f"unknown operation {name[:40]!r}; known are {known}", "operation"
                )
            if not frames:
                raise invalid("", "the message frame is missing")
            reply, raw = self._methods[name](codec.decode(request[0], frames[0]), frames[1:])
            return [codec.encode(reply), *raw]
        except ProtocolError as error:
            self.traffic.refusals += 1
            return [codec.encode(m.Refused(m.Refusal(error.code, error.message, error.field)))]
        except Exception:  # the boundary of one request: a fault of ours must not end the loop or go unanswered
            self.traffic.faults += 1
            log.exception("a fault while answering %r", operation[:40])
            fault = m.Refusal(ErrorCode.INTERNAL, "a fault of the server; its log has the trace")
            return [codec.encode(m.Refused(fault))]

    # Being known.

    def hello(self, request: m.Hello) -> m.HelloReply:
        """What this server is."""
        if request.protocol != m.PROTOCOL_VERSION:
            raise ProtocolError(
                ErrorCode.INCOMPATIBLE,
                f"the server speaks protocol {m.PROTOCOL_VERSION}, the client {request.protocol}; match their versions",
                "protocol",
            )
        return self._hello

    def register(self, request: m.Register) -> m.RegisterReply:
        """Make the sender an instance."""
        if len(self._instances) >= MAX_INSTANCES:
            raise ProtocolError(
                ErrorCode.INCOMPATIBLE,
                f"{MAX_INSTANCES} clients are registered, as many as may be; does one register again and again?",
            )
        chunk_size, pool_bytes = self._hello.chunk_size, self._hello.pool_bytes
        largest = max(slot_bytes(group, chunk_size) for group in request.layout.groups)
        if largest > pool_bytes:
            raise ProtocolError(
                ErrorCode.INCOMPATIBLE,
                f"{chunk_size} tokens take {largest} bytes, the pool has {pool_bytes}; make --l1-size-gb larger",
                "layout.groups",
            )
        instance = self._instances.register(request, self._clock())
        view = instance.view
        log.info(
            "registered %s %d: model %s, kind %s, shard %s of %d, layout %s",
            request.role, instance.id, request.model_name, request.kind.value,
            "all" if request.worker_id is None else request.worker_id, request.world_size, view.namespace.layout,
        )  # fmt: skip
        return m.RegisterReply(
            instance.id,
            self._hello.incarnation,
            view.namespace.layout,
            tuple(view.part_bytes[part] for part in view.own),
        )

    def unregister(self, request: m.Unregister) -> m.UnregisterReply:
        """The sender leaves, and says that it writes no more."""
        known = self._instances.remove(request.instance) is not None
        self._lingering.pop(request.instance, None)
        self._cache.leave(request.instance, may_still_write=False)
        if known:
            self._sessions.end_owner(request.instance)
            log.info("unregistered %d", request.instance)
        return m.UnregisterReply(known)

    def ping(self, request: m.Ping) -> m.PingReply:
        """A sign of life."""
        now = self._clock()
        known = request.instance is None or self._instances.seen(request.instance, now) is not None
        renewed = self._cache.renew(request.instance, request.renew, now) if request.instance is not None else 0
        return m.PingReply(self._hello.incarnation, known, renewed)

    # Reading and writing chunks.

    def acquire(self, request: m.Acquire) -> m.AcquireReply:
        """Longest cached prefixes, leased."""
        instance, now = self._instance(request.instance)
        first = request.first or (0,) * len(request.prompts)
        self._check_prompts(request.prompts)
        if request.lease:
            self._use_sessions(instance, request.prompts, now)
        results = [
            self._cache.acquire(instance.view, prompt, skip, request.lease, now)
            for prompt, skip in zip(request.prompts, first, strict=True)
        ]
        return m.AcquireReply(tuple(results))

    def release(self, request: m.Release) -> m.ReleaseReply:
        """Leases back."""
        instance, _ = self._instance(request.instance)
        return m.ReleaseReply(self._cache.release(instance.id, request.leases))

    def reserve(self, request: m.Reserve) -> m.ReserveReply:
        """Slots for what is missing."""
        instance, now = self._instance(request.instance)
        self._check_prompts(request.prompts)
        self._use_sessions(instance, request.prompts, now)
        first = request.first or (0,) * len(request.prompts)
        results = [
            self._cache.reserve(instance.view, prompt, now, skip)
            for prompt, skip in zip(request.prompts, first, strict=True)
        ]
        return m.ReserveReply(tuple(results))

    def commit(self, request: m.Commit) -> m.CommitReply:
        """Reservations published."""
        owner = self._writer(request.instance)
        return m.CommitReply(
            tuple([self._cache.commit(owner, item.reservation, item.filled) for item in request.commits])
        )

    def abort(self, request: m.Abort) -> m.AbortReply:
        """Reservations given up."""
        owner = self._writer(request.instance)
        return m.AbortReply(self._cache.abort(owner, request.reservations))

    def end(self, request: m.End) -> m.EndReply:
        """Attempts that are over."""
        owner = self._writer(request.instance)
        ended = 0
        for session in request.sessions:
            self._cache.end(owner, session)
            ended += self._sessions.end(owner, session)
        return m.EndReply(ended)

    def explain(self, request: m.Explain) -> m.ExplainReply:
        """Why a prompt is cached as far as it is."""
        instance, _ = self._instance(request.instance)
        self._check_prompts((request.prompt,))
        return explain(self._cache, instance.view, request.prompt)

    def events(self, request: m.Events) -> m.EventsReply:
        """Which chunks came and went."""
        instance, _ = self._instance(request.instance)
        return self._cache.journal.read(instance.id, instance.view.namespace, request.after, request.limit)

    # The bytes, where there is no shared memory.

    def write(self, request: m.Write, frames: Sequence[Buffer]) -> tuple[m.WriteReply, Sequence[Buffer]]:
        """Raw frames into reserved objects."""
        instance, _ = self._instance(request.instance)
        if len(frames) != len(request.pieces):
            raise invalid("pieces", f"{len(request.pieces)} pieces announced, {len(frames)} frames came")
        written = 0
        for i, (piece, frame) in enumerate(zip(request.pieces, frames, strict=True)):
            obj = self._cache.reserved_object(instance.id, request.reservation, piece.chunk, piece.part)
            if obj is None:
                raise _no_lease(i, piece, f"reserved by this instance under {request.reservation}; reserve again")
            if piece.offset != obj.written or len(frame) != piece.length or obj.written + piece.length > obj.length:
                raise invalid(
                    f"pieces[{i}]",
                    f"expected bytes from {obj.written} of {obj.length}, "
                    f"got {len(frame)} bytes announced as {piece.length} from {piece.offset}",
                )
            start = obj.offset + piece.offset
            self._pool[start : start + piece.length] = frame
            obj.written += piece.length
            written += piece.length
        self.traffic.bytes_written += written
        return m.WriteReply(written), ()

    def read(self, request: m.Read, _: Sequence[Buffer]) -> tuple[m.ReadReply, Sequence[Buffer]]:
        """Leased objects as raw frames."""
        instance, _now = self._instance(request.instance)
        total = sum(piece.length for piece in request.pieces)
        if total > self._hello.frame_bytes:
            raise invalid(
                "pieces",
                f"at most {self._hello.frame_bytes} bytes per request, asked for {total}; ask in smaller pieces",
            )
        frames: list[Buffer] = []
        for i, piece in enumerate(request.pieces):
            obj = self._cache.leased_object(instance.id, request.lease, piece.chunk, piece.part)
            if obj is None:
                raise _no_lease(i, piece, f"leased to this instance under {request.lease}; acquire again")
            if piece.offset < 0 or piece.length < 0 or piece.offset + piece.length > obj.length:
                raise invalid(
                    f"pieces[{i}]", f"expected bytes within 0..{obj.length}, got {piece.length} from {piece.offset}"
                )
            start = obj.offset + piece.offset
            # A copy: the socket sends later, when the lease may have ended and the bytes be another's.
            frames.append(bytes(self._pool[start : start + piece.length]))
        self.traffic.bytes_read += total
        return m.ReadReply(total), frames

    # Administration.

    def clear(self, _: m.Clear | None = None) -> m.ClearReply:
        """Everything forgotten."""
        freed, held = self._cache.clear()
        log.info("cleared: %d objects freed, %d held until their readers and writers are done", freed, held)
        return m.ClearReply(freed, held)

    def status(self, _: m.Status) -> m.StatusReply:
        """The status document."""
        return m.StatusReply(self._document())

    # Time.

    def tick(self, process_gone: Callable[[m.ProcessId], bool | None]) -> None:
        """What time alone brings: leases and sessions that ran out, instances that are gone, room ahead of demand.

        `process_gone` says whether a process has ended; None if it cannot be known from here.
        """
        now = self._clock()
        gone = functools.cache(process_gone)  # many instances may be of one process
        self._cache.expire(now)
        self._sessions.forget_idle(now)
        for instance in list(self._instances):
            process = instance.register.process
            if process is not None and gone(process):
                self._forget(instance, "its process ended", may_still_write=False)
        for instance in self._instances.silent(now, self._hello.reap_seconds):
            process = instance.register.process
            # A process that is known to run may wake up and write on; any other is taken to be gone.
            alive = process is not None and gone(process) is False
            self._forget(instance, f"silent for {now - instance.last_seen:.0f} s", may_still_write=alive)
            if process is not None and self._cache.lost.owned_by(instance.id):
                self._lingering[instance.id] = process
        for owner, process in list(self._lingering.items()):
            if gone(process) is not False:
                self._cache.leave(owner, may_still_write=False)
            if not self._cache.lost.owned_by(owner):
                del self._lingering[owner]
        self._cache.evict_to_watermark()
        self._cache.index.prune_roots()

    # Helpers.

    def _forget(self, instance: Instance, reason: str, *, may_still_write: bool) -> None:
        log.info("forgot %s %d (%s): %s", instance.register.role, instance.id, instance.register.model_name, reason)
        self._instances.remove(instance.id)
        self._sessions.end_owner(instance.id)
        self._cache.leave(instance.id, may_still_write=may_still_write)

    def _instance(self, owner: int) -> tuple[Instance, float]:
        now = self._clock()
        instance = self._instances.seen(owner, now)
        if instance is None:
            raise ProtocolError(
                ErrorCode.UNKNOWN_INSTANCE, f"{owner} is not registered with this server; register again", "instance"
            )
        return instance, now

    def _writer(self, owner: int) -> int:
        """`owner`, if it is registered, or was and left something that it may still be writing to: then it may say
        that it is done with that.
        """
        return owner if owner in self._lingering else self._instance(owner)[0].id

    def _check_prompts(self, prompts: Sequence[m.Prompt]) -> None:
        limit = MAX_CHUNKS * self._hello.chunk_size * 4
        for i, prompt in enumerate(prompts):
            if len(prompt.tokens) > limit:
                raise invalid(f"prompts[{i}].tokens", f"at most {limit // 4} tokens, got {len(prompt.tokens) // 4}")

    def _use_sessions(self, instance: Instance, prompts: Sequence[m.Prompt], now: float) -> None:
        for prompt in prompts:
            self._sessions.use(instance.id, prompt.session, now)

    @staticmethod
    def _plain(
        method: Callable[[Any], Any],
    ) -> Callable[[Any, Sequence[Buffer]], tuple[Any, Sequence[Buffer]]]:
        def answer(request: Any, frames: Sequence[Buffer]) -> tuple[Any, Sequence[Buffer]]:
            if frames:
                raise invalid("", f"this operation takes no raw frames, {len(frames)} came")
            return method(request), ()

        return answer


def _operation_name(operation: bytes) -> str:
    try:
        name = codec.unpack(operation)
    except ProtocolError as error:
        raise invalid("operation", error.message) from error
    if not isinstance(name, str):
        raise ProtocolError(
            ErrorCode.UNKNOWN_OPERATION, f"expected an operation's name, got {type(name).__name__}", "operation"
        )
    return name


def _no_lease(index: int, piece: m.Piece, what: str) -> ProtocolError:
    message = f"chunk {piece.chunk}, part {piece.part} is not {what}"
    return ProtocolError(ErrorCode.UNKNOWN_LEASE, message, f"pieces[{index}]")
