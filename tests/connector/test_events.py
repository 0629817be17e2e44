"""Whoever listens to the engine's KV events knows what its cache server holds, also when the server goes and comes."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch

from lmcache_connector import events
from lmcache_connector.events import EventFeed, block_name
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import ServerRefused, ServerUnavailable
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.errors import ErrorCode, ProtocolError
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.messages import Clear
from tests.connector.rig import Rig, rig_config
from tests.lmcache_server.test_service import CHUNK, PART, Bench, prompt
from tests.servers import CacheServer, running_server


class Subscriber:
    """Knows what the events that it was sent say."""

    def __init__(self) -> None:
        self.resident: dict[bytes, BlockStored] = {}

    def take(self, sent: list[KVCacheEvent]) -> None:
        batch = msgspec.msgpack.Encoder().encode(KVEventBatch(ts=0.0, events=sent))
        for event in msgspec.msgpack.Decoder(KVEventBatch).decode(batch).events:
            if isinstance(event, BlockStored):
                assert event.medium == "CPU"
                for name in event.block_hashes:
                    assert name not in self.resident, "told twice"
                    self.resident[cast(bytes, name)] = event
            else:
                assert isinstance(event, BlockRemoved) and event.medium == "CPU"
                for name in event.block_hashes:
                    del self.resident[cast(bytes, name)]


class Wire:
    """A connection to a service in this process; what is asked over it may fail, before or after it is done."""

    def __init__(self, bench: Bench, chance: random.Random | None = None) -> None:
        self.bench = bench
        self.chance = chance
        self.asked = 0

    def request(self, message: Any) -> Any:
        self.asked += 1
        if self.chance is not None and self.chance.random() < 0.1:
            raise ServerUnavailable("v1/events", "here", 1.0)
        try:
            reply = self.bench.ask(message)
        except ProtocolError as error:
            raise ServerRefused(error.code, error.message, error.field) from None
        if self.chance is not None and self.chance.random() < 0.1:
            raise ServerUnavailable("v1/events", "here", 1.0)
        return reply


class World:
    """A service, somebody who stores there, and an engine that publishes."""

    def __init__(self, pool: int = 8, chance: random.Random | None = None) -> None:
        self.bench = Bench(pool=pool * PART)
        self.writer = self.bench.register()
        self.wire = Wire(self.bench, chance)
        self.feed, self.subscriber = EventFeed(), Subscriber()
        self.join()

    def join(self) -> None:
        """The engine registers (again)."""
        self.reader = self.bench.register(role="scheduler", worker_id=None)
        self.attachment = cast(Attachment, _Attachment(self.reader, self.bench.hello))

    def poll(self) -> None:
        self.feed.poll(cast(ServerConnection, self.wire), self.attachment)

    def tell(self) -> None:
        self.poll()
        self.subscriber.take(self.feed.take())

    def resident(self) -> set[bytes]:
        nodes = self.bench.cache.index.nodes()
        return {block_name(node.hash, key[1]) for key, node in nodes if not node.missing}  # type: ignore[index]


class _Attachment:
    def __init__(self, instance: int, hello: Any) -> None:
        self.instance = instance
        self.hello = hello


@pytest.mark.parametrize("block", range(4))
def test_the_events_rebuild_what_is_resident_whatever_happens(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores, evictions, clears, lost connections, forgotten readers, and an engine that does not always step."""
    for seed in range(block * 25, block * 25 + 25):
        chance = random.Random(seed)
        monkeypatch.setattr(events, "PAGE", chance.choice([1, 3, 256]))
        monkeypatch.setattr(events, "MOST_WAITING", chance.choice([4, 1000]))
        world = World(chance.randint(2, 10), chance)
        for _ in range(60):
            step = chance.choices(["store", "clear", "poll", "take", "lost", "forgotten"], [10, 0.5, 6, 4, 0.5, 0.3])[0]
            if step == "store":
                world.bench.store(world.writer, "".join(chance.choices("abc", k=chance.randint(1, 4))))
            elif step == "clear":
                world.bench.ask(Clear())
            elif step == "poll":
                world.poll()
            elif step == "take":
                world.subscriber.take(world.feed.take())
            elif step == "lost":
                world.feed.withdraw()
            else:
                world.bench.cache.leave(world.reader, may_still_write=False)
                world.join()
        world.wire.chance = None
        for _ in range(200):
            world.tell()
        assert set(world.subscriber.resident) == world.resident()


def test_a_stored_block_says_what_vllm_says_of_its_own() -> None:
    world = World()
    world.bench.store(world.writer, "ab")
    world.tell()
    first, second = world.subscriber.resident.values()
    hashes = ChunkHasher(CHUNK).hashes(prompt("ab").tokens)
    assert (first.block_hashes, first.parent_block_hash, first.extra_keys) == ([hashes[0]], None, [None])
    assert (second.block_hashes, second.parent_block_hash) == ([hashes[1]], hashes[0])
    assert (first.token_ids, first.block_size) == ([ord("a")] * CHUNK, CHUNK)


def test_the_same_tokens_under_another_salt_are_other_blocks() -> None:
    names = {block_name(b"h" * 16, salt) for salt in ("", "a", "b")}
    assert len(names) == 3
    assert {len(name) for name in names} == {16}
    assert block_name(b"h" * 16, "") == b"h" * 16


def test_a_server_that_is_away_holds_nothing_that_can_be_loaded() -> None:
    world = World()
    world.bench.store(world.writer, "abc")
    world.tell()
    world.feed.withdraw()
    world.feed.withdraw()
    (event,) = world.feed.take()
    assert isinstance(event, BlockRemoved)
    assert event.block_hashes == list(world.subscriber.resident)[::-1]


def test_an_engine_that_takes_no_step_is_not_sent_more_than_it_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 4)
    monkeypatch.setattr(events, "PAGE", 2)
    world = World(pool=50)
    for letter in "abcdefghijkl":
        world.bench.store(world.writer, letter)
    for _ in range(20):
        world.poll()
    assert len(world.feed.take()) <= 5


def test_a_server_without_events_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.bench.service._methods.pop("v1/events")
    refuse = ServerRefused(ErrorCode.UNKNOWN_OPERATION, "unknown operation 'v1/events'", "operation")

    def request(message: Any) -> Any:
        world.wire.asked += 1
        raise refuse

    world.wire.request = request  # type: ignore[method-assign]
    for _ in range(5):
        world.poll()
    assert world.wire.asked == 1
    assert len(caplog.records) == 1 and "no KV events" in caplog.text


# --- with a real server ----------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


class Listener:
    """Listens to what the rig's engine would publish."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.subscriber = Subscriber()

    def hears(self, condition: Callable[[list[bytes]], bool], seconds: float = 10.0) -> bool:
        """Whether what it knows gets to be what `condition` asks for."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.rig.scheduler.feed is not None
            self.subscriber.take(self.rig.scheduler.feed.take())
            if condition(list(self.subscriber.resident)):
                return True
            time.sleep(0.01)
        return False

    def attached(self, _: list[bytes]) -> bool:
        return None not in (self.rig.scheduler.link.attachment, self.rig.worker.link.attachment)


def chunks(tokens: int) -> list[bytes]:
    """The hashes of the chunks of the first `tokens` numbers."""
    return ChunkHasher(16).hashes(b"".join(token.to_bytes(4, "little") for token in range(tokens)))


@pytest.mark.process
def test_what_an_engine_stores_is_published_by_all_of_its_model_until_the_server_is_gone(server: CacheServer) -> None:
    config = rig_config(server.url, publishes_events=True)
    with Rig(config) as one, Rig(config) as other, Rig(rig_config(server.url, model="other")) as stranger:
        listeners = [Listener(one), Listener(other)]
        stranger.serve("r", range(64))
        one.serve("r", range(40), cache_salt="tenant")
        salted = [block_name(chunk, "tenant") for chunk in chunks(40)]
        assert all(listener.hears(lambda known: known == salted) for listener in listeners)
        one.scheduler.clear()
        one.serve("again", range(16))
        assert all(listener.hears(lambda known: known == chunks(16)) for listener in listeners)
        server.kill()
        assert all(listener.hears(lambda known: known == []) for listener in listeners)
        server.start()
        assert all(listener.hears(listener.attached) for listener in listeners)
        other.serve("after", range(33))
        assert all(listener.hears(lambda known: known == chunks(32)) for listener in listeners)
