"""The older stream is the newer one under other names; what it does is tested there."""

import inspect

import pytest
import torch

from lmcache_sdk import LMCacheSDKContext
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.batch import LMCacheBatchedStream
from lmcache_sdk.request import LMCacheRequestStream, LMCacheRequestStreamError
from lmcache_sdk.stream import LMCacheStream, LMCacheStreamError, create_request
from tests.lmcache_sdk.story_engine import StoryEngine, kv_of

PROMPT = list(range(800, 840))


@pytest.fixture
def stream(context: LMCacheSDKContext, engine: Attachment) -> LMCacheStream:
    stream = create_request(context, StoryEngine(engine), PROMPT, cache_salt="salt")
    stream.generate({"max_tokens": 2})
    return stream


def test_its_accessors_are_called_and_say_what_the_newer_ones_hold(stream: LMCacheStream) -> None:
    newer = stream.request
    assert isinstance(newer, LMCacheRequestStream)
    assert stream.stream_id() == stream.request_stream_id == newer.request_stream_id
    assert stream.decoded_tokens() == newer.decoded_tokens == 2
    assert stream.output_text() == newer.output_text != ""
    assert stream.output_tokens() is stream.tokens is newer.tokens
    assert stream.suffix_tokens() is newer.suffix_tokens
    assert (stream.is_done(), stream.done) == (newer.is_done, newer.done)
    assert newer.cache_salt == "salt"


def test_its_edits_are_of_kv_and_tokens(stream: LMCacheStream, engine: Attachment) -> None:
    tail = stream.tokens[32:]
    expected = kv_of(PROMPT[:32], StoryEngine(engine).geometry)
    assert torch.equal(stream.retrieve_kv(timeout=1, poll_interval=0.01), expected)
    stream.modify_kv(lambda kv, tokens: (kv[:, :, 16:] * 2, tokens[16:]))
    assert (stream.tokens, stream.suffix_tokens()) == (PROMPT[16:32], tail)
    assert torch.equal(stream.retrieve_kv(), expected[:, :, 16:] * 2)
    stream.update_kv(expected, PROMPT[:32])
    assert torch.equal(stream.retrieve_kv(), expected)
    assert stream.suffix_tokens() == tail


def test_its_error_is_the_newer_one(stream: LMCacheStream) -> None:
    assert LMCacheStreamError is LMCacheRequestStreamError
    with pytest.raises(LMCacheStreamError, match="edit function failed"):
        stream.modify_kv(lambda kv, tokens: 1 / 0)  # type: ignore[arg-type, return-value]


def test_it_goes_through_a_batch(stream: LMCacheStream) -> None:
    batch = LMCacheBatchedStream()
    batch.add(stream)
    batch.modify(lambda kv, tokens: (kv, tokens))
    batch.decode({"max_tokens": 1})
    assert batch.failures == {}
    assert batch.get_request_stream(stream.stream_id()) is stream


def test_its_calls_take_the_documented_arguments() -> None:
    for function in (LMCacheStream.modify_kv, LMCacheStream.retrieve_kv):
        parameters = inspect.signature(function).parameters
        assert (parameters["timeout"].default, parameters["poll_interval"].default) == (30.0, 0.2)
