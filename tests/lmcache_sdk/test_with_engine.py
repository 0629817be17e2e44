"""The SDK with a real engine: what it takes out is the model's KV, what it puts back is what the engine computes with.

One engine in float32, one server, one context for all tests; each test has prompts of its own.
"""

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3ForCausalLM

from lmcache_sdk import LMCacheSDKContext, kvcache
from lmcache_sdk.edits import Rotary, edit_salt, keep_tokens
from tests.engine import Completion, InProcessEngine, connector_config, in_process_engine, tiny_model
from tests.qwen3 import Past, PlainQwen3
from tests.servers import CacheServer, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

CHUNK = 64
TAIL = 10
TOLERANCE = 1e-3
"""Between logprobs of float32 computations that order their sums differently; a wrong key shows as 0.1 and more."""

_seeds = itertools.count(1)


@dataclass
class Setup:
    """An engine, its server and a context for its cache."""

    engine: InProcessEngine
    server: CacheServer
    cache: LMCacheSDKContext

    def ask(self, prompt: list[int], cached: int, salt: str = "") -> Completion:
        """What the engine says when it has only external KV; asserts how many tokens of it it took."""
        self.engine.reset_prefix_cache()
        answer = self.engine.complete(prompt, max_tokens=4, cache_salt=salt)
        assert answer.cached_tokens == cached
        return answer

    def cached_prompt(self, chunks: int) -> list[int]:
        """A new prompt of so many chunks and a tail, whose KV the server has."""
        prompt = random.Random(next(_seeds)).choices(range(256), k=chunks * CHUNK + TAIL)
        self.engine.complete(prompt)
        self.wait_until_cached(prompt, chunks * CHUNK)
        return prompt

    def wait_until_cached(self, prompt: list[int], tokens: int) -> None:
        deadline = time.monotonic() + 10
        while (found := self.cache.lookup(prompt)) < tokens:
            assert time.monotonic() < deadline, f"{found} of {tokens} tokens cached after 10 s"
            time.sleep(0.01)

    def kv_of(self, prompt: list[int]) -> torch.Tensor:
        """The cached KV of the prompt's whole chunks."""
        kv = self.cache.retrieve(prompt)
        assert kv is not None
        assert kv.shape[2] == len(prompt) - TAIL
        return kv


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    model = tiny_model(dtype="float32")
    with (
        running_server("--chunk-size", str(CHUNK)) as server,
        in_process_engine(model, connector=connector_config(server.port), block_size=32) as engine,
        kvcache.connect(server.url, server.http_url, str(model), timeout=10) as cache,
    ):
        yield Setup(engine, server, cache)


@pytest.fixture(scope="module")
def oracle() -> PlainQwen3:
    return PlainQwen3(tiny_model(dtype="float32"))


def rotary() -> Rotary:
    return Rotary.from_config(Qwen3ForCausalLM.config_class.from_pretrained(tiny_model(dtype="float32")))


def distance(answer: Completion, logprobs: torch.Tensor) -> float:
    """The largest difference between the logprobs of a first token and those of the whole vocabulary."""
    return max(abs(value - logprobs[token].item()) for token, value in answer.logprobs[0].items())


def canonical(heads_first: torch.Tensor) -> torch.Tensor:
    """transformers' `[1, heads, T, head_size]` as `[T, heads * head_size]`."""
    return heads_first[0].transpose(0, 1).flatten(1)


def test_the_kv_of_a_prompt_is_what_transformers_computes_for_it(setup: Setup) -> None:
    prompt = setup.cached_prompt(3)
    kv = setup.kv_of(prompt)
    model = Qwen3ForCausalLM.from_pretrained(tiny_model(dtype="float32"), dtype=torch.float32)
    with torch.no_grad():
        computed = model(torch.tensor([prompt[: 3 * CHUNK]]), use_cache=True).past_key_values.layers
    assert kv.shape[:2] == (2, len(computed))
    for layer, reference in enumerate(computed):
        assert torch.allclose(kv[0, layer], canonical(reference.keys), atol=1e-4)
        assert torch.allclose(kv[1, layer], canonical(reference.values), atol=1e-4)


def test_an_edit_that_returns_its_input_changes_nothing(setup: Setup) -> None:
    prompt = setup.cached_prompt(3)
    plain = setup.ask(prompt, cached=3 * CHUNK)
    salt = edit_salt()
    assert setup.cache.store(setup.kv_of(prompt), prompt[: 3 * CHUNK], salt)
    assert setup.ask(prompt, cached=3 * CHUNK, salt=salt) == plain


def test_dropping_the_last_chunk_gives_the_logprobs_of_the_shorter_prompt(setup: Setup) -> None:
    prompt = setup.cached_prompt(3)
    kv, tokens = keep_tokens(setup.kv_of(prompt), prompt[: 3 * CHUNK], range(2 * CHUNK), rotary())
    short = tokens + prompt[-TAIL:]
    salt = edit_salt()
    assert setup.cache.store(kv, tokens, salt)
    edited = setup.ask(short, cached=2 * CHUNK, salt=salt)
    assert edited == setup.ask(short, cached=2 * CHUNK)


def test_dropping_a_middle_chunk_gives_the_logprobs_of_attention_over_what_is_left(
    setup: Setup, oracle: PlainQwen3
) -> None:
    prompt = setup.cached_prompt(4)
    kept = [i for i in range(4 * CHUNK) if i // CHUNK != 1]
    kv, tokens = keep_tokens(setup.kv_of(prompt), prompt[: 4 * CHUNK], kept, rotary())
    salt = edit_salt()
    assert setup.cache.store(kv, tokens, salt)
    answer = setup.ask(tokens + prompt[-TAIL:], cached=3 * CHUNK, salt=salt)

    # The oracle never saw the cache: raw keys of the whole prompt, turned for the places that the kept ones have now.
    whole = oracle.forward(prompt[: 4 * CHUNK])
    raw, values = whole.raw_keys[:, kept], whole.values[:, kept]
    moved = Past(oracle.turn(raw, torch.arange(len(kept))), values)
    assert distance(answer, oracle.forward(prompt[-TAIL:], moved).logits[-1].log_softmax(-1)) < TOLERANCE

    # The check can tell: neither keys left at their old places nor the prompt without the chunk say the same.
    stale = Past(oracle.turn(raw, torch.tensor(kept)), values)
    assert distance(answer, oracle.forward(prompt[-TAIL:], stale).logits[-1].log_softmax(-1)) > 10 * TOLERANCE
    recomputed = oracle.forward(tokens + prompt[-TAIL:])
    assert distance(answer, recomputed.logits[-1].log_softmax(-1)) > 10 * TOLERANCE


def test_a_plain_client_is_never_served_an_edit_of_the_same_tokens(setup: Setup) -> None:
    prompt = setup.cached_prompt(3)
    plain = setup.ask(prompt, cached=3 * CHUNK)
    edited = setup.kv_of(prompt)
    edited[1] *= -1
    salt = edit_salt()
    assert setup.cache.store(edited, prompt[: 3 * CHUNK], salt)
    assert setup.ask(prompt, cached=3 * CHUNK, salt=salt).logprobs != plain.logprobs
    assert setup.ask(prompt, cached=3 * CHUNK) == plain


def test_a_plain_client_computes_a_prompt_of_which_only_an_edit_is_cached(setup: Setup, oracle: PlainQwen3) -> None:
    prompt = setup.cached_prompt(2)
    # KV of other tokens: no prefix of the edited prompt is anybody's own.
    foreign = [token ^ 1 for token in prompt[: 2 * CHUNK]]
    salt = edit_salt()
    assert setup.cache.store(setup.kv_of(prompt), foreign, salt)
    edited = foreign + prompt[-TAIL:]
    served = setup.ask(edited, cached=2 * CHUNK, salt=salt)
    computed = setup.ask(edited, cached=0)
    expected = oracle.forward(edited).logits[-1].log_softmax(-1)
    assert distance(computed, expected) < TOLERANCE
    assert distance(served, expected) > 10 * TOLERANCE


def test_an_edit_under_the_plain_key_is_refused_and_changes_nothing(setup: Setup) -> None:
    prompt = setup.cached_prompt(2)
    plain = setup.ask(prompt, cached=2 * CHUNK)
    edited = setup.kv_of(prompt) + 1
    assert setup.cache.store(edited, prompt[: 2 * CHUNK]) is False
    assert setup.ask(prompt, cached=2 * CHUNK) == plain
