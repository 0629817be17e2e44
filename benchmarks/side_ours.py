"""Our side of the comparison: this project's server and SDK. Prints one JSON object; see server_sdk.py."""

import argparse
import itertools
import json
import struct
import time

import torch

import lmcache_sdk as lmc_sdk
from benchmarks._server import MODEL, engine, serving
from benchmarks._side_work import (
    LOOKUP_TOKENS,
    RATE_TOKENS,
    add_options,
    median_seconds,
    rate,
    resident_mb,
    seconds_of,
    share_of_memcpy,
)
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.messages import Acquire, Commit, CommittedChunks, Prompt, Reserve, SessionId


def copies(layers: int, heads: int, head_size: int, tokens: int, repeats: int) -> dict[str, float]:
    """Store and retrieve as shares of memcpy; milliseconds of a view."""
    kv = torch.randn(2, layers, tokens, heads * head_size).to(torch.bfloat16)
    with (
        serving(kv.nbytes * 3.2 / 2**30) as server,
        engine(server, layers, heads, head_size),
        lmc_sdk.kvcache.connect(server.url, server.http_url, MODEL) as ctx,
    ):
        ids, out = list(range(tokens)), torch.empty_like(kv)
        salts = map(str, itertools.count())
        for _ in range(4):  # every page of the pool is touched before anything is timed
            ctx.store(kv, ids, next(salts))
        ctx.store(kv, ids, "kept")
        retrieve = share_of_memcpy(kv, lambda: seconds_of(lambda: ctx.retrieve(ids, "kept", out=out)), repeats)
        assert torch.equal(out, kv)

        def view() -> None:
            with ctx.view(ids, "kept") as chunks:
                assert chunks.tokens == tokens

        seen = median_seconds(view, 100)
        store = share_of_memcpy(kv, lambda: seconds_of(lambda: ctx.store(kv, ids, next(salts))), repeats)
    return {"store": store, "retrieve": retrieve, "view_ms": seen * 1e3}


def prompt(tokens: int, request: str) -> Prompt:
    return Prompt(SessionId(request), struct.pack(f"<{tokens}I", *range(tokens)))


def keep(worker: Attachment, tokens: int) -> None:
    """Have `tokens` tokens in the cache."""
    (reserved,) = worker.connection.request(Reserve(worker.instance, (prompt(tokens, "store"),))).results
    if reserved.reservation:
        worker.connection.request(Commit(worker.instance, (CommittedChunks(reserved.reservation),)))


def lookups(seconds: float) -> dict[str, float]:
    """Milliseconds of a hit by length, hits per second of one and four clients; a lease and its slots each time."""
    facts = {}
    begin = time.perf_counter()
    with serving(0.25) as server, engine(server, 1, 1, 8) as worker:
        facts["start_seconds"] = time.perf_counter() - begin
        for tokens in LOOKUP_TOKENS:
            keep(worker, tokens)
            message = Acquire(worker.instance, (prompt(tokens, "lookup"),))
            facts[f"lookup_ms_{tokens}"] = 1e3 * median_seconds(lambda m=message: worker.connection.request(m), 100)  # type: ignore[misc]

        def client(number: int) -> object:
            connection = ServerConnection(server.url)
            message = Acquire(worker.instance, (prompt(RATE_TOKENS, f"client-{number}"),))
            return lambda: connection.request(message)

        for clients in (1, 4):
            facts[f"lookups_per_second_{clients}"] = rate(clients, seconds, client)  # type: ignore[arg-type]
        facts["resident_mb"] = resident_mb(server.pid)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    facts = copies(options.layers, options.heads, options.head_size, options.tokens, options.repeats)
    print(json.dumps(facts | lookups(options.seconds)))


if __name__ == "__main__":
    main()
