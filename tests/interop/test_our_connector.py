"""LMCache's SDK, unmodified, on the cache of an engine that runs this project's connector on a CPU."""

import pytest

import lmcache_sdk
from tests.engine import connector_config, in_process_engine, tiny_model
from tests.interop.peer import Peer
from tests.interop.test_sdk import sha256
from tests.interop.test_vllm import prompt
from tests.servers import running_server

CHUNK = 64


@pytest.mark.vllm
@pytest.mark.process
def test_their_sdk_reads_and_moves_what_our_connector_stored(peer: Peer) -> None:
    source, target, tail = prompt(2 * CHUNK, 91), prompt(2 * CHUNK, 92), prompt(9, 93)
    model = tiny_model(dtype="float32")
    with (
        running_server("--chunk-size", str(CHUNK)) as server,
        in_process_engine(model, connector=connector_config(server.port), block_size=32) as engine,
    ):
        engine.complete(source + tail)
        peer.call("connect", url=server.url, http_url=server.http_url, model=str(model))
        shape, bits = peer.call("retrieve", tokens=source)
        assert shape == [2, 4, 2 * CHUNK, 256], "keys and values, as every engine has them"
        with lmcache_sdk.kvcache.connect(server.url, server.http_url, str(model), timeout=10) as ours:
            values = ours.retrieve(source)
        assert values is not None and sha256(values) == bits
        assert peer.call("move", source=source, target=target) == [[shape, bits], True]
        engine.reset_prefix_cache()
        genuine, moved = (engine.complete(tokens + tail, max_tokens=4) for tokens in (source, target))
        assert (genuine.cached_tokens, moved.cached_tokens) == (2 * CHUNK, 2 * CHUNK)
        assert moved.logprobs == genuine.logprobs, "the engine computed on what the SDK put there"
        peer.call("close")
