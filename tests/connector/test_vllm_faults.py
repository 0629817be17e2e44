"""A real engine through accidents: shared blocks, lost chunks, a killed server, many stores per prompt."""

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from lmcache_connector.metadata import StepPlan
from tests.connector.watched import Watched, prompt_of, watched_engine, without_lease_on_chunk
from tests.engine import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

CHUNK, BLOCK = 96, 32
_seeds = count(1000)


@pytest.fixture(scope="module")
def engine() -> Iterator[Watched]:
    # float32, so that tokens never depend on the order of additions.
    with watched_engine(CHUNK, BLOCK, dtype="float32", max_num_batched_tokens=512, max_num_seqs=8) as running:
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
    mapped = {
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "lmcache" in line
    }
    assert mapped == {f"/dev/shm/{watched.server.segment}"}, "the pools of the killed servers are let go"


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
