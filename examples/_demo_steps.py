"""What the demo does to one engine and one cache, each step with the check that proves it.

Times are for reading; every claim rests on the engine's own count of cached prompt tokens and on its logprobs. Steps
that do the same work must give the same bits, so they are compared for equality.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from _demo_engine import Completion, Engine
from _demo_setup import wait_until_cached

from lmcache_sdk import LMCacheSDKContext
from lmcache_sdk.edits import EveryOtherChunk, Rotary, edit_salt, keep_tokens

REPEATS = 3
"""How many measurements each time is the median of."""
CHUNKS = 16
TAIL = 40
"""Tokens after the last whole chunk: a chunk is the unit of caching, so the engine computes these each time."""
DECODE = 8

Say = Callable[[str], None]


class DemoFailed(RuntimeError):
    """A step did not show what it should have; the message says what was seen."""


@dataclass
class Measured:
    """What the steps have shown so far; lists are milliseconds to the first token."""

    cold: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    external: list[float] = field(default_factory=list)
    edited: list[float] = field(default_factory=list)
    external_equals_local: bool = False
    cached_tokens: int = 0
    kept_tokens: int = 0
    dropped_tokens: int = 0
    edit_served: bool = False
    plain_client_unaffected: bool = False


def prompts(chunk_size: int) -> list[list[int]]:
    """Prompts of random bytes, the same in every run."""
    rng = random.Random(20)
    return [rng.choices(range(256), k=CHUNKS * chunk_size + TAIL) for _ in range(REPEATS)]


def hits(engine: Engine, cache: LMCacheSDKContext, measured: Measured, say: Say) -> None:
    """Each prompt cold, then from the engine's own cache, then from ours after the engine forgot its own."""
    everything = prompts(cache.chunk_size)
    whole = CHUNKS * cache.chunk_size
    say(f"cold: {REPEATS} prompts of {len(everything[0])} tokens, nothing cached")
    for prompt in everything:
        measured.cold.append(_ask(engine, prompt, cached=0, step="cold prompt").ttft_ms)
        _wait_until_cached(cache, prompt)
    say(f"      {_milliseconds(measured.cold)} to the first token; the server holds {whole} tokens of each")

    say("local hit: the same prompts again, from the engine's own cache")
    local = [_ask(engine, prompt, cached=whole, step="local hit") for prompt in everything]
    measured.local += [answer.ttft_ms for answer in local]
    say(f"      {_milliseconds(measured.local)}")

    say("external hit: the engine forgets its cache and takes the KV from the server")
    engine.reset_prefix_cache()
    external = [_ask(engine, prompt, cached=whole, step="external hit") for prompt in everything]
    measured.external += [answer.ttft_ms for answer in external]
    measured.cached_tokens = whole
    measured.external_equals_local = [a.logprobs for a in external] == [a.logprobs for a in local]
    if not measured.external_equals_local:
        raise DemoFailed("external hit: its logprobs are not those of the local hit, though both did the same work")
    say(f"      {_milliseconds(measured.external)}; all logprobs are the local hit's, bit for bit")


def edit(engine: Engine, cache: LMCacheSDKContext, rotary: Rotary, measured: Measured, say: Say) -> None:
    """Drop half of the chunks of a cached prompt, decode on what is left, and show that nobody else is served it."""
    prompt = prompts(cache.chunk_size)[0]
    kv = cache.retrieve(prompt)
    if kv is None or kv.shape[2] != CHUNKS * cache.chunk_size:
        raise DemoFailed(f"edit: expected KV of {CHUNKS} chunks, got {'none' if kv is None else list(kv.shape)}")
    cached, tail = prompt[: kv.shape[2]], prompt[kv.shape[2] :]
    kept = EveryOtherChunk(cache.chunk_size)({}, cached)
    edited_kv, tokens = keep_tokens(kv, cached, kept, rotary)
    measured.kept_tokens, measured.dropped_tokens = len(tokens), len(cached) - len(tokens)
    say(
        f"edit: {measured.dropped_tokens} of {len(cached)} tokens dropped, the keys of the others moved to their places"
    )

    # The first chunk is kept, so a plain client rightly shares it with the long prompt. The cold run shares it with the
    # long prompt of a tenant of its own: then both do the same work.
    cold_salt = edit_salt()
    _ask(engine, prompt, cached=0, step="cold prompt of another tenant", salt=cold_salt)
    cold = _ask(engine, tokens + tail, cached=cache.chunk_size, step="cold run of the short prompt", salt=cold_salt)

    salt = edit_salt()
    if not cache.store(edited_kv, tokens, salt):
        raise DemoFailed("edit: the server says that it had this edit already, under a salt that is new")
    step = "decode on the edited cache"
    for _ in range(REPEATS):
        engine.reset_prefix_cache()
        edited = _ask(engine, tokens + tail, cached=len(tokens), step=step, salt=salt)
        measured.edited.append(edited.ttft_ms)
    measured.edit_served = edited.logprobs != cold.logprobs
    if not measured.edit_served:
        raise DemoFailed(f"{step}: the logprobs are those of a prompt that was never edited")
    say(f"      decoded on {len(tokens)} edited tokens, {_milliseconds(measured.edited)} to the first token")

    engine.reset_prefix_cache()
    plain = _ask(engine, tokens + tail, cached=cache.chunk_size, step="a plain client with the short prompt")
    measured.plain_client_unaffected = plain.logprobs == cold.logprobs
    if not measured.plain_client_unaffected:
        raise DemoFailed("a plain client with the short prompt: its logprobs are not those of a cold run")
    say("      a plain client with the same short prompt gets a cold run's logprobs, bit for bit: not the edit")


def _ask(engine: Engine, prompt: Sequence[int], *, cached: int, step: str, salt: str = "") -> Completion:
    answer = engine.complete(prompt, max_tokens=DECODE, cache_salt=salt)
    if answer.cached_tokens != cached:
        raise DemoFailed(f"{step}: the engine reports {answer.cached_tokens} cached tokens instead of {cached}")
    return answer


def _wait_until_cached(cache: LMCacheSDKContext, prompt: list[int]) -> None:
    try:
        wait_until_cached(cache, prompt)
    except TimeoutError as error:
        raise DemoFailed(f"cold prompt: {error}") from error


def _milliseconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ms"
