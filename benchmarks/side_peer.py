"""The peer's side of the comparison: an unmodified LMCache 0.5.6 server with its own SDK, used as black boxes.

Runs in the environment that `make interop` builds and prints one JSON object; see server_sdk.py. Its SDK attaches only
to a model that an engine registered, so this registers one, over the wire as the peer's documents describe it.
Lookups go over the wire too: a request, its acknowledgement, then the question for the result, which is the least
that any client of it must send.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import msgpack
import torch
import zmq

import lmcache.sdk as lmc_sdk

sys.path.append(str(Path(__file__).parent))
from _peer_server import PeerServer, peer_serving
from _side_work import (
    LOOKUP_TOKENS,
    RATE_TOKENS,
    add_options,
    median_seconds,
    rate,
    resident_mb,
    seconds_of,
    share_of_memcpy,
)

MODEL, BLOCK, INSTANCE = "benchmark/model", 16, 12345
REGISTER, LOOKUP, STATUS, FREE, END = 1, 8, 9, 12, 13


class Wire:
    """A client that sends one operation and waits for its reply."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.RCVTIMEO = 30_000
        self._uid = 0

    def ask(self, operation: int, *arguments: Any) -> Any:
        self._uid += 1
        frames = [msgpack.packb(value) for value in (self._uid, operation, *arguments)]
        self._socket.send_multipart(frames)
        result = self._socket.recv_multipart()[2:]
        return msgpack.unpackb(result[0]) if result else None


@contextmanager
def engine(port: int, layers: int, heads: int, head_size: int) -> Iterator[Wire]:
    """An engine of `MODEL` with one block of KV per layer."""
    wire, segments, tensors = Wire(port), [], []
    size = 2 * BLOCK * heads * head_size * 2
    stride = [size // 4, size // 4, heads * head_size, head_size, 1]
    for layer in range(layers):
        name = f"lmcache_kv_{os.getpid()}_{port}_{layer}"
        segments.append(shared_memory.SharedMemory(name=name, create=True, size=size))
        shape = {"dtype": "bfloat16", "shape": [2, 1, BLOCK, heads, head_size], "stride": stride}
        metadata = {**shape, "storage_offset": 0, "device_uuid": "cpu"}
        body = {"type": "cpu_shm", "shm_name": f"/{name}", "nbytes": size, "version": 1, "metadata": metadata}
        tensors.append(msgpack.ExtType(1, msgpack.packb(body)))
    group = {"engine_group_id": 0, "layer_indices": list(range(layers)), "tokens_per_block": BLOCK}
    group |= {"sw_size_tokens": -1, "extra_object_group_tag": 0, "recurrent_state": False}
    wire.ask(REGISTER, INSTANCE, tensors, MODEL, 1, "vllm", {"kv_layout": "NHD"}, [group])
    try:
        yield wire
    finally:
        for segment in segments:
            segment.close()
            segment.unlink()


def serving(gib: float) -> AbstractContextManager[PeerServer]:
    return peer_serving(gib, Path(sys.executable), {})


def connected(server: PeerServer) -> Any:
    """Its SDK's context for MODEL."""
    return lmc_sdk.kvcache.connect(f"tcp://127.0.0.1:{server.port}", f"http://127.0.0.1:{server.http}", MODEL, 60)


def copies(layers: int, heads: int, head_size: int, tokens: int, repeats: int) -> dict[str, float]:
    kv = torch.randn(2, layers, tokens, heads * head_size).to(torch.bfloat16)
    with serving(kv.nbytes * 3.2 / 2**30 + 0.5) as server, engine(server.port, layers, heads, head_size):
        ctx = connected(server)
        ids = list(range(tokens))
        salts = map(str, itertools.count())

        def store() -> float:
            server.clear()
            begin = time.perf_counter()
            assert ctx.store(kv, ids, cache_salt=next(salts))
            return time.perf_counter() - begin

        for _ in range(4):
            store()
        stored = share_of_memcpy(kv, store, repeats)
        ctx.store(kv, ids, cache_salt="kept")
        assert torch.equal(ctx.retrieve(ids, cache_salt="kept"), kv)
        retrieved = share_of_memcpy(kv, lambda: seconds_of(lambda: ctx.retrieve(ids, cache_salt="kept")), repeats)
        ctx.close()
    return {"store": stored, "retrieve": retrieved}


def key(tokens: int, request: str) -> dict[str, Any]:
    return {
        "model_name": MODEL, "world_size": 1, "worker_id": None, "token_ids": list(range(tokens)), "start": 0,
        "end": tokens, "request_id": request, "cache_salt": "", "request_configs": None, "num_kv_readers": 1,
    }  # fmt: skip


def lookups(seconds: float) -> dict[str, float]:
    facts: dict[str, float] = {}
    with serving(1.0) as server, engine(server.port, 1, 1, 8) as wire:
        facts["start_seconds"] = server.started
        ctx = connected(server)
        longest = max(LOOKUP_TOKENS)
        ctx.store(torch.zeros(2, 1, longest, 8, dtype=torch.bfloat16), list(range(longest)))
        numbers = itertools.count()
        for tokens in LOOKUP_TOKENS:
            found = []

            def look_up(tokens: int = tokens, found: list[int] = found) -> None:
                request = f"r{next(numbers)}"
                fields = key(tokens, request)
                begin = time.perf_counter()
                wire.ask(LOOKUP, fields, 1)
                while (chunks := wire.ask(STATUS, request)) is None:
                    pass
                found.append(time.perf_counter() - begin)
                assert chunks == tokens // 256, chunks
                wire.ask(FREE, fields, 1)
                wire.ask(END, request)

            median_seconds(look_up, 60)
            facts[f"lookup_ms_{tokens}"] = 1e3 * sorted(found[1:])[len(found[1:]) // 2]

        def client(number: int) -> Any:
            own, counter = Wire(server.port), itertools.count()

            def call() -> None:
                request = f"client-{number}-{next(counter)}"
                own.ask(LOOKUP, key(RATE_TOKENS, request), 1)
                while own.ask(STATUS, request) is None:
                    pass
                own.ask(END, request)

            return call

        for clients in (1, 4):
            facts[f"lookups_per_second_{clients}"] = rate(clients, seconds, client)
        facts["resident_mb"] = resident_mb(server.pid)
        ctx.close()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    facts = copies(options.layers, options.heads, options.head_size, options.tokens, options.repeats)
    print(json.dumps(facts | lookups(options.seconds)))


if __name__ == "__main__":
    main()
