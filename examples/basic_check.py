# %% [markdown]
# # Basic check: store, retrieve, compare
#
# A real vLLM computes a prompt, the server keeps its KV, and the SDK takes it out, puts it back and compares.
#
# Run it as a file (`python examples/basic_check.py`) or as a notebook. It starts a server and an engine of its own, on
# the CPU, with a tiny model of random weights.

# %%
import time

import torch
from _demo_setup import start, wait_until_cached
from tokenizers import Tokenizer

import lmcache_sdk as lmc_sdk

setup = start("basic_check")
cache = lmc_sdk.kvcache.connect(setup.url, setup.http_url, setup.model_name)
tokenizer = Tokenizer.from_file(str(setup.model / "tokenizer.json"))
text = "The cache keeps what was computed, so that nobody has to compute it again. " * 40
# Eleven whole chunks and 40 tokens, less than one of the engine's own blocks: its own hits are as long as ours.
prompt = tokenizer.encode(text).ids[: 11 * cache.chunk_size + 40]
print(f"{len(prompt)} tokens, cached in chunks of {cache.chunk_size}: {cache!r}")

# %% [markdown]
# ## The engine stores
# Nothing is cached. The engine computes the prompt, and its connector stores each whole chunk.

# %%
assert cache.retrieve(prompt) is None
cold = setup.engine.complete(prompt, max_tokens=8)
assert cold.cached_tokens == 0
whole = wait_until_cached(cache, prompt)
print(f"cold: {cold.ttft_ms:.1f} ms to the first token; {whole} of {len(prompt)} tokens are cached now")

# %% [markdown]
# ## The SDK retrieves
# Keys and values come in canonical order, whatever the engine's paging: `[2, layers, tokens, heads * head_size]`.

# %%
kv = cache.retrieve(prompt)
assert kv is not None
assert kv.shape[2] == whole
print(f"retrieved {list(kv.shape)} {kv.dtype}, {kv.nbytes / 2**20:.1f} MiB")

half = cache.retrieve(prompt[: whole // 2])
assert half is not None
assert torch.equal(half, kv[:, :, : half.shape[2]])
assert cache.retrieve([token ^ 1 for token in prompt]) is None
print("a shorter prompt has the same KV, bit for bit; other tokens have none")

# %% [markdown]
# ## The SDK stores
# A salt of one's own keeps a copy apart from what everybody shares. Tokens are stored once under a salt.

# %%
begin = time.perf_counter()
assert cache.store(kv, prompt[:whole], cache_salt="my-copy") is True
print(f"stored in {(time.perf_counter() - begin) * 1e3:.1f} ms")
assert cache.store(kv, prompt[:whole], cache_salt="my-copy") is False
copy = cache.retrieve(prompt, cache_salt="my-copy")
assert copy is not None
assert torch.equal(copy, kv)
print("what comes back is what was put in, bit for bit")

# %% [markdown]
# ## The engine uses it
# The engine answers from its own cache, then forgets it and answers from the server: the same work, so the same
# logprobs. Then it is asked with our salt, and answers from our copy.

# %%
local = setup.engine.complete(prompt, max_tokens=8)
setup.engine.reset_prefix_cache()
external = setup.engine.complete(prompt, max_tokens=8)
ours = setup.engine.complete(prompt, max_tokens=8, cache_salt="my-copy")
assert local.cached_tokens == external.cached_tokens == ours.cached_tokens == whole
assert external.logprobs == ours.logprobs == local.logprobs
print(f"local hit {local.ttft_ms:.1f} ms, external hit {external.ttft_ms:.1f} ms, our copy {ours.ttft_ms:.1f} ms")
print("all three have the same logprobs, bit for bit")

# %%
cache.close()
setup.stop()
