"""LMCache's own command line against our server: what it reads over HTTP, and its load generator, which is LMCache's
engine-driven client with several ranks and readers.
"""

import json
import re
from typing import Any

import pytest

from tests.interop.conftest import registered
from tests.interop.peer import Peer
from tests.servers import CacheServer, running_server

SPLIT, LATENT = "(2,64,16,2,16):float16:3", "(1,64,16,1,32):float16:3"
"""Their way to say: planes, blocks, block size, heads, head size, element type, layers."""


def report(peer: Peer, *words: str) -> dict[str, Any]:
    """The metrics that a command reports as JSON."""
    code, output = peer.call("run", words=[*words, "--format", "json"])
    assert code == 0, output
    document: dict[str, Any] = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    metrics: dict[str, Any] = document["metrics"]
    return metrics


def bench(server: CacheServer, *words: str) -> list[str]:
    return [
        "bench", "server", "--rpc-url", server.url, "--url", server.http_url, "--mode", "cpu", "--num-tokens", "256",
        "--num-blocks", "64", "--block-size", "16", "--start", "0", "--end", "3", "--interval", "0", *words,
    ]  # fmt: skip


@pytest.mark.process
def test_ping_says_that_it_is_there(peer: Peer, server: CacheServer) -> None:
    metrics = report(peer, "ping", "kvcache", "--url", server.http_url)
    assert metrics["status"] == "OK"


@pytest.mark.process
def test_describe_shows_the_server_and_its_engines(peer: Peer, server: CacheServer) -> None:
    with registered(server, "a model", 2):
        metrics = report(peer, "describe", "kvcache", "--url", server.http_url)
    assert (metrics["health"], metrics["chunk_size"], metrics["engine_type"]) == ("OK", 16, "MPCacheServer")
    assert metrics["eviction_policy"] == "LRU"
    (model,) = metrics["models"]
    assert (model["model"], model["world_size"], model["num_layers"]) == ("a model", 1, 3)
    (group,) = metrics["kernel_groups"]
    assert (group["tokens_per_block"], group["dtype"]) == (8, "torch.bfloat16")


@pytest.mark.process
def test_clear_clears(peer: Peer, server: CacheServer) -> None:
    code, output = peer.call("run", words=["kvcache", "clear", "--url", server.http_url])
    assert (code, re.findall("Status: +(.*)", output)) == (0, ["OK"])
    assert "cleared" in server.log


@pytest.mark.process
@pytest.mark.parametrize(
    ("shape", "ranks", "objects"),
    [((SPLIT,), 1, 12), ((SPLIT,), 2, 24), ((LATENT, "--use-mla"), 2, 12)],
    ids=["one rank", "two ranks", "two readers of one plane"],
)
def test_their_engine_driven_client_gets_back_what_it_stored(
    peer: Peer, shape: tuple[str, ...], ranks: int, objects: int
) -> None:
    """Each of three requests: lookup (nothing), store by each writer, lookup (four chunks), retrieve by each rank, and
    a comparison of checksums.
    """
    with running_server("--chunk-size", "64") as server:
        results = report(peer, *bench(server, "--tp-size", str(ranks), "--kvcache-shape-spec", *shape))["results"]
        assert (results["total_requests"], results["checksum_ok"], results["checksum_fail"]) == (3, 3, 0)
        status = server.quiet()
        assert status["storage_manager"]["l1_manager"]["total_object_count"] == objects
        assert status["counters"]["lookups"] == 6
        assert status["cache_context_meta"] == {}, "they unregister"


@pytest.mark.process
def test_a_server_driven_engine_fails_at_once_with_the_remedy(peer: Peer, server: CacheServer) -> None:
    words = bench(server, "--transfer-mode", "lmcache_driven", "--kvcache-shape-spec", SPLIT)
    (code, _), seconds = peer.timed("run", words=words)
    remedy = "set lmcache.mp.mp_transfer_mode to engine_driven"
    assert code != 0
    assert re.search(f"refused: .*{remedy}", peer.log.read_text())
    assert server.log.count(remedy) == 1
    assert seconds < 20, "its time-out is 300 s"
