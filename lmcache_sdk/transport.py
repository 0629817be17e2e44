"""Requests and replies over one ZMQ socket, from any thread, with no thread of its own.

What one may rely on:

    one request, one outcome    a typed reply, or ServerRefused, or ServerUnavailable at the deadline, never later
    nothing is sent too late    a request that finds no connection waits here, not in ZMQ, and is dropped at its
                                deadline: a server that comes back never gets what its sender has given up
    nothing stays behind        a reply to something given up is dropped; the table of pending requests holds no more
                                than what somebody still holds
    or nobody waits             with `patient=False` a request fails at once while the connection is broken
    a restart is survived       libzmq reconnects within a second or two; what was under way fails at once

How the socket is shared: whoever holds the lock may use it, and takes in whatever arrived for anybody (`_pump`). Of the
threads that wait, one at a time sleeps on the socket's file descriptors, without the lock; the others sleep on the
condition. ZMQ's descriptor is edge-triggered: one may sleep on it only after the socket was asked and had nothing
(`_armed`), and a thread that pumps while another sleeps wakes that one itself. Asking costs system calls, so a thread
that has its reply leaves it to the next one that has to wait.
"""

import contextlib
import itertools
import math
import os
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import msgpack
import zmq

from lmcache_sdk.errors import ConnectionLost, LMCacheSDKError, ServerRefused, ServerUnavailable
from lmcache_sdk.url import server_url
from lmcache_server.protocol.codec import decode, encode
from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.messages import OPERATIONS, Refused

__all__ = ["Buffer", "PendingReply", "ServerConnection"]

Buffer = bytes | bytearray | memoryview
"""What a raw frame may be."""

MAX_OUTBOX = 1024
"""Requests that may wait for a connection; beyond it the sender hears at once that the server is away."""

SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,  # nothing is queued for a peer that is not there
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 500,
    zmq.CONNECT_TIMEOUT: 2000,  # the system's own is two minutes when packets are swallowed
    zmq.HEARTBEAT_IVL: 5000,  # a peer that vanished without a word is noticed
    zmq.HEARTBEAT_TIMEOUT: 15000,
    zmq.MAXMSGSIZE: 1 << 30,
}

EVENTS, POLLIN, POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As enums they would cost more than the calls that they are used in; so would pyzmq's own multipart calls."""


_OPERATION_OF: dict[type[Any], tuple[str, bytes, type[Any]]] = {
    request: (name, bytes(msgpack.packb(name)), reply) for name, (request, reply) in OPERATIONS.items()
}


class PendingReply:
    """A request that was submitted. Forgetting it gives its reply up; nobody has to be told."""

    __slots__ = (
        "__weakref__", "_connection", "_deadline", "_outcome", "_seconds", "_sent", "_type", "_uid", "operation",
    )  # fmt: skip

    def __init__(self, connection: "ServerConnection", uid: bytes, operation: str, reply: type[Any], seconds: float):
        self.operation = operation
        self._connection = connection
        self._uid = uid
        self._type = reply
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._sent = False
        self._outcome: list[zmq.Frame] | LMCacheSDKError | None = None

    def poll(self, wait: float = 0.0) -> Any | None:
        """The typed reply, or None if it is not there after `wait` seconds (at most until the request's own deadline).

        Raises ServerUnavailable once the deadline has passed, ServerRefused if the server refused.
        """
        if self._outcome is None:
            self._connection._await(self, min(self._deadline, time.monotonic() + wait))
        if isinstance(self._outcome, LMCacheSDKError):
            raise self._outcome
        return None if self._outcome is None else self._decode(self._outcome)

    def wait(self) -> Any:
        """The typed reply; raises as `poll` does."""
        return self.poll(math.inf)

    @property
    def frames(self) -> list[memoryview]:
        """The raw frames after the reply, uncopied; empty before the reply is there."""
        return [part.buffer for part in self._outcome[3:]] if isinstance(self._outcome, list) else []

    def _expired(self) -> ServerUnavailable:
        detail = "" if self._sent else "no connection could be made (is `lmcache server` running there?)"
        return ServerUnavailable(self.operation, self._connection.url, self._seconds, detail)

    def _decode(self, frames: list[zmq.Frame]) -> Any:
        try:
            return decode(self._type, frames[2].buffer, counted=False)
        except (IndexError, ProtocolError) as error:
            with contextlib.suppress(IndexError, ProtocolError):
                refusal = decode(Refused, frames[2].buffer).error
                raise ServerRefused(refusal.code, refusal.message, refusal.field) from None
            reason = f"{type(error).__name__}: {error}"
            raise LMCacheSDKError(
                f"{self._connection.url} answered {self.operation} with nonsense ({reason})"
            ) from error


class ServerConnection:
    """A connection to one server, shared by any number of threads of one process; not by a forked child."""

    def __init__(self, url: str, timeout: float = 60.0, *, patient: bool = True) -> None:
        """Start connecting to `url` in the background; `timeout` seconds is the default deadline of every request.

        A `patient` one waits that long for a server that went away to come back; else only for the first connection.
        Raises LMCacheSDKError if `url` cannot be a server's address.
        """
        self.url = server_url(url)
        self.timeout = timeout
        self._patient = patient
        self._broken = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: weakref.WeakValueDictionary[bytes, PendingReply] = weakref.WeakValueDictionary()
        self._outbox: deque[tuple[PendingReply, list[Buffer]]] = deque()
        self._uids = itertools.count()
        self._reading = False
        self._armed = False
        self._closed = False
        self._open()

    def request(self, message: Any, *, timeout: float | None = None, frames: Sequence[Buffer] = ()) -> Any:
        """Send `message` (with raw `frames` after it) and wait for its typed reply.

        Raises ServerUnavailable after `timeout` seconds, ServerRefused if the server refuses.
        """
        return self.submit(message, timeout=timeout, frames=frames).wait()

    def request_frames(self, message: Any, *, timeout: float | None = None) -> tuple[Any, list[memoryview]]:
        """As `request`, with the raw frames that follow the reply, uncopied."""
        pending = self.submit(message, timeout=timeout)
        return pending.wait(), pending.frames

    def submit(self, message: Any, *, timeout: float | None = None, frames: Sequence[Buffer] = ()) -> PendingReply:
        """Send `message` and return at once; without a connection it goes out with the first call after there is one.

        Raises ServerUnavailable if MAX_OUTBOX requests wait already, or if this connection is broken and not patient.
        """
        operation, name, reply = _OPERATION_OF[type(message)]
        uid = struct.pack("<Q", next(self._uids))
        pending = PendingReply(self, uid, operation, reply, self.timeout if timeout is None else timeout)
        parts = [uid, name, encode(message), *frames]
        self._check_process()
        with self._lock:
            self._check_open()
            if len(self._outbox) >= MAX_OUTBOX:
                raise ServerUnavailable(
                    operation, self.url, 0.0, f"{MAX_OUTBOX} requests wait for a connection already"
                )
            self._pending[uid] = pending
            self._outbox.append((pending, parts))
            self._pump()
            if self._broken and not self._patient and self._outbox and self._outbox[-1][0] is pending:
                self._pending.pop(uid, None)
                self._outbox.pop()
                raise ServerUnavailable(operation, self.url, 0.0, "the connection to it is broken")
        return pending

    def close(self) -> None:
        """Close the socket and end every wait for it with an error. Idempotent."""
        if os.getpid() != self._pid:
            return  # the parent's sockets are the parent's to close
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._fail_all(LMCacheSDKError(f"the connection to {self.url} was closed"), sent_only=False)
            self._changed.notify_all()
            while self._reading:
                os.eventfd_write(self._wake, 1)
                self._changed.wait()
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            os.close(self._wake)
        self._context.term()

    def __del__(self) -> None:
        # A context that is collected with open sockets would wait for them for ever.
        if not getattr(self, "_closed", True):
            self.close()

    def __enter__(self) -> "ServerConnection":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._pending)} pending, {len(self._outbox)} unsent"
        return f"ServerConnection({self.url}, {state})"

    # --- waiting: without the lock on entry and on return -------------------------------------------------------

    def _await(self, pending: PendingReply, until: float) -> None:
        """Return when `pending` is settled or it is `until`; at its deadline it is settled as expired."""
        self._check_process()
        with self._lock:
            if not self._closed and time.monotonic() >= until:
                self._pump()
            while pending._outcome is None and (now := time.monotonic()) < until:
                if self._reading:
                    self._changed.wait(until - now)
                elif self._armed:
                    self._sleep_on_socket(until)
                else:
                    self._pump()
            if pending._outcome is None and time.monotonic() >= pending._deadline:
                pending._outcome = pending._expired()
                self._pending.pop(pending._uid, None)

    def _sleep_on_socket(self, until: float) -> None:
        """Sleep until something arrives or it is `until`, take it in, and let another thread have the socket."""
        self._reading = True
        self._lock.release()
        try:
            events = self._arrivals.poll(max(0, math.ceil((until - time.monotonic()) * 1000)))
        finally:
            self._lock.acquire()
            self._reading = False
            self._changed.notify_all()
        if self._closed or not events:
            return
        self._armed = False
        if events == self._arrival and not self._outbox:
            # Mostly the one reply that is waited for; whoever has to wait longer looks for more.
            with contextlib.suppress(zmq.Again):
                self._receive()
            return
        if (self._wake, select.POLLIN) in events:
            os.eventfd_read(self._wake)
        self._pump()

    # --- the socket: with the lock ------------------------------------------------------------------------------

    def _open(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in SOCKET_OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IPV6, int("[" in self.url))
        address = f"inproc://monitor-{id(self)}"
        self._socket.monitor(address, zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full monitor would block libzmq's own thread
        self._monitor.connect(address)
        _events(self._monitor)  # a descriptor is armed by asking
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrivals, self._breaks = select.poll(), select.poll()
        self._breaks.register(self._monitor.fileno(), select.POLLIN)
        for fd in (self._socket.fileno(), self._monitor.fileno(), self._wake):
            self._arrivals.register(fd, select.POLLIN)
        self._arrival = [(self._socket.fileno(), select.POLLIN)]
        try:
            self._socket.connect(self.url)
        except zmq.ZMQError as error:
            self.close()
            raise LMCacheSDKError(f"url: {self.url!r} cannot be connected to ({error})") from error

    def _pump(self) -> None:
        """Send what can be sent, take in what arrived; leaves the descriptors armed."""
        self._armed = False
        news = self._take_breaks()
        while self._outbox and self._send_next():
            pass
        while True:
            # Asking for the events is what makes libzmq look; a send alone may not notice that a peer is there now.
            events = _events(self._socket)
            if events & POLLIN:
                self._receive()
                news = True
            elif not (self._outbox and events & POLLOUT and self._send_next()):
                break
        self._armed = True
        if news:
            self._changed.notify_all()
            if self._reading:
                os.eventfd_write(self._wake, 1)

    def _take_breaks(self) -> bool:
        """If the connection broke, fail what was under way over it; what is sent later goes over the next one."""
        if not self._breaks.poll(0):
            return False
        broke = False
        while _events(self._monitor) & POLLIN:
            self._monitor.recv_multipart()
            while _events(self._socket) & POLLIN:
                self._receive()  # what came before it broke still counts
            self._fail_all(None, sent_only=True)
            self._broken = broke = True
        return broke

    def _receive(self) -> None:
        """Take one message in; raises zmq.Again if there is none."""
        receive = self._socket.recv
        part = receive(NOBLOCK, copy=False)
        parts = [part]
        while part.more:
            part = receive(NOBLOCK, copy=False)
            parts.append(part)
        pending = self._pending.pop(parts[0].bytes, None)
        if pending is not None and pending._outcome is None:
            pending._outcome = parts

    def _send_next(self) -> bool:
        """Send the oldest unsent request, or drop it if it was given up; False if it cannot be sent now."""
        pending, parts = self._outbox[0]
        if pending._outcome is None and time.monotonic() < pending._deadline:
            send = self._socket.send
            try:
                for part in parts[:-1]:
                    send(part, MORE)
                send(parts[-1], NOBLOCK)
            except zmq.Again:
                return False
            pending._sent = True
            self._broken = False
        self._outbox.popleft()
        return True

    def _fail_all(self, failure: LMCacheSDKError | None, *, sent_only: bool) -> None:
        for uid, pending in list(self._pending.items()):
            if pending._sent or not sent_only:
                pending._outcome = failure or ConnectionLost(pending.operation, self.url, pending._seconds)
                self._pending.pop(uid, None)
        if not sent_only:
            self._outbox.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise LMCacheSDKError(f"the connection to {self.url} is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LMCacheSDKError(
                f"this connection to {self.url} belongs to process {self._pid}; a forked child must open its own"
            )


def _events(socket: "zmq.Socket[bytes]") -> int:
    """What can be done with a socket now; asking also re-arms its descriptor."""
    return cast(int, socket.get(EVENTS))
