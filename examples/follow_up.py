# %% [markdown]
# # A follow-up question on an edited context
#
# A long document is prefilled and edited once: its first tokens and its most recent half stay (StreamingLLM). Then two
# questions are asked on what is left, one after the other, as in a conversation. The document is never computed again.
#
# Run it as a file (`python examples/follow_up.py`) or as a notebook. It starts a server and an engine of its own, on
# the CPU, with a tiny model of random weights: its answers are nonsense, its caches are not.

# %%
from _demo_setup import start, wait_until_cached
from tokenizers import Tokenizer

import lmcache_sdk as lmc_sdk
from lmcache_sdk.completion import post_completion
from lmcache_sdk.edits import SinksAndRecent, token_dropping
from lmcache_sdk.request import LMCacheRequestStream, create_request

setup = start("follow_up")
cache = lmc_sdk.kvcache.connect(setup.url, setup.http_url, setup.model_name)
tokenizer = Tokenizer.from_file(str(setup.model / "tokenizer.json"))


def encode(text: str) -> list[int]:
    """The text's tokens; the tiny model has one per byte."""
    ids: list[int] = tokenizer.encode(text).ids
    return ids


document = encode("".join(f"Entry {i}: the cache of request {i * 37 % 101} was kept. " for i in range(100)))
first_question = encode("\nQuestion: which request came first? Answer:")
second_question = encode("\nQuestion: and which one was kept last? Answer:")
sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
chunk = cache.chunk_size
ENGINE_BLOCK = 128  # tokens that vLLM's own cache holds or forgets together

# %% [markdown]
# ## Prefill and edit, once
# A stream is one request over all of its passes. What follows the last whole chunk has no cached KV; the stream keeps
# it as its suffix, and the next pass sends it along.

# %%
stream = create_request([cache], post_completion(setup.engine.url, setup.model_name), document)
prefill = stream.generate({**sampling, "max_tokens": 1})
whole = wait_until_cached(cache, document)
kept = whole // 2 // chunk * chunk
stream.modify_kv(token_dropping(SinksAndRecent(recent=kept - 4), setup.rotary))
assert len(stream.tokens) == kept
assert stream.tokens == [*document[:4], *document[whole - kept + 4 : whole]]
print(f"document of {len(document)} tokens prefilled in {prefill.ttft:.2f} s; {kept} of {whole} cached tokens kept")


# %% [markdown]
# ## Two questions
# The engine forgets its own cache first, so that the edited KV must come from the server. The second turn then finds
# the edited document and the first turn in the engine's own cache. The engine's own counters say how much was taken.


# %%
def ask(stream: LMCacheRequestStream, question: list[int]) -> tuple[int, int]:
    """One turn of the conversation: how many of its prompt's tokens were cached, and how many were computed."""
    hits = ("prefix_cache_hits", "external_prefix_cache_hits")
    before = sum(map(setup.engine.counter, hits))
    turn = stream.generate(sampling, question)
    cached = sum(map(setup.engine.counter, hits)) - before
    computed = turn.input_tokens - cached
    print(f"  {turn.ttft * 1e3:7.1f} ms to the first token, {cached} tokens cached, {computed} computed")
    return cached, computed


setup.engine.reset_prefix_cache()
print("first question, on the edited document")
tail = len(stream.suffix_tokens)
assert ask(stream, first_question) == (kept, tail + len(first_question))
so_far = len(stream.tokens)
print("second question, on the edited document and the first turn")
cached, computed = ask(stream, second_question)
assert cached > so_far - ENGINE_BLOCK
assert computed < len(second_question) + ENGINE_BLOCK

# %% [markdown]
# ## The same without the edit
# The whole document is still cached, untouched: another stream goes on from it. And who sends the tokens that the edit
# left over gets what the model computes for them, not the edit: that is kept under a salt of the stream's own.

# %%
unedited = create_request([cache], stream.post_completion, document)
setup.engine.reset_prefix_cache()
print("first question, on the whole document")
assert ask(unedited, first_question) == (whole, len(document) - whole + len(first_question))

plain = setup.engine.complete(stream.tokens[: kept + 1])
print(f"a plain client with the edit's {kept} tokens: {plain.cached_tokens} cached")
assert plain.cached_tokens == 0

# %%
cache.close()
setup.stop()
