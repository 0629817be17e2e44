"""Which tensors a context is about."""

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind

__all__ = ["LMCacheSDKCacheKind"]
