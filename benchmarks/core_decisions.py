"""Decisions of the server's core per second, without any I/O, at 1,000 to 1,000,000 resident chunks.

Why: everything else stands on these calls, and they must not grow slower as the cache fills. The pool is imaginary (a
chunk is one allocation unit), the token ids are not: every decision hashes and compares them.

And a full pass of Python's garbage collector, which holds up every request: as the server has it, which freezes what it
keeps (lmcache_server.io.freezer), and as it would be over everything.
"""

import argparse
import gc
import itertools
import random
import struct
import time
from array import array
from collections.abc import Callable, Sequence

from benchmarks._measure import interleaved, report
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.records import Limits, View
from lmcache_server.io.freezer import EVERY, Freezer
from lmcache_server.protocol.keys import ChunkHasher, Namespace
from lmcache_server.protocol.layout import Kind
from lmcache_server.protocol.messages import Prompt, SessionId

CHUNK, ALIGN, PROMPT_CHUNKS = 256, 64, 32
SIZES = (1_000, 100_000, 1_000_000)
REPEATS = 15

_BODY = struct.pack(f"<{CHUNK * PROMPT_CHUNKS}I", *random.Random(0).choices(range(150_000), k=CHUNK * PROMPT_CHUNKS))


def prompt(seed: int) -> Prompt:
    """A prompt of 32 chunks (8k tokens); its first token makes every chunk's hash its own."""
    return Prompt(SessionId(f"r{seed}"), struct.pack("<I", seed) + _BODY[4:])


def filled(chunks: int) -> tuple[L1Cache, View, list[Prompt]]:
    """A cache with `chunks` resident chunks, and some of the prompts in it."""
    pool = (chunks + 4 * PROMPT_CHUNKS) * ALIGN
    limits = Limits(pool, ALIGN, 1.0, 0.2, 300.0, 600.0)
    cache = L1Cache(ChunkHasher(CHUNK), limits, array("Q", bytes(pool // ALIGN * 8)))
    view = View(1, Namespace("model", "", Kind.KV, "layout", 1), (ALIGN,), range(1))
    kept = []
    freezer = Freezer(lambda: cache.counters.reserved_chunks)
    for seed in range(max(1, chunks // PROMPT_CHUNKS)):
        freezer.tick()
        one = prompt(seed)
        cache.commit(1, cache.reserve(view, one, 0.0).reservation, None)
        if seed % max(1, chunks // PROMPT_CHUNKS // 64) == 0:
            kept.append(one)
    return cache, view, kept


def looking_up(size: int) -> Callable[[], None]:
    """A full hit of 8k tokens, leased and released."""
    cache, view, kept = filled(size)
    turn = itertools.cycle(kept)
    assert cache.acquire(view, kept[0], 0, False, 0.0).chunks == PROMPT_CHUNKS

    def call() -> None:
        cache.release(1, [cache.acquire(view, next(turn), 0, True, 0.0).lease])

    return call


def storing(size: int) -> Callable[[], None]:
    """8k new tokens stored in a full pool: each chunk evicts another."""
    cache, view, _ = filled(size)
    fresh = (prompt(seed) for seed in itertools.count(size))

    def call() -> None:
        cache.commit(1, cache.reserve(view, next(fresh), 0.0).reservation, None)

    return call


def full_passes() -> tuple[float, float]:
    """Milliseconds of a full pass with all frozen but the newest EVERY chunks, and with nothing frozen."""
    freezer = Freezer(lambda: 0)
    freezer.freeze()
    newest = filled(EVERY)
    seen = milliseconds(gc.collect)
    freezer.thaw()
    everything = milliseconds(gc.collect)
    freezer.freeze()
    del newest
    return seen, everything


def milliseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args(arguments)
    calls = {}
    passes: list[list[object]] = []
    chunks = EVERY
    for size in options.sizes:
        calls[f"acquire+release @{size}"] = looking_up(size)
        calls[f"reserve+commit, evicting @{size}"] = storing(size)
        chunks += 2 * size
        passes.append([chunks, *full_passes()])
    samples = interleaved(calls, repeats=REPEATS, inner=40)
    smallest = options.sizes[0]
    rows = []
    for name, sample in samples.items():
        base = samples[f"{name.split('@')[0]}@{smallest}"]
        rows.append([name, sample.median * 1e6, 1 / sample.median, str(sample.over(base))])
    report(
        "a full pass of the garbage collector",
        ["chunks in the process", "ms, as the server has it", "ms, over everything"],
        passes,
        {f"full_pass_ms_{row[0]}": row[1] for row in passes},
    )
    growth = samples[f"acquire+release @{options.sizes[-1]}"].ratios(samples[f"acquire+release @{smallest}"])
    report(
        "core decisions, prompts of 8k tokens",
        ["decision @resident chunks", "us", "per second", f"ratio to {smallest}"],
        rows,
        {"lookups_per_second": 1 / samples[f"acquire+release @{smallest}"].median}
        | ({"budgets": {"lookup_growth": {"ours": growth}}} if tuple(options.sizes) == SIZES else {}),
    )


if __name__ == "__main__":
    main()
