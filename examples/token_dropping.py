# %% [markdown]
# # Token dropping with a batch of requests
#
# Eight long prompts are prefilled and decoded, once on all of their KV and once after half of the chunks were dropped:
#
#     prefill, decode, clear          the baseline
#     prefill, modify, decode         the same with half of the KV
#
# Run it as a file (`python examples/token_dropping.py`) or as a notebook. It starts a server and an engine of its own,
# on the CPU, with a tiny model of random weights: it shows the mechanism and its speed, not the quality of a text.

# %%
import random
import statistics

import matplotlib.pyplot as plt
from _demo_setup import CACHE, start, wait_until_cached

import lmcache_sdk as lmc_sdk
from lmcache_sdk.batch import LMCacheBatchedStream
from lmcache_sdk.completion import post_completion
from lmcache_sdk.edits import RandomChunks, token_dropping
from lmcache_sdk.request import create_request

STREAMS, CHUNKS, TAIL, DECODE = 8, 8, 40, 32
SAMPLING = {"max_tokens": DECODE, "temperature": 0.0, "ignore_eos": True}

setup = start("token_dropping")
cache = lmc_sdk.kvcache.connect(setup.url, setup.http_url, setup.model_name)
complete = post_completion(setup.engine.url, setup.model_name)
rng = random.Random(1)
prompts = [rng.choices(range(256), k=CHUNKS * cache.chunk_size + TAIL) for _ in range(STREAMS)]


def new_batch() -> LMCacheBatchedStream:
    """A request stream for each prompt."""
    batch = LMCacheBatchedStream()
    for prompt in prompts:
        batch.add(create_request([cache], complete, prompt))
    return batch


def decode(batch: LMCacheBatchedStream) -> tuple[float, int, list[float]]:
    """Decode all; tokens per second, the engine's own count of tokens it took from the server, gaps between tokens."""
    # The engine forgets its own copy, so that both runs begin alike: with KV from the server.
    setup.engine.reset_prefix_cache()
    before = setup.engine.counter("external_prefix_cache_hits")
    report = batch.decode(SAMPLING)
    report.emit()
    assert not batch.failures
    taken = setup.engine.counter("external_prefix_cache_hits") - before
    gaps = [gap for perf in batch.perf_metrics.values() for gap in perf.tpot]
    return report.to_dict()["metrics"]["results"]["output_tput"], taken, gaps


# %% [markdown]
# ## Baseline: decode on everything

# %%
batch = new_batch()
batch.prefill(SAMPLING).emit()
assert not batch.failures
for prompt in prompts:
    wait_until_cached(cache, prompt)
whole_tput, whole_tokens, whole_gaps = decode(batch)
assert whole_tokens == STREAMS * CHUNKS * cache.chunk_size
setup.clear()

# %% [markdown]
# ## Half of the KV
# The edit is a function of one request's tensors and tokens; the batch calls it for each stream. `RandomChunks` chooses
# without looking; see `snapkv.py` for a choice that looks at what the prompt attends to.

# %%
batch = new_batch()
batch.prefill(SAMPLING).emit()
batch.modify(token_dropping(RandomChunks(cache.chunk_size, keep=0.5), setup.rotary)).emit()
assert not batch.failures
half_tput, half_tokens, half_gaps = decode(batch)
assert half_tokens == whole_tokens // 2

# %% [markdown]
# ## Side by side

# %%
print(f"{'':14}{'KV tokens':>12}{'tokens/s':>12}{'ms/token':>12}")
for name, tokens, tput, gaps in (
    ("all KV", whole_tokens, whole_tput, whole_gaps),
    ("half of it", half_tokens, half_tput, half_gaps),
):
    print(f"{name:14}{tokens:12}{tput:12.1f}{statistics.median(gaps) * 1e3:12.2f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.bar(["all KV", "half of it"], [whole_tput, half_tput], color=["tab:gray", "tab:blue"])
left.set_ylabel("decoded tokens per second")
right.boxplot([[gap * 1e3 for gap in gaps] for gaps in (whole_gaps, half_gaps)], showfliers=False)
right.set_xticks([1, 2], ["all KV", "half of it"])
right.set_ylabel("milliseconds per token of a stream")
figure.suptitle(f"{STREAMS} streams, {CHUNKS * cache.chunk_size} tokens each")
picture = CACHE / "token_dropping.png"
figure.savefig(picture)
print(f"the plot is in {picture}")

# %%
cache.close()
setup.stop()
