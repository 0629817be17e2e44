# %% [markdown]
# # SnapKV: keep what the prompt's last tokens look at
#
# SnapKV (arXiv 2404.14469) rates each token of a prompt by the attention that it gets from the last ones, and keeps the
# best. So it needs the prompt's queries beside its KV: a context of each kind, and a stream that has both.
#
# **Where the queries come from.** The engine computes them anyway; `"lmcache.mp.transfer_intermediate_tensors": true`
# tells its connector to store them, in a cache of their own. That is what `start(..., queries=True)` sets.
#
# Run it as a file (`python examples/snapkv.py`) or as a notebook. It starts a server and an engine of its own, on the
# CPU, with a tiny model of random weights. Such a model attends almost evenly, so the methods differ little and none
# keeps its answers; what can be shown is which one keeps most of the attention, and that the engine decodes on exactly
# what was kept.

# %%
from contextlib import ExitStack

import torch
from _demo_plain import load_model, logprobs_after
from _demo_setup import start, wait_until_cached
from tokenizers import Tokenizer

import lmcache_sdk as lmc_sdk
from lmcache_sdk import LMCacheSDKCacheKind
from lmcache_sdk.completion import post_completion
from lmcache_sdk.edits import HighestScores, RandomChunks, SinksAndRecent, SnapKV, keydiff, token_dropping
from lmcache_sdk.edits.scoring import cached_layers
from lmcache_sdk.edits.snapkv import window_attention
from lmcache_sdk.request import create_request

WINDOW = 16
SAMPLING = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}

running = ExitStack()
setup = start("snapkv", queries=True)
running.callback(setup.stop)
model = load_model(setup.model)
rotary = setup.rotary

# %% [markdown]
# ## Prefill
# The engine computes the prompt and stores its KV and its queries.

# %%
kv_ctx = running.enter_context(lmc_sdk.kvcache.connect(setup.url, setup.http_url, setup.model_name))
q_ctx = running.enter_context(lmc_sdk.qcache.connect(setup.url, setup.http_url, setup.model_name))
tokenizer = Tokenizer.from_file(str(setup.model / "tokenizer.json"))
text = "".join(f"Entry {i}: the cache of request {i * 37 % 101} was kept. " for i in range(60))
prompt = tokenizer.encode(text).ids[: 8 * kv_ctx.chunk_size + 40]
complete = post_completion(setup.engine.url, setup.model_name)
stream = create_request([kv_ctx, q_ctx], complete, prompt)
stream.generate({**SAMPLING, "max_tokens": 1})
whole = wait_until_cached(kv_ctx, prompt)

queries = stream.retrieve(LMCacheSDKCacheKind.QUERY)
kv = stream.retrieve(LMCacheSDKCacheKind.KV)
assert queries.shape[2] == kv.shape[2] == whole
print(f"keys and values {list(kv.shape)}, queries {list(queries.shape)}: two query heads look at each key head")

# %% [markdown]
# ## Choose
# Each method keeps half of the tokens. The share of the last tokens' attention that falls on what is kept is what
# SnapKV chooses by, and what the others do not know.

# %%
tensors = {LMCacheSDKCacheKind.KV: kv, LMCacheSDKCacheKind.QUERY: queries}
attention = torch.stack(
    [window_attention(layer, WINDOW).mean(dim=(0, 1, 2)) for layer in cached_layers(tensors, rotary.head_size)]
).mean(dim=0)
# Without smoothing over neighbours: in a model of random weights they have nothing to do with each other.
snapkv = HighestScores(SnapKV(WINDOW, kernel=1), rotary.head_size, keep=0.5, chunk_size=kv_ctx.chunk_size)
methods = {
    "SnapKV": snapkv,
    "KeyDiff": HighestScores(keydiff, rotary.head_size, keep=0.5, chunk_size=kv_ctx.chunk_size),
    "sinks and recent": SinksAndRecent(recent=whole // 2 - 4),
    "random chunks": RandomChunks(kv_ctx.chunk_size, keep=0.5),
}
shares = {}
for name, select in methods.items():
    kept = list(select(tensors, prompt[:whole]))
    assert len(kept) == whole // 2
    shares[name] = attention[kept].sum().item()
    print(f"{name:18}{len(kept):6} tokens, {shares[name]:6.1%} of the attention")
assert max(shares, key=lambda name: shares[name]) == "SnapKV"

# %% [markdown]
# ## Edit and decode
# The stream hands the edit both tensors. What the engine says next is what plain torch computes from the edited KV.

# %%
stream.modify_kv(token_dropping(snapkv, rotary))
assert len(stream.tokens) == whole // 2
edited_prompt = [*stream.tokens, *stream.suffix_tokens]
edited_kv = kv_ctx.retrieve(stream.tokens, stream.cache_salt)
assert edited_kv is not None

answer = setup.engine.complete(edited_prompt, cache_salt=stream.cache_salt)
assert answer.cached_tokens == whole // 2
on_edit = logprobs_after(model, edited_kv, stream.suffix_tokens)
on_whole = logprobs_after(model, kv, prompt[whole:])


def distance(expected: torch.Tensor) -> float:
    """The largest difference from what the engine says of the likeliest tokens."""
    return max(abs(value - expected[token].item()) for token, value in answer.logprobs[0].items())


print(f"logprobs differ from plain torch on the edited KV by {distance(on_edit):.3f} (bfloat16)")
print(f"                 and from that on the whole KV by {distance(on_whole):.3f}")
assert distance(on_edit) < distance(on_whole) / 4

pass_ = stream.generate(SAMPLING)
print(f"decoded {pass_.output_tokens} tokens on half of the KV, {pass_.ttft * 1e3:.1f} ms to the first")

# %%
running.close()
