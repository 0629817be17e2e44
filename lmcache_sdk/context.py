"""A person's hold on one cache: one server, one model, one kind of tensors.

A context registers in the layout that the engine registered and stays registered until it is closed. Its calls may come
from several threads. Every wait ends after `timeout` seconds with an error that says what was waited for. A call is
done again at most once per reason (the connection broke, the registration was void, a slot changed during the copy),
and never half: a tensor that is returned is verified.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lmcache_sdk import reading, writing
from lmcache_sdk.awaiting import in_thread
from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.explanation import Explanation, explained
from lmcache_sdk.reading import CacheView
from lmcache_sdk.registration import Registrar, Registration
from lmcache_sdk.shapes import CachedTensors, TensorShape, token_count
from lmcache_sdk.tokens import TokenIds, token_bytes
from lmcache_sdk.transfer import Transfer
from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.keys import TOKEN_BYTES
from lmcache_server.protocol.messages import Prompt, SessionId

__all__ = ["LMCacheSDKContext", "LMCacheSDKError", "ModifyFnType"]

ModifyFnType = Callable[
    [Mapping[LMCacheSDKCacheKind, CachedTensors], Sequence[int]], tuple[CachedTensors, Sequence[int]]
]
"""An edit: cached tensors by kind and their tokens -> the new KV [2, L, T, D] and its T tokens."""

CONFIG_PREFIX = "lmcache."


class LMCacheSDKContext:
    """Retrieves, shows and stores the cached tensors of one model. Made by `connect`; `with` closes it."""

    def __init__(
        self, kind: LMCacheSDKCacheKind, url: str, http_url: str, model_name: str, timeout: float = 60.0
    ) -> None:
        """Connect to the server at `url` (its --port) and `http_url` (its --http-port).

        Raises LMCacheSDKError if that does not work within `timeout` seconds, or if these are two servers, or if no
        engine of `model_name` has registered such a cache.
        """
        if not isinstance(kind, LMCacheSDKCacheKind):
            raise LMCacheSDKError(f"kind: expected a LMCacheSDKCacheKind, got {kind!r}")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise LMCacheSDKError(f"timeout: expected seconds above 0, got {timeout!r}")
        self._kind = kind
        self._model_name = model_name
        self._timeout = float(timeout)
        self._registrar = Registrar(kind, url, http_url, model_name, self._timeout)

    @property
    def kind(self) -> LMCacheSDKCacheKind:
        """Which tensors this context is about."""
        return self._kind

    @property
    def model_name(self) -> str:
        """The model, as its engine names it."""
        return self._model_name

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk of this server."""
        return self._registrar.current().geometry.tokens

    @property
    def shapes(self) -> tuple[TensorShape, ...]:
        """Which layers, heads and dtype each tensor of the cache has. One for most models; several where the layers of
        a model differ in shape: then all calls take and return tuples of so many tensors.
        """
        return self._registrar.current().geometry.shapes

    @property
    def transfer_ctx(self) -> Transfer:
        """How bytes travel now: through shared memory, or as frames."""
        return self._registrar.current().attachment.transfer

    def __repr__(self) -> str:
        return f"LMCacheSDKContext({self._kind.name}, {self._model_name!r}, {self._registrar!r})"

    def __enter__(self) -> "LMCacheSDKContext":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def register_caches(self) -> None:
        """Learn the layout that the engine registered, and register with it; `connect` has done so already."""
        self._registrar.register()

    def close(self) -> None:
        """Unregister and let go of threads, sockets and shared memory. Idempotent; returned tensors stay valid."""
        self._registrar.close()

    def lookup(self, tokens: TokenIds, cache_salt: str = "") -> int:
        """How many leading `tokens` are cached now, in whole chunks. Nothing is held: the next call may find less."""
        prompt = self._prompt("lookup", token_bytes(tokens), cache_salt)
        if not prompt.tokens:
            return 0
        chunks = self._registrar.attempt(lambda r: reading.cached_chunks(r.attachment, prompt, self._timeout))
        return chunks * self.chunk_size

    def explain(self, tokens: TokenIds, cache_salt: str = "") -> Explanation:
        """Why `retrieve` finds what it finds now, and no more; print it. Nothing is held or counted."""
        data = token_bytes(tokens)
        prompt = self._prompt("explain", data, cache_salt)
        total = len(data) // TOKEN_BYTES
        return self._registrar.attempt(lambda r: explained(r.attachment, r.geometry, prompt, total, self._timeout))

    def retrieve(
        self,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
        *,
        out: CachedTensors | None = None,
    ) -> CachedTensors | None:
        """The cached tensors of the longest cached prefix of `tokens`, whole chunks only; None if there is none.

        The result is [2, L, T, D] (keys, values), or [1, L, T, D] for queries and MLA models: all layers in the model's
        order, all heads; a tuple of such tensors where layers differ in shape, see `shapes`. With `out`, which must
        have that shape and room for as many tokens as are cached, it is the filled part of `out`.
        `request_configs` may hold `lmcache.*` entries of the request; none of them changes what is cached.
        Raises LMCacheSDKError for tokens, a salt or an `out` that do not fit, ServerUnavailable after the timeout.
        """
        _check_configs(request_configs)
        prompt = self._prompt("retrieve", token_bytes(tokens), cache_salt)
        if out is not None:
            self._registrar.current().geometry.check(out, "out")
        if not prompt.tokens:
            return None

        def once(r: Registration) -> tuple[CachedTensors | None, bool]:
            return reading.retrieve(r.attachment, r.geometry, r.heartbeat, prompt, out, self._timeout)

        tensor, whole = self._registrar.attempt(once)
        if not whole:  # a slot changed during the copy: once more, and then as much as can be verified
            tensor, _ = self._registrar.attempt(once)
        return tensor

    @contextmanager
    def view(self, tokens: TokenIds, cache_salt: str = "") -> Iterator[CacheView]:
        """While the block runs: the cached chunks where they lie (`CacheView`); empty on a miss.

        Nothing is copied where each tensor is of one shard and one kernel group; for others `retrieve` does as well.
        They are leased as long as the block runs, and void after it; a write to one ends this process. Raises
        LMCacheSDKError at the end of the block if they changed during it in spite of that.
        """
        prompt = self._prompt("view", token_bytes(tokens), cache_salt)
        if not prompt.tokens:
            yield CacheView([], self.chunk_size)
            return
        with ExitStack() as stack:

            def once(r: Registration) -> CacheView:
                looking = reading.view(r.attachment, r.geometry, r.heartbeat, prompt, self._timeout)
                return stack.enter_context(looking)

            yield self._registrar.attempt(once)

    def store(
        self,
        kv: CachedTensors,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Put `kv`, shaped as `retrieve` returns it, into the cache under `tokens`, one token per kv.shape[2].

        True if all of it is cached now and some of it was not before; False if all was cached already, so that
        nothing was written. Tokens after the last whole chunk are not stored. Raises LMCacheSDKError if kv and tokens
        do not fit, or if the pool has no room for all of it: then the error says how many chunks are there.
        """
        _check_configs(request_configs)
        self._registrar.current().geometry.check(kv, "kv")
        data = token_bytes(tokens)
        length, got = token_count(kv), len(data) // TOKEN_BYTES
        if got != length:
            raise LMCacheSDKError(f"tokens: expected one per kv.shape[2] ({length}), got {got}")
        prompt = self._prompt("store", data, cache_salt)
        if not prompt.tokens:
            return False
        return self._registrar.attempt(lambda r: writing.store(r.attachment, r.geometry, kv, prompt, self._timeout))

    async def aretrieve(
        self,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
        *,
        out: CachedTensors | None = None,
    ) -> CachedTensors | None:
        """`retrieve` for asyncio. A cancelled call ends when its thread has: nobody fills `out` after that."""
        return await in_thread(lambda: self.retrieve(tokens, cache_salt, request_configs, out=out))

    async def astore(
        self,
        kv: CachedTensors,
        tokens: TokenIds,
        cache_salt: str = "",
        request_configs: Mapping[str, Any] | None = None,
    ) -> bool:
        """`store` for asyncio. A cancelled call ends when its thread has: nobody reads `kv` after that."""
        return await in_thread(lambda: self.store(kv, tokens, cache_salt, request_configs))

    def _prompt(self, purpose: str, tokens: bytes, cache_salt: str) -> Prompt:
        """The whole chunks of `tokens`, under a session of their own."""
        if not isinstance(cache_salt, str):
            raise LMCacheSDKError(f"cache_salt: expected a str, got {type(cache_salt).__name__}")
        chunk_bytes = self.chunk_size * TOKEN_BYTES
        session = SessionId(f"{purpose}-{uuid.uuid4().hex}")
        try:
            return Prompt(session, tokens[: len(tokens) // chunk_bytes * chunk_bytes], cache_salt)
        except ProtocolError as error:
            raise LMCacheSDKError(f"cache_{error}") from error


def _check_configs(request_configs: Mapping[str, Any] | None) -> None:
    if request_configs is None:
        return
    if not isinstance(request_configs, Mapping):
        raise LMCacheSDKError(f"request_configs: expected a mapping or None, got {type(request_configs).__name__}")
    for key in request_configs:
        if not isinstance(key, str) or not key.startswith(CONFIG_PREFIX):
            raise LMCacheSDKError(f"request_configs: unknown key {key!r}; keys begin with {CONFIG_PREFIX!r}")
