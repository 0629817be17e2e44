"""The cache of keys and values."""

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import LMCacheSDKContext

__all__ = ["connect"]


def connect(url: str, http_url: str, model_name: str, timeout: float = 60.0) -> LMCacheSDKContext:
    """A context for the KV of `model_name`; tensors are [2, L, T, D], or [1, L, T, D] for MLA models.

    `url` and `http_url` are the two ports of one server. Raises LMCacheSDKError if that does not work, or if no engine
    of that model is registered.
    """
    return LMCacheSDKContext(LMCacheSDKCacheKind.KV, url, http_url, model_name, timeout)
