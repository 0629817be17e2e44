"""The cache of keys and values. `close`, `retrieve` and `store` are the context's methods under their older names."""

from typing import Any

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import LMCacheSDKContext
from lmcache_sdk.shapes import CachedTensors
from lmcache_sdk.tokens import TokenIds

__all__ = ["close", "connect", "retrieve", "store"]


def connect(url: str, http_url: str, model_name: str, timeout: float = 60.0) -> LMCacheSDKContext:
    """A context for the KV of `model_name`; tensors are [2, L, T, D], or [1, L, T, D] for MLA models
    (several of them where layers differ in shape).

    `url` and `http_url` are the two ports of one server. Raises LMCacheSDKError if that does not work, or if no engine
    of that model is registered.
    """
    return LMCacheSDKContext(LMCacheSDKCacheKind.KV, url, http_url, model_name, timeout)


def close(ctx: LMCacheSDKContext) -> None:
    """As `ctx.close()`."""
    ctx.close()


def retrieve(ctx: LMCacheSDKContext, tokens: TokenIds, cache_salt: str = "", **options: Any) -> CachedTensors | None:
    """As `ctx.retrieve(...)`."""
    return ctx.retrieve(tokens, cache_salt, **options)


def store(ctx: LMCacheSDKContext, kv: CachedTensors, tokens: TokenIds, cache_salt: str = "", **options: Any) -> bool:
    """As `ctx.store(...)`."""
    return ctx.store(kv, tokens, cache_salt, **options)
