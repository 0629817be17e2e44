"""A real engine with two LoRA adapters and the base model in one seeded mix of requests: every answer is the one that
the engine computes itself, and every hit is of the request's own adapter.

The oracle is the same engine, asked to keep out of the cache request by request; that it did is asserted.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lmcache_connector.metadata import StepPlan
from tests.connector.test_vllm_equality import close
from tests.connector.watched import Watched, prompt_of, watched_engine
from tests.engine import tiny_model
from tests.lora import save_adapter

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

CHUNK = 32
KEEP_OUT = {"kv_transfer_params": {"no_store": True, "no_load": True}}


@dataclass(frozen=True)
class Answer:
    """What a request got: tokens, for each the likeliest tokens' logprobs, and how many prompt tokens were cached."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached: int

    def equals(self, other: "Answer") -> bool:
        """Whether both are the same answer; what was computed in other batches differs in the last bits."""
        alike = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(close(some, others, 1e-3) for some, others in alike)


@dataclass(frozen=True)
class Asked:
    """One request of the mix."""

    prompt: tuple[int, ...]
    adapter: LoRARequest | None = field(compare=False)
    name: str

    def prefix(self, chunks: int) -> tuple[str, tuple[int, ...]]:
        """Its first chunks, which only a request with the same adapter may share."""
        return self.name, self.prompt[: chunks * CHUNK]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    # One slot more than adapters: vLLM's CPU backend applies the adapter in the last slot, if there is one, to requests
    # without an adapter when they are computed together with others.
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_num_seqs": 32}
    with watched_engine(CHUNK, CHUNK, dtype="float32", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapters are: A with number 1, B with number 2."""
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("AB"):
        save_adapter(made / name, tiny_model(dtype="float32"), seed)
    return made


def adapter(folder: Path, name: str, number: int = 0) -> LoRARequest | None:
    """The adapter of that name; "" is the base model."""
    return LoRARequest(name, number or " AB".index(name), str(folder / name)) if name else None


def answers(watched: Watched, requests: list[Asked], **sampling: Any) -> list[Answer]:
    """All of them, submitted at once to an engine that has forgotten everything."""
    watched.engine.reset_prefix_cache()
    given = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "logprobs": 3, **sampling}
    prompts: Any = [{"prompt_token_ids": list(asked.prompt)} for asked in requests]
    adapters: Any = [asked.adapter for asked in requests]
    outputs = watched.engine.llm.generate(prompts, SamplingParams(**given), lora_request=adapters, use_tqdm=False)
    return [
        Answer(
            tuple(output.outputs[0].token_ids),
            tuple(
                {t: entry.logprob for t, entry in likeliest.items()} for likeliest in output.outputs[0].logprobs or ()
            ),
            output.num_cached_tokens or 0,
        )
        for output in outputs
    ]


def computed(watched: Watched, requests: list[Asked]) -> list[Answer]:
    """The answers without the cache: nothing is asked for, loaded or stored."""
    counters, done = watched.server.status()["counters"], (len(watched.loads), len(watched.stores))
    found = answers(watched, requests, extra_args=KEEP_OUT)
    assert (len(watched.loads), len(watched.stores)) == done
    now = watched.server.status()["counters"]
    assert all(now[name] == counters[name] for name in ("lookups", "reserved_chunks", "committed_chunks"))
    return found


def batches(folder: Path) -> list[list[Asked]]:
    """300 requests in 10 batches; in a batch no two share a chunk, so that each hit can be foreseen."""
    chance = random.Random(7)
    beginnings = [prompt_of(100, seed) for seed in range(10)]
    made = []
    for _ in range(10):
        batch = []
        for name in ("", "A", "B"):
            for beginning in beginnings:
                tail = prompt_of(chance.choice([20, 60]), seed=100 + chance.randrange(2))
                prompt = tuple(beginning[: chance.choice([40, 100])] + tail)
                batch.append(Asked(prompt, adapter(folder, name), name))
        chance.shuffle(batch)
        made.append(batch)
    return made


def test_a_mix_of_300_requests_is_answered_as_without_a_cache_and_hits_its_own_adapters_only(
    watched: Watched, folder: Path
) -> None:
    watched.forget()
    mix = batches(folder)
    different = list({asked: asked for batch in mix for asked in batch}.values())
    oracle: dict[Asked, Answer] = {}
    for i in range(0, len(different), 30):
        some = different[i : i + 30]
        oracle |= dict(zip(some, computed(watched, some), strict=True))
    for prompt in {asked.prompt for asked in different}:
        alike = [oracle[one] for name in ("", "A", "B") if (one := Asked(prompt, None, name)) in oracle]
        assert not any(a.equals(b) for a, b in combinations(alike, 2)), "each adapter makes a difference"

    stored: set[tuple[str, tuple[int, ...]]] = set()
    external = dict.fromkeys(("", "A", "B"), 0)
    for batch in mix:
        for asked, answer in zip(batch, answers(watched, batch), strict=True):
            foreseen = max(
                (n for n in range(1, len(asked.prompt) // CHUNK + 1) if asked.prefix(n) in stored), default=0
            )
            assert answer.cached == min(foreseen * CHUNK, len(asked.prompt) - 1), asked.name
            assert answer.equals(oracle[asked]), asked.name
            external[asked.name] += answer.cached
        stored |= {asked.prefix(n) for asked in batch for n in range(1, len(asked.prompt) // CHUNK + 1)}
    assert min(external.values()) > 1000
    counters = watched.server.status()["counters"]
    assert counters["evicted_chunks"] == 0, "or the hits could not be foreseen"


def test_other_weights_under_the_same_name_do_not_hit(watched: Watched, folder: Path) -> None:
    watched.forget()
    prompt = tuple(prompt_of(100, 50))
    old = Asked(prompt, adapter(folder, "B"), "B")
    (first,) = answers(watched, [old])
    save_adapter(folder / "B", tiny_model(dtype="float32"), seed=9)
    done = len(watched.loads), len(watched.stores)
    (same_number,) = answers(watched, [old])
    assert same_number.cached == 0 and same_number.equals(first), "the engine has not read the new weights"
    assert (len(watched.loads), len(watched.stores)) == done, "and nobody can know that"
    new = Asked(prompt, adapter(folder, "B", number=3), "B")
    (expected,) = computed(watched, [new])
    assert not expected.equals(first)
    cold, warm = (answers(watched, [new])[0] for _ in range(2))
    assert (cold.cached, warm.cached) == (0, 96)
    assert cold.equals(expected) and warm.equals(expected)


def test_several_answers_to_one_prompt_and_logprobs_of_a_prompt(watched: Watched) -> None:
    watched.forget()
    prompt = prompt_of(100, 60)
    plans: list[StepPlan] = []

    def complete(**sampling: Any) -> Any:
        watched.engine.reset_prefix_cache()
        parameters = SamplingParams(max_tokens=2, top_k=1, ignore_eos=True, **sampling)
        return watched.engine.llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)[0]

    cold = complete(prompt_logprobs=2)
    watched.after_load = plans.append
    again = complete(prompt_logprobs=2)
    assert not any(plan.loads for plan in plans), "each prompt token has to be computed"
    of_cold, of_again = (
        [max(entry.logprob for entry in likeliest.values()) for likeliest in output.prompt_logprobs[1:]]
        for output in (cold, again)
    )
    assert of_cold == pytest.approx(of_again, abs=1e-4)
    several = complete(n=3)
    assert any(plan.loads for plan in plans)
    assert [answer.token_ids for answer in several.outputs] == [cold.outputs[0].token_ids] * 3
    watched.after_load = lambda plan: None
