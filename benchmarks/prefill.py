"""A real vLLM: time to the first token cold, from its own cache and from the server, and what storing costs a prefill.

Why: this is what a user sees. One engine has no connector, one has ours, and with --peer one has LMCache 0.5.6's own
adapter, to LMCache's own server; all are alive at once and do the same in turn.

    hits        each prompt from the engine's own cache (local hit), then, when the engine has dropped that, from the
                server (external hit): pairs, and what is compared is the ratio of each
    throughput  prompts that nobody had before, on every engine, each time in another order: storing against no
                connector, in pairs; what is stored goes into memory that was written before (the first pair does not
                count)
    stores      of that, what our connector counts as its own: an engine waits while it stores, so this share is what
                storing costs, and it does not swing with the machine as two engines in turn do

`--gpu` runs the engines on CUDA. THAT HAS NOT RUN YET.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks._budgets import COLUMNS, table
from benchmarks._measure import Sample, Spread, report, require_cuda
from benchmarks._peer import require_peer, serving_peer
from benchmarks._server import serving
from benchmarks._vllm import Engine, build_model, engine, prompt, ready

NAMES = {"none": "no connector", "ours": "ours", "peer": "LMCache 0.5.6"}
PROMPTS = 2
"""Prompts of the hits."""
KV_BYTES_PER_TOKEN, POOL_PROMPTS = 12 * 2**10, 2.5
"""Our server evicts from the third prompt on, which is the first pair's."""
STORES = "lmcache_mp_store_duration_seconds_sum"
SETTLED = 0.1
"""Seconds for what the engine before may still have to do."""


@contextmanager
def alive(tokens: int, peer: bool, gpu: bool) -> Iterator[tuple[dict[str, Engine], dict[str, Callable[[], object]]]]:
    """Engines by side, ready, and what is to be done before a new prompt of a side."""
    ports: dict[str, int | None] = {"none": None}
    before: dict[str, Callable[[], object]] = {}
    with ExitStack() as running:
        model, pool = build_model(), POOL_PROMPTS * KV_BYTES_PER_TOKEN * tokens / 2**30
        ports["ours"] = running.enter_context(serving(pool, 256, "--no-l1-use-lazy")).port
        if peer:
            server = running.enter_context(serving_peer(3.0))
            ports["peer"], before["peer"] = server.port, server.clear
        engines = {
            side: running.enter_context(engine(model, side, port, tokens, peer=side == "peer", gpu=gpu))
            for side, port in ports.items()
        }
        ready(engines.values())
        yield engines, before


def hits(engines: Mapping[str, Engine], prompts: Sequence[list[int]], rounds: int) -> dict[str, tuple[Sample, Sample]]:
    """Side -> seconds to the first token of (local, external) hits, in pairs."""
    times: dict[str, tuple[list[float], list[float]]] = {side: ([], []) for side in engines}
    for _ in range(rounds):
        for one in prompts:
            for side, running in engines.items():
                running.complete(one)  # it is the local cache's now, and the engine has woken up
                local = running.complete(one)
                running.reset_prefix_cache()
                external = running.complete(one)
                assert external.cached_tokens >= len(one) - 256, f"{NAMES[side]}: {external.cached_tokens} tokens hit"
                for list_of, hit in zip(times[side], (local, external), strict=True):
                    list_of.append(hit.ttft_ms / 1e3)
    return {side: (Sample(tuple(local)), Sample(tuple(external))) for side, (local, external) in times.items()}


def throughput(
    engines: Mapping[str, Engine], tokens: int, pairs: int, before: Mapping[str, Callable[[], object]]
) -> dict[str, Sample]:
    """Side -> seconds of new prompts; `before` is what is done before those of a side."""
    times: dict[str, list[float]] = {side: [] for side in engines}
    sides = list(engines)
    for number in range(-1, pairs):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            before.get(side, bool)()
            time.sleep(SETTLED)
            begin = time.perf_counter()
            engines[side].complete(prompt(1000 + number, tokens))
            seconds = time.perf_counter() - begin
            if number >= 0:
                times[side].append(seconds)
    return {side: Sample(tuple(values)) for side, values in times.items()}


def budgets(hit: Mapping[str, tuple[Sample, Sample]], new: Mapping[str, Sample]) -> dict[str, dict[str, list[float]]]:
    """What is compared, pair by pair."""
    return {
        "external_over_local": {side: external.ratios(local) for side, (local, external) in hit.items()},
        "storing_over_none": {side: new["none"].ratios(new[side]) for side in hit},
    }


def rows(hit: Mapping[str, tuple[Sample, Sample]], new: Mapping[str, Sample], tokens: int) -> list[list[object]]:
    """One row per engine."""

    def ms(sample: Sample) -> str:
        return str(Spread.of([1e3 * one for one in sample.seconds]))

    return [
        [
            NAMES[side],
            ms(cold),
            str(Spread.of([tokens / one for one in cold.seconds])),
            *(map(ms, hit[side]) if side in hit else ("-", "-")),
        ]
        for side, cold in new.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="an engine with LMCache 0.5.6 too (needs `make interop`)")
    parser.add_argument("--gpu", action="store_true", help="engines on CUDA")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8, help="of the hits")
    parser.add_argument("--pairs", type=int, default=12, help="of the throughput")
    options = parser.parse_args(arguments)
    require_cuda(options.gpu)
    require_peer(options.peer)
    tokens = options.tokens
    with alive(tokens, options.peer, options.gpu) as (engines, before):
        caching = {side: one for side, one in engines.items() if side != "none"}
        prompts = [prompt(seed, tokens) for seed in range(PROMPTS)]
        for one in caching.values():
            for new_prompt in prompts:
                one.complete(new_prompt)
        hit = hits(caching, prompts, options.rounds)
        stored = engines["ours"].metric(STORES)
        new = throughput(engines, tokens, options.pairs, before)
        storing = (engines["ours"].metric(STORES) - stored) / (options.pairs + 1)
    found = budgets(hit, new)
    columns = ["engine", "cold prompt, ms", "its tokens per second", "local hit, ms", "external hit, ms"]
    facts = {side: {"tokens_per_second": tokens / sample.median} for side, sample in new.items()}
    for side, (local, external) in hit.items():
        facts[side] |= {"local_ms": local.median * 1e3, "external_ms": external.median * 1e3}
    device = "CUDA" if options.gpu else "the CPU"
    report(f"prefill, {tokens} tokens, 12 layers, on {device}", columns, rows(hit, new, tokens), facts)
    share = storing / new["ours"].median
    report(
        "stores of our connector, as it counts them itself",
        ["ms per prompt", "share of a cold prompt"],
        [[storing * 1e3, share]],
        {"store_ms": storing * 1e3, "store_share": share},
    )
    report("prefill, ratios", COLUMNS, table(found), {"budgets": found})


if __name__ == "__main__":
    main()
