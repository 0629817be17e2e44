"""Queries from a forward pass to the cache and out again by `qcache`, with a real server: bytes, gaps, room, ends."""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

import lmcache_sdk
from lmcache_server.protocol.messages import Clear
from tests.connector.q_rig import HEADS, QueryRig
from tests.connector.rig import Served, prompt, rig_config
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

CHUNK = 16
_models = count()


@pytest.fixture(scope="module", params=["shm", "frames"])
def server(request: pytest.FixtureRequest) -> Iterator[CacheServer]:
    with running_server(shared_memory=request.param == "shm") as running:
        yield running


@pytest.fixture(scope="module")
def pool_server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def rig(pool_server: CacheServer) -> Iterator[QueryRig]:
    with query_rig(pool_server) as made:
        yield made
        assert_drained(made)
    pool_server.quiet()


def query_rig(server: CacheServer, *, blocks: int = 64, heads: int = HEADS, **shape: Any) -> QueryRig:
    """A rig for a model that no other test stores for."""
    return QueryRig(rig_config(server.url, query_blocks=blocks, model=f"model {next(_models)}", **shape), heads=heads)


def assert_drained(rig: QueryRig) -> None:
    """Nothing of any request that is over waits in the ring once another step begins."""
    rig.step({})
    assert [store.ring.free for store in rig.stores] == [store.ring.blocks for store in rig.stores]
    assert [store._rows for store in rig.stores] == [{} for _ in rig.stores]


def cached(server: CacheServer, rig: QueryRig, tokens: list[int], salt: str = "") -> torch.Tensor | None:
    """What a user of `qcache` gets."""
    with lmcache_sdk.qcache.connect(server.url, server.http_url, rig.config.model_name) as context:
        return context.retrieve(tokens, salt)


def assert_cached(server: CacheServer, rig: QueryRig, tokens: list[int], chunks: int, salt: str = "") -> None:
    """Exactly the queries of the first `chunks` chunks are cached, bit for bit."""
    found = cached(server, rig, tokens, salt)
    assert (found is None) == (chunks == 0)
    if found is not None:
        assert torch.equal(found, rig.queries_of(tokens, chunks * CHUNK, salt))


def start(rig: QueryRig, request_id: str, tokens: list[int], local: int = 0, **facts: Any) -> Served:
    """A request with its blocks, of which the engine's own cache has filled the first `local` tokens."""
    served = rig.arrive(request_id, tokens, **facts)
    rig.allocate(served, 0)
    served.request.num_computed_tokens = local
    return served


# --- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_the_queries_of_every_whole_chunk_of_a_batch_are_cached(server: CacheServer, block_size: int) -> None:
    with query_rig(server, block_size=block_size) as rig:
        prompts = [prompt(length, length) for length in (15, 16, 40, 100)]
        batch = [start(rig, f"r{i}", tokens) for i, tokens in enumerate(prompts)]
        rig.step({served: len(served.request.all_token_ids) for served in batch})
        for tokens in prompts:
            assert_cached(server, rig, tokens, len(tokens) // CHUNK)
        for served in batch:
            rig.finish(served)
        assert_drained(rig)


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("budget", [1, 7, 16, 20, 33])
def test_a_chunk_that_several_steps_compute_is_cached_whole(
    pool_server: CacheServer, block_size: int, budget: int
) -> None:
    with query_rig(pool_server, block_size=block_size) as rig:
        prompts = [prompt(70, seed) for seed in range(2)]
        batch = [start(rig, f"r{i}", tokens) for i, tokens in enumerate(prompts)]
        while (left := 70 - batch[0].request.num_computed_tokens) > 0:
            rig.step(dict.fromkeys(batch, min(left, budget)))
            waiting = [rows.end - rows.start for rows in rig.queries._rows.values()]
            assert all(tokens < CHUNK for tokens in waiting), "only an incomplete chunk waits"
        for tokens in prompts:
            assert_cached(pool_server, rig, tokens, 4)
        for served in batch:
            rig.finish(served)
        assert_drained(rig)


@pytest.mark.parametrize(
    "shape",
    [
        {"windows": (16, 0), "block_size": (8, 32)},
        {"windows": (24, 40)},
        {"shards": 2},
        {"shards": 2, "replicas": 2},
    ],
    ids=["hybrid", "only windows", "two ranks", "four ranks, two of them alike"],
)
def test_all_layers_of_several_groups_and_all_ranks_are_captured(
    pool_server: CacheServer, shape: dict[str, Any]
) -> None:
    with query_rig(pool_server, **shape) as rig:
        prompts = [prompt(70, seed) for seed in range(2)]
        batch = [start(rig, f"r{i}", tokens) for i, tokens in enumerate(prompts)]
        for scheduled in (25, 24, 21):
            rig.step(dict.fromkeys(batch, scheduled))
        for tokens in prompts:
            assert_cached(pool_server, rig, tokens, 4)
        for served in batch:
            rig.finish(served)
        assert_drained(rig)


def test_generated_tokens_are_not_captured(rig: QueryRig, pool_server: CacheServer) -> None:
    served = start(rig, "r", prompt(20))
    rig.step({served: 20})
    for token in range(16):
        served.request.append_output_token_ids(1000 + token)
        rig.step({served: 1})
    assert_cached(pool_server, rig, list(served.request.all_token_ids), 1)
    rig.finish(served)


def test_salts_separate_queries_and_what_bypasses_the_cache_is_not_captured(
    rig: QueryRig, pool_server: CacheServer
) -> None:
    tokens = prompt(40)
    for name, facts in {"a": {"cache_salt": "tenant"}, "b": {"resumable": True}}.items():
        served = start(rig, name, tokens, **facts)
        rig.step({served: 40})
        rig.finish(served)
    assert_cached(pool_server, rig, tokens, 2, "tenant")
    assert_cached(pool_server, rig, tokens, 0)


def test_what_is_cached_already_is_not_captured_again(rig: QueryRig, pool_server: CacheServer) -> None:
    tokens = prompt(64)
    for name, whole in (("first", 32), ("second", 64), ("third", 64)):
        served = start(rig, name, tokens[:whole])
        plan = rig.plan({served: whole})
        rig.queries.begin(plan)
        captured = [(first, rows.end) for _, rows, first in rig.queries._step]
        assert captured == {"first": [(0, 32)], "second": [(32, 64)], "third": []}[name]
        rig.forward({served: whole})
        rig.queries.store()
        rig.finish(served)
    assert_cached(pool_server, rig, tokens, 4)


# --- prefixes that the engine did not compute ------------------------------------------------------------------------


def test_behind_a_hit_queries_are_added_only_if_those_of_the_hit_are_cached(
    rig: QueryRig, pool_server: CacheServer
) -> None:
    tokens = prompt(64)
    for local in (16, 20, 32, 63):
        served = start(rig, f"unknown {local}", tokens, local)
        rig.step({served: 64 - local})
        rig.finish(served)
    assert cached(pool_server, rig, tokens) is None
    served = start(rig, "prefix", tokens[:32])
    rig.step({served: 32})
    rig.finish(served)
    served = start(rig, "in a chunk that is missing", tokens, 40)
    rig.step({served: 24})
    rig.finish(served)
    assert_cached(pool_server, rig, tokens, 2)
    served = start(rig, "known", tokens, 24)
    rig.step({served: 40})
    rig.finish(served)
    assert_cached(pool_server, rig, tokens, 4)


def test_a_hit_without_queries_gets_them_under_another_salt(rig: QueryRig, pool_server: CacheServer) -> None:
    tokens = prompt(50)
    served = start(rig, "warm", tokens, 48)
    rig.step({served: 2})
    rig.finish(served)
    served = start(rig, "fresh", tokens, cache_salt="fresh")
    rig.step({served: 50})
    rig.finish(served)
    assert_cached(pool_server, rig, tokens, 0)
    assert_cached(pool_server, rig, tokens, 3, "fresh")


def test_what_was_forgotten_between_two_steps_leaves_no_hole(rig: QueryRig, pool_server: CacheServer) -> None:
    tokens = prompt(64)
    served = start(rig, "r", tokens)
    rig.step({served: 40})
    attachment = rig.scheduler.link.attachment
    assert attachment is not None
    attachment.connection.request(Clear())  # somebody else's, of which this engine knows nothing
    rig.step({served: 24})
    assert pool_server.quiet()["storage_manager"]["l1_manager"]["total_object_count"] == 4, (
        "keys and values of all chunks, no queries"
    )
    rig.finish(served)
    served = start(rig, "again", tokens)
    rig.step({served: 64})
    assert_cached(pool_server, rig, tokens, 4)
    rig.finish(served)


def skipped(rig: QueryRig) -> int:
    taken = rig.queries._stats.take()
    return taken.data.get("skipped_queries", 0) if taken is not None else 0


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_request_that_finds_the_ring_full_is_passed_over_and_counted(pool_server: CacheServer) -> None:
    with query_rig(pool_server, blocks=5) as rig:
        prompts = [prompt(48, seed) for seed in range(3)]
        batch = [start(rig, f"r{i}", tokens) for i, tokens in enumerate(prompts)]
        rig.step(dict.fromkeys(batch, 48))
        assert skipped(rig) == 2
        assert rig.queries.ring.free == 5
        assert [cached(pool_server, rig, tokens) is not None for tokens in prompts] == [True, False, False]
        assert_cached(pool_server, rig, prompts[0], 3)
        for served in batch:
            rig.finish(served)
        served = start(rig, "again", prompts[1])
        rig.step({served: 48})
        assert_cached(pool_server, rig, prompts[1], 3)
        rig.finish(served)


def test_a_request_that_was_passed_over_half_way_keeps_what_is_stored_and_adds_nothing(
    pool_server: CacheServer,
) -> None:
    with query_rig(pool_server, blocks=3) as rig:
        one, other = (start(rig, name, prompt(64, seed)) for name, seed in (("one", 1), ("other", 2)))
        rig.step({one: 40})
        assert rig.queries.ring.free == 2
        rig.step({other: 32, one: 24})
        assert skipped(rig) == 1
        assert rig.queries.ring.free == 3
        rig.step({other: 32})
        assert_cached(pool_server, rig, prompt(64, 1), 2)
        assert_cached(pool_server, rig, prompt(64, 2), 4)
        rig.finish(one)
        rig.finish(other)
        assert_drained(rig)


def test_a_pool_that_is_full_gives_the_blocks_back() -> None:
    # A chunk of queries takes 512 KiB of a pool of 1 MiB.
    with running_server("--l1-size-gb", "0.001") as server, query_rig(server, heads=512) as rig:
        for seed in range(2):
            served = start(rig, f"r{seed}", prompt(70, seed))
            rig.step({served: 50})
            assert rig.queries.ring.free == 64, "also what is behind the chunk that did not fit"
            rig.step({served: 20})
            rig.finish(served)
            found = cached(server, rig, prompt(70, seed))
            assert found is not None
            assert found.shape[2] < 3 * CHUNK
        assert_drained(rig)
        server.quiet()


def test_a_ring_that_does_not_fit_into_memory_is_refused_with_what_to_lower(pool_server: CacheServer) -> None:
    with pytest.raises(ValueError, match=r"no memory for the queries .* lower lmcache.mp.q.ring_depth"):
        query_rig(pool_server, blocks=2**40)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_of_a_prompt_gives_the_blocks_back(rig: QueryRig, pool_server: CacheServer) -> None:
    served = start(rig, "aborted", prompt(64))
    rig.step({served: 25})
    assert rig.queries.ring.free == rig.queries.ring.blocks - 1
    rig.finish(served)
    assert_drained(rig)
    assert_cached(pool_server, rig, prompt(64), 1)
    served = start(rig, "aborted", prompt(64))  # the same name again
    rig.step({served: 64})
    rig.finish(served)
    assert_cached(pool_server, rig, prompt(64), 4)


def test_a_preempted_request_gives_its_blocks_back_and_goes_on_behind_what_is_cached(
    rig: QueryRig, pool_server: CacheServer
) -> None:
    served = start(rig, "r", prompt(64))
    rig.step({served: 40})
    rig.preempt(served)
    rig.step({})
    assert rig.queries.ring.free == rig.queries.ring.blocks
    rig.allocate(served, 0)
    rig.step({served: 30})
    rig.step({served: 34})
    assert_cached(pool_server, rig, prompt(64), 4)
    rig.finish(served)


def test_tokens_that_are_computed_again_after_a_failed_load_do_not_continue_old_rows(
    rig: QueryRig, pool_server: CacheServer
) -> None:
    served = start(rig, "r", prompt(64))
    rig.step({served: 40})
    served.request.num_computed_tokens = 16
    rig.step({served: 48})
    assert_cached(pool_server, rig, prompt(64), 4)
    rig.finish(served)


def test_a_pass_that_failed_stores_nothing_and_leaves_no_block_behind(rig: QueryRig, pool_server: CacheServer) -> None:
    served = start(rig, "r", prompt(32))
    rig.queries.begin(rig.plan({served: 32}))
    rig.queries.store()  # without a forward pass
    assert rig.queries.ring.free == rig.queries.ring.blocks
    rig.queries.begin(rig.plan({served: 32}))  # and this one is not even stored
    rig.step({served: 32})
    assert_cached(pool_server, rig, prompt(32), 2)
    rig.finish(served)


def test_a_server_that_dies_costs_queries_and_no_block_and_is_used_again() -> None:
    with running_server() as server, query_rig(server) as rig:
        for when in ("before the pass", "during the pass"):
            tokens = prompt(64)
            served, new = start(rig, "r", tokens), start(rig, "new", prompt(40, 1))
            rig.step({served: 20})
            plan = rig.plan({served: 44, new: 40})
            before = rig.queries.link.attachment
            started = time.monotonic()
            if when == "before the pass":
                server.kill()
            rig.queries.begin(plan)
            if when == "during the pass":
                server.kill()
            rig.forward({served: 44, new: 40})
            rig.queries.store()
            assert time.monotonic() - started < 2.5, "one deadline of the rig's second, once"
            rig.finish(new)
            rig.step({})
            assert rig.queries.ring.free == rig.queries.ring.blocks, "though one request goes on"
            server.start()
            deadline = time.monotonic() + 10
            while rig.queries.link.attachment in (None, before) or rig.scheduler.link.attachment is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            served.request.num_computed_tokens = 20
            rig.step({served: 44})
            assert cached(server, rig, tokens) is None, "rows of the old server are not for the new one"
            rig.finish(served)
            assert_drained(rig)
            served = start(rig, "again", tokens)
            rig.step({served: 20})
            rig.step({served: 44})
            assert_cached(server, rig, tokens, 4)
            rig.finish(served)
            assert_drained(rig)
            server.quiet()


def test_without_a_ring_nothing_is_planned(pool_server: CacheServer) -> None:
    with QueryRig(rig_config(pool_server.url, query_blocks=4)) as rig:
        served = start(rig, "r", prompt(32))
        assert len(rig.plan({served: 32}).queries) == 1
        rig.scheduler._config = rig_config(pool_server.url)
        plan = rig.plan({served: 32})
        assert (plan.queries, plan.over) == ((), frozenset())
        rig.finish(served)
