"""The context and what belongs to it."""

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import LMCacheSDKContext, ModifyFnType
from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["LMCacheSDKCacheKind", "LMCacheSDKContext", "LMCacheSDKError", "ModifyFnType"]
