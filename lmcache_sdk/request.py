"""One logical request over several passes of an engine: prefill, edit the cached KV, decode.

    tokens            the sequence behind the cached KV; the next prompt
    suffix_tokens     what follows it and has no cached KV yet: the tail that an edit left over

    generate          tokens += suffix, run the engine on tokens, tokens += what it generated
    modify_kv         take the cached prefix out, edit it, put it back as a new prefix; the rest becomes suffix

An edit is isolated: it is stored, and the later passes run, under a salt of this stream's own, so that nobody else's
prompt can meet it. An edit lands exactly once or is refused by name: if the stream moved on meanwhile (`StaleEdit`), if
it was applied already (`EditAlreadyApplied`), if the stream was aborted (`StreamAborted`). A failing edit changes
nothing.
"""

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import LMCacheSDKContext, ModifyFnType
from lmcache_sdk.edits.salt import edit_salt
from lmcache_sdk.errors import (
    EditAlreadyApplied,
    LMCacheRequestStreamError,
    LMCacheSDKError,
    StaleEdit,
    StreamAborted,
)
from lmcache_sdk.perf import StreamPerfMetrics, measured
from lmcache_sdk.shapes import CachedTensors, first_tokens, token_count
from lmcache_sdk.tokens import TokenIds, token_bytes

__all__ = [
    "Edit",
    "EditAlreadyApplied",
    "LMCacheRequestStream",
    "LMCacheRequestStreamError",
    "PostCompletion",
    "StaleEdit",
    "StreamAborted",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token: its id, and its text as far as the engine tells."""

    token_id: int
    text: str


class PostCompletion(Protocol):
    """How a stream runs its engine; see `completion.post_completion` for a ready one."""

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterable[TokenEvent]:
        """Complete the prompt; one event per generated token, as it comes."""


class Edit:
    """The cached tensors of a stream at one moment, and the right to replace them once."""

    def __init__(
        self, stream: "LMCacheRequestStream", tensors: Mapping[LMCacheSDKCacheKind, CachedTensors], version: int
    ) -> None:
        self.tensors = tensors
        """By kind, as contexts retrieve them: KV [2, L, T, D], queries [1, L, T, D]; T is the same for all."""
        self._cached = token_count(next(iter(tensors.values())))
        self.tokens: list[int] = stream.tokens[: self._cached]
        """The T tokens behind them."""
        self._stream = stream
        self._version = version
        self._applied = False

    def apply(self, kv: CachedTensors, tokens: TokenIds) -> None:
        """Put `kv` [2, L, T', D] of T' `tokens` in the place of what was retrieved.

        Raises EditAlreadyApplied, StaleEdit or StreamAborted if it is too late, LMCacheRequestStreamError if kv and
        tokens do not fit or cannot be stored. The stream is unchanged then.
        """
        if self._applied:
            raise EditAlreadyApplied("this edit was applied already", self._stream.request_stream_id)
        self._stream._replace(LMCacheSDKCacheKind.KV, kv, tokens, self._version, cached=self._cached)
        self._applied = True


class LMCacheRequestStream:
    """One request, bound to the contexts of its cache and to an engine. Used by one thread at a time."""

    def __init__(
        self,
        contexts: Iterable[LMCacheSDKContext],
        post_completion: PostCompletion,
        prompt_token_ids: TokenIds,
        cache_salt: str = "",
        *,
        isolate_edits: bool = True,
    ) -> None:
        """`contexts`: one per kind. Without `isolate_edits` an edit is stored under `cache_salt` itself: whoever sends
        the same tokens with the same salt then gets the edited KV, and tokens that are cached already stay as they are.
        """
        self.request_stream_id = str(uuid.uuid4())
        self.post_completion = post_completion
        self.tokens: list[int] = _ids(prompt_token_ids, "prompt_token_ids", self.request_stream_id)
        self.cache_salt = cache_salt
        self.done = False
        self._contexts = _by_kind(contexts, self.request_stream_id)
        self._tenant_salt = cache_salt
        self._isolate_edits = isolate_edits
        self._suffix_tokens: list[int] = []
        self._prompt_length = len(self.tokens)
        self._decoded = 0
        self._text_parts: list[str] = []
        self._version = 0
        self._edits = 0
        self._aborted = False
        self._busy = threading.Lock()

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "done" if self.done else "open"
        sizes = f"{len(self.tokens)} tokens, {len(self._suffix_tokens)} suffix, {self._decoded} decoded"
        return f"<{type(self).__name__} {self.request_stream_id}: {sizes}, {state}>"

    @property
    def suffix_tokens(self) -> list[int]:
        """Tokens behind `tokens` that have no cached KV yet; the next pass submits them."""
        return self._suffix_tokens

    @property
    def decoded_tokens(self) -> int:
        """Tokens generated by all passes."""
        return self._decoded

    @property
    def output_text(self) -> str:
        """Text generated by all passes."""
        return "".join(self._text_parts)

    @property
    def output_tokens(self) -> list[int]:
        """The whole sequence: prompt, as edited, and what was generated."""
        return self.tokens

    @property
    def is_done(self) -> bool:
        """Whether the last pass ended before its `max_tokens`."""
        return self.done

    def generate(self, sampling_params: Mapping[str, Any], suffix_tokens: TokenIds = ()) -> StreamPerfMetrics:
        """Run one pass: the pending suffix and `suffix_tokens` join the prompt, what is generated follows it.

        Raises LMCacheRequestStreamError if the engine fails, StreamAborted if the stream is aborted meanwhile; what was
        generated until then counts.
        """
        if not isinstance(sampling_params, Mapping):
            kind = type(sampling_params).__name__
            raise LMCacheRequestStreamError(f"sampling_params: expected a mapping, got {kind}", self.request_stream_id)
        most = sampling_params.get("max_tokens", 1)
        if not isinstance(most, int) or most < 1:
            raise LMCacheRequestStreamError(f"max_tokens: expected at least 1, got {most!r}", self.request_stream_id)
        with self._alone("generate"):
            suffix = _ids(suffix_tokens, "suffix_tokens", self.request_stream_id)
            self.tokens += [*self._suffix_tokens, *suffix]
            self._suffix_tokens = []
            self._prompt_length = len(self.tokens)
            self._version += 1
            generated: list[int] = []
            gaps: list[float] = []
            begin = last = time.perf_counter()
            try:
                for event in self.post_completion(list(self.tokens), dict(sampling_params), self.cache_salt):
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last = now
                    generated.append(event.token_id)
                    self._text_parts.append(event.text)
                    if self._aborted:
                        raise StreamAborted(f"aborted after {len(generated)} tokens", self.request_stream_id)
            except StreamAborted:
                raise
            except Exception as error:  # whatever the engine's client raises: it is not ours
                raise LMCacheRequestStreamError(
                    f"the engine failed after {len(generated)} tokens: {error}", self.request_stream_id
                ) from error
            finally:
                self.tokens += generated
                self._decoded += len(generated)
            self.done = len(generated) < most
            return measured(self._prompt_length, time.perf_counter() - begin, gaps)

    def retrieve(self, kind: LMCacheSDKCacheKind, timeout: float = 30.0, poll_interval: float = 0.2) -> CachedTensors:
        """The cached prefix of `tokens`: KV [2, L, T, D] or queries [1, L, T, D], T in whole chunks.

        Waits until there is one, and as long as it still grows (an engine stores a prompt in several steps). Raises
        LMCacheRequestStreamError if nothing is cached after `timeout` seconds, at once if `tokens` are less than a
        chunk.
        """
        context = self._context(kind)
        if len(self.tokens) < context.chunk_size:
            raise LMCacheRequestStreamError(
                f"no {kind.name}: its {len(self.tokens)} tokens are less than a chunk of {context.chunk_size}, the "
                "least that is cached",
                self.request_stream_id,
            )
        whole = self._prompt_length // context.chunk_size * context.chunk_size
        deadline = time.monotonic() + timeout
        cached = -1
        while True:
            before, cached = cached, context.lookup(self.tokens, self.cache_salt)
            late = time.monotonic() >= deadline
            if cached and (cached >= whole or cached == before or late):
                tensor = context.retrieve(self.tokens, self.cache_salt)
                if tensor is not None:
                    return tensor
            if late:
                raise LMCacheRequestStreamError(
                    f"no {kind.name} of its {len(self.tokens)} tokens was cached within {timeout:g} s "
                    f"(chunks of {context.chunk_size} tokens; is the engine's connector storing?)",
                    self.request_stream_id,
                )
            time.sleep(min(poll_interval, max(0.0, deadline - time.monotonic())))

    def begin_edit(self, timeout: float = 30.0, poll_interval: float = 0.2) -> Edit:
        """Retrieve the tensors of every kind, cut to the shortest; to be edited anywhere and applied once."""
        with self._alone("begin_edit"):
            tensors = {kind: self.retrieve(kind, timeout, poll_interval) for kind in self._contexts}
            length = min(map(token_count, tensors.values()))
            return Edit(self, {kind: first_tokens(t, length) for kind, t in tensors.items()}, self._version)

    def update(self, kind: LMCacheSDKCacheKind, kv: CachedTensors, tokens: TokenIds) -> None:
        """Store `kv` for `tokens`, one per kv.shape[2], and go on from them; what was `tokens` until now is forgotten.

        Whole chunks are stored; the engine computes what follows the last one. Raises LMCacheRequestStreamError if kv
        and tokens do not fit or cannot be stored. The stream is unchanged then.
        """
        self._replace(kind, kv, tokens, self._version, cached=len(self.tokens))

    def modify_kv(self, fn: ModifyFnType, timeout: float = 30.0, poll_interval: float = 0.2) -> None:
        """Edit the cached KV: `fn(tensors by kind, tokens) -> (new KV [2, L, T', D], its T' tokens)`.

        `fn` sees the cached prefix and its tokens; what follows it stays, as suffix. If `fn` or the store fails, the
        stream is as it was.
        """
        edit = self.begin_edit(timeout, poll_interval)
        try:
            edited = fn(edit.tensors, edit.tokens)
        except Exception as error:  # whatever the caller's function raises
            raise LMCacheRequestStreamError(
                f"the edit function failed: {type(error).__name__}: {error}", self.request_stream_id
            ) from error
        if not isinstance(edited, tuple | list) or len(edited) != 2:
            raise LMCacheRequestStreamError(
                f"the edit function: expected (new KV, its tokens), got {type(edited).__name__}", self.request_stream_id
            )
        edit.apply(*edited)

    def abort(self) -> None:
        """Give the stream up: later passes and edits, also one under way, are refused."""
        self._aborted = True
        self._version += 1

    def _replace(
        self, kind: LMCacheSDKCacheKind, kv: CachedTensors, tokens: TokenIds, version: int, cached: int
    ) -> None:
        """Store an edit of the first `cached` tokens as they were at `version`, then make it the stream's own."""
        with self._alone("an edit"):
            if version != self._version:
                raise StaleEdit("it changed after the edit's source was retrieved", self.request_stream_id)
            context, new_tokens = self._context(kind), _ids(tokens, "tokens", self.request_stream_id)
            salt = self._next_salt(kind)
            try:
                stored = context.store(kv, new_tokens, salt)
            except LMCacheSDKError as error:
                raise LMCacheRequestStreamError(f"the edit was not stored: {error}", self.request_stream_id) from error
            if self._aborted:
                raise StreamAborted("it was aborted while an edit was stored", self.request_stream_id)
            if not stored:
                self._warn_of_nothing_stored(len(new_tokens), context.chunk_size)
            self.cache_salt = salt
            self._suffix_tokens = [*self.tokens[cached:], *self._suffix_tokens]
            self.tokens = new_tokens
            self._prompt_length = len(new_tokens)
            self.done = False
            self._version += 1

    def _warn_of_nothing_stored(self, tokens: int, chunk_size: int) -> None:
        why = "were cached already and stay as they are" if tokens >= chunk_size else "are less than a chunk"
        logger.warning("request stream %s: nothing was stored, its %d tokens %s", self.request_stream_id, tokens, why)

    def _next_salt(self, kind: LMCacheSDKCacheKind) -> str:
        """A salt that nobody else knows, another one for every attempt: what an edit or a failed one left is never
        "cached already".
        """
        if not self._isolate_edits or kind is not LMCacheSDKCacheKind.KV:
            return self.cache_salt
        self._edits += 1
        return edit_salt(self._tenant_salt, f"{self.request_stream_id}/{self._edits}")

    def _context(self, kind: LMCacheSDKCacheKind) -> LMCacheSDKContext:
        context = self._contexts.get(kind)
        if context is None:
            has = ", ".join(sorted(k.name for k in self._contexts))
            raise LMCacheRequestStreamError(f"it has no context for {kind}, only {has}", self.request_stream_id)
        return context

    def _alone(self, what: str) -> "_Alone":
        return _Alone(self, what)


class _Alone:
    """Held while a stream does one thing; a second one at the same time is a mistake, and is told so."""

    def __init__(self, stream: LMCacheRequestStream, what: str) -> None:
        self._stream = stream
        self._what = what

    def __enter__(self) -> None:
        if not self._stream._busy.acquire(blocking=False):
            raise LMCacheRequestStreamError(
                f"{self._what} while it is busy; a stream does one thing at a time", self._stream.request_stream_id
            )
        if self._stream._aborted:
            self._stream._busy.release()
            raise StreamAborted(f"{self._what} after it was aborted", self._stream.request_stream_id)

    def __exit__(self, *exc_info: object) -> None:
        self._stream._busy.release()


def create_request(
    contexts: Iterable[LMCacheSDKContext],
    post_completion: PostCompletion,
    prompt_token_ids: TokenIds,
    cache_salt: str = "",
    *,
    isolate_edits: bool = True,
) -> LMCacheRequestStream:
    """A stream for one prompt; see LMCacheRequestStream."""
    return LMCacheRequestStream(contexts, post_completion, prompt_token_ids, cache_salt, isolate_edits=isolate_edits)


def _by_kind(contexts: Iterable[LMCacheSDKContext], stream_id: str) -> dict[LMCacheSDKCacheKind, LMCacheSDKContext]:
    by_kind: dict[LMCacheSDKCacheKind, LMCacheSDKContext] = {}
    if isinstance(contexts, LMCacheSDKContext) or not isinstance(contexts, Iterable):
        raise LMCacheRequestStreamError(f"contexts: expected a list of them, got {type(contexts).__name__}", stream_id)
    for context in contexts:
        if not isinstance(context, LMCacheSDKContext):
            raise LMCacheRequestStreamError(f"contexts: expected contexts, got {context!r}", stream_id)
        if context.kind in by_kind:
            raise LMCacheRequestStreamError(f"contexts: two for {context.kind.name}, expected one per kind", stream_id)
        by_kind[context.kind] = context
    if not by_kind:
        raise LMCacheRequestStreamError("contexts: expected at least one", stream_id)
    return by_kind


def _ids(tokens: TokenIds, name: str, stream_id: str) -> list[int]:
    """`tokens` as a new list; LMCacheRequestStreamError for anything that is not a sequence of token ids."""
    try:
        ids: list[int] = np.frombuffer(token_bytes(tokens), dtype="<u4").tolist()
    except LMCacheSDKError as error:
        where = str(error).removeprefix("tokens")
        raise LMCacheRequestStreamError(f"{name}{where}", stream_id) from error
    return ids
