"""Tensor-parallel engines: each rank stores its shard, a context sees all of them side by side, on both transports."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lmcache_sdk
from lmcache_sdk import LMCacheSDKCacheKind, LMCacheSDKContext, LMCacheSDKError
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.request import TokenEvent, create_request
from lmcache_sdk.transfer import SharedMemoryTransfer
from lmcache_server.protocol.layout import KernelGroup
from lmcache_server.protocol.messages import End, Reserve
from tests.lmcache_sdk.fake_engine import random_kv, registered_engine
from tests.lmcache_sdk.story_engine import StoryEngine, kv_of
from tests.servers import CacheServer, running_server

KV = LMCacheSDKCacheKind.KV
MLA = KernelGroup((0, 1), planes=1, heads=1, head_size=24, dtype="bfloat16")
TOKENS = list(range(300, 348))
"""Three chunks."""


@pytest.fixture
def ranks(server: CacheServer, model: str) -> Iterator[list[StoryEngine]]:
    """The two workers of one engine."""
    with contextlib.ExitStack() as stack:
        workers = [registered_engine(server, model, world_size=2, worker_id=rank) for rank in range(2)]
        yield [ShardEngine(stack.enter_context(worker), rank) for rank, worker in enumerate(workers)]


@pytest.fixture
def both(server: CacheServer, ranks: list[StoryEngine], model: str) -> Iterator[LMCacheSDKContext]:
    """A context for all shards."""
    with lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as context:
        yield context
    server.quiet()


class ShardEngine(StoryEngine):
    """One rank: it computes its own shard's KV."""

    def __init__(self, attachment: Attachment, rank: int) -> None:
        super().__init__(attachment)
        self.rank = rank

    def computed(self, tokens: Any) -> torch.Tensor:
        return kv_of(tokens, self.geometry, self.rank)


def joined(ranks: list[StoryEngine], tokens: list[int]) -> torch.Tensor:
    return torch.cat([rank.computed(tokens) for rank in ranks], dim=3)


def test_what_each_rank_stored_comes_back_side_by_side(both: LMCacheSDKContext, ranks: list[StoryEngine]) -> None:
    ranks[0].store(TOKENS)
    assert both.retrieve(TOKENS) is None
    ranks[1].store(TOKENS[:32])
    back = both.retrieve(TOKENS)
    assert back is not None
    assert torch.equal(back, joined(ranks, TOKENS[:32]))
    assert not torch.equal(back[..., :16], back[..., 16:])


def test_what_a_context_stores_each_rank_gets_its_shard_of(both: LMCacheSDKContext, ranks: list[StoryEngine]) -> None:
    kv = random_kv(48, shards=2)
    assert both.store(kv, TOKENS) is True
    for rank, engine in enumerate(ranks):
        taken = engine.load(TOKENS)
        assert taken is not None
        assert torch.equal(taken, kv[..., 16 * rank : 16 * (rank + 1)])


@pytest.mark.parametrize("stored_by", [0, 1])
def test_a_store_adds_the_shards_that_are_missing_and_leaves_those_that_are_there(
    both: LMCacheSDKContext, ranks: list[StoryEngine], stored_by: int
) -> None:
    ranks[stored_by].store(TOKENS[:32])
    kv = random_kv(48, shards=2)
    assert both.store(kv, TOKENS) is True
    expected = kv.clone()
    expected[:, :, :32, 16 * stored_by : 16 * (stored_by + 1)] = ranks[stored_by].computed(TOKENS[:32])
    back = both.retrieve(TOKENS)
    assert back is not None
    assert torch.equal(back, expected)
    assert both.store(kv, TOKENS) is False


def test_an_edit_of_a_sharded_stream_reaches_every_rank(both: LMCacheSDKContext, ranks: list[StoryEngine]) -> None:
    def complete(prompt: list[int], params: dict[str, Any], salt: str) -> Iterator[TokenEvent]:
        outputs = [list(rank(prompt, params, salt)) for rank in ranks]
        yield from outputs[0]

    stream = create_request([both], complete, TOKENS)
    stream.generate({"max_tokens": 1})
    stream.modify_kv(lambda tensors, tokens: (tensors[KV][:, :, 16:] * 2, tokens[16:]))
    stream.generate({"max_tokens": 1})
    for rank in ranks:
        taken = rank.calls[1].taken
        assert taken is not None
        assert torch.equal(taken, rank.computed(TOKENS)[:, :, 16:] * 2)


def test_latents_of_a_multi_head_latent_model_are_one_plane(server: CacheServer, model: str) -> None:
    with (
        registered_engine(server, model, MLA) as engine,
        lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as context,
    ):
        story = StoryEngine(engine)
        stream = create_request([context], story, TOKENS)
        stream.generate({"max_tokens": 1})
        assert stream.retrieve(KV).shape == (1, 2, 48, 24)
        stream.modify_kv(lambda tensors, tokens: (tensors[KV][:, :, :16] + 1, tokens[:16]))
        stream.generate({"max_tokens": 1})
        taken = story.calls[1].taken
        assert taken is not None
        assert torch.equal(taken, kv_of(TOKENS, story.geometry)[:, :, :16] + 1)


def test_slots_of_one_server_are_refused_and_not_verified_in_an_equally_named_pool_of_another() -> None:
    with (
        running_server() as one,
        running_server() as other,
        registered_engine(one, "m") as ours,
        registered_engine(other, "m") as theirs,
    ):
        prompt = StoryEngine(ours).prompt(TOKENS, "")
        (reserved,) = ours.connection.request(Reserve(ours.instance, (prompt,))).results
        (elsewhere,) = theirs.connection.request(Reserve(theirs.instance, (prompt,))).results
        assert isinstance(ours.transfer, SharedMemoryTransfer)
        assert len(ours.transfer.writable(reserved)) == 3
        with pytest.raises(LMCacheSDKError, match="is not the pool that the server reserves from"):
            ours.transfer.writable(elsewhere)
        for each in (ours, theirs):
            each.connection.request(End(each.instance, (prompt.session,)))


def test_a_context_beats_often_enough_for_the_leases_of_its_server() -> None:
    with (
        running_server("--l1-read-ttl-seconds", "1.5") as server,
        registered_engine(server, "m"),
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=10) as context,
    ):
        assert context._registrar.current().heartbeat._seconds == 0.5
