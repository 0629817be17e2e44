"""Scheduler half and worker half against a real server, with and without shared memory: bytes, counts, leases."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
import torch

from lmcache_connector.metadata import StepOutcome
from lmcache_connector.scheduler import PATIENCE
from tests.connector.rig import Rig, prompt, rig_config
from tests.servers import CacheServer, running_server

pytestmark = pytest.mark.process

_models = count()


@pytest.fixture(scope="module", params=["shm", "frames"])
def server(request: pytest.FixtureRequest) -> Iterator[CacheServer]:
    with running_server(shared_memory=request.param == "shm") as running:
        yield running


@pytest.fixture
def model() -> str:
    """A model that no other test stores for."""
    return f"model {next(_models)}"


@pytest.fixture
def rig(server: CacheServer, model: str) -> Iterator[Rig]:
    with Rig(rig_config(server.url, model=model)) as made:
        yield made
    server.quiet()


# --- what is stored and loaded ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_second_run_loads_every_whole_chunk_but_never_the_last_token(
    server: CacheServer, model: str, block_size: int, chunks: int, more: int
) -> None:
    tokens = prompt(16 * chunks + more)
    with Rig(rig_config(server.url, model=model, block_size=block_size)) as rig:
        assert rig.serve("cold", tokens).external == 0
        hit = len(tokens) // 16 * 16
        assert rig.serve("warm", tokens).external == min(hit, len(tokens) - 1)


def test_another_engine_of_the_same_model_shares_the_chunks_whatever_its_block_size(
    server: CacheServer, model: str
) -> None:
    tokens = prompt(100)
    with Rig(rig_config(server.url, model=model, block_size=8)) as first:
        first.serve("cold", tokens)
    with Rig(rig_config(server.url, model=model, block_size=64)) as second:
        assert second.serve("warm", tokens).external == 96


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 20, 33])
def test_chunked_prefill_stores_every_whole_chunk(server: CacheServer, model: str, step_tokens: int) -> None:
    with Rig(rig_config(server.url, model=model), step_tokens=step_tokens) as rig:
        for seed in range(3):
            tokens = prompt(70, seed)
            rig.serve(f"cold {seed}", tokens)
            assert rig.serve(f"warm {seed}", tokens).external == 64


def test_only_computed_tokens_are_planned_to_be_stored(rig: Rig) -> None:
    served = rig.arrive("r", prompt(64))
    rig.allocate(served, rig.matched(served))
    sizes = []
    for tokens in (15, 1, 31, 1, 16):
        plan = rig.plan({served: tokens})
        sizes.append([len(job.tokens) // 4 for job in plan.stores])
        rig.compute(served, served.request.num_computed_tokens, served.request.num_computed_tokens + tokens)
        served.request.num_computed_tokens += tokens
        rig.report(plan)
    assert sizes == [[], [16], [32], [48], [64]]
    rig.finish(served)


def test_generated_tokens_are_stored_only_if_asked_for(server: CacheServer, model: str) -> None:
    for save, stored in ((False, 16), (True, 32)):
        config = rig_config(server.url, model=f"{model} {save}", settings={"save_decode_cache": save})
        with Rig(config) as rig:
            served = rig.arrive("r", prompt(20))
            rig.allocate(served, rig.matched(served))
            rig.step({served: 20})
            for token in range(16):
                served.request.append_output_token_ids(1000 + token)
                rig.step({served: 1})
            tokens = list(served.request.all_token_ids)
            rig.finish(served)
            assert rig.serve("again", tokens).external == stored


def test_a_token_that_is_only_drafted_is_not_stored(server: CacheServer, model: str) -> None:
    config = rig_config(server.url, model=model, settings={"save_decode_cache": True})
    with Rig(config) as rig:
        served = rig.arrive("r", prompt(14))
        rig.allocate(served, rig.matched(served))
        rig.step({served: 14})
        served.request.append_output_token_ids(7)
        plan = rig.plan({served: 4})  # one known token and three drafted ones: 18 in all
        assert plan.stores == ()
        rig.finish(served)


def test_roles_that_only_store_or_only_load_keep_to_it(server: CacheServer, model: str) -> None:
    tokens = prompt(64)
    with Rig(rig_config(server.url, model=model, stores=False)) as consumer:
        consumer.serve("r", tokens)
    with Rig(rig_config(server.url, model=model, loads=False)) as producer:
        producer.serve("r", tokens)
        assert producer.serve("again", tokens).external == 0
    with Rig(rig_config(server.url, model=model, stores=False)) as consumer:
        assert consumer.serve("r", tokens).external == 63


def test_requests_of_one_step_are_stored_together(rig: Rig) -> None:
    batch = [rig.arrive(f"r{i}", prompt(40, i)) for i in range(4)]
    for served in batch:
        rig.allocate(served, rig.matched(served))
    outcome = rig.step(dict.fromkeys(batch, 40)).kv_connector_worker_meta
    assert outcome == StepOutcome({f"r{i}": 2 for i in range(4)})
    for served in batch:
        rig.finish(served)
    for i in range(4):
        assert rig.serve(f"warm {i}", prompt(40, i)).external == 32


# --- salts and what cannot be named ----------------------------------------------------------------------------------


def test_salts_separate_tenants(rig: Rig) -> None:
    tokens = prompt(64)
    for salt in (None, "a", "b"):
        assert rig.serve(f"cold {salt}", tokens, cache_salt=salt).external == 0
    for salt in (None, "a", "b"):
        assert rig.serve(f"warm {salt}", tokens, cache_salt=salt).external == 63


@pytest.mark.parametrize(
    "facts",
    [{"lora_request": object()}, {"mm_features": [object()]}, {"cache_salt": "a/b"}, {"resumable": True},
     {"prompt_embeds": torch.zeros(64, 4)}, {"prompt_is_token_ids": [True] * 64}],
    ids=["lora", "multimodal", "salt", "resumable", "embeddings", "mixed"],
)  # fmt: skip
def test_what_we_cannot_name_bypasses_the_cache_both_ways(rig: Rig, facts: dict[str, object]) -> None:
    tokens = prompt(64)
    served = rig.arrive("special", tokens, **facts)
    rig.allocate(served, rig.matched(served))
    assert rig.plan({served: 64}).stores == ()
    rig.finish(served)
    assert rig.serve("cold", tokens).external == 0
    again = rig.arrive("special again", tokens, **facts)
    assert rig.matched(again) == 0
    rig.finish(again)


# --- hooks that are called more than once ----------------------------------------------------------------------------


def test_asking_again_gives_the_same_answer_and_adds_nothing(rig: Rig, server: CacheServer) -> None:
    tokens = prompt(70)
    rig.serve("cold", tokens)
    served = rig.arrive("warm", tokens)
    assert [rig.matched(served) for _ in range(10)] == [64] * 10
    assert [rig.matched(served, local) for local in (16, 48, 64, 0)] == [48, 16, 0, 64]
    assert server.status()["read_leases"] == 1
    rig.allocate(served, 64)
    rig.step({})
    assert rig.wrong_tokens(served) == []
    rig.finish(served)


def test_the_tokens_written_are_the_tokens_promised(rig: Rig) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens)
    served = rig.arrive("warm", tokens)
    external = rig.matched(served)
    assert external == 63
    rig.allocate(served, external)
    before = rig.memory.clone()
    rig.step({})
    written = [t for t in range(64) if not torch.equal(rig.slot(served, t), before_slot(rig, before, served, t))]
    assert written == list(range(63))
    rig.finish(served)


def before_slot(rig: Rig, memory: torch.Tensor, served: object, token: int) -> torch.Tensor:
    """The token's K and V in an earlier copy of the pages."""
    view = rig.slot(served, token)  # type: ignore[arg-type]
    return memory.as_strided(view.shape, view.stride(), view.storage_offset())


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("local_blocks", [1, 2, 3])
def test_loading_behind_a_local_hit_leaves_the_shared_blocks_alone(
    server: CacheServer, model: str, block_size: int, local_blocks: int
) -> None:
    tokens = prompt(144)
    with Rig(rig_config(server.url, model=model, block_size=block_size)) as rig:
        rig.serve("cold", tokens)
        other = rig.arrive("other live request", [*tokens[: local_blocks * block_size], 1])
        rig.allocate(other, rig.matched(other, local_blocks * block_size))
        shared = other.blocks[:local_blocks]
        rig.memory.view(torch.uint8).random_()  # whatever the local blocks hold, it must stay
        before = [[page[block].clone() for block in shared] for page in rig.pages]
        served = rig.arrive("warm", tokens)
        external = rig.matched(served, local_blocks * block_size)
        assert external == 143 - local_blocks * block_size
        rig.allocate(served, external, shared)
        rig.step({})
        after = [[page[block] for block in shared] for page in rig.pages]
        for layer_before, layer_after in zip(before, after, strict=True):
            for was, now in zip(layer_before, layer_after, strict=True):
                assert torch.equal(was.view(torch.int32), now.view(torch.int32))
        loaded = range(local_blocks * block_size, 143)
        assert all(torch.equal(rig.slot(served, t), torch.cat(list(rig.kv_of(served, t)), dim=-1)) for t in loaded)
        rig.finish(served)
        rig.finish(other)


def test_a_preempted_request_asks_anew_and_loads_what_it_stored(rig: Rig) -> None:
    served = rig.arrive("r", prompt(100))
    rig.allocate(served, rig.matched(served))
    rig.step({served: 50})
    served.request.num_computed_tokens = 0  # preempted: its blocks are gone
    rig.free += served.blocks
    external = rig.matched(served)
    assert external == 48
    rig.allocate(served, external)
    rig.step({})
    served.request.num_computed_tokens = external
    rig.step({served: 52})
    assert rig.wrong_tokens(served) == []
    rig.finish(served)
    assert rig.serve("again", prompt(100)).external == 96


# --- leases ----------------------------------------------------------------------------------------------------------


def test_the_lease_ends_at_once_when_nothing_is_loaded(rig: Rig, server: CacheServer) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens, cache_salt="tenant")
    served = rig.arrive("warm", tokens, cache_salt="tenant")
    assert rig.matched(served) == 63
    assert server.status()["read_leases"] == 1
    rig.allocate(served, 0)
    assert eventually(lambda: server.status()["read_leases"] == 0)
    rig.finish(served)


def test_an_abort_before_the_blocks_are_there_leaves_nothing(rig: Rig, server: CacheServer) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens)
    for attempt in range(50):
        served = rig.arrive("aborted", tokens)
        if attempt % 2:
            rig.matched(served)
        else:
            rig.scheduler.matched_tokens(served.request, 0)
        rig.scheduler.finished(served.request)
    assert server.quiet()["read_leases"] == 0


def test_an_abort_during_the_load_keeps_the_lease_until_the_load_is_over(rig: Rig, server: CacheServer) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens)
    served = rig.arrive("warm", tokens)
    rig.allocate(served, rig.matched(served))
    plan = rig.plan({})
    rig.scheduler.finished(served.request)
    assert server.status()["read_leases"] == 1
    output = rig.report(plan)
    assert output.finished_recving == {"warm"}
    server.quiet()


def test_a_lease_in_use_is_renewed_while_its_request_waits() -> None:
    with running_server("--l1-read-ttl-seconds", "1") as server, Rig(rig_config(server.url)) as rig:
        tokens = prompt(64)
        rig.serve("cold", tokens)
        served = rig.arrive("warm", tokens)
        assert rig.matched(served) == 63
        time.sleep(2.5)
        assert server.status()["read_leases"] == 1
        rig.allocate(served, 63)
        assert rig.step({}).invalid_block_ids == set()
        rig.finish(served)
        server.quiet()


# --- loads that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_a_chunk_that_was_gone_is_reported_by_its_blocks_and_only_those(chunk: int) -> None:
    tokens = prompt(81)
    with running_server() as server, Rig(rig_config(server.url, block_size=8)) as rig:
        rig.serve("cold", tokens)
        served = rig.arrive("warm", tokens)
        rig.allocate(served, rig.matched(served))
        plan = rig.plan({})
        (job,) = plan.loads
        slots = bytearray(job.acquired.slots)
        slots[16 * chunk + 8] ^= 1  # another generation: the chunk is not there any more
        stale = dataclasses.replace(job, acquired=msgspec.structs.replace(job.acquired, slots=bytes(slots)))
        output = rig.report(dataclasses.replace(plan, loads=(stale,)))
        assert output.invalid_block_ids == set(served.blocks[2 * chunk : 2 * chunk + 2])
        assert output.finished_recving == {"warm"}
        rig.finish(served)


def test_a_load_whose_lease_the_server_does_not_know_fails_as_a_whole(model: str) -> None:
    tokens = prompt(81)
    with running_server(shared_memory=False) as server, Rig(rig_config(server.url, model=model)) as rig:
        rig.serve("cold", tokens)
        served = rig.arrive("warm", tokens)
        rig.allocate(served, rig.matched(served))
        plan = rig.plan({})
        (job,) = plan.loads
        unknown = dataclasses.replace(job, acquired=msgspec.structs.replace(job.acquired, lease=job.acquired.lease + 1))
        output = rig.report(dataclasses.replace(plan, loads=(unknown,)))
        assert output.invalid_block_ids == set(served.blocks[:5])
        rig.finish(served)


def test_after_one_failed_load_the_request_is_computed(rig: Rig) -> None:
    tokens = prompt(64)
    rig.serve("cold", tokens)
    served = rig.arrive("warm", tokens)
    rig.allocate(served, rig.matched(served))
    plan = rig.plan({})
    (job,) = plan.loads
    gone = dataclasses.replace(job, incarnation=job.incarnation + 1)
    output = rig.report(dataclasses.replace(plan, loads=(gone,)))
    assert output.invalid_block_ids == set(served.blocks[:4])
    assert [rig.matched(served) for _ in range(3)] == [0, 0, 0]
    rig.allocate(served, 0)
    rig.step({served: 64})
    assert rig.wrong_tokens(served) == []
    rig.finish(served)
    assert rig.serve("another", tokens).external == 63


# --- stores that fail ------------------------------------------------------------------------------------------------


def test_a_store_that_another_engine_is_busy_with_is_asked_for_again(server: CacheServer, model: str) -> None:
    config = rig_config(server.url, model=model)
    tokens = prompt(64)
    with Rig(config) as first, Rig(config) as second:
        hold, one = threading.Event(), first.arrive("one", tokens)
        first.allocate(one, first.matched(one))
        storer = first.worker.storer
        fill, reserved = storer._fill, threading.Event()

        def slowly(*arguments: object) -> int:
            reserved.set()
            hold.wait()
            return fill(*arguments)  # type: ignore[arg-type]

        storer._fill = slowly  # type: ignore[method-assign]
        storing = threading.Thread(target=first.step, args=({one: 64},))
        storing.start()
        reserved.wait()
        two = second.arrive("two", tokens)
        second.allocate(two, second.matched(two))
        assert second.step({two: 64}).kv_connector_worker_meta == StepOutcome({"two": 0})
        hold.set()
        storing.join()
        two.request.append_output_token_ids(5)
        outcomes = []
        for _ in range(3):
            two.request.num_computed_tokens -= 1  # decode steps
            outcomes.append(second.step({two: 1}).kv_connector_worker_meta)
        assert StepOutcome({"two": 4}) in outcomes
        first.finish(one)
        second.finish(two)
    server.quiet()


def test_a_pool_that_is_too_small_keeps_the_leading_chunks() -> None:
    with running_server("--l1-size-gb", "0.001") as server:
        with Rig(rig_config(server.url, head_size=512), step_tokens=48) as rig:  # chunks of 256 KiB in a pool of 1 MiB
            tokens = prompt(160)
            rig.serve("cold", tokens)
            assert 16 <= rig.serve("warm", tokens).external <= 64
        server.quiet()


# --- what the engine's thread pays -----------------------------------------------------------------------------------


def test_two_hundred_waiting_requests_cost_one_patience_per_step_together() -> None:
    with running_server() as server, Rig(rig_config(server.url, settings={})) as rig:
        server_pid = server.pid
        waiting = [rig.arrive(f"r{i}", prompt(64, i)) for i in range(200)]
        os.kill(server_pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            answers = [rig.scheduler.matched_tokens(served.request, 0) for served in waiting]
            first = time.monotonic() - started
            rig.plan({})
            started = time.monotonic()
            answers += [rig.scheduler.matched_tokens(served.request, 0) for served in waiting]
            second = time.monotonic() - started
        finally:
            os.kill(server_pid, signal.SIGCONT)
        assert set(answers) == {(None, False)}
        assert second < 20 * PATIENCE, f"{first:.4f} s, then {second:.4f} s"
        for served in waiting:
            assert rig.matched(served) == 0
            rig.finish(served)
        server.quiet()


def eventually(condition: object, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False
