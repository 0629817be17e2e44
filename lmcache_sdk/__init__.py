"""The client: take cached KV out of a server, edit it, put it back. Needs torch; knows no web framework or engine.

import lmcache_sdk

with lmcache_sdk.kvcache.connect("tcp://localhost:5555", "http://localhost:8080", model_name) as cache:
    kv = cache.retrieve(tokens)             # [2, L, T, D], the cached prefix
    cache.store(edit(kv), edited_tokens)
"""

from lmcache_sdk import kvcache, qcache
from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import LMCacheSDKContext, ModifyFnType
from lmcache_sdk.errors import ConnectionLost, LMCacheSDKError, ServerRefused, ServerUnavailable
from lmcache_sdk.explanation import Explanation
from lmcache_sdk.reading import CacheView
from lmcache_sdk.shapes import CachedTensors, TensorShape

__all__ = [
    "CacheView",
    "CachedTensors",
    "ConnectionLost",
    "Explanation",
    "LMCacheSDKCacheKind",
    "LMCacheSDKContext",
    "LMCacheSDKError",
    "ModifyFnType",
    "ServerRefused",
    "ServerUnavailable",
    "TensorShape",
    "connect",
    "kvcache",
    "qcache",
]


def connect(
    kind: LMCacheSDKCacheKind, url: str, http_url: str, model_name: str, timeout: float = 60.0
) -> LMCacheSDKContext:
    """A context for `kind` of `model_name`; as `kvcache.connect` and `qcache.connect`."""
    return LMCacheSDKContext(kind, url, http_url, model_name, timeout)
