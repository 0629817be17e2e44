"""A real engine through accidents: shared blocks, lost chunks, a killed server, many stores per prompt. And what its
metrics, its log and its events say about that.
"""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVEventBatch

from lmcache_connector.metadata import StepPlan
from lmcache_connector.metrics import PREFIX
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.layout import slot_bytes
from tests.connector.watched import Watched, prompt_of, watched_engine, without_lease_on_chunk
from tests.engine import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

CHUNK, BLOCK = 96, 32
HITS_BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
_seeds = count(1000)


@pytest.fixture(scope="module")
def events() -> Iterator["zmq.Socket[bytes]"]:
    """What the engine publishes; its end connects to this one."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.bind("tcp://127.0.0.1:*")
        socket.subscribe(b"")
        yield socket


@pytest.fixture(scope="module")
def engine(events: "zmq.Socket[bytes]") -> Iterator[Watched]:
    published = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=events.get_string(zmq.LAST_ENDPOINT)
    )
    # float32, so that tokens never depend on the order of additions.
    with watched_engine(
        CHUNK, BLOCK, dtype="float32", max_num_batched_tokens=512, max_num_seqs=8, disable_log_stats=False,
        kv_events_config=published,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def watched(engine: Watched) -> Iterator[Watched]:
    """The engine, as if new."""
    engine.forget()
    yield engine
    engine.before_load = lambda plan: plan
    engine.after_load = lambda plan: None


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of four chunks and a bit that no other test has used."""
    return prompt_of(4 * CHUNK + 5, seed=next(_seeds))


def same_answer(one: Completion, other: Completion) -> bool:
    """The same tokens, with logprobs that agree as far as the order of additions allows."""
    if one.tokens != other.tokens:
        return False
    pairs = zip(one.tokens, one.logprobs, other.logprobs, strict=True)
    return all(abs(mine[token] - theirs[token]) < 1e-2 for token, mine, theirs in pairs)


# --- local hit and external hit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_blocks", [1, 2, 4, 9])
def test_blocks_shared_with_a_live_request_are_the_same_before_and_after_a_load(
    watched: Watched, prompt: list[int], local_blocks: int
) -> None:
    alone = watched.complete(prompt, max_tokens=2)
    neighbour = prompt[: local_blocks * BLOCK] + prompt_of(20, seed=local_blocks)
    watched.engine.reset_prefix_cache()
    neighbour_alone = watched.complete(neighbour, max_tokens=12)
    shared: list[torch.Tensor] = []

    def look(plan: StepPlan) -> StepPlan:
        for job in plan.loads:
            if job.first:
                shared.append(pages_of(watched, job.tables[0][: job.first // BLOCK]))
        return plan

    def look_again(plan: StepPlan) -> None:
        watched.wait_for_loads()
        for job in plan.loads:
            if job.first:
                shared.append(pages_of(watched, job.tables[0][: job.first // BLOCK]))

    watched.before_load, watched.after_load = look, look_again
    watched.loads.clear()
    # The neighbour's blocks are still the engine's own: both requests share them, and the longer one loads the rest.
    answers = watched.engine.complete_all([neighbour, prompt], max_tokens=12)
    assert same_answer(answers[0], neighbour_alone)
    assert answers[1].tokens[:2] == alone.tokens
    job = next(job for job in watched.loads if job.end == 4 * CHUNK)
    assert job.first == local_blocks * BLOCK
    assert len(shared) == 2
    assert torch.equal(shared[0], shared[1])


def pages_of(watched: Watched, block_ids: tuple[int, ...]) -> torch.Tensor:
    """All bytes of these blocks in all layers."""
    return torch.stack([page[list(block_ids)].clone() for page in watched.engine.kv_caches]).view(torch.uint8)


def test_what_is_promised_is_what_is_written(watched: Watched, prompt: list[int]) -> None:
    full = prompt[: 2 * CHUNK]
    watched.complete(full)
    watched.engine.reset_prefix_cache()
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []

    def look(plan: StepPlan) -> StepPlan:
        before.extend(watched.tokens_in_pages(job.tables[0], 2 * CHUNK) for job in plan.loads)
        return plan

    def look_again(plan: StepPlan) -> None:
        watched.wait_for_loads()
        after.extend(watched.tokens_in_pages(job.tables[0], 2 * CHUNK) for job in plan.loads)

    watched.engine.kv_caches[0].untyped_storage().fill_(0xA5)
    watched.before_load, watched.after_load = look, look_again
    assert watched.complete(full).cached_tokens == 2 * CHUNK - 1
    changed = (before[0] != after[0]).flatten(3).any(dim=-1).all(dim=0).all(dim=0)
    assert changed.tolist() == [True] * (2 * CHUNK - 1) + [False]


# --- loads that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_lost_chunk_is_computed_again_and_the_answer_is_right(
    watched: Watched, prompt: list[int], chunk: int
) -> None:
    cold = watched.complete(prompt, max_tokens=4)
    watched.before_load = lambda plan: without_lease_on_chunk(plan, chunk)
    recovered = watched.external(prompt, max_tokens=4)
    assert same_answer(recovered, cold)
    watched.before_load = lambda plan: plan
    assert same_answer(watched.external(prompt, max_tokens=4), cold)


def test_a_request_whose_loads_always_fail_is_computed_after_the_first(watched: Watched, prompt: list[int]) -> None:
    cold = watched.complete(prompt, max_tokens=4)
    watched.before_load = lambda plan: without_lease_on_chunk(plan, 0)
    watched.loads.clear()
    assert same_answer(watched.external(prompt, max_tokens=4), cold)
    assert len(watched.loads) == 1
    watched.before_load = lambda plan: plan


def test_with_the_policy_fail_the_user_sees_an_error(watched: Watched, prompt: list[int]) -> None:
    watched.complete(prompt)
    watched.engine.reset_prefix_cache()
    watched.before_load = lambda plan: without_lease_on_chunk(plan, 2)
    watched.engine.scheduler.recompute_kv_load_failures = False
    try:
        (output,) = generate(watched, prompt)
        assert output.outputs[0].finish_reason == "error"
    finally:
        watched.engine.scheduler.recompute_kv_load_failures = True
        watched.before_load = lambda plan: plan
    assert watched.external(prompt).cached_tokens == 4 * CHUNK


def generate(watched: Watched, prompt: list[int]) -> list:  # type: ignore[type-arg]
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": prompt}]
    return watched.engine.llm.generate(inputs, SamplingParams(max_tokens=2), use_tqdm=False)  # type: ignore[arg-type]


# --- stores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_a_prompt_that_is_prefilled_in_many_steps_is_stored_whole(watched: Watched, blocks: int) -> None:
    scheduler = watched.engine.scheduler
    budget, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, blocks * BLOCK
    try:
        prompts = [prompt_of(CHUNK * (1 + i % 4) + 7 * i, seed=50 * blocks + i) for i in range(4)]
        watched.engine.complete_all(prompts)
        watched.engine.reset_prefix_cache()
        warm = watched.engine.complete_all(prompts)
    finally:
        scheduler.max_num_scheduled_tokens = budget
    assert [answer.cached_tokens for answer in warm] == [
        min(len(prompt) // CHUNK * CHUNK, len(prompt) - 1) for prompt in prompts
    ]


def test_generated_tokens_are_not_stored_by_default(watched: Watched) -> None:
    prompt = prompt_of(CHUNK - 10, seed=next(_seeds))
    answer = watched.complete(prompt, max_tokens=30)
    assert watched.stores == []
    assert watched.external([*prompt, *answer.tokens]).cached_tokens == 0


def test_salts_separate_tenants(watched: Watched, prompt: list[int]) -> None:
    watched.complete(prompt, cache_salt="a")
    assert watched.external(prompt).cached_tokens == 0
    assert watched.external(prompt, cache_salt="b").cached_tokens == 0
    assert watched.external(prompt, cache_salt="a").cached_tokens == 4 * CHUNK


def test_prompts_whose_logprobs_are_wanted_are_computed_and_still_stored(watched: Watched, prompt: list[int]) -> None:
    assert watched.complete(prompt, prompt_logprobs=1).cached_tokens == 0
    watched.engine.reset_prefix_cache()
    assert watched.complete(prompt, prompt_logprobs=1).cached_tokens == 0
    assert watched.external(prompt).cached_tokens == 4 * CHUNK


# --- the server comes and goes ----------------------------------------------------------------------------------------


def test_answers_stay_right_while_the_server_is_killed_and_hits_are_back_within_ten_seconds(
    watched: Watched, prompt: list[int]
) -> None:
    cold = watched.complete(prompt, max_tokens=4)
    before = mapped_pools()
    for _ in range(2):
        watched.server.kill()
        assert same_answer(watched.external(prompt, max_tokens=4), cold)
        assert same_answer(watched.external(prompt, max_tokens=4), cold)
        watched.server.start()
        started = time.monotonic()
        while True:
            answer = watched.external(prompt, max_tokens=4)
            assert same_answer(answer, cold)
            if answer.cached_tokens == 4 * CHUNK:
                break
            assert time.monotonic() - started < 10
    assert mapped_pools() == before, "the pools of the killed servers are let go"


def mapped_pools() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "lmcache" in line}


def test_a_known_absence_of_the_server_costs_a_request_nothing(watched: Watched, prompt: list[int]) -> None:
    watched.complete(prompt)
    watched.server.kill()
    try:
        watched.external(prompt)  # this one may still find out
        started = time.monotonic()
        for _ in range(3):
            watched.external(prompt[:BLOCK])
        assert time.monotonic() - started < 1.5
    finally:
        watched.server.start()
        deadline = time.monotonic() + 10
        while watched.worker_half.link.attachment is None or watched.scheduler_half.link.attachment is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# --- what the engine says about it ------------------------------------------------------------------------------------


def counters(watched: Watched) -> dict[str, float]:
    """Our metrics and the external hits by source, as an operator sees them; a histogram counts its observations."""
    values: dict[str, float] = {}
    for metric in watched.engine.llm.get_metrics():
        if metric.name.startswith((PREFIX, HITS_BY_SOURCE)):
            name = metric.name.removeprefix(PREFIX) + metric.labels.get("source", "")
            values[name] = getattr(metric, "count", getattr(metric, "value", None))
    return values


def test_the_metrics_of_a_workload_are_exactly_what_was_done(watched: Watched, prompt: list[int]) -> None:
    token_bytes = sum(slot_bytes(group, 1) for group in watched.worker_half.loader._shape.layout.groups)
    before = counters(watched)
    watched.complete(prompt)
    watched.external(prompt)
    watched.complete(prompt[:20])  # shorter than a chunk: nothing to look up
    watched.external(prompt)
    watched.complete(prompt)  # all of it is the engine's own hit
    after = counters(watched)
    asked, hit = 3 * len(prompt), 2 * 4 * CHUNK
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "lookup_duration_seconds": 3, "load_duration_seconds": 2, "store_duration_seconds": 1,
        "asked_tokens": asked, "hit_tokens": hit, "loaded_tokens": hit, "loaded_bytes": hit * token_bytes,
        "stored_tokens": 4 * CHUNK, "stored_bytes": 4 * CHUNK * token_bytes, f"{HITS_BY_SOURCE}host": hit,
        f"{HITS_BY_SOURCE}device": 4 * CHUNK,
    }  # fmt: skip


def test_what_was_lost_on_the_way_is_counted(watched: Watched, prompt: list[int]) -> None:
    watched.complete(prompt)
    before = counters(watched)
    watched.before_load = lambda plan: without_lease_on_chunk(plan, 1)
    watched.external(prompt)
    after = counters(watched)
    assert after["failed_loads"] - before["failed_loads"] == 1
    assert after["failed_blocks"] - before["failed_blocks"] == CHUNK // BLOCK
    assert after["loaded_tokens"] - before["loaded_tokens"] == 3 * CHUNK


def test_the_log_has_one_line_per_interval_and_none_per_request(watched: Watched, prompt: list[int]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("vllm", "lmcache_sdk")]
    watched.engine.llm.llm_engine.do_log_stats()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        watched.complete(prompt)
        watched.external(prompt)
        ours = [record for record in records if "lmcache" in record.name]
        watched.engine.llm.llm_engine.do_log_stats()
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert ours == []
    (line,) = [record.getMessage() for record in records if "KV Transfer metrics" in record.getMessage()]
    for words in ("loads=1, loaded tokens=384, load GB/s=", "stored tokens=384, store GB/s=", "hit rate (%)=49.4"):
        assert words in line


def test_a_listener_to_kv_events_knows_what_the_cache_holds_until_it_is_reset(
    watched: Watched, prompt: list[int], events: "zmq.Socket[bytes]"
) -> None:
    chunks = ChunkHasher(CHUNK).hashes(np.array(prompt, dtype="<u4").tobytes())
    watched.complete(prompt)
    resident, numbers = listen(watched, events, lambda known: set(chunks) <= known.keys())
    assert [resident[chunk].parent_block_hash for chunk in chunks] == [None, *chunks[:-1]]
    assert resident[chunks[1]].token_ids == prompt[CHUNK : 2 * CHUNK]
    assert resident[chunks[1]].block_size == CHUNK
    assert watched.server.status()["storage_manager"]["l1_manager"]["total_object_count"] == len(chunks)

    assert watched.engine.llm.reset_prefix_cache(reset_connector=True)
    assert watched.server.status()["storage_manager"]["l1_manager"]["total_object_count"] == 0
    _, later = listen(watched, events, lambda known: not set(chunks) & known.keys(), resident)
    assert numbers + later == list(range(numbers[0], numbers[0] + len(numbers + later)))


def listen(
    watched: Watched,
    events: "zmq.Socket[bytes]",
    enough: Callable[[dict[bytes, BlockStored]], bool],
    known: dict[bytes, BlockStored] | None = None,
) -> tuple[dict[bytes, BlockStored], list[int]]:
    """What blocks in host memory a listener knows of once it is `enough`, and the numbers of the batches."""
    known, numbers = known if known is not None else {}, []
    deadline = time.monotonic() + 10
    while not enough(known):
        assert time.monotonic() < deadline, f"batches {numbers}, {vars(watched.scheduler_half.feed)}"
        watched.complete(prompt_of(8, seed=next(_seeds)))  # an engine publishes when it steps
        while events.poll(50):
            _, number, batch = events.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            for event in msgspec.msgpack.Decoder(KVEventBatch).decode(batch).events:
                if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU:
                    known[event.block_hashes[0]] = event  # type: ignore[index]
                elif isinstance(event, BlockRemoved) and event.medium == MEDIUM_CPU:
                    for name in event.block_hashes:
                        known.pop(name, None)  # type: ignore[call-overload]
    return known, numbers
