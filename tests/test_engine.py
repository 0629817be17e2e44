"""The engine harness itself, without a connector: the other tests that use a real engine rest on it."""

import random
from pathlib import Path

import pytest

from tests.engine import engine_process, in_process_engine, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_an_engine_in_process_answers_and_can_be_built_again_after_it_was_closed() -> None:
    model, prompt = tiny_model(), prompt_of(300)
    answers = []
    for _ in range(2):
        with in_process_engine(model) as engine:
            cold = engine.complete(prompt, max_tokens=3)
            hit = engine.complete(prompt, max_tokens=3)
            engine.reset_prefix_cache()
            again = engine.complete(prompt, max_tokens=3)
            assert engine.scheduler_connector is None
            assert engine.kv_caches[0].ndim == 4
        assert (cold.cached_tokens, hit.cached_tokens, again.cached_tokens) == (0, 256, 0)
        assert cold == again
        answers.append(cold)
    assert answers[0] == answers[1]


def test_an_engine_process_answers_reports_cached_tokens_and_leaves_nothing_behind(tmp_path: Path) -> None:
    prompt = prompt_of(300)
    with engine_process(tiny_model(), tmp_path / "vllm.log", arguments=["--max-model-len", "4096"]) as engine:
        cold = engine.complete(prompt, max_tokens=3)
        hit = engine.complete(prompt, max_tokens=3)
        engine.reset_prefix_cache()
        again = engine.complete(prompt, max_tokens=3)
        salted = engine.complete(prompt, max_tokens=3, cache_salt="another")
        assert len(engine.process.group()) > 1
    assert (cold.cached_tokens, hit.cached_tokens, again.cached_tokens, salted.cached_tokens) == (0, 256, 0, 0)
    assert cold.logprobs == again.logprobs == salted.logprobs
    assert len(cold.tokens) == len(cold.logprobs) == 3
    assert cold.ttft_ms > 0
    assert engine.process.group() == []
