"""Requests that share their beginnings, on a real vLLM with and without the server.

Why: this is the traffic that such a server is for. The engine's own prefix cache is as scarce as an accelerator's: it
holds 8k tokens, and the requests of each workload go round half as many again.

    chat    12 users, each with one of 2 system prompts of 1k tokens and a history that grows from turn to turn
    rag     6 documents of 2k tokens, each asked 5 questions, in an order that comes back to none of them soon

Two requests are under way at a time. All engines see the same requests in the same order, first the one without a
server, with --peer at last one with LMCache 0.5.6; all begin with nothing cached. One record per request goes to
sharing.jsonl beside this file. `--gpu` runs the engines on CUDA. THAT HAS NOT RUN YET.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._measure import report, require_cuda
from benchmarks._peer import require_peer, serving_peer
from benchmarks._server import serving
from benchmarks._vllm import Engine, build_model, engine, prompt, ready

LONGEST, CACHED_BLOCKS = 4096, 64
"""Blocks have 128 tokens."""
NAMES = {"none": "without a server", "ours": "with the server", "peer": "with LMCache 0.5.6"}
AT_ONCE, ANSWER = 2, 8


@dataclass(frozen=True)
class Record:
    """One request: how many of its tokens were not computed, and when its first token came."""

    workload: str
    side: str
    number: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    seconds: float


def chat(rng: random.Random) -> list[list[int]]:
    histories = [prompt(1 + user % 2, 1024) + prompt(100 + user, 512) for user in range(12)]
    requests = []
    for turn in range(3):
        for user in rng.sample(range(12), 12):
            histories[user] = histories[user] + prompt(1000 + 12 * turn + user, 256)
            requests.append(histories[user])
    return requests


def rag(rng: random.Random) -> list[list[int]]:
    documents = [prompt(500 + number, 2048) for number in range(6)]
    order = [document for _ in range(5) for document in rng.sample(documents, 6)]
    return [document + prompt(2000 + i, 48) for i, document in enumerate(order)]


WORKLOADS = {"chat": chat, "rag": rag}


def served(one: Engine, workload: str, side: str, requests: list[list[int]]) -> tuple[list[Record], float]:
    """A record of each request, and the seconds that all of them took."""

    def ask(number: int) -> Record:
        begin = time.perf_counter()
        answer = one.complete(requests[number], max_tokens=ANSWER)
        seconds = time.perf_counter() - begin
        length = len(requests[number])
        return Record(workload, side, number, length, answer.cached_tokens, round(answer.ttft_ms, 1), round(seconds, 3))

    begin = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        records = list(pool.map(ask, range(len(requests))))
    return records, time.perf_counter() - begin


def row(records: list[Record], seconds: float) -> dict[str, float]:
    times = sorted(record.ttft_ms for record in records)
    tokens = sum(record.prompt_tokens for record in records)
    return {
        "ttft_p50_ms": statistics.median(times),
        "ttft_p90_ms": times[len(times) * 9 // 10],
        "requests_per_second": len(records) / seconds,
        "prompt_tokens_per_second": tokens / seconds,
        "cached_share": sum(record.cached_tokens for record in records) / tokens,
    }


def beside(medians: dict[str, dict[str, float]]) -> list[tuple[str, list[object]]]:
    """What each server is worth: its numbers over those without one, and ours over the peer's."""
    pairs = [("ours", "none"), ("peer", "none"), ("ours", "peer")]
    return [
        (f"{NAMES[one]}, over {NAMES[other]}", list(map(over, medians[one].values(), medians[other].values())))
        for one, other in pairs
        if one in medians and other in medians
    ]


def over(one: float, other: float) -> object:
    return one / other if other else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="an engine with LMCache 0.5.6 too (needs `make interop`)")
    parser.add_argument("--gpu", action="store_true", help="engines on CUDA")
    parser.add_argument("--records", type=Path, default=Path(__file__).with_name("sharing.jsonl"))
    options = parser.parse_args(arguments)
    require_cuda(options.gpu)
    require_peer(options.peer)
    rows: list[list[object]] = []
    facts, lines = {}, []
    with ExitStack() as running:
        model, scarce = build_model(), ("--num-gpu-blocks-override", str(CACHED_BLOCKS))
        ports = {"none": None, "ours": running.enter_context(serving(1.0)).port}
        if options.peer:
            ports["peer"] = running.enter_context(serving_peer(1.0)).port
        engines = {
            side: running.enter_context(
                engine(model, f"sharing-{side}", port, LONGEST, *scarce, peer=side == "peer", gpu=options.gpu)
            )
            for side, port in ports.items()
        }
        ready(engines.values())
        for workload, requests in WORKLOADS.items():
            medians: dict[str, dict[str, float]] = {}
            for side, one in engines.items():
                records, seconds = served(one, workload, side, requests(random.Random(1)))
                lines += [json.dumps(asdict(record)) for record in records]
                medians[side] = row(records, seconds)
                rows.append([f"{workload}, {NAMES[side]}", *medians[side].values()])
                times = {"ttft_ms": [record.ttft_ms for record in records]}
                facts[f"{workload}, {NAMES[side]}"] = medians[side] | times
            rows += [[f"{workload}, {name}", *ratios] for name, ratios in beside(medians)]
    options.records.write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = ["workload", "TTFT p50 ms", "TTFT p90 ms", "requests/s", "prompt tokens/s", "cached share"]
    report("sharing", columns, rows, facts)


if __name__ == "__main__":
    main()
