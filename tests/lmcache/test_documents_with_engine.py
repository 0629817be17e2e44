"""The documents' code of both generations, with a real vLLM and the ready PostCompletion.

That an edit is what the engine decodes on is told by the engine: an edit that keeps a prefix as it is must give the
logprobs of the shorter prompt, and its cached tokens are counted by the engine itself.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from lmcache_sdk.completion import EngineCompletion, post_completion
from tests.engine import Engine, connector_config, engine_process, tiny_model
from tests.servers import CacheServer, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(420)]

CHUNK = 64
DECODE = 8
SAMPLING = {"max_tokens": DECODE, "temperature": 0.0, "ignore_eos": True}


@dataclass
class Running:
    server: CacheServer
    engine: Engine
    model: str
    complete: EngineCompletion


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = tiny_model(dtype="float32")
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    arguments = ["--max-model-len", "1024", "--block-size", "32"]
    with (
        running_server("--chunk-size", str(CHUNK), "--l1-size-gb", "0.25") as server,
        engine_process(model, log, connector=connector_config(server.port), arguments=arguments) as engine,
        post_completion(engine.url, str(model), timeout=300) as complete,
    ):
        yield Running(server, engine, str(model), complete)


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=4 * CHUNK + 10)


def assert_decoded_on(running: Running, tokens: Sequence[int], salt: str, kept: int) -> None:
    """The engine has `kept` tokens of the edit and nothing else, and decoded what the short prompt gives without it."""
    before = list(tokens[:-DECODE])
    running.engine.reset_prefix_cache()
    edited = running.engine.complete(before, max_tokens=DECODE, cache_salt=salt)
    assert edited.cached_tokens == kept
    assert list(edited.tokens) == list(tokens[-DECODE:])
    plain = running.engine.complete(before, max_tokens=DECODE, cache_salt="somebody-else")
    assert plain.cached_tokens == 0
    assert plain.tokens == edited.tokens


def test_newer_stream(running: Running) -> None:
    import lmcache.sdk as lmc_sdk

    def drop_tokens(
        tensors: Mapping[lmc_sdk.LMCacheSDKCacheKind, torch.Tensor], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        return tensors[lmc_sdk.LMCacheSDKCacheKind.KV][:, :, : 2 * CHUNK], tokens[: 2 * CHUNK]

    kind = lmc_sdk.LMCacheSDKCacheKind.KV
    server = running.server
    ctx = lmc_sdk.connect(kind=kind, url=server.url, http_url=server.http_url, model_name=running.model)
    request = lmc_sdk.request.create_request([ctx], running.complete, prompt_token_ids=prompt(1))
    request.generate({**SAMPLING, "max_tokens": 1})
    request.modify_kv(drop_tokens)
    perf = request.generate(SAMPLING)
    assert perf.output_tokens == DECODE
    assert_decoded_on(running, request.output_tokens, request.cache_salt, kept=2 * CHUNK)
    ctx.close()


def test_newer_batch(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    import lmcache.sdk as lmc_sdk

    kind = lmc_sdk.LMCacheSDKCacheKind.KV
    server = running.server
    ctx = lmc_sdk.kvcache.connect(server.url, server.http_url, running.model)
    batch = lmc_sdk.batch.LMCacheBatchedStream()
    for seed in (2, 3, 4):
        batch.add(lmc_sdk.request.create_request([ctx], running.complete, prompt_token_ids=prompt(seed)))
    batch.prefill(sampling_params=SAMPLING).emit()
    batch.modify(lambda tensors, tokens: (tensors[kind][:, :, :CHUNK], tokens[:CHUNK])).emit()
    results = batch.decode(sampling_params=SAMPLING)
    results.emit()
    assert batch.failures == {}
    assert results.to_dict()["metrics"]["results"]["output_tokens"] == 3 * DECODE
    assert "Batched Stream Metrics (decode)" in capsys.readouterr().out
    for request in batch.request_streams.values():
        assert_decoded_on(running, request.output_tokens, request.cache_salt, kept=CHUNK)
    ctx.close()


def test_older_stream(running: Running) -> None:
    import lmcache.sdk.kvcache as lmc_sdk
    import lmcache.sdk.stream as lmc_stream

    def drop_tokens(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return kv[:, :, : 3 * CHUNK], tokens[: 3 * CHUNK]

    server = running.server
    ctx = lmc_sdk.connect(url=server.url, http_url=server.http_url, model_name=running.model)
    stream = lmc_stream.create_request(ctx, running.complete, prompt_token_ids=prompt(5))
    stream.generate({**SAMPLING, "max_tokens": 1})
    stream.modify_kv(drop_tokens)
    stream.generate(SAMPLING)
    assert stream.decoded_tokens() == DECODE + 1
    assert_decoded_on(running, stream.output_tokens(), stream.request.cache_salt, kept=3 * CHUNK)
    lmc_sdk.close(ctx)
