"""SDK store, retrieve and view against a plain copy of the same bytes, for three model shapes.

Why: moving KV is the SDK's work, and the memory's own speed is its limit. Store is measured into a warm pool (its pages
are there, as after the first minutes of any server), retrieve into a tensor that is reused; the copy is torch's own,
from and to warm tensors of the same size. `--transport frames` measures the path without shared memory.
"""

import argparse
import itertools
from collections.abc import Sequence

import torch

import lmcache_sdk as lmc_sdk
from benchmarks._measure import interleaved, report
from benchmarks._server import MODEL, engine, serving

SHAPES = {"small (12 x 256)": (12, 4, 64), "8B (36 x 1024)": (36, 8, 128), "wide (80 x 1024)": (80, 8, 128)}


def measure(name: str, tokens: int, transport: str, repeats: int) -> list[list[object]]:
    layers, heads, head_size = SHAPES[name]
    kv = torch.randn(2, layers, tokens, heads * head_size).to(torch.bfloat16)
    source, target, out = kv.clone(), torch.empty_like(kv), torch.empty_like(kv)
    target.copy_(source)
    gib = kv.nbytes * 3.2 / 2**30
    with (
        serving(gib, shared_memory=transport == "shm") as server,
        engine(server, layers, heads, head_size),
        lmc_sdk.kvcache.connect(server.url, server.http_url, MODEL) as ctx,
    ):
        salts = (f"{i}" for i in itertools.count())
        ids = list(range(tokens))

        def store() -> None:
            assert ctx.store(kv, ids, next(salts))

        for _ in range(4):  # every page of the pool is touched before anything is timed
            store()
        ctx.store(kv, ids)

        def retrieve() -> None:
            assert ctx.retrieve(ids, out=out) is not None

        def view() -> None:
            with ctx.view(ids) as chunks:
                assert chunks.tokens == tokens

        calls = {"memcpy": lambda: target.copy_(source), "retrieve": retrieve, "view": view}
        reads = interleaved(calls, repeats)
        assert torch.equal(out, kv)
        writes = interleaved({"memcpy": lambda: target.copy_(source), "store": store}, repeats)
    gigabytes = kv.nbytes / 1e9
    rows: list[list[object]] = []
    for call, run in (("store", writes), ("retrieve", reads)):
        share = run["memcpy"].over(run[call])
        rows.append(
            [name, call, gigabytes / run[call].median, gigabytes / run["memcpy"].median, str(share), share.median]
        )
    rows.append([name, "view (ms)", reads["view"].median * 1e3, "", "", None])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--transport", choices=["shm", "frames"], default="shm")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    rows = [row for name in SHAPES for row in measure(name, options.tokens, options.transport, options.repeats)]
    facts = {f"{row[0].split()[0]}_{row[1].split()[0]}": row[5] if row[5] is not None else row[2] for row in rows}
    report(
        f"SDK copies of {options.tokens} tokens over {options.transport}",
        ["model", "call", "GB/s (ms)", "memcpy GB/s", "share of memcpy"],
        [row[:5] for row in rows],
        facts,
    )


if __name__ == "__main__":
    main()
