"""The SDK under its documented name."""

from lmcache.sdk import batch, cache_kind, context, kvcache, qcache, request, stream
from lmcache_sdk import LMCacheSDKCacheKind, LMCacheSDKContext, LMCacheSDKError, ModifyFnType, connect

__all__ = [
    "LMCacheSDKCacheKind",
    "LMCacheSDKContext",
    "LMCacheSDKError",
    "ModifyFnType",
    "batch",
    "cache_kind",
    "connect",
    "context",
    "kvcache",
    "qcache",
    "request",
    "stream",
]
