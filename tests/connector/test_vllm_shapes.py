"""Real engines of every shape that we take, under a mix of 300 requests: no answer differs from an engine's without us.

Few blocks, so that requests wait and are preempted; steps of few tokens, so that prompts are computed in pieces; some
requests given up at random. Afterwards what the server holds is compared with what transformers computes.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_connector.metadata import StepPlan
from lmcache_sdk import kvcache
from tests.connector.mix import Asked, disagreements, mix, run
from tests.connector.watched import Watched, watched_engine, without_lease_on_chunk
from tests.engine import Completion, in_process_engine
from tests.models import hybrid_model, tiny_model
from tests.reference import reference_kv

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(280)]

CHUNK = 32
LONGEST = 7 * CHUNK
LIMITS = {"max_model_len": 320, "max_num_batched_tokens": 96, "max_num_seqs": 6, "block_size": 32}


@dataclass(frozen=True)
class Engine:
    """A shape of engine; `tolerance` is for logprobs, between computations that order their sums differently."""

    model: Path
    blocks: int
    oracle: str
    tolerance: float = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def engine_named(name: str) -> Engine:
    plain, hybrid = tiny_model(dtype="float32"), hybrid_model(window=64)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    return {
        "plain": Engine(plain, 18, "plain"),
        "loads before the step": Engine(
            plain, 18, "plain", options={"async_scheduling": False}, settings={"load_async": False}
        ),
        "drafts from the prompt": Engine(
            plain, 18, "plain", options={"speculative_config": ngram}, settings={"save_decode_cache": True}
        ),
        "two ranks": Engine(
            plain, 18, "plain", options={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        ),
        "hybrid": Engine(hybrid, 42, "hybrid"),
        "hybrid, as full attention": Engine(hybrid, 18, "hybrid", options={"disable_hybrid_kv_cache_manager": True}),
        "quantised": Engine(tiny_model(), 18, "quantised", 1.5, options={"kv_cache_dtype": "fp8"}),
    }[name]


NAMES = (
    "plain",
    "loads before the step",
    "drafts from the prompt",
    "two ranks",
    "hybrid",
    "hybrid, as full attention",
    "quantised",
)
REQUESTS: list[Asked] = mix(300, seed=7, chunk=CHUNK, longest=LONGEST)
_answers: dict[str, dict[int, Completion]] = {}


def answers_without_us(engine: Engine) -> dict[int, Completion]:
    """Those of an engine without a connector."""
    if engine.oracle not in _answers:
        with in_process_engine(engine.model, **{**LIMITS, **engine.options}) as oracle:
            _answers[engine.oracle] = run(oracle, REQUESTS)
    return _answers[engine.oracle]


@dataclass
class Case:
    name: str
    engine: Engine
    oracle: dict[int, Completion]
    watched: Watched


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    engine = engine_named(request.param)
    oracle = answers_without_us(engine)
    options = {**LIMITS, **engine.options, "num_gpu_blocks_override": engine.blocks, "model": engine.model}
    with watched_engine(CHUNK, options.pop("block_size"), settings=engine.settings, **options) as watched:
        watched.before_load = spoiler(random.Random(5))
        yield Case(request.param, engine, oracle, watched)


def spoiler(rng: random.Random) -> Callable[[StepPlan], StepPlan]:
    """Makes some loads find a chunk gone."""

    def spoil(plan: StepPlan) -> StepPlan:
        if rng.random() < 0.9 or not plan.loads:
            return plan
        job = plan.loads[0]
        return without_lease_on_chunk(plan, rng.randrange(job.first // job.chunk_size, -(-job.end // job.chunk_size)))

    return spoil


def test_no_answer_of_a_mix_differs_from_an_engine_without_us(case: Case) -> None:
    watched = case.watched
    answers = run(watched.engine, REQUESTS)
    assert disagreements(answers, case.oracle, case.engine.tolerance) == []
    assert len(answers) > 250
    assert len(watched.planned) > 30, "many were loaded"
    assert any(job.first for job in watched.planned), "some behind a local hit"
    assert watched.preemptions > 0
    watched.server.quiet()


def test_what_the_mix_stored_is_what_transformers_computes(case: Case) -> None:
    url = (case.watched.server.url, case.watched.server.http_url, str(case.engine.model))
    checked = longest = 0
    with kvcache.connect(*url, timeout=10) as cache:
        for i, asked in list(enumerate(REQUESTS))[::4]:
            tokens = [*asked.prompt, *(case.oracle[i].tokens if i in case.oracle else ())]
            kv = cache.retrieve(tokens, cache_salt=asked.salt)
            if kv is not None:
                same_as_reference(case, kv, tokens)
                checked += 1
                longest = max(longest, kv.shape[2] - len(asked.prompt))
    assert checked > 30
    assert (longest > 0) == case.watched.scheduler_half._config.settings.save_decode_cache


def same_as_reference(case: Case, kv: torch.Tensor, tokens: list[int]) -> None:
    theirs = reference_kv(case.engine.model, tokens[: kv.shape[2]])
    if case.name == "quantised":
        assert close(kv.view(torch.float8_e4m3fn).float(), theirs, 0.2)
    else:
        assert (kv - theirs).abs().max() < 1e-3


def close(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> bool:
    """Whether they differ by at most `share` of what there is, in the root of the mean of the squares."""
    return bool((ours - theirs).pow(2).mean().sqrt() < share * theirs.pow(2).mean().sqrt())
