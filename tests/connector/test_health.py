"""The link to the server through absence, restart, slowness and forgetting; every server here is a real process."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_connector.health import ServerLink, attacher
from lmcache_sdk.errors import ServerRefused, ServerUnavailable
from lmcache_server.protocol.errors import ErrorCode
from lmcache_server.protocol.messages import Unregister
from tests.connector.rig import rig_config
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process


def link_to(server: CacheServer, **facts: Any) -> ServerLink:
    config = rig_config(server.url, **facts)
    return ServerLink(config.settings, attacher(config, "worker", 0))


def eventually(condition: object, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


def test_a_server_that_is_there_is_used_at_once_and_left_on_close(server: CacheServer) -> None:
    link = link_to(server)
    link.start()
    assert link.attachment is not None
    assert len(server.status()["cache_context_meta"]) == 1
    link.close()
    link.close()
    assert link.attachment is None
    assert server.status()["cache_context_meta"] == {}


def test_a_server_that_is_away_at_the_start_is_found_when_it_appears(caplog: pytest.LogCaptureFixture) -> None:
    server = CacheServer()
    link = link_to(server)
    with caplog.at_level(logging.WARNING):
        link.start()
        assert link.attachment is None
        time.sleep(1.5)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, however long it takes"
    assert "computing without a cache" in caplog.text
    try:
        server.start()
        assert eventually(lambda: link.attachment is not None)
        link.close()
        server.stop()
    finally:
        server._clean_up()


def test_closing_while_the_server_is_away_takes_no_time() -> None:
    link = link_to(CacheServer())
    link.start()
    started = time.monotonic()
    link.close()
    assert time.monotonic() - started < 0.5


def test_a_server_that_does_not_fit_ends_the_start_with_a_sentence(server: CacheServer) -> None:
    with pytest.raises(ValueError, match=r"the cache server at .* cannot be used: .*revision: expected at most"):
        link_to(server, revision="r" * 10_000).start()
    assert server.status()["cache_context_meta"] == {}


def test_a_restarted_server_is_noticed_within_a_few_heartbeats_and_the_old_pool_is_let_go(
    server: CacheServer,
) -> None:
    link = link_to(server)
    link.start()
    mapped = mapped_pools()
    for _ in range(3):
        before = link.attachment
        assert before is not None
        server.restart()
        assert eventually(lambda: link.attachment not in (None, before))  # noqa: B023
        after = link.attachment
        assert after is not None
        assert after.incarnation != before.incarnation
        assert mapped_pools() == mapped, "the mapping of the killed server's pool is gone"
    link.close()


def mapped_pools() -> int:
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "/dev/shm/lmcache_l1_pool_test" in line})


def test_a_server_that_forgot_us_is_registered_with_again(server: CacheServer) -> None:
    link = link_to(server)
    link.start()
    before = link.attachment
    assert before is not None
    before.connection.request(Unregister(before.instance))
    assert eventually(lambda: link.attachment not in (None, before))
    after = link.attachment
    assert after is not None
    assert (after.incarnation, after.instance != before.instance) == (before.incarnation, True)
    link.close()


def test_a_server_that_was_only_slow_is_taken_up_again_as_it_was(server: CacheServer) -> None:
    link = link_to(server)
    link.start()
    before = link.attachment
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: link.attachment is None)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert eventually(lambda: link.attachment is not None)
    assert link.attachment is before
    link.close()


def test_who_notices_first_that_the_server_is_away_spares_the_others(server: CacheServer) -> None:
    link = link_to(server)
    link.start()
    attachment = link.attachment
    assert attachment is not None
    link.lost(attachment, ServerRefused(ErrorCode.UNKNOWN_LEASE, "not this one"))
    assert link.attachment is attachment, "a refusal is no absence"
    server.kill()
    link.lost(attachment, ServerUnavailable("v1/reserve", server.url, 1.0))
    assert link.attachment is None
    time.sleep(0.5)
    assert link.attachment is None
    server.start()
    assert eventually(lambda: link.attachment is not None)
    link.close()


def test_no_thread_stays(server: CacheServer) -> None:
    before = threading.active_count()
    link = link_to(server)
    link.start()
    assert threading.active_count() == before + 1
    link.close()
    assert threading.active_count() == before
