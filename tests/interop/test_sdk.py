"""LMCache's SDK, unmodified, against our server: what it stores it gets back, and so does ours, and the reverse."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lmcache_sdk
from lmcache_server.protocol.layout import Kind
from tests.interop.conftest import CHUNK, HEAD_SIZE, HEADS, LAYERS, registered
from tests.interop.peer import Peer, PeerRaised
from tests.servers import CacheServer, running_server

QUICK = 3.0
"""Seconds; their time-outs are 10 here, and 60 by default."""


def tensor(shape: list[int], seed: int) -> torch.Tensor:
    """Values that say whose they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def shape(model: str, tokens: int) -> list[int]:
    return [2 if model == "two planes" else 1, LAYERS, tokens, HEADS * HEAD_SIZE]


def expected(model: str, tokens: int, seed: int, kept: int) -> list[Any]:
    """What `retrieve` says of the first `kept` of `tokens` tokens."""
    return [shape(model, kept), sha256(tensor(shape(model, tokens), seed)[:, :, :kept])]


def sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.fixture
def context(peer: Peer, server: CacheServer, model: str) -> Iterator[Peer]:
    """Their process, connected to the cache of `model`."""
    assert peer.call("connect", url=server.url, http_url=server.http_url, model=model) == [CHUNK, "KV"]
    yield peer
    peer.call("close")
    server.quiet()


def test_what_their_sdk_stores_it_gets_back(context: Peer, model: str) -> None:
    tokens = list(range(100, 140))
    assert context.call("retrieve", tokens=tokens) is None
    assert context.call("store", shape=shape(model, 40), seed=1, tokens=tokens) is True
    assert context.call("retrieve", tokens=tokens) == expected(model, 40, seed=1, kept=32)
    assert context.call("retrieve", tokens=tokens[:20]) == expected(model, 40, seed=1, kept=16)
    assert context.call("retrieve", tokens=tokens[:32] + [7] * 40) == expected(model, 40, seed=1, kept=32)
    assert context.call("retrieve", tokens=tokens[:15]) is None
    assert context.call("store", shape=shape(model, 40), seed=2, tokens=tokens) is False, "it is there already"
    assert context.call("retrieve", tokens=tokens) == expected(model, 40, seed=1, kept=32)


def test_salts_share_nothing(context: Peer, model: str) -> None:
    tokens = list(range(200, 232))
    assert context.call("store", shape=shape(model, 32), seed=3, tokens=tokens, salt="one") is True
    assert context.call("store", shape=shape(model, 32), seed=4, tokens=tokens, salt="two") is True
    found = [context.call("retrieve", tokens=tokens, salt=salt) for salt in ("one", "two", "")]
    assert found == [expected(model, 32, seed=3, kept=32), expected(model, 32, seed=4, kept=32), None]


def test_ours_and_theirs_read_what_the_other_stored(context: Peer, server: CacheServer, model: str) -> None:
    tokens, others = list(range(300, 332)), list(range(400, 432))
    with lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as ours:
        assert context.call("store", shape=shape(model, 32), seed=5, tokens=tokens) is True
        found = ours.retrieve(tokens)
        assert found is not None
        assert torch.equal(found.reshape(shape(model, 32)), tensor(shape(model, 32), 5))
        assert ours.store(tensor(shape(model, 32), 6).reshape(found.shape), others)
        assert context.call("retrieve", tokens=others) == expected(model, 32, seed=6, kept=32)


def test_queries_are_read_by_their_sdk(peer: Peer, server: CacheServer) -> None:
    model, tokens, wide = "with queries", list(range(32)), [1, LAYERS, 32, 2 * HEADS * HEAD_SIZE]
    with registered(server, model), registered(server, f"{model}##query", 1, Kind.QUERY, 2 * HEADS):
        with lmcache_sdk.qcache.connect(server.url, server.http_url, model, timeout=10) as ours:
            assert ours.store(tensor(wide, 7), tokens)
        where = {"url": server.url, "http_url": server.http_url, "model": model}
        assert peer.call("connect", kind="QUERY", **where) == [CHUNK, "QUERY"]
        assert peer.call("retrieve", tokens=tokens) == [wide, sha256(tensor(wide, 7))]
        peer.call("close")


def test_an_unknown_model_is_refused_at_once(peer: Peer, server: CacheServer) -> None:
    raised, seconds = peer.timed("connect", url=server.url, http_url=server.http_url, model="nobody's")
    assert isinstance(raised, PeerRaised)
    assert seconds < QUICK


def test_a_server_without_shared_memory_is_refused_at_once_with_the_remedy(peer: Peer) -> None:
    with running_server(shared_memory=False) as bare, registered(bare, "m"):
        raised, seconds = peer.timed("connect", url=bare.url, http_url=bare.http_url, model="m")
        assert isinstance(raised, PeerRaised)
        assert "start it with --shm-name" in str(raised)
        assert "start it with --shm-name" in bare.log
        assert seconds < QUICK


def test_after_a_restart_of_the_server_a_context_misses_at_once_and_a_new_one_works(peer: Peer) -> None:
    tokens, facts = list(range(32)), {"shape": [2, LAYERS, 32, HEADS * HEAD_SIZE], "seed": 8}
    with running_server("--chunk-size", str(CHUNK)) as restarted:
        where = {"url": restarted.url, "http_url": restarted.http_url, "model": "m"}
        with registered(restarted, "m"):
            peer.call("connect", **where)
            assert peer.call("store", tokens=tokens, **facts) is True
            restarted.restart()
            for name, arguments, answer in (("retrieve", {}, None), ("store", facts, False)):
                result, seconds = peer.timed(name, tokens=tokens, **arguments)
                assert (result, seconds < QUICK) == (answer, True)
            peer.call("close")
        with registered(restarted, "m"):
            peer.call("connect", **where)
            assert peer.call("store", tokens=tokens, **facts) is True
            assert peer.call("retrieve", tokens=tokens) is not None
            peer.call("close")
