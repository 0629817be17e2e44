"""The code of both generations of documents runs: their imports, names, calls and fields, against a live server.

Where the documents call a real engine, one in this process stores, takes and generates instead.
"""

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from lmcache_sdk.attachment import Attachment
from lmcache_server.protocol.layout import KernelGroup, Kind
from tests.lmcache_sdk.fake_engine import random_kv, registered_engine
from tests.lmcache_sdk.story_engine import StoryEngine, kv_of
from tests.servers import CacheServer, running_server

MODEL = "Qwen/Qwen3-8B"
QUERIES = KernelGroup((0, 1, 2), planes=1, heads=4, head_size=8, dtype="float32")
CHUNK = 16


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server("--eviction-policy", "LRU", "--no-l1-use-lazy", "--supported-transfer-mode", "auto") as server:
        yield server
        server.quiet()


@pytest.fixture(scope="module")
def engine(server: CacheServer) -> Iterator[Attachment]:
    with (
        registered_engine(server, MODEL) as engine,
        registered_engine(server, MODEL + "##query", QUERIES, kind=Kind.QUERY),
    ):
        yield engine


@pytest.fixture(autouse=True)
def empty(server: CacheServer) -> Iterator[None]:
    """Nothing is cached when a test begins."""
    request = urllib.request.Request(f"{server.http_url}/cache/clear", method="POST")
    urllib.request.urlopen(request, timeout=10).close()
    yield


@pytest.fixture
def post_completion(engine: Attachment) -> StoryEngine:
    return StoryEngine(engine)


source_tokens = list(range(1000, 1000 + 4 * CHUNK + 5))


# The newer generation.


def test_newer_contexts(server: CacheServer, engine: Attachment) -> None:
    import lmcache.sdk as lmc_sdk

    kv_ctx = lmc_sdk.kvcache.connect(url=server.url, http_url=server.http_url, model_name=MODEL, timeout=60)
    q_ctx = lmc_sdk.qcache.connect(url=server.url, http_url=server.http_url, model_name=MODEL, timeout=60)
    kv, tokens = random_kv(32), list(range(32))
    assert kv_ctx.retrieve(tokens, cache_salt="") is None
    assert kv_ctx.store(kv, tokens, cache_salt="") is True
    assert kv_ctx.store(kv, tokens) is False
    back = kv_ctx.retrieve(tokens)
    assert back is not None
    assert torch.equal(back, kv)
    q = random_kv(32, QUERIES)
    assert q_ctx.store(q, tokens) is True
    back = q_ctx.retrieve(tokens)
    assert back is not None
    assert back.shape == (1, 3, 32, 32)
    kv_ctx.register_caches()
    assert kv_ctx.transfer_ctx is not None
    kv_ctx.close()
    q_ctx.close()


def test_newer_stream(server: CacheServer, post_completion: StoryEngine) -> None:
    import lmcache.sdk as lmc_sdk

    def drop_tokens(
        tensors: Mapping[lmc_sdk.LMCacheSDKCacheKind, torch.Tensor], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        kv = tensors[lmc_sdk.LMCacheSDKCacheKind.KV]
        assert kv.shape == (2, 3, len(tokens), 16)
        return kv[:, :, : 2 * CHUNK], tokens[: 2 * CHUNK]

    kind = lmc_sdk.LMCacheSDKCacheKind.KV
    ctx = lmc_sdk.connect(kind=kind, url=server.url, http_url=server.http_url, model_name=MODEL)
    request = lmc_sdk.request.create_request([ctx], post_completion, prompt_token_ids=source_tokens)
    request.generate({"max_tokens": 1})
    request.modify_kv(drop_tokens)
    assert request.tokens == source_tokens[: 2 * CHUNK]
    perf = request.generate({"max_tokens": 256})
    assert (perf.output_tokens, post_completion.calls[1].cached) == (256, 2 * CHUNK)
    assert len(post_completion.calls[1].prompt) == 2 * CHUNK + 5 + 1
    assert perf.duration > 0
    assert len(perf.tpot) == 255
    assert request.decoded_tokens == 257
    assert not request.is_done
    assert request.suffix_tokens == []
    assert request.output_text.startswith("<")
    assert request.output_tokens[-1] == request.tokens[-1]
    kv = request.retrieve(kind, timeout=30.0, poll_interval=0.2)
    request.update(kind, kv, request.tokens[: kv.shape[2]])
    ctx.close()


def test_newer_batch(server: CacheServer, post_completion: StoryEngine, capsys: pytest.CaptureFixture[str]) -> None:
    import lmcache.sdk as lmc_sdk

    max_tokens = 8
    prompts = [[i, *source_tokens] for i in range(4)]
    kv_ctx = lmc_sdk.kvcache.connect(url=server.url, http_url=server.http_url, model_name=MODEL)
    q_ctx = lmc_sdk.qcache.connect(url=server.url, http_url=server.http_url, model_name=MODEL)
    for prompt in prompts:
        q_ctx.store(random_kv(64, QUERIES), prompt[:64])
    batch = lmc_sdk.batch.LMCacheBatchedStream()
    for prompt in prompts:
        request = lmc_sdk.request.create_request(
            contexts=[kv_ctx, q_ctx], post_completion=post_completion, prompt_token_ids=prompt
        )
        batch.add(request)
    results = batch.prefill(sampling_params={"max_tokens": 1, "temperature": 1.0, "ignore_eos": True})
    results.emit()
    assert "Batched Stream Metrics (prefill)" in capsys.readouterr().out
    assert set(results.to_dict()["metrics"]["results"]) == {"duration", "input_tokens", "input_tput"}

    def drop_tokens(tensors: Mapping[Any, torch.Tensor], tokens: Sequence[int]) -> Any:
        kv = tensors[lmc_sdk.LMCacheSDKCacheKind.KV]
        q = tensors[lmc_sdk.LMCacheSDKCacheKind.QUERY]
        assert kv.shape[2] == q.shape[2] == len(tokens) == 64
        return kv[:, :, :32], tokens[:32]

    results = batch.modify(drop_tokens)
    results.emit()
    assert set(results.to_dict()["metrics"]["results"]) == {"duration"}
    results = batch.decode(sampling_params={"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True})
    results.emit()
    document = json.loads(json.dumps(results.to_dict()))
    assert set(document) == {"title", "metrics"}
    assert document["metrics"]["results"]["output_tokens"] == 4 * max_tokens
    for stream_id, stream in batch.request_streams.items():
        assert batch.get_request_stream(stream_id).output_text == stream.output_text
        assert batch.perf_metrics[stream_id].output_tokens == max_tokens
    with pytest.raises(lmc_sdk.batch.LMCacheBatchedStreamError):
        batch.get_request_stream("unknown")
    kv_ctx.close()
    q_ctx.close()


def test_newer_names() -> None:
    import lmcache.sdk.batch as lmc_batch
    import lmcache.sdk.context as lmc_context
    import lmcache.sdk.request as lmc_request
    from lmcache.banner import print_banner_once
    from lmcache.cli.metrics import Metrics
    from lmcache.logging import init_logger
    from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
    from lmcache.sdk.wrapper.contiguous import ContiguousTransferWrapper

    assert issubclass(lmc_request.LMCacheRequestStreamError, lmc_context.LMCacheSDKError)
    assert issubclass(lmc_batch.LMCacheBatchedStreamError, lmc_context.LMCacheSDKError)
    assert lmc_request.TokenEvent(token_id=1, text="a").text == "a"
    assert [kind.name for kind in LMCacheSDKCacheKind] == ["KV", "QUERY"]
    assert lmc_context.ModifyFnType is not None
    assert lmc_request.PostCompletion is not None
    assert ContiguousTransferWrapper is not None
    assert Metrics("t").to_dict() == {"title": "t", "metrics": {}}
    init_logger(__name__).debug("a logger")
    print_banner_once()


# The older generation.


def test_older_context(server: CacheServer, engine: Attachment) -> None:
    import lmcache.sdk.kvcache as lmc_sdk

    ctx = lmc_sdk.connect(
        url=server.url,
        http_url=server.http_url,
        model_name=MODEL,
        timeout=60,
    )
    kv = random_kv(32)
    assert lmc_sdk.store(ctx, kv, list(range(32))) is True
    back = lmc_sdk.retrieve(ctx, list(range(32)))
    assert back is not None
    assert torch.equal(back, kv)
    lmc_sdk.close(ctx)


def test_older_stream(server: CacheServer, post_completion: StoryEngine) -> None:
    import lmcache.sdk.kvcache as lmc_sdk
    import lmcache.sdk.stream as lmc_stream

    def drop_tokens(kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        assert kv.shape == (2, 3, len(tokens), 16)
        return kv[:, :, CHUNK:], tokens[CHUNK:]

    ctx = lmc_sdk.connect(url=server.url, http_url=server.http_url, model_name=MODEL)
    stream = lmc_stream.create_request(ctx, post_completion, prompt_token_ids=source_tokens)
    stream.generate({"max_tokens": 1})
    stream.modify_kv(drop_tokens)
    assert stream.tokens == source_tokens[CHUNK : 4 * CHUNK]
    assert len(stream.suffix_tokens()) == 5 + 1
    stream.generate({"max_tokens": 256})
    assert post_completion.calls[1].cached == 3 * CHUNK
    assert stream.suffix_tokens() == []
    assert stream.decoded_tokens() == 257
    assert stream.output_text().startswith("<")
    assert stream.output_tokens() == stream.tokens
    assert stream.is_done() is stream.done is False
    assert stream.stream_id() == stream.request_stream_id
    kv = stream.retrieve_kv(timeout=30, poll_interval=0.2)
    stream.update_kv(kv, stream.tokens[: kv.shape[2]])
    with pytest.raises(lmc_stream.LMCacheStreamError):
        stream.update_kv(kv, [1])
    lmc_sdk.close(ctx)


def test_older_batch(server: CacheServer, post_completion: StoryEngine) -> None:
    import lmcache.sdk.batch as lmc_batch
    import lmcache.sdk.kvcache as lmc_sdk
    import lmcache.sdk.stream as lmc_stream

    ctx = lmc_sdk.connect(url=server.url, http_url=server.http_url, model_name=MODEL)
    batch = lmc_batch.LMCacheBatchedStream()
    for i in range(3):
        batch.add(lmc_stream.create_request(ctx, post_completion, prompt_token_ids=[i, *source_tokens], cache_salt=""))
    assert batch.prefill({"max_tokens": 9}).to_dict()["metrics"]["results"]["input_tokens"] == 3 * 70
    batch.modify(lambda kv, tokens: (kv[:, :, :CHUNK], tokens[:CHUNK]))
    assert batch.failures == {}
    assert batch.decode({"max_tokens": 4}).to_dict()["metrics"]["results"]["output_tokens"] == 12
    assert [call.cached for call in post_completion.calls[3:]] == [CHUNK] * 3
    lmc_sdk.close(ctx)


def test_older_isolation_is_the_newer_ones(server: CacheServer, post_completion: StoryEngine) -> None:
    import lmcache.sdk.kvcache as lmc_sdk
    import lmcache.sdk.stream as lmc_stream

    ctx = lmc_sdk.connect(url=server.url, http_url=server.http_url, model_name=MODEL)
    stream = lmc_stream.create_request(ctx, post_completion, source_tokens)
    stream.generate({"max_tokens": 1})
    stream.modify_kv(lambda kv, tokens: (kv + 1, tokens))
    back = ctx.retrieve(source_tokens)
    assert back is not None
    assert torch.equal(back, kv_of(source_tokens[:64], post_completion.geometry))
    lmc_sdk.close(ctx)
