"""Real engines of every shape that we take, under a mix of 300 requests: no answer differs from an engine's without us.

Few blocks, so that requests wait and are preempted; steps of few tokens, so that prompts are computed in pieces; some
requests given up at random. Afterwards what the server holds is compared with what transformers computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_sdk import kvcache
from tests.connector.mix import Asked, disagreements, mix, run
from tests.connector.watched import Watched, watched_engine
from tests.engine import Completion, in_process_engine
from tests.models import hybrid_model, latent_model, tiny_model
from tests.reference import reference_kv, reference_latents

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(280)]

CHUNK = 32
LONGEST = 7 * CHUNK
LIMITS = {"max_model_len": 320, "max_num_batched_tokens": 96, "max_num_seqs": 6, "block_size": 32}


@dataclass(frozen=True)
class Engine:
    """A shape of engine; `tolerance` is for logprobs, between computations that order their sums differently."""

    model: Path
    blocks: int
    tolerance: float
    oracle: str
    options: tuple[tuple[str, Any], ...] = ()


def engines() -> dict[str, Engine]:
    plain, hybrid = tiny_model(dtype="float32"), hybrid_model(window=64)
    unified = (("disable_hybrid_kv_cache_manager", True),)
    ranks = (("tensor_parallel_size", 2), ("distributed_executor_backend", "mp"))
    return {
        "plain": Engine(plain, 18, 0.01, "plain"),
        "two ranks": Engine(plain, 18, 0.01, "plain", ranks),
        "hybrid": Engine(hybrid, 42, 0.01, "hybrid"),
        "hybrid, as full attention": Engine(hybrid, 18, 0.01, "hybrid", unified),
        "latent": Engine(latent_model(), 18, 0.5, "latent"),
        "quantised": Engine(tiny_model(), 18, 1.5, "quantised", (("kv_cache_dtype", "fp8"),)),
    }


NAMES = ("plain", "two ranks", "hybrid", "hybrid, as full attention", "latent", "quantised")
REQUESTS: list[Asked] = mix(300, seed=7, chunk=CHUNK, longest=LONGEST)
_answers: dict[str, dict[int, Completion]] = {}


def answers_without_us(engine: Engine) -> dict[int, Completion]:
    """Those of an engine without a connector."""
    if engine.oracle not in _answers:
        with in_process_engine(engine.model, **LIMITS, **dict(engine.options)) as oracle:
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
    engine = engines()[request.param]
    oracle = answers_without_us(engine)
    options = {**LIMITS, **dict(engine.options), "num_gpu_blocks_override": engine.blocks, "model": engine.model}
    with watched_engine(CHUNK, options.pop("block_size"), **options) as watched:
        yield Case(request.param, engine, oracle, watched)


def test_no_answer_of_a_mix_differs_from_an_engine_without_us(case: Case) -> None:
    watched = case.watched
    answers = run(watched.engine, REQUESTS)
    assert disagreements(answers, case.oracle, case.engine.tolerance) == []
    assert len(answers) > 250
    hits = [job for job in watched.planned if job.end > job.first]
    assert len(hits) > 30, "many were loaded"
    assert any(job.first for job in hits), "some behind a local hit"
    assert watched.preemptions > 0
    watched.server.quiet()


def test_what_the_mix_stored_is_what_transformers_computes(case: Case) -> None:
    url = (case.watched.server.url, case.watched.server.http_url, str(case.engine.model))
    checked = 0
    with kvcache.connect(*url, timeout=10) as cache:
        for asked in REQUESTS[::25]:
            kv = cache.retrieve(list(asked.prompt), cache_salt=asked.salt)
            if kv is not None:
                same_as_reference(case, kv, asked)
                checked += 1
    assert checked > 6


def same_as_reference(case: Case, kv: torch.Tensor, asked: Asked) -> None:
    if case.name == "latent":
        tokens = list(asked.prompt[: kv.shape[1]])
        ours, theirs = kv.float(), reference_latents(case.engine.model, tokens)
        assert close(ours[..., :512], theirs[..., :512], 0.1)
        assert close(lengths(ours[..., 512:]), lengths(theirs[..., 512:]), 0.1)
        return
    theirs = reference_kv(case.engine.model, list(asked.prompt[: kv.shape[2]]))
    if case.name == "quantised":
        assert close(kv.view(torch.float8_e4m3fn).float(), theirs, 0.2)
    else:
        assert (kv - theirs).abs().max() < 1e-3


def lengths(turned: torch.Tensor) -> torch.Tensor:
    """Of each pair of elements, which turning does not change."""
    return turned.unflatten(-1, (-1, 2)).norm(dim=-1)


def close(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> bool:
    """Whether they differ by at most `share` of what there is, in the root of the mean of the squares."""
    return bool((ours - theirs).pow(2).mean().sqrt() < share * theirs.pow(2).mean().sqrt())
