"""Requests that share their beginnings, on a real vLLM on the CPU with and without the server.

Why: this is the traffic that such a server is for. The engine's own prefix cache is as scarce as an accelerator's: it
holds 8k tokens, and the requests of each workload go round half as many again.

    chat    12 users, each with one of 2 system prompts of 1k tokens and a history that grows from turn to turn
    rag     6 documents of 2k tokens, each asked 5 questions, in an order that comes back to none of them soon

Two requests are under way at a time. Both engines see the same requests in the same order, first the one without the
server; both begin with nothing cached. One record per request goes to sharing.jsonl beside this file.
"""

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._measure import report
from benchmarks._server import serving
from benchmarks._vllm import Engine, build_model, engine, prompt

LONGEST, CACHED_BLOCKS = 4096, 64
"""Blocks have 128 tokens."""
AT_ONCE, ANSWER = 2, 8
RECORDS = Path(__file__).with_name("sharing.jsonl")


@dataclass(frozen=True)
class Record:
    """One request: how many of its tokens were not computed, and when its first token came."""

    workload: str
    server: bool
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


def served(one: Engine, workload: str, server: bool, requests: list[list[int]]) -> tuple[list[Record], float]:
    """A record of each request, and the seconds that all of them took."""

    def ask(number: int) -> Record:
        begin = time.perf_counter()
        answer = one.complete(requests[number], max_tokens=ANSWER)
        seconds = time.perf_counter() - begin
        length = len(requests[number])
        return Record(
            workload, server, number, length, answer.cached_tokens, round(answer.ttft_ms, 1), round(seconds, 3)
        )

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    rows: list[list[object]] = []
    facts, lines = {}, []
    with ExitStack() as running:
        model, scarce = build_model(), ("--num-gpu-blocks-override", str(CACHED_BLOCKS))
        server = running.enter_context(serving(1.0))
        without = running.enter_context(engine(model, f"alone-{os.getpid()}", None, LONGEST, *scarce))
        beside = running.enter_context(engine(model, f"shared-{os.getpid()}", server.port, LONGEST, *scarce))
        engines = {False: without, True: beside}
        for one in engines.values():
            one.wait_until_ready()
        for workload, requests in WORKLOADS.items():
            medians: dict[bool, dict[str, float]] = {}
            for with_server, one in engines.items():
                records, seconds = served(one, workload, with_server, requests(random.Random(1)))
                lines += [json.dumps(asdict(record)) for record in records]
                name = f"{workload}, {'with' if with_server else 'without'} the server"
                medians[with_server] = row(records, seconds)
                rows.append([name, *medians[with_server].values()])
                facts[name] = {**medians[with_server], "ttft_ms": [record.ttft_ms for record in records]}
            ratios = [medians[True][key] / medians[False][key] for key in medians[True]]
            rows.append([f"{workload}, with over without", *ratios])
    RECORDS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = ["workload", "TTFT p50 ms", "TTFT p90 ms", "requests/s", "prompt tokens/s", "cached share"]
    report("sharing", columns, rows, facts)


if __name__ == "__main__":
    main()
