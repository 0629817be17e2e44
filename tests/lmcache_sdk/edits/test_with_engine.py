"""Edits by streams and batches, with a real vLLM: what is decoded is attention over what was kept.

The oracle never sees the cache: it computes a prompt in plain torch, turns the raw keys of the kept tokens for the
places that they have now, and goes on from there. One engine in float32 behind its HTTP endpoint for all tests.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from lmcache_sdk import LMCacheSDKContext, kvcache, qcache
from lmcache_sdk.batch import LMCacheBatchedStream
from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.completion import post_completion
from lmcache_sdk.edits import (
    RKV,
    ExpectedAttention,
    HighestScores,
    RandomChunks,
    Rotary,
    SinksAndRecent,
    SnapKV,
    TokenSelector,
    keydiff,
    token_dropping,
)
from lmcache_sdk.request import LMCacheRequestStream, LMCacheRequestStreamError, PostCompletion, create_request
from tests.engine import Completion, Engine, connector_config, engine_process, tiny_model
from tests.qwen3 import Past, PlainQwen3
from tests.servers import running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(420)]

STREAMS = 8
CHUNK = 64
CHUNKS = 8
WHOLE = CHUNKS * CHUNK
HALF = WHOLE // 2
TAIL = 10
DECODE = 5
GREEDY = {"max_tokens": DECODE, "temperature": 0.0, "ignore_eos": True}
TOLERANCE = 1e-3
"""Between logprobs of float32 computations that order their sums differently; a wrong key shows as 0.1 and more."""

QUERY_TOLERANCE = 1e-4
"""The same between queries, which are of size 1."""

_seeds = itertools.count(1)


@dataclass
class Setup:
    """An engine that captures queries, and contexts for its caches."""

    engine: Engine
    kv: LMCacheSDKContext
    queries: LMCacheSDKContext
    complete: PostCompletion
    oracle: PlainQwen3
    rotary: Rotary

    def stream(self, *contexts: LMCacheSDKContext, prompt: list[int] | None = None) -> LMCacheRequestStream:
        """A stream whose prompt was prefilled."""
        stream = create_request(contexts or [self.kv], self.complete, prompt or new_prompt())
        stream.generate({**GREEDY, "max_tokens": 1})
        return stream

    def ask(self, prompt: Sequence[int], cached: int, salt: str = "") -> Completion:
        """What the engine says of a prompt when it has only external KV; asserts how much of that it took."""
        self.engine.reset_prefix_cache()
        answer = self.engine.complete(prompt, max_tokens=DECODE, cache_salt=salt)
        assert answer.cached_tokens == cached
        return answer

    def past(self, prompt: Sequence[int], kept: Sequence[int]) -> Past:
        """What attention should see of an edited prompt: the kept tokens' values, and their keys turned anew."""
        whole = self.oracle.forward(list(prompt[:WHOLE]))
        return Past(self.oracle.turn(whole.raw_keys[:, kept], torch.arange(len(kept))), whole.values[:, kept])

    def expected(self, tokens: Sequence[int], past: Past | None) -> torch.Tensor:
        """For each of the last DECODE of `tokens`, which stand after `past`, the logprobs of what comes there."""
        return self.oracle.forward(list(tokens[:-1]), past).logits[-DECODE:].log_softmax(-1)

    def decoded_on(self, stream: LMCacheRequestStream, prompt: Sequence[int], kept: Sequence[int]) -> torch.Tensor:
        """What attention over `kept` says of each token that the stream decoded; asserts that the engine says so too,
        and that the stream decoded the likeliest ones."""
        before, decoded = stream.tokens[:-DECODE], stream.tokens[-DECODE:]
        assert before[: len(kept)] == [prompt[i] for i in kept]
        answer = self.ask(before, cached=len(kept), salt=stream.cache_salt)
        assert list(answer.tokens) == decoded
        expected = self.expected(stream.tokens[len(kept) :], self.past(prompt, kept))
        assert distance(answer, expected) < TOLERANCE
        assert decoded == expected.argmax(dim=-1).tolist()
        return expected


def new_prompt() -> list[int]:
    return random.Random(next(_seeds)).choices(range(256), k=WHOLE + TAIL)


def distance(answer: Completion, expected: torch.Tensor, steps: int = DECODE) -> float:
    """The largest difference between an answer's logprobs and the expected ones `[steps, vocabulary]`."""
    told = [(step, token, value) for step in range(steps) for token, value in answer.logprobs[step].items()]
    return max(abs(value - expected[step, token].item()) for step, token, value in told)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    # The oracle beside a busy engine is quicker without threads that wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tiny_model(dtype="float32")
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    arguments = ["--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "16"]
    capture = {"transfer_intermediate_tensors": True}
    with (
        running_server("--chunk-size", str(CHUNK), "--l1-size-gb", "0.5") as server,
        engine_process(model, log, connector=connector_config(server.port, **capture), arguments=arguments) as engine,
        kvcache.connect(server.url, server.http_url, str(model), timeout=10) as kv,
        qcache.connect(server.url, server.http_url, str(model), timeout=10) as queries,
    ):
        complete = post_completion(engine.url, str(model))
        rotary = Rotary.from_config(json.loads((model / "config.json").read_text()))
        yield Setup(engine, kv, queries, complete, PlainQwen3(model), rotary)
    torch.set_num_threads(threads)


class Remembering:
    """A TokenSelector that remembers what another one chose."""

    def __init__(self, select: TokenSelector) -> None:
        self.select = select
        self.kept: list[int] = []

    def __call__(self, tensors: Mapping[LMCacheSDKCacheKind, torch.Tensor], tokens: Sequence[int]) -> Sequence[int]:
        self.kept = list(self.select(tensors, tokens))
        return self.kept


def test_a_batch_that_drops_half_decodes_on_half_the_kv_and_nobody_else_sees_it(setup: Setup) -> None:
    prompts = [new_prompt() for _ in range(STREAMS)]
    batch = LMCacheBatchedStream()
    streams = [create_request([setup.kv], setup.complete, prompt) for prompt in prompts]
    for stream in streams:
        batch.add(stream)
    select = RandomChunks(CHUNK, seed=1)
    assert batch.prefill(GREEDY).to_dict()["metrics"]["results"]["input_tokens"] == STREAMS * (WHOLE + TAIL)
    batch.modify(token_dropping(select, setup.rotary))
    assert not batch.failures
    counters = ("prompt_tokens", "prefix_cache_hits", "external_prefix_cache_hits", "generation_tokens")
    before = [setup.engine.counter(name) for name in counters]
    report = batch.decode(GREEDY)
    assert not batch.failures
    assert report.to_dict()["metrics"]["results"]["output_tokens"] == STREAMS * DECODE

    # The engine's own account: each prompt is half, the tail, and the token of the prefill; half came from the cache.
    prompt_tokens, own_hits, external_hits, generated = (
        setup.engine.counter(name) - earlier for name, earlier in zip(counters, before, strict=True)
    )
    assert (prompt_tokens, own_hits) == (STREAMS * (HALF + TAIL + 1), 0)
    assert (external_hits, generated) == (STREAMS * HALF, STREAMS * DECODE)

    for stream, prompt in zip(streams, prompts, strict=True):
        kept = select({}, prompt[:WHOLE])
        edited = setup.decoded_on(stream, prompt, kept)
        shortened = stream.tokens[:-DECODE]
        # A plain client shares the chunks up to the first one that was dropped, and computes the rest.
        shared = next((i for i, token in enumerate(kept) if token != i), len(kept))
        plain = setup.ask(shortened, cached=shared)
        assert distance(plain, setup.expected([*shortened, *plain.tokens], None)) < TOLERANCE
        assert distance(plain, edited, steps=1) > 10 * TOLERANCE


@pytest.mark.parametrize("method", ["sinks", "keydiff", "SnapKV", "Expected Attention", "R-KV"])
def test_what_a_method_keeps_of_real_kv_is_what_is_decoded_on(setup: Setup, method: str) -> None:
    size = setup.rotary.head_size
    scores = {
        "keydiff": keydiff,
        "SnapKV": SnapKV(window=16),
        "Expected Attention": ExpectedAttention(setup.rotary),
        "R-KV": RKV(),
    }
    select = Remembering(
        HighestScores(scores[method], size, chunk_size=CHUNK) if method in scores else SinksAndRecent(HALF - 4)
    )
    prompt = new_prompt()
    stream = setup.stream(setup.kv, setup.queries, prompt=prompt)
    captured = stream.retrieve(LMCacheSDKCacheKind.QUERY)
    computed = setup.oracle.turn(setup.oracle.forward(prompt[:WHOLE]).raw_queries, torch.arange(WHOLE)).flatten(2)[None]
    torch.testing.assert_close(captured, computed, rtol=QUERY_TOLERANCE, atol=QUERY_TOLERANCE)
    stream.modify_kv(token_dropping(select, setup.rotary))
    stream.generate(GREEDY)
    assert len(select.kept) == HALF
    assert select.kept != list(range(HALF))
    setup.decoded_on(stream, prompt, select.kept)


def test_without_a_query_context_a_method_says_what_is_missing_and_the_stream_goes_on_unedited(setup: Setup) -> None:
    prompt = new_prompt()
    stream = setup.stream(prompt=prompt)
    edit = token_dropping(HighestScores(SnapKV(), setup.rotary.head_size), setup.rotary)
    with pytest.raises(LMCacheRequestStreamError, match=r"needs the prompt's queries, .* qcache\.connect"):
        stream.modify_kv(edit)
    assert (stream.tokens[:-1], stream.suffix_tokens, stream.cache_salt) == (prompt, [], "")
    stream.generate(GREEDY)
    answer = setup.ask(stream.tokens[:-DECODE], cached=WHOLE)
    assert list(answer.tokens) == stream.tokens[-DECODE:]


def test_edits_can_follow_each_other_and_each_is_served(setup: Setup) -> None:
    prompt = new_prompt()
    stream = setup.stream(prompt=prompt)
    edit = token_dropping(RandomChunks(CHUNK), setup.rotary)
    stream.modify_kv(edit)
    once = (list(stream.tokens), stream.cache_salt)
    stream.modify_kv(edit)
    first = RandomChunks(CHUNK)({}, prompt[:WHOLE])
    kept = [first[i] for i in RandomChunks(CHUNK)({}, once[0])]
    assert len(kept) == HALF // 2
    stream.generate(GREEDY)
    assert stream.cache_salt != once[1]
    setup.decoded_on(stream, prompt, kept)
