"""The cache of queries, which an engine fills if it is told to transfer intermediate tensors."""

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import LMCacheSDKContext

__all__ = ["connect"]


def connect(url: str, http_url: str, model_name: str, timeout: float = 60.0) -> LMCacheSDKContext:
    """A context for the queries of `model_name`; tensors are [1, L, T, D].

    `url` and `http_url` are the two ports of one server. Raises LMCacheSDKError if that does not work, or if no engine
    of that model caches its queries.
    """
    return LMCacheSDKContext(LMCacheSDKCacheKind.QUERY, url, http_url, model_name, timeout)
