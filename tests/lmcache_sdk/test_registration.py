import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import lmcache_sdk
from lmcache_sdk import LMCacheSDKContext, LMCacheSDKError, ServerUnavailable
from lmcache_sdk.transfer import SharedMemoryTransfer
from tests.lmcache_sdk.fake_engine import random_kv, registered_engine
from tests.lmcache_sdk.http_double import HttpDouble, ok
from tests.servers import CacheServer, free_ports, running_server


def connect(server: CacheServer, timeout: float = 10.0, model: str = "m") -> LMCacheSDKContext:
    return lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=timeout)


def instances(server: CacheServer) -> int:
    count: int = server.status()["worker_liveness"]["tracked_instances"]
    return count


def until(condition: object, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_context_outlives_its_server(shared_memory: bool) -> None:
    with (
        running_server(shared_memory=shared_memory) as server,
        registered_engine(server, "m"),
        connect(server) as context,
    ):
        kv = random_kv(32)
        for _ in range(3):
            assert context.store(kv, range(32)) is True
            back = context.retrieve(range(32))
            assert back is not None
            assert torch.equal(back, kv)
            server.restart()
            assert context.retrieve(range(32)) is None
        with context.view(range(32)) as view:
            assert view.tokens == 0
        assert instances(server) == 1


def test_what_was_retrieved_or_is_viewed_stays_right_over_a_restart() -> None:
    with running_server() as server, registered_engine(server, "m"), connect(server) as context:
        kv, other = random_kv(32), random_kv(32)
        context.store(kv, range(32))
        with context.view(range(32)) as view:
            server.restart()
            assert context.store(other, range(32)) is True
            assert torch.equal(torch.cat(list(view), dim=2), kv)
        back = context.retrieve(range(32))
        assert back is not None
        assert torch.equal(back, other)


def test_a_restart_in_the_middle_of_calls_costs_no_wrong_byte() -> None:
    wrong: list[str] = []
    stop = threading.Event()

    def work(context: LMCacheSDKContext, number: int) -> None:
        kv = torch.full((2, 3, 64, 16), float(number))
        tokens = range(1000 * number, 1000 * number + 64)
        while not stop.is_set():
            try:
                context.store(kv, tokens)
                back = context.retrieve(tokens)
            except LMCacheSDKError as error:
                if isinstance(error, ServerUnavailable):
                    continue
                wrong.append(str(error))
                return
            if back is not None and not bool((back == number).all()):
                wrong.append(f"{number}: {back.unique()}")

    with running_server() as server, registered_engine(server, "m"), connect(server) as context:
        threads = [threading.Thread(target=work, args=(context, number)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.3)
            server.restart()
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        server.quiet()


def test_the_heartbeat_registers_again_and_lets_the_old_pool_go() -> None:
    with (
        running_server("--worker-reap-timeout-seconds", "1") as server,
        registered_engine(server, "m") as engine,
        connect(server) as context,
    ):
        engine.transfer.close()  # of the same process: its mapping would count too
        before = context._registrar.current().attachment.incarnation
        server.restart()
        until(lambda: context._registrar.current().attachment.incarnation != before)
        gc.collect()
        assert instances(server) == 1
        mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if server.segment in line]
        assert [mapping.split()[1] for mapping in mappings] in (["r--s", "rw-s"], ["rw-s", "r--s"])
        assert "(deleted)" not in "".join(mappings)


def test_an_idle_context_is_not_forgotten() -> None:
    with (
        running_server("--worker-reap-timeout-seconds", "1") as server,
        registered_engine(server, "m"),
        connect(server) as context,
    ):
        instance = context._registrar.current().attachment.instance
        time.sleep(3)
        assert context.retrieve(range(32)) is None
        assert context._registrar.current().attachment.instance == instance


def test_a_context_that_was_forgotten_registers_again() -> None:
    with (
        running_server("--worker-reap-timeout-seconds", "1") as server,
        registered_engine(server, "m"),
        connect(server) as context,
    ):
        context._registrar.current().heartbeat.stop()
        until(lambda: instances(server) == 0)
        kv = random_kv(32)
        assert context.store(kv, range(32)) is True
        until(lambda: instances(server) == 0)
        back = context.retrieve(range(32))
        assert back is not None
        assert torch.equal(back, kv)
        until(lambda: instances(server) == 0)
        with context.view(range(32)) as view:
            assert view.tokens == 32


def test_a_server_that_comes_back_with_other_chunks_is_an_error() -> None:
    with running_server() as server, registered_engine(server, "m"), connect(server) as context:
        server.kill()
        server.flags = ("--chunk-size", "32")
        server.start()
        with pytest.raises(LMCacheSDKError, match="restarted with chunks of 32 tokens instead of 16: connect again"):
            context.retrieve(range(64))
        assert instances(server) == 0


def test_a_server_that_is_gone_is_an_error_at_the_deadline() -> None:
    with running_server() as server, registered_engine(server, "m"), connect(server, timeout=0.5) as context:
        context.store(random_kv(16), range(16))
        server.kill()
        for call in (context.retrieve, context.lookup):
            start = time.monotonic()
            with pytest.raises(ServerUnavailable, match=r"v1/acquire .*within 0\.5 s"):
                call(range(16))
            assert time.monotonic() - start < 2
        start = time.monotonic()
        context.close()
        assert time.monotonic() - start < 4
        server.start()


def test_two_addresses_of_two_servers_are_refused_by_name() -> None:
    with (
        running_server() as one,
        running_server() as other,
        registered_engine(one, "m"),
        registered_engine(other, "m"),
    ):
        with pytest.raises(LMCacheSDKError, match="must be the two ports of one server"):
            lmcache_sdk.kvcache.connect(one.url, other.http_url, "m", timeout=10)
        assert (instances(one), instances(other)) == (1, 1)


def test_a_status_page_of_other_chunks_is_refused(server: CacheServer, model: str) -> None:
    with registered_engine(server, model):
        config = server.get("/config")
        config["mp"]["chunk_size"] = 32
        count = instances(server)
        with (
            HttpDouble({"/config": ok(config), "/status": ok(server.status())}) as double,
            pytest.raises(LMCacheSDKError, match=r"chunks of 16 tokens, but http.* with chunks of 32: url and http"),
        ):
            lmcache_sdk.kvcache.connect(server.url, double.url, model, timeout=10)
        assert instances(server) == count


def test_a_status_page_of_another_dtype_costs_a_miss_and_no_wrong_byte(server: CacheServer, model: str) -> None:
    with registered_engine(server, model), connect(server, model=model) as context:
        context.store(random_kv(32), range(32))
        status = server.status()
        for entry in status["cache_context_meta"].values():
            entry["layout"]["groups"][0]["dtype"] = "float16"
        with (
            HttpDouble({"/config": ok(server.get("/config")), "/status": ok(status)}) as double,
            lmcache_sdk.kvcache.connect(server.url, double.url, model, timeout=10) as misled,
        ):
            assert misled.retrieve(range(32)) is None


def test_a_model_that_nobody_registered_is_refused_and_nothing_is_left(server: CacheServer) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with registered_engine(server, "known model"):
        count = instances(server)
        with pytest.raises(LMCacheSDKError, match=r"no engine has registered 'unknown'.* known model"):
            connect(server, model="unknown")
        assert instances(server) == count
    until(lambda: len(os.listdir("/proc/self/fd")) <= len(before))


def test_nobody_at_the_address_is_an_error_at_the_deadline() -> None:
    port, http_port = free_ports(2)
    start = time.monotonic()
    with pytest.raises(ServerUnavailable, match="GET /config"):
        lmcache_sdk.kvcache.connect(f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", "m", timeout=1)
    assert time.monotonic() - start < 3


def test_closing_leaves_no_thread_no_file_and_no_instance(server: CacheServer, model: str) -> None:
    with registered_engine(server, model):
        files, tasks = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        count = instances(server)
        for _ in range(3):
            context = connect(server, model=model)
            context.store(random_kv(16), range(16))
            context.retrieve(range(16))
            context.close()
            context.close()
        assert instances(server) == count
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("lmcache-sdk")]
        until(lambda: len(os.listdir("/proc/self/fd")) <= files)
        until(lambda: len(os.listdir("/proc/self/task")) <= tasks)


def test_closing_ends_calls_that_are_under_way() -> None:
    failures: list[str] = []

    def call(context: LMCacheSDKContext) -> None:
        try:
            context.retrieve(range(64))
        except LMCacheSDKError as error:
            failures.append(str(error))

    with running_server() as server, registered_engine(server, "m"):
        context = connect(server)
        server.kill()
        thread = threading.Thread(target=call, args=(context,))
        thread.start()
        time.sleep(0.2)
        start = time.monotonic()
        context.close()
        thread.join(5)
        assert not thread.is_alive()
        assert time.monotonic() - start < 4
        assert len(failures) == 1
        assert "close" in failures[0]
        server.start()


def test_a_forked_child_gets_an_error_and_the_parent_keeps_its_context(server: CacheServer, model: str) -> None:
    with registered_engine(server, model), connect(server, model=model) as context:
        kv = random_kv(16)
        context.store(kv, range(16))
        child = os.fork()
        if not child:
            code = 1
            try:
                context.retrieve(range(16))
            except LMCacheSDKError as error:
                code = 0 if "a forked child must open its own" in str(error) else 2
            context.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        back = context.retrieve(range(16))
        assert back is not None
        assert torch.equal(back, kv)


def test_many_refusals_leave_the_client_empty(server: CacheServer, model: str) -> None:
    with registered_engine(server, model), connect(server, model=model, timeout=5) as context:
        registrar = context._registrar
        for _ in range(200):
            with pytest.raises(LMCacheSDKError):
                context.retrieve(range(16), "a/b")
            attachment = registrar.current().attachment
            attachment.detach()
            if isinstance(attachment.transfer, SharedMemoryTransfer):
                assert attachment.transfer._pool is None
            assert context.retrieve(range(16)) is None
        assert len(registrar._connection._pending) == 0
        assert len(registrar._connection._outbox) == 0
        assert instances(server) == 2
    server.quiet()
