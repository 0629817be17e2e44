"""A real engine with very few blocks: requests wait, are preempted, and are asked about again and again."""

from collections.abc import Iterator

import pytest

from tests.connector.test_vllm_faults import same_answer
from tests.connector.watched import Watched, prompt_of, watched_engine

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

SIZE = 32
"""Tokens of a chunk and of a block."""
BLOCKS = 15


@pytest.fixture(scope="module")
def engine() -> Iterator[Watched]:
    options = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 13 * SIZE, "max_num_batched_tokens": 64}
    with watched_engine(SIZE, SIZE, dtype="float32", max_num_seqs=4, **options) as running:
        yield running


@pytest.fixture
def watched(engine: Watched) -> Watched:
    engine.forget()
    return engine


def test_requests_that_wait_for_blocks_are_stored_without_a_hole_and_loaded_whole(watched: Watched) -> None:
    prompts = [prompt_of(6 * SIZE + 3, seed) for seed in range(5)]
    cold = watched.engine.complete_all(prompts, max_tokens=3)
    watched.engine.reset_prefix_cache()
    watched.asked.clear()
    warm = watched.engine.complete_all(prompts, max_tokens=3)
    questions = [request for request, _, _ in watched.asked]
    assert len(questions) > len(set(questions)), "somebody waited and was asked about again"
    for request in set(questions):
        assert {answer for asked, _, answer in watched.asked if asked == request and answer is not None} == {6 * SIZE}
    assert [answer.cached_tokens for answer in warm] == [6 * SIZE] * 5
    assert all(same_answer(a, b) for a, b in zip(warm, cold, strict=True))


def test_what_preempted_requests_stored_is_right_and_what_they_are_promised_possible(watched: Watched) -> None:
    prompts = [prompt_of(3 * SIZE + 25, 100 + seed) for seed in range(4)]
    alone = [watched.complete(prompt, max_tokens=24) for prompt in prompts]
    watched.forget()
    together = watched.engine.complete_all(prompts, max_tokens=24)
    for one, other in zip(together, alone, strict=True):
        assert same_answer(one, other)
    assert watched.preemptions > 0
    for prompt, answer in zip(prompts, alone, strict=True):
        warm = watched.external(prompt, max_tokens=24)
        assert warm.cached_tokens == 3 * SIZE
        assert same_answer(warm, answer)


def test_hits_larger_than_half_of_all_blocks_get_through_one_after_the_other(watched: Watched) -> None:
    prompts = [prompt_of(9 * SIZE + 3, 200 + seed) for seed in range(4)]
    for prompt in prompts:
        watched.complete(prompt)
    watched.engine.reset_prefix_cache()
    warm = watched.engine.complete_all(prompts, max_tokens=3)
    assert [answer.cached_tokens for answer in warm] == [9 * SIZE] * 4


def test_requests_aborted_while_they_wait_leave_nothing(watched: Watched) -> None:
    from vllm import SamplingParams

    prompts = [prompt_of(9 * SIZE + 3, 300 + seed) for seed in range(3)]
    for prompt in prompts:
        watched.complete(prompt)
    watched.engine.reset_prefix_cache()
    llm = watched.engine.llm.llm_engine
    parameters = SamplingParams(max_tokens=20, ignore_eos=True)
    for round in range(20):
        for i, prompt in enumerate(prompts):
            llm.add_request(f"{round}-{i}", {"prompt_token_ids": prompt}, parameters)
        for _ in range(1 + round % 5):
            llm.step()
        llm.abort_request([f"{round}-{i}" for i in range(3)])
    while llm.has_unfinished_requests() or watched.engine.scheduler.has_requests():
        llm.step()
    watched.server.quiet()
    assert watched.scheduler_half._requests == {}
    assert watched.scheduler_half._loading == {}
