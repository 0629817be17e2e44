import logging
import os
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from lmcache_sdk.attachment import Attachment, attach, this_process
from lmcache_sdk.errors import LMCacheSDKError, ServerUnavailable
from lmcache_sdk.transfer import FrameTransfer
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.codec import decode, encode
from lmcache_server.protocol.layout import CacheLayout, Kind, fingerprint, slot_bytes
from lmcache_server.protocol.messages import (
    OPERATIONS,
    Hello,
    HelloReply,
    Ping,
    Register,
    RegisterReply,
    Transport,
    Unregister,
    UnregisterReply,
)
from tests.lmcache_sdk.fake_engine import TINY, registered_engine
from tests.lmcache_sdk.router import Router
from tests.servers import CacheServer, running_server

LAYOUT = CacheLayout((TINY,))
HELLO = HelloReply(1, "double", "double", 1, 16, "xxh3_128", Transport.FRAMES, "", 4096, 4096, 1024, 60.0, 300.0)
NOBODY = 65534


def attach_tiny(connection: ServerConnection, **changes: Any) -> Attachment:
    facts: dict[str, Any] = {
        "role": "worker", "model_name": "m", "revision": "r", "kind": Kind.KV, "world_size": 1, "worker_id": 0,
        "layout": LAYOUT, "block_size": 16, "timeout": 5.0,
    }  # fmt: skip
    return attach(connection, **(facts | changes))


class Double:
    """Answers hello and register with what a test gives it; the last of each again and again."""

    def __init__(self, hellos: list[HelloReply], incarnations: list[int], **changes: Any) -> None:
        self._hellos = hellos
        self._incarnations = incarnations
        self._changes = changes

    def __call__(self, operation: str, message: bytes, _: list[bytes]) -> list[list[bytes]]:
        request = decode(OPERATIONS[operation][0], message)
        if isinstance(request, Hello):
            return [[encode(self._hellos.pop(0) if len(self._hellos) > 1 else self._hellos[0])]]
        if isinstance(request, Register):
            incarnation = self._incarnations.pop(0) if len(self._incarnations) > 1 else self._incarnations[0]
            parts = tuple(slot_bytes(group, 16) for group in request.layout.groups)
            reply = RegisterReply(7, incarnation, fingerprint(request.layout), parts)
            return [[encode(msgspec.structs.replace(reply, **self._changes))]]
        assert isinstance(request, Unregister)
        return [[encode(UnregisterReply(True))]]


def test_an_attachment_says_what_it_rests_on(server: CacheServer, model: str) -> None:
    with registered_engine(server, model, world_size=4, worker_id=3) as engine:
        assert engine.hello.server_id == server.status()["server_id"]
        assert engine.incarnation == engine.hello.incarnation == server.status()["incarnation"]
        assert (engine.model_name, engine.kind, engine.worker_id, engine.world_size) == (model, Kind.KV, 3, 4)
        assert engine.fingerprint == fingerprint(LAYOUT)
        entry = server.status()["cache_context_meta"][str(engine.instance)]
        assert (entry["model_name"], entry["worker_id"], entry["world_size"]) == (model, 3, 4)


def test_detaching_unregisters_and_may_be_repeated(server: CacheServer, model: str) -> None:
    with registered_engine(server, model) as engine:
        engine.detach()
        assert str(engine.instance) not in server.status()["cache_context_meta"]
        engine.detach()
        assert not engine.connection.request(Ping(engine.instance)).known


def test_detaching_without_a_server_does_not_wait_long() -> None:
    with running_server() as server, registered_engine(server, "m") as engine:
        server.kill()
        start = time.monotonic()
        engine.detach()
        assert time.monotonic() - start < 4
        server.start()


def test_a_server_that_restarts_meanwhile_is_asked_again() -> None:
    second = msgspec.structs.replace(HELLO, incarnation=2)
    with Router(Double([HELLO, second], [2])) as router, ServerConnection(router.url) as connection:
        attachment = attach_tiny(connection)
        assert attachment.incarnation == attachment.hello.incarnation == 2
        assert router.received == ["v1/hello", "v1/register"] * 2


def test_a_server_that_keeps_restarting_is_an_error() -> None:
    with (
        Router(Double([HELLO], [2])) as router,
        ServerConnection(router.url) as connection,
        pytest.raises(LMCacheSDKError, match="restarted 3 times while this client registered"),
    ):
        attach_tiny(connection)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": 2}, r"\(version double\) speaks protocol 2, this client 1"),
        ({"chunk_size": 0}, "impossible facts"),
        ({"frame_bytes": 0}, "impossible facts"),
        ({"reap_seconds": 0.0}, "impossible facts"),
        ({"read_ttl_seconds": 0.0}, "impossible facts"),
        ({"read_ttl_seconds": float("nan")}, "impossible facts"),
        ({"reap_seconds": float("nan")}, "impossible facts"),
        ({"transport": Transport.SHM, "shm_name": "not_there_0"}, "/dev/shm/not_there_0 cannot be opened"),
        ({"transport": Transport.SHM, "shm_name": "../etc/passwd"}, "shm_name: expected the name of a file"),
        ({"transport": Transport.SHM, "shm_name": ""}, "shm_name: expected the name of a file"),
    ],
)
def test_a_server_whose_facts_do_not_fit_is_not_registered_with(changes: dict[str, Any], message: str) -> None:
    hello = msgspec.structs.replace(HELLO, **changes)
    with Router(Double([hello], [1])) as router, ServerConnection(router.url) as connection:
        with pytest.raises(LMCacheSDKError, match=message):
            attach_tiny(connection)
        assert router.received == ["v1/hello"]


def test_a_foreign_file_in_place_of_the_pool_is_not_mapped() -> None:
    with running_server() as other:
        hello = msgspec.structs.replace(HELLO, transport=Transport.SHM, shm_name=other.segment, pool_bytes=1 << 20)
        with (
            Router(Double([hello], [1])) as router,
            ServerConnection(router.url) as connection,
            pytest.raises(LMCacheSDKError, match="its mark is missing"),
        ):
            attach_tiny(connection)


@pytest.mark.parametrize("changes", [{"fingerprint": "another"}, {"part_bytes": (1,)}, {"part_bytes": ()}])
def test_a_server_that_lays_chunks_out_otherwise_is_left_again(changes: dict[str, Any]) -> None:
    with Router(Double([HELLO], [1], **changes)) as router, ServerConnection(router.url) as connection:
        with pytest.raises(LMCacheSDKError, match="lays a chunk out as parts of"):
            attach_tiny(connection)
        assert router.received == ["v1/hello", "v1/register", "v1/unregister"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worker_id": 1}, "cannot register: worker_id: expected 0 to 0"),
        ({"world_size": 0, "worker_id": None}, "cannot register: world_size"),
        ({"model_name": ""}, "cannot register: model_name"),
        ({"block_size": 0}, "cannot register: block_size"),
    ],
)
def test_facts_that_cannot_be_registered_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with ServerConnection("127.0.0.1:1") as connection, pytest.raises(LMCacheSDKError, match=message):
        attach_tiny(connection, **changes)


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    with (
        Router(lambda *_: []) as router,
        ServerConnection(router.url) as connection,
        pytest.raises(ServerUnavailable, match="no answer to v1/hello"),
    ):
        attach_tiny(connection, timeout=0.2)


def test_a_process_is_known_by_its_start_and_not_by_its_number_alone() -> None:
    here = this_process()
    assert here.pid == os.getpid()
    assert here.namespace == os.stat("/proc/self/ns/pid").st_ino
    with open(f"/proc/{os.getpid()}/stat") as file:
        assert here.started == int(file.read().split(") ")[-1].split()[19])
    program = (
        "open('/proc/self/comm', 'w').write('x) R 1 2 (y')\n"
        "from lmcache_sdk.attachment import this_process\n"
        "print(this_process().started)"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(child.stdout) > here.started


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_pool_of_another_user_is_left_alone_and_bytes_travel_as_frames(caplog: pytest.LogCaptureFixture) -> None:
    with running_server() as server:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.seteuid(NOBODY)
                with caplog.at_level(logging.WARNING), ServerConnection(server.url) as connection:
                    attachment = attach_tiny(connection)
                    warnings = [r.getMessage() for r in caplog.records if "travel as frames" in r.getMessage()]
                    code = 0 if isinstance(attachment.transfer, FrameTransfer) and len(warnings) == 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
