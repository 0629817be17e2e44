"""A real vLLM on the CPU: time to the first token cold, from its own cache and from ours, and what storing costs a
prefill.

Why: this is what a user sees. One engine has the connector, the other none; both run the same 12-layer model of
random weights. TTFT: the same prompts of 8k tokens cold, again (local hit), and after the engine dropped its cache
(external hit). Throughput: fresh prompts on both engines in turn; a prefill that stores against one that does not.
"""

import argparse
import os
import statistics
import time
from contextlib import ExitStack

from benchmarks._measure import report
from benchmarks._server import serving
from benchmarks._vllm import Engine, build_model, engine, prompt

TOKENS = 8192


def first_tokens(with_connector: Engine, prompts: list[list[int]], rounds: int) -> dict[str, float]:
    """Median ms to the first token; a local and an external hit of each prompt in turn."""
    cold = [with_connector.complete(one).ttft_ms for one in prompts]
    local, external = [], []
    for _ in range(rounds):
        for one in prompts:
            local.append(with_connector.complete(one).ttft_ms)
        with_connector.reset_prefix_cache()
        for one in prompts:
            hit = with_connector.complete(one)
            assert hit.cached_tokens >= TOKENS - 256, hit.cached_tokens
            external.append(hit.ttft_ms)
    times = {"cold_ms": cold, "local_ms": local, "external_ms": external}
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians | {"external_over_local": medians["external_ms"] / medians["local_ms"]}


def storing(with_connector: Engine, without: Engine, rounds: int) -> dict[str, float]:
    """Prefill throughput with the connector storing, over none: median of the pairs."""
    ratios, rates = [], []
    for seed in range(1000, 1000 + rounds):
        seconds = {}
        for name, one in (("with", with_connector), ("without", without)):
            begin = time.perf_counter()
            one.complete(prompt(seed, TOKENS))
            seconds[name] = time.perf_counter() - begin
        ratios.append(seconds["without"] / seconds["with"])
        rates.append(TOKENS / seconds["with"])
    return {"storing_over_none": statistics.median(ratios), "tokens_per_second": statistics.median(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as running:
        model = build_model()
        server = running.enter_context(serving(3.0))
        with_connector = running.enter_context(engine(model, f"with-{os.getpid()}", server.port, TOKENS))
        without = running.enter_context(engine(model, f"without-{os.getpid()}", None, TOKENS))
        with_connector.wait_until_ready()
        without.wait_until_ready()
        facts = first_tokens(with_connector, [prompt(seed, TOKENS) for seed in range(3)], options.rounds)
        facts |= storing(with_connector, without, options.rounds)
    rows = [
        ["cold, ms to the first token", "", facts["cold_ms"]],
        ["local hit, ms", "", facts["local_ms"]],
        ["external hit, ms", "", facts["external_ms"]],
        ["external over local", "<= 1.4", facts["external_over_local"]],
        ["prefill tokens per second, storing", "", facts["tokens_per_second"]],
        ["prefill throughput, storing over none", ">= 0.985", facts["storing_over_none"]],
    ]
    report(f"vLLM on the CPU, {TOKENS} tokens, 12 layers", ["what", "budget", "ours"], rows, facts)


if __name__ == "__main__":
    main()
