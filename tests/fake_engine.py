"""A client without an engine: it speaks the wire itself and writes bytes that verify themselves.

    with FakeEngine(server.url) as engine:
        tokens = engine.tokens(4)             # four chunks that nobody had before
        engine.store(tokens)                  # reserve, fill, commit
        assert engine.load(tokens) == 4       # acquire, copy, compare byte by byte, release

The bytes of a chunk are a keystream whose seed is everything that decides them: model, revision, kind, layout, shard,
group, salt, extras and every token up to the chunk's end. So each reader can tell wrong bytes by itself. Bytes whose
generation changed during the copy do not count as read; wrong bytes under a right generation are an AssertionError.

Nothing of the SDK is used here, so that it checks the server alone. One engine belongs to one thread.
"""

import contextlib
import hashlib
import itertools
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zmq

from lmcache_server.protocol import messages as m
from lmcache_server.protocol.codec import encode, from_map
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind

__all__ = ["LAYOUT", "FakeEngine", "Held", "NoReply", "Peer", "Writing", "this_process"]

LAYOUT = CacheLayout((KernelGroup((0,), 2, 1, 32, "float32"),))
"""4 KiB per chunk of 16 tokens."""

PIECE_BYTES = 1 << 20
_OPERATIONS = {request: (msgpack.packb(name), reply) for name, (request, reply) in m.OPERATIONS.items()}


class NoReply(Exception):
    """The server did not answer in time."""


class Peer:
    """A DEALER socket: any frames out, whatever comes back in."""

    def __init__(self, url: str, **options: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        for name, value in options.items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._socket.connect(url)

    def send(self, *frames: Any) -> None:
        """Send one message; NoReply if the server takes nothing for 20 s."""
        if not self._socket.poll(20_000, zmq.POLLOUT):
            raise NoReply("the message could not be sent")
        self._socket.send_multipart(frames)

    def receive(self, timeout: float) -> list[bytes]:
        """One message, or NoReply after `timeout` seconds."""
        if not self._socket.poll(max(0.0, timeout) * 1000):
            raise NoReply(f"no reply after {timeout} s")
        return list(self._socket.recv_multipart())

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


@dataclass(frozen=True)
class _Chunks:
    """Chunks of one prompt, with the slots that this client has in the pool for them."""

    engine: "FakeEngine"
    tokens: bytes
    salt: str
    extras: Mapping[int, bytes]
    session: m.SessionId
    slots: list[m.SlotRef]


@dataclass(frozen=True)
class Writing(_Chunks):
    """A reservation: `chunks` are to be filled, `resident` were there already."""

    reservation: int
    chunks: tuple[int, ...]
    resident: int
    busy: int
    full: int


@dataclass(frozen=True)
class Held(_Chunks):
    """A read lease: of the `hit` chunks that are cached, those from `first` on."""

    lease: int
    hit: int
    first: int


@dataclass
class FakeEngine:
    """A registered client. `frames` True sends bytes as frames even where there is shared memory."""

    url: str
    model: str = "fake"
    revision: str = ""
    kind: Kind = Kind.KV
    world_size: int = 1
    worker_id: int | None = 0
    layout: CacheLayout = LAYOUT
    frames: bool = False
    process: m.ProcessId | None = field(default_factory=lambda: this_process())
    timeout: float = 20.0

    def __post_init__(self) -> None:
        self.peer = Peer(self.url)
        self._uids = itertools.count(1)
        self._names = itertools.count(1)
        self.register()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NoReply, m.ProtocolError):
            self.ask(m.Unregister(self.instance), timeout=2.0)
        self.close()

    # Messages.

    def ask(self, message: Any, frames: Iterable[Any] = (), timeout: float | None = None) -> Any:
        """The reply; ProtocolError if the server refuses, NoReply if it does not answer in time."""
        return self.ask_frames(message, frames, timeout)[0]

    def ask_frames(
        self, message: Any, frames: Iterable[Any] = (), timeout: float | None = None
    ) -> tuple[Any, Sequence[bytes]]:
        """The reply and its raw frames."""
        operation, reply = _OPERATIONS[type(message)]
        uid = b"%d" % next(self._uids)
        self.peer.send(uid, operation, encode(message), *frames)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            got, echoed, payload, *raw = self.peer.receive(deadline - time.monotonic())
            if got == uid:
                break  # anything else answers what was given up
        assert echoed == operation
        value = msgpack.unpackb(payload, strict_map_key=False)
        if value.keys() == {"error"}:
            raise from_map(m.Refusal, value["error"]).raised()
        return from_map(reply, value), raw

    # Being known.

    def register(self) -> None:
        """Greet, map the pool, become an instance (again)."""
        self.hello: m.HelloReply = self.ask(m.Hello())
        self._map()
        reply = self.ask(
            m.Register(
                "worker", self.model, self.revision, self.kind, self.world_size, self.worker_id, self.layout, 16,
                self.process,
            )
        )  # fmt: skip
        self.instance: int = reply.instance
        self.part_bytes: tuple[int, ...] = reply.part_bytes
        self.fingerprint: str = reply.fingerprint
        self.chunk_bytes = self.hello.chunk_size * 4

    def ping(self, *leases: int) -> m.PingReply:
        """A sign of life that renews `leases`."""
        reply: m.PingReply = self.ask(m.Ping(self.instance, leases))
        return reply

    def close(self) -> None:
        """Hang up without a word."""
        self.peer.close()
        self._unmap()

    # Prompts.

    def tokens(self, chunks: int, after: bytes = b"") -> bytes:
        """`after`, and as many whole chunks of random tokens."""
        return after + secrets.token_bytes(chunks * self.chunk_bytes)

    def prompt(
        self, tokens: bytes, salt: str = "", session: str | m.SessionId = "", extras: Mapping[int, bytes] | None = None
    ) -> m.Prompt:
        """A prompt, by default in a session of its own."""
        if not isinstance(session, m.SessionId):
            session = m.SessionId(session or f"r{next(self._names)}")
        return m.Prompt(session, tokens, salt, dict(extras or {}))

    def body(self, chunk: int, part: int, tokens: bytes, salt: str, extras: Mapping[int, bytes]) -> bytes:
        """What the bytes of one part of one chunk must be."""
        first = 0 if self.worker_id is None else self.worker_id * len(self.layout.groups)
        before = sorted((i, extra) for i, extra in extras.items() if i <= chunk)
        identity = [self.model, self.revision, self.kind, self.fingerprint, self.world_size, first + part, salt]
        seed = msgpack.packb([*identity, before, tokens[: (chunk + 1) * self.chunk_bytes]])
        return hashlib.shake_128(hashlib.blake2b(seed).digest()).digest(self.part_bytes[part])

    # Writing.

    def reserve(
        self, tokens: bytes, salt: str = "", session: str | m.SessionId = "", extras: Mapping[int, bytes] | None = None
    ) -> Writing:
        """Ask for slots for what is missing of `tokens`."""
        prompt = self.prompt(tokens, salt, session, extras)
        got = self.ask(m.Reserve(self.instance, (prompt,))).results[0]
        return Writing(
            self, tokens, salt, prompt.extras, prompt.session, m.unpack_slots(got.slots), got.reservation, got.chunks,
            got.resident, got.busy, got.full,
        )  # fmt: skip

    def fill(self, writing: Writing, chunks: Iterable[int] | None = None, *, share: float = 1.0) -> None:
        """Write reserved chunks (all, or those listed), or only the first `share` of their bytes."""
        wanted = set(writing.chunks if chunks is None else chunks)
        for i, chunk in enumerate(writing.chunks):
            for part, length in enumerate(self.part_bytes):
                if chunk in wanted:
                    body = self.body(chunk, part, writing.tokens, writing.salt, writing.extras)
                    slot = writing.slots[i * len(self.part_bytes) + part]
                    self._write(writing, chunk, part, slot, body[: int(length * share)])

    def commit(self, writing: Writing, filled: tuple[int, ...] | None = None) -> m.Committed:
        """Publish what was filled (None: everything)."""
        commits = (m.CommittedChunks(writing.reservation, filled),)
        result: m.Committed = self.ask(m.Commit(self.instance, commits)).results[0]
        return result

    def store(self, tokens: bytes, salt: str = "", session: str | m.SessionId = "", **extras: Any) -> int:
        """Reserve, fill, commit, end; how many chunks became visible by it."""
        writing = self.reserve(tokens, salt, session, **extras)
        sealed = 0
        if writing.reservation:
            self.fill(writing)
            sealed = len(self.commit(writing).sealed)
        self.end(writing.session)
        return sealed

    # Reading.

    def acquire(
        self, tokens: bytes, salt: str = "", session: str | m.SessionId = "", first: int = 0,
        extras: Mapping[int, bytes] | None = None,
    ) -> Held:  # fmt: skip
        """Lease the longest cached prefix."""
        prompt = self.prompt(tokens, salt, session, extras)
        got = self.ask(m.Acquire(self.instance, (prompt,), (first,))).results[0]
        slots = m.unpack_slots(got.slots)
        return Held(self, tokens, salt, prompt.extras, prompt.session, slots, got.lease, got.chunks, first)

    def hit(self, tokens: bytes, salt: str = "", **extras: Any) -> int:
        """How many chunks are cached, holding nothing."""
        question = m.Acquire(self.instance, (self.prompt(tokens, salt, **extras),), lease=False)
        return int(self.ask(question).results[0].chunks)

    def read(self, held: Held, *, pause: float = 0.0) -> list[int]:
        """Copy what is leased, slowly if there is a `pause` per chunk; the chunks whose bytes are verified.

        Left out are those that were gone after the copy. AssertionError if a chunk is there and its bytes are wrong.
        """
        verified = []
        for i in range(len(held.slots) // len(self.part_bytes)):
            chunk, good = held.first + i, True
            for part, length in enumerate(self.part_bytes):
                slot = held.slots[i * len(self.part_bytes) + part]
                copy = self._copy(held, i, part, slot, length, pause)
                if copy is None:
                    good = False
                    continue
                wanted = self.body(chunk, part, held.tokens, held.salt, held.extras)
                assert copy == wanted, f"wrong bytes in chunk {chunk}, part {part}, at {slot}"
            verified += [chunk] if good else []
        return verified

    def release(self, *held: Held) -> int:
        """Give leases back; how many were still there."""
        return int(self.ask(m.Release(self.instance, tuple(h.lease for h in held))).released)

    def load(self, tokens: bytes, salt: str = "", *, pause: float = 0.0, **extras: Any) -> int:
        """Acquire, read, end; the chunks that were cached, each verified."""
        held = self.acquire(tokens, salt, **extras)
        verified = self.read(held, pause=pause)
        self.end(held.session)
        assert verified == list(range(held.hit)), f"of {held.hit} leased chunks only {verified} were still there"
        return held.hit

    def end(self, *sessions: m.SessionId) -> int:
        """The attempts are over."""
        return int(self.ask(m.End(self.instance, sessions)).ended)

    # Bytes.

    def generation(self, slot: m.SlotRef) -> int:
        """The generation in the table, of what is at the slot's offset now."""
        assert self._mapping is not None
        unit = slot.offset // self.hello.align_bytes
        return int(struct.unpack_from("<Q", self._mapping, self.hello.pool_bytes + unit * 8)[0])

    def _write(self, writing: Writing, chunk: int, part: int, slot: m.SlotRef, body: bytes) -> None:
        if self._mapping is not None:
            self._mapping[slot.offset : slot.offset + len(body)] = body
            return
        for offset in range(0, len(body), PIECE_BYTES):
            piece = body[offset : offset + PIECE_BYTES]
            where = m.Piece(chunk, part, offset, len(piece))
            self.ask(m.Write(self.instance, writing.reservation, (where,)), [piece])

    def _copy(self, held: Held, i: int, part: int, slot: m.SlotRef, length: int, pause: float) -> bytes | None:
        if self._mapping is not None:
            half = self._mapping[slot.offset : slot.offset + length // 2]
            time.sleep(pause)
            copy = half + self._mapping[slot.offset + length // 2 : slot.offset + length]
            return copy if self.generation(slot) == slot.generation else None
        time.sleep(pause)
        pieces = [(offset, min(PIECE_BYTES, length - offset)) for offset in range(0, length, PIECE_BYTES)]
        try:
            return b"".join(
                self.ask_frames(m.Read(self.instance, held.lease, (m.Piece(i, part, offset, size),)))[1][0]
                for offset, size in pieces
            )
        except m.ProtocolError as error:
            if error.code is not m.ErrorCode.UNKNOWN_LEASE:
                raise  # another server may have taken the place of the one that leased it
            return None

    def _map(self) -> None:
        self._unmap()
        if self.frames or self.hello.transport is not m.Transport.SHM:
            return
        size = self.hello.pool_bytes + self.hello.pool_bytes // self.hello.align_bytes * 8
        fd = os.open(f"/dev/shm/{self.hello.shm_name}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def _unmap(self) -> None:
        mapping: mmap.mmap | None = getattr(self, "_mapping", None)
        if mapping is not None:
            mapping.close()
        self._mapping: mmap.mmap | None = None


def this_process() -> m.ProcessId:
    """This process, as a server on the same host can find it."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return m.ProcessId(os.getpid(), int(after_name[19]), os.stat("/proc/self/ns/pid").st_ino)
