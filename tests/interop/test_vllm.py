"""A real vLLM whose connector is LMCache's own, unmodified, against our server; its oracle is a vLLM without connector.

Both run the same weights in float32. On a CPU LMCache's adapter moves pages as they are, so what it stores is opaque to
an SDK; whole chunks can still be moved.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

import lmcache_sdk
from tests.engine import Completion, Engine, connector_config, tiny_model
from tests.interop.peer import ENVIRONMENT, PYTHON, Peer
from tests.interop.test_sdk import sha256
from tests.servers import CacheServer, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(600)]

BLOCK, CHUNK = 32, 64
OPTIONS = ("--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-batched-tokens", "512")
ORACLE_OPTIONS = (*OPTIONS, "--no-enable-prefix-caching")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two engines on two cores: threads that wait for each other by spinning would take the time of the other engine."""
START_SECONDS = 400.0
"""Two engines start at once, on a machine that may have two cores and other work."""
HEARTBEAT = 2.0
RECOVERY = 20.0
"""Seconds until an engine has noticed what became of its server, and until it caches again after a restart."""
DEGRADED = "entering degraded mode"
"""What their adapter logs, in each of its halves, when it noticed that the server is gone."""


@dataclass(frozen=True)
class Engines:
    """An engine on LMCache's connector, its server, and an engine without either."""

    server: CacheServer
    cached: Engine
    oracle: Engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model, logs = tiny_model(dtype="float32"), tmp_path_factory.mktemp("vllm")
    with running_server("--chunk-size", str(CHUNK), "--l1-size-gb", "0.03") as server:
        connector = connector_config(
            server.port, mp_transfer_mode="engine_driven", mq_timeout=30, heartbeat_interval=HEARTBEAT
        )
        connector["kv_load_failure_policy"] = "recompute"
        environment = {**ENVIRONMENT, **ONE_THREAD}
        with (
            Engine(
                model,
                logs / "cached.log",
                connector=connector,
                arguments=OPTIONS,
                environment=environment,
                python=PYTHON,
            ) as cached,
            Engine(model, logs / "oracle.log", arguments=ORACLE_OPTIONS, environment=ONE_THREAD) as oracle,
        ):
            for engine in (cached, oracle):
                engine.wait_until_ready(START_SECONDS)
            yield Engines(server, cached, oracle)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def close(one: Completion, other: Completion) -> bool:
    """The same tokens, and logprobs that differ by rounding at most."""
    if one.tokens != other.tokens:
        return False
    pairs = [
        (likeliest[token], others[token])
        for likeliest, others in zip(one.logprobs, other.logprobs, strict=True)
        for token in likeliest.keys() & others.keys()
    ]
    return len(pairs) >= len(one.tokens) and all(abs(a - b) < 1e-3 for a, b in pairs)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7, 1100])
def test_an_external_hit_equals_a_local_one_bit_for_bit(engines: Engines, length: int) -> None:
    engine, tokens = engines.cached, prompt(length, length)
    cold = engine.complete(tokens, max_tokens=4)
    local = engine.complete(tokens, max_tokens=4)
    engine.reset_prefix_cache()
    external = engine.complete(tokens, max_tokens=4)
    whole = length // CHUNK * CHUNK
    assert cold.cached_tokens == 0
    assert external.cached_tokens == min(whole, length - 1)
    if whole:
        assert local.cached_tokens == external.cached_tokens
        assert external.logprobs == local.logprobs
    for answer in (cold, local, external):
        assert close(answer, engines.oracle.complete(tokens, max_tokens=4))
    engines.server.quiet()


@pytest.mark.parametrize("kept", [BLOCK, CHUNK, 3 * BLOCK])
def test_an_external_hit_goes_on_where_a_local_one_ends(engines: Engines, kept: int) -> None:
    engine, tokens = engines.cached, prompt(3 * CHUNK + 7, 40 + kept)
    engine.complete(tokens)
    local = engine.complete(tokens, max_tokens=4)
    engine.reset_prefix_cache()
    assert engine.complete(tokens[: kept + 1]).cached_tokens == kept // CHUNK * CHUNK
    both = engine.complete(tokens, max_tokens=4)
    assert (both.cached_tokens, both.logprobs) == (3 * CHUNK, local.logprobs)
    engines.server.quiet()


def mixed_prompts(count: int) -> list[tuple[list[int], str]]:
    """Short prompts with shared beginnings, and the salt of each."""
    chance = random.Random(2)
    heads = [prompt(chance.randrange(40, 300), seed) for seed in range(12)]
    mix = []
    for seed in range(count):
        head = chance.choice(heads)
        tail = prompt(chance.randrange(1, 60), 1000 + seed)
        mix.append((head[: chance.randrange(20, len(head) + 1)] + tail, chance.choice(["", "", "", "salt"])))
    return mix


def answers(engine: Engine, asked: Sequence[tuple[list[int], str]], threads: int = 12) -> list[Completion]:
    """Ask all at once."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda one: engine.complete(one[0], max_tokens=3, cache_salt=one[1]), asked))


def test_a_mix_of_200_requests_is_answered_as_without_a_cache(engines: Engines) -> None:
    mix = mixed_prompts(200)
    found: list[Completion] = []
    before = engines.server.status()["counters"]
    for start in range(0, len(mix), 25):
        found += answers(engines.cached, mix[start : start + 25])
        engines.cached.reset_prefix_cache()
    expected = answers(engines.oracle, mix)
    assert not [i for i in range(len(mix)) if not close(found[i], expected[i])]
    after = engines.server.quiet()["counters"]
    grown = {name: after[name] - before[name] for name in after}
    assert grown["hit_tokens"] > 0.2 * grown["requested_tokens"], "there was something to find"
    assert grown["evicted_chunks"] > 0, "and not room for everything"
    assert (after["faults"], after["expired_reads"], after["lost_chunks"]) == (0, 0, 0)


@pytest.fixture
def sdk(engines: Engines, peer: Peer) -> Iterator[Peer]:
    """LMCache's SDK, connected to the cache of the engine."""
    peer.call("connect", url=engines.server.url, http_url=engines.server.http_url, model=engines.cached.model)
    yield peer
    peer.call("close")
    engines.server.quiet()


def test_their_sdk_moves_chunks_of_an_engine_on_a_cpu(engines: Engines, sdk: Peer) -> None:
    source, target, tail = prompt(2 * CHUNK, 51), prompt(2 * CHUNK, 52), prompt(9, 53)
    engine = engines.cached
    engine.complete(source + tail)
    (shape, bits), stored = sdk.call("move", source=source, target=target)
    assert (shape, stored) == ([1, 4, 2 * CHUNK, 512], True)
    engine.reset_prefix_cache()
    genuine = engine.complete(source + tail, max_tokens=4)
    moved = engine.complete(target + tail, max_tokens=4)
    assert (genuine.cached_tokens, moved.cached_tokens) == (2 * CHUNK, 2 * CHUNK)
    assert moved.logprobs == genuine.logprobs, "the engine computed on what the SDK put there"
    with lmcache_sdk.kvcache.connect(engines.server.url, engines.server.http_url, engine.model, timeout=10) as ours:
        for tokens in (source, target):
            values = ours.retrieve(tokens)
            assert values is not None and sha256(values) == bits


def test_their_batches_of_streams_edit_and_go_on(engines: Engines, sdk: Peer) -> None:
    prompts = [prompt(length, 60 + length) for length in (2 * CHUNK + 5, 3 * CHUNK, 4 * CHUNK + 40)]
    engine = {"model": engines.cached.model, "completions_url": f"{engines.cached.url}/v1/completions"}
    streams, titles = sdk.call("edit_in_a_batch", prompts=prompts, chunk=CHUNK, **engine)
    assert titles == [
        "Batched Stream Metrics (prefill)", "Batched Stream Modify Metrics", "Batched Stream Metrics (decode)",
    ]  # fmt: skip
    for tokens, stream in zip(prompts, streams, strict=True):
        first = engines.oracle.complete(tokens).tokens
        kept = len(tokens) // CHUNK * CHUNK - CHUNK
        expected = [*tokens[:kept], *tokens[kept + CHUNK :], *first]
        assert stream == [*expected, *engines.oracle.complete(expected, max_tokens=4).tokens]


def test_a_server_killed_and_started_again_costs_no_answer_and_is_used_again(engines: Engines) -> None:
    server, engine, asked = engines.server, engines.cached, [(prompt(200, 70 + i), "") for i in range(8)]
    expected = answers(engines.oracle, asked)
    engine.complete(asked[0][0])
    told = engine.process.log.read_text().count(DEGRADED)
    server.kill()
    # Their adapter raises in the engine if it stores before both of its halves have noticed.
    wait_until(lambda: engine.process.log.read_text().count(DEGRADED) >= told + 2, "noticed that the server is gone")
    engine.reset_prefix_cache()
    assert all(map(close, answers(engine, asked), expected)), "without a server"
    server.start()
    used_again(engines, asked, expected)


def test_a_server_that_was_away_for_less_than_a_heartbeat_is_used_again(engines: Engines) -> None:
    server, engine, asked = engines.server, engines.cached, [(prompt(200, 80 + i), "") for i in range(8)]
    expected = answers(engines.oracle, asked)
    for _ in range(2):
        server.restart()
        engine.reset_prefix_cache()
        assert all(map(close, answers(engine, asked), expected)), "its worker is not registered"
        used_again(engines, asked, expected)


def used_again(engines: Engines, asked: Sequence[tuple[list[int], str]], expected: list[Completion]) -> None:
    """The worker registers again by itself, and what it stores from then on is found."""

    def found() -> bool:
        engines.cached.reset_prefix_cache()
        again = answers(engines.cached, asked)
        assert all(map(close, again, expected))
        return all(answer.cached_tokens == 3 * CHUNK for answer in again)

    wait_until(lambda: bool(engines.server.status()["cache_context_meta"]), "registered again")
    wait_until(found, "found what it stored since")
    engines.server.quiet()


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + RECOVERY
    while not done():
        assert time.monotonic() < deadline, f"{RECOVERY} s later the engine has not {what}"
        time.sleep(0.1)
