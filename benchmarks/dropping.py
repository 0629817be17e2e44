"""Token dropping: how quickly a real vLLM decodes when a share of each prompt's KV is kept.

Why: attention reads all KV for each token, so what an edit drops is time won at every step. Four prompts of 7.5k tokens
are prefilled once; for each share their KV is taken out, cut to random chunks of that share, and put back. Then the
engine drops its own cache, takes all of them from the server, and decodes a few tokens of each share in turn.

`--gpu` runs the engine on CUDA. THAT HAS NOT RUN YET.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import lmcache_sdk as lmc_sdk
from benchmarks._measure import Sample, report, require_cuda
from benchmarks._server import serving
from benchmarks._vllm import build_model, engine, prompt, ready
from lmcache_sdk.batch import LMCacheBatchedStream
from lmcache_sdk.completion import post_completion
from lmcache_sdk.edits import RandomChunks, Rotary, token_dropping
from lmcache_sdk.request import create_request

STREAMS, TOKENS = 4, 7680
SHARES = (1.0, 0.5, 0.25, 0.125)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode", type=int, default=16, help="tokens per stream and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true", help="an engine on CUDA")
    options = parser.parse_args(arguments)
    require_cuda(options.gpu)
    logging.disable(logging.WARNING)
    sampling = {"max_tokens": options.decode, "temperature": 0.0, "ignore_eos": True}
    prompts = [prompt(3000 + stream, TOKENS + 40) for stream in range(STREAMS)]
    rows: list[list[object]] = []
    facts = {}
    with ExitStack() as running:
        model = build_model()
        server = running.enter_context(serving(1.5))
        vllm = running.enter_context(engine(model, "dropping", server.port, 8192, gpu=options.gpu))
        ready([vllm])
        cache = running.enter_context(lmc_sdk.kvcache.connect(server.url, server.http_url, vllm.model))
        complete = post_completion(vllm.url, vllm.model, timeout=300.0)
        rotary = Rotary.from_config(json.loads((model / "config.json").read_text()))
        batches, edits = {}, {}
        for share in SHARES:
            batch = batches[share] = LMCacheBatchedStream(progress=False)
            for one in prompts:
                batch.add(create_request([cache], complete, one))
            batch.run_request_streams({**sampling, "max_tokens": 1})
            begin = time.perf_counter()
            if share < 1:
                batch.modify_request_streams(token_dropping(RandomChunks(cache.chunk_size, keep=share), rotary))
            edits[share] = time.perf_counter() - begin
        vllm.reset_prefix_cache()
        gaps: dict[float, list[float]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share, batch in batches.items():
                batch.run_request_streams(sampling)
                assert not batch.failures, batch.failures
                gaps[share].append(statistics.median(gap for perf in batch.perf_metrics.values() for gap in perf.tpot))
    whole = Sample(tuple(gaps[1.0]))
    for share, times in gaps.items():
        sample = Sample(tuple(times))
        rows.append([f"{share:g}", sample.median * 1e3, STREAMS / sample.median, str(whole.over(sample)), edits[share]])
        facts[f"{share:g}"] = {"tokens_per_second": STREAMS / sample.median, "times_faster": whole.over(sample).median}
    columns = ["kept share", "ms per token", "decoded tokens/s", "times faster", "edit s"]
    report(f"token dropping, {STREAMS} streams of {TOKENS} tokens", columns, rows, facts)


if __name__ == "__main__":
    main()
