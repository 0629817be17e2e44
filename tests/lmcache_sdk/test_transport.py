import gc
import os
import threading
import time

import msgpack
import pytest
import zmq

from lmcache_sdk.errors import ConnectionLost, LMCacheSDKError, ServerRefused, ServerUnavailable
from lmcache_sdk.transport import MAX_OUTBOX, PendingReply, ServerConnection
from lmcache_server.protocol.codec import encode
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.messages import Hello, Piece, Read, ReadReply, Refusal, Write, WriteReply
from tests.lmcache_sdk.router import Router, answer_hello, hello_reply
from tests.servers import free_ports


class InPairs(Router):
    """Answers nothing until there are two requests, then both."""

    def _serve(self) -> None:
        waiting: list[list[bytes]] = []
        while not self._stopping.is_set():
            if self._socket.poll(10):
                identity, uid, name, message = self._socket.recv_multipart()
                waiting.append([identity, uid, name, encode(hello_reply(message))])
                if len(waiting) == 2:
                    for frames in waiting:
                        self._socket.send_multipart(frames)
                    waiting.clear()


def mute(*_: object) -> list[list[bytes]]:
    return []


def wait_for(pending: PendingReply, seconds: float = 5.0) -> object:
    deadline = time.monotonic() + seconds
    while (reply := pending.poll()) is None:
        assert time.monotonic() < deadline, "no reply"
        time.sleep(0.001)
    return reply


def test_a_request_gets_its_typed_reply() -> None:
    with Router(answer_hello) as router, ServerConnection(router.url) as connection:
        assert connection.request(Hello(7)).protocol == 7
        assert repr(connection) == f"ServerConnection({router.url}, 0 pending, 0 unsent)"


def test_an_address_without_a_scheme_is_tcp() -> None:
    with Router(answer_hello) as router, ServerConnection(f"127.0.0.1:{router.port}") as connection:
        assert connection.url == router.url
        assert connection.request(Hello(1)).protocol == 1


def test_replies_find_their_requests_whatever_their_order() -> None:
    held: list[list[bytes]] = []

    class Backwards(Router):
        def _serve(self) -> None:
            while len(held) < 3 and not self._stopping.is_set():
                if self._socket.poll(10):
                    identity, uid, name, message = self._socket.recv_multipart()
                    held.append([identity, uid, name, encode(hello_reply(message))])
            for frames in reversed(held):
                self._socket.send_multipart(frames)

    with Backwards(mute) as router, ServerConnection(router.url) as connection:
        pending = [connection.submit(Hello(number)) for number in range(3)]
        assert [wait_for(one).protocol for one in pending] == [0, 1, 2]  # type: ignore[attr-defined]


def test_many_threads_each_get_their_own_replies() -> None:
    wrong: list[tuple[int, int]] = []

    def ask(connection: ServerConnection, first: int) -> None:
        for number in range(first, first + 100):
            got = connection.request(Hello(number)).protocol
            if got != number:
                wrong.append((number, got))

    with Router(answer_hello) as router, ServerConnection(router.url) as connection:
        threads = [threading.Thread(target=ask, args=(connection, 1000 * i)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert len(connection._pending) == 0
    assert wrong == []


def test_a_sleeping_thread_wakes_when_another_thread_takes_its_reply_in() -> None:
    with InPairs(mute) as router, ServerConnection(router.url) as connection:
        for _ in range(50):
            sleeper = threading.Thread(target=connection.request, args=(Hello(1),), kwargs={"timeout": 20})
            sleeper.start()
            wait_for(connection.submit(Hello(2)))
            sleeper.join(2)
            assert not sleeper.is_alive(), "the reply was taken in, and nobody told the thread that waited for it"


def test_what_arrived_together_is_there_for_each_that_waits() -> None:
    with InPairs(mute) as router, ServerConnection(router.url, timeout=2) as connection:
        for _ in range(20):
            first, second = connection.submit(Hello(1)), connection.submit(Hello(2))
            time.sleep(0.01)
            assert [first.wait().protocol, second.wait().protocol] == [1, 2]


def test_a_wake_for_nothing_is_no_reply_and_no_error() -> None:
    def late(_: str, message: bytes, __: list[bytes]) -> list[list[bytes]]:
        time.sleep(0.2)
        return [[encode(hello_reply(message))]]

    with Router(late) as router, ServerConnection(router.url, timeout=5) as connection:
        pending, poll = connection.submit(Hello(3)), connection._arrivals.poll
        woken: list[object] = []

        class Restless:
            def poll(self, milliseconds: int) -> list[tuple[int, int]]:
                woken.append(milliseconds)
                return connection._arrival if len(woken) < 3 else poll(milliseconds)

        connection._arrivals = Restless()  # type: ignore[assignment]
        assert pending.wait().protocol == 3
        assert len(woken) >= 3


def test_a_thread_takes_the_socket_over_from_one_that_gives_up() -> None:
    def late(_: str, message: bytes, __: list[bytes]) -> list[list[bytes]]:
        if hello_reply(message).protocol == 1:
            return []
        time.sleep(0.4)
        return [[encode(hello_reply(message))]]

    with Router(late) as router, ServerConnection(router.url) as connection:

        def give_up() -> None:
            with pytest.raises(ServerUnavailable):
                connection.request(Hello(1), timeout=0.2)

        sleeper = threading.Thread(target=give_up)
        sleeper.start()
        time.sleep(0.05)
        start = time.monotonic()
        assert connection.request(Hello(2), timeout=5).protocol == 2
        assert time.monotonic() - start < 2
        sleeper.join()


def test_a_deadline_is_kept_and_the_error_says_what_was_waited_for() -> None:
    with Router(mute) as router, ServerConnection(router.url) as connection:
        wait_until_connected(connection, router)
        start = time.monotonic()
        with pytest.raises(ServerUnavailable, match=rf"no answer to v1/hello from {router.url} within 0\.3 s$"):
            connection.request(Hello(), timeout=0.3)
        assert 0.3 <= time.monotonic() - start < 0.8


def wait_until_connected(connection: ServerConnection, router: Router) -> None:
    connection.submit(Hello())
    deadline = time.monotonic() + 5
    while not router.received:
        assert time.monotonic() < deadline
        time.sleep(0.005)
        connection.submit(Hello())


def test_every_thread_keeps_its_own_deadline() -> None:
    took: dict[float, float] = {}

    def ask(connection: ServerConnection, seconds: float) -> None:
        start = time.monotonic()
        with pytest.raises(ServerUnavailable):
            connection.request(Hello(), timeout=seconds)
        took[seconds] = time.monotonic() - start

    with Router(mute) as router, ServerConnection(router.url) as connection:
        threads = [threading.Thread(target=ask, args=(connection, s)) for s in (0.9, 0.1, 0.5, 0.3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
    assert all(seconds <= took[seconds] < seconds + 0.5 for seconds in (0.1, 0.3, 0.5, 0.9)), took


def test_without_a_server_the_error_says_that_no_connection_could_be_made() -> None:
    (port,) = free_ports(1)
    with (
        ServerConnection(f"127.0.0.1:{port}", timeout=0.2) as connection,
        pytest.raises(ServerUnavailable, match="no connection could be made") as caught,
    ):
        connection.request(Hello())
    assert caught.value.waited_for == "v1/hello"
    assert caught.value.seconds == 0.2


def test_submit_never_blocks_and_goes_out_when_a_server_comes() -> None:
    (port,) = free_ports(1)
    with ServerConnection(f"127.0.0.1:{port}") as connection:
        start = time.monotonic()
        pending = [connection.submit(Hello(number)) for number in range(100)]
        assert all(one.poll() is None for one in pending)
        assert time.monotonic() - start < 1.0
        with Router(answer_hello, port):
            assert [wait_for(one).protocol for one in pending] == list(range(100))  # type: ignore[attr-defined]


def test_what_was_given_up_never_reaches_a_server_that_comes_later() -> None:
    (port,) = free_ports(1)
    with ServerConnection(f"127.0.0.1:{port}") as connection:
        for number in range(5):
            with pytest.raises(ServerUnavailable):
                connection.request(Hello(number), timeout=0.02)
        forgotten = connection.submit(Hello(6), timeout=0.02)
        del forgotten
        time.sleep(0.05)
        with Router(answer_hello, port) as router:
            assert connection.request(Hello(9), timeout=5).protocol == 9
            assert router.received == ["v1/hello"]


def test_requests_that_wait_for_a_connection_are_bounded() -> None:
    (port,) = free_ports(1)
    with ServerConnection(f"127.0.0.1:{port}") as connection:
        for _ in range(MAX_OUTBOX):
            connection.submit(Hello())
        with pytest.raises(ServerUnavailable, match=f"{MAX_OUTBOX} requests wait"):
            connection.submit(Hello())


def test_a_late_reply_to_something_given_up_is_dropped() -> None:
    def slowly(_: str, message: bytes, __: list[bytes]) -> list[list[bytes]]:
        time.sleep(0.2)
        return [[encode(hello_reply(message))]]

    with Router(slowly) as router, ServerConnection(router.url) as connection:
        given_up = connection.submit(Hello(1), timeout=0.05)
        with pytest.raises(ServerUnavailable):
            given_up.poll(1.0)
        assert connection.request(Hello(2), timeout=5).protocol == 2
        with pytest.raises(ServerUnavailable):
            given_up.poll()
        assert len(connection._pending) == 0


def test_many_errors_leave_nothing_in_the_client() -> None:
    def badly(_: str, message: bytes, __: list[bytes]) -> list[list[bytes]]:
        kind = hello_reply(message).protocol % 4
        refusal = encode({"error": Refusal(ErrorCode.INVALID, "no", "protocol")})
        return [[[refusal]], [[b"\xc1"]], [[encode(WriteReply(1))]], []][kind]

    errors = 0
    with Router(badly) as router, ServerConnection(router.url) as connection:
        for number in range(400):
            try:
                connection.request(Hello(number), timeout=2.0 if number % 4 < 3 else 0.002)
            except LMCacheSDKError:
                errors += 1
        forgotten = [connection.submit(Hello(3)) for _ in range(100)]
        assert len(connection._pending) == 100
        del forgotten
        gc.collect()
        assert len(connection._pending) == 0
        assert len(connection._outbox) == 0
    assert errors == 400


def test_a_refusal_is_an_error_with_its_code_and_field() -> None:
    refusal = encode({"error": Refusal(ErrorCode.UNKNOWN_INSTANCE, "register again", "instance")})
    with Router(lambda *_: [[refusal]]) as router, ServerConnection(router.url) as connection:
        with pytest.raises(ServerRefused, match="instance: register again") as caught:
            connection.request(Hello())
        assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
        assert caught.value.field == "instance"


@pytest.mark.parametrize(
    "frames",
    [[], [b"\xc1"], [msgpack.packb([1])], [msgpack.packb({"protocol": "one"})], [msgpack.packb({"error": 3})], [b""]],
)
def test_nonsense_for_a_reply_is_an_error_that_names_the_operation(frames: list[bytes]) -> None:
    with (
        Router(lambda *_: [frames]) as router,
        ServerConnection(router.url) as connection,
        pytest.raises(LMCacheSDKError, match="answered v1/hello with nonsense"),
    ):
        connection.request(Hello(), timeout=5)


def test_a_server_that_answers_twice_is_heard_once() -> None:
    def twice(_: str, message: bytes, __: list[bytes]) -> list[list[bytes]]:
        return [[encode(hello_reply(message))]] * 2

    with Router(twice) as router, ServerConnection(router.url) as connection:
        assert [connection.request(Hello(number)).protocol for number in range(5)] == [0, 1, 2, 3, 4]


def test_raw_frames_travel_both_ways() -> None:
    taken: list[list[bytes]] = []

    def answer(operation: str, _: bytes, raw: list[bytes]) -> list[list[bytes]]:
        taken.append(raw)
        if operation == "v1/write":
            return [[encode(WriteReply(sum(map(len, raw))))]]
        return [[encode(ReadReply(5)), b"abc", b"de"]]

    with Router(answer) as router, ServerConnection(router.url) as connection:
        pieces = (Piece(0, 0, 0, 3), Piece(0, 0, 3, 2))
        assert connection.request(Write(1, 1, pieces), frames=[b"xyz", memoryview(b"12")]) == WriteReply(5)
        reply, frames = connection.request_frames(Read(1, 1, pieces))
        assert reply == ReadReply(5)
        assert [bytes(frame) for frame in frames] == [b"abc", b"de"]
    assert taken[0] == [b"xyz", b"12"]


def test_a_restart_of_the_server_is_survived() -> None:
    with Router(answer_hello) as first, ServerConnection(first.url, timeout=5) as connection:
        assert connection.request(Hello(1)).protocol == 1
        first.stop()
        with Router(answer_hello, first.port):
            assert connection.request(Hello(2)).protocol == 2


def test_an_impatient_connection_waits_for_its_first_server_and_for_none_to_come_back() -> None:
    with Router(answer_hello) as first:
        port = first.port
    with ServerConnection(f"tcp://127.0.0.1:{port}", timeout=5, patient=False) as connection:
        early = connection.submit(Hello(1))
        with Router(answer_hello, port) as router:
            assert early.wait().protocol == 1
            assert connection.request(Hello(2)).protocol == 2
            router.stop()
            broken_at = time.monotonic()
            for _ in range(3):  # the first may be sent before the break is known
                with pytest.raises(ServerUnavailable, match=r"is broken|was lost"):
                    connection.request(Hello())
            with pytest.raises(ServerUnavailable):
                connection.submit(Hello(), timeout=0).poll()
            assert time.monotonic() - broken_at < 2
            assert "0 pending, 0 unsent" in repr(connection)
        with Router(answer_hello, port):
            deadline = time.monotonic() + 5
            while True:
                try:
                    assert connection.request(Hello(3)).protocol == 3
                    break
                except ServerUnavailable:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)


def test_what_is_under_way_when_the_connection_breaks_fails_at_once() -> None:
    with Router(mute) as router, ServerConnection(router.url, timeout=30) as connection:
        wait_until_connected(connection, router)
        polled = connection.submit(Hello())
        stopper = threading.Timer(0.2, router._stopping.set)
        stopper.start()
        breaker = threading.Thread(target=lambda: (router._thread.join(), router._socket.close(0)))
        breaker.start()
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match="was lost while waiting for v1/hello"):
            connection.request(Hello())
        with pytest.raises(ConnectionLost):
            polled.poll()
        assert time.monotonic() - start < 5
        breaker.join()


def test_an_address_that_swallows_packets_does_not_delay_the_reconnection_for_long() -> None:
    with ServerConnection("127.0.0.1:1") as connection:
        assert connection._socket.get(zmq.CONNECT_TIMEOUT) + connection._socket.get(zmq.RECONNECT_IVL_MAX) <= 5000
        assert connection._socket.get(zmq.HEARTBEAT_TIMEOUT) > 0


def test_closing_ends_every_wait_and_leaves_nothing_behind() -> None:
    failures: list[LMCacheSDKError] = []

    def ask(connection: ServerConnection) -> None:
        try:
            connection.request(Hello(), timeout=30)
        except LMCacheSDKError as error:
            failures.append(error)

    with Router(mute) as router:
        files, tasks = set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))
        connection = ServerConnection(router.url)
        threads = [threading.Thread(target=ask, args=(connection,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        start = time.monotonic()
        connection.close()
        connection.close()
        for thread in threads:
            thread.join(2)
        assert time.monotonic() - start < 2
        assert len(failures) == 4
        assert all("was closed" in str(error) for error in failures)
        with pytest.raises(LMCacheSDKError, match="is closed"):
            connection.request(Hello())
        deadline = time.monotonic() + 2
        while len(os.listdir("/proc/self/fd")) > len(files) and time.monotonic() < deadline:
            time.sleep(0.01)  # the router's own side of the connection
        assert len(os.listdir("/proc/self/fd")) <= len(files)
        assert len(os.listdir("/proc/self/task")) <= len(tasks)


def test_a_forked_child_gets_an_error_and_the_parent_keeps_its_connection() -> None:
    with Router(answer_hello) as router, ServerConnection(router.url, timeout=5) as connection:
        connection.request(Hello(1))
        child = os.fork()
        if not child:
            code = 1
            try:
                connection.request(Hello(2), timeout=5)
            except LMCacheSDKError as error:
                code = 0 if "a forked child must open its own" in str(error) else 2
            connection.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert connection.request(Hello(3)).protocol == 3


def test_polling_again_gives_the_same_reply() -> None:
    with Router(answer_hello) as router, ServerConnection(router.url) as connection:
        pending = connection.submit(Hello(4))
        assert wait_for(pending) == pending.poll()
