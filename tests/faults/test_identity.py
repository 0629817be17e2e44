"""What is, and what is not, the same cached chunk."""

from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import pytest

from lmcache_server.protocol.errors import ErrorCode, ProtocolError
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from lmcache_server.protocol.messages import Reserve
from tests.fake_engine import LAYOUT, FakeEngine
from tests.faults.world import SHORT_TIMES, assert_quiet, child, tokens
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server(*SHORT_TIMES) as server:
        yield server


def test_processes_with_different_hash_seeds_share_one_cache(server: CacheServer) -> None:
    script = "say(engine.store(tokens(3, 43)), engine.load(tokens(3, 43)))"
    said = []
    for seed in ("0", "1", "random"):
        with child(script, server.url, env={"PYTHONHASHSEED": seed}) as client:
            said.append(client.line())
    assert said == ["3 3", "0 3", "0 3"]
    with FakeEngine(server.url) as engine:
        assert engine.load(tokens(3, seed=43)) == 3
    assert_quiet(server)


def test_tenants_with_different_salts_see_nothing_of_each_other(server: CacheServer) -> None:
    with FakeEngine(server.url) as engine:
        prompt = engine.tokens(3)
        salts = ["", "a", "b", "A", "a "]
        for i, salt in enumerate(salts):
            assert [engine.hit(prompt, s) for s in salts] == [3] * i + [0] * (len(salts) - i)
            assert engine.store(prompt, salt) == 3
        assert [engine.load(prompt, salt) for salt in salts] == [3] * 5
    assert_quiet(server)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, None, 7, b"a"])
def test_a_salt_that_cannot_separate_is_refused_and_never_replaced_by_none(server: CacheServer, salt: Any) -> None:
    with FakeEngine(server.url) as engine:
        prompt = {"session": {"request_id": "r"}, "tokens": bytes(64), "salt": salt}
        wire = msgpack.packb({"instance": engine.instance, "prompts": [prompt]})
        engine.peer.send(b"u", msgpack.packb("v1/reserve"), wire)
        refusal = msgpack.unpackb(engine.peer.receive(20)[2])["error"]
        assert (refusal["code"], refusal["field"]) == ("invalid", "prompts[0].salt")


def test_whatever_shapes_the_bytes_is_part_of_their_identity(server: CacheServer) -> None:
    group = LAYOUT.groups[0]
    others: list[dict[str, Any]] = [
        {"model": "other"},
        {"revision": "2"},
        {"world_size": 2},
        {"kind": Kind.QUERY, "layout": CacheLayout((msgspec.structs.replace(group, planes=1),))},
        {"layout": CacheLayout((msgspec.structs.replace(group, dtype="bfloat16", head_size=64),))},
        {"layout": CacheLayout((msgspec.structs.replace(group, heads=2, head_size=16),))},
        {"layout": CacheLayout((msgspec.structs.replace(group, layers=(1,)),))},
        {"layout": CacheLayout((msgspec.structs.replace(group, window=64),))},
        {"layout": CacheLayout(LAYOUT.groups, "fp8")},
        {"layout": CacheLayout((KernelGroup((0, 1), 1, 1, 32, "float32"),))},
    ]
    with FakeEngine(server.url) as engine:
        prompt = engine.tokens(2)
        engine.store(prompt)
        for changes in others:
            with FakeEngine(server.url, **changes) as other:
                assert other.hit(prompt) == 0, changes
        with FakeEngine(server.url) as same:
            assert same.load(prompt) == 2
    assert_quiet(server)


def test_what_shapes_a_chunk_beside_its_tokens_divides_it_from_there_on(server: CacheServer) -> None:
    image, other = b"img:" + bytes(28) + b"\xff" * 4, b"img:" + bytes(27) + b"\x01" + b"\xff" * 4
    with FakeEngine(server.url) as engine:
        prompt = engine.tokens(4)
        assert engine.store(prompt, extras={2: image}) == 4
        assert engine.load(prompt, extras={2: image}) == 4
        assert [engine.hit(prompt, extras=e) for e in ({2: other}, {}, {1: image}, {2: image, 3: b"x"})] == [2, 2, 1, 3]
        assert engine.store(prompt, extras={2: other}) == 2
        assert engine.load(prompt, extras={2: image}) == engine.load(prompt, extras={2: other}) == 4
    assert_quiet(server)


def test_a_client_cannot_name_the_hash_of_a_chunk(server: CacheServer) -> None:
    with FakeEngine(server.url) as engine:
        prompt = {"session": {"request_id": "r"}, "tokens": bytes(64), "hashes": [bytes(16)]}
        wire = msgpack.packb({"instance": engine.instance, "prompts": [prompt]})
        engine.peer.send(b"u", msgpack.packb("v1/reserve"), wire)
        refusal = msgpack.unpackb(engine.peer.receive(20)[2])["error"]
        assert (refusal["code"], refusal["field"]) == ("invalid", "prompts[0].hashes")


def test_each_shard_has_its_own_bytes_and_a_chunk_needs_all_of_them(server: CacheServer) -> None:
    with (
        FakeEngine(server.url, model="tp", world_size=2, worker_id=0) as first,
        FakeEngine(server.url, model="tp", world_size=2, worker_id=1) as second,
        FakeEngine(server.url, model="tp", world_size=2, worker_id=None) as everything,
    ):
        prompt = first.tokens(3)
        assert (first.store(prompt), first.hit(prompt)) == (3, 0)
        assert second.store(prompt[: 2 * first.chunk_bytes]) == 2
        assert first.load(prompt) == second.load(prompt) == 2
        held = everything.acquire(prompt)
        assert (held.hit, len(held.slots)) == (2, 4)
        with pytest.raises(ProtocolError) as refused:
            first.ask(Reserve(second.instance + 1, ()))
        assert refused.value.code is ErrorCode.UNKNOWN_INSTANCE
    assert_quiet(server)
