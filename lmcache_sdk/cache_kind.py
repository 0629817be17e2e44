"""Which tensors of a model a context is about."""

from enum import Enum

from lmcache_server.protocol.keys import QUERY_SUFFIX
from lmcache_server.protocol.layout import Kind

__all__ = ["LMCacheSDKCacheKind"]


class LMCacheSDKCacheKind(Enum):
    """`KV`: keys and values. `QUERY`: the queries that an engine captured, cached under `<model>##query`."""

    KV = Kind.KV
    QUERY = Kind.QUERY

    def cached_name(self, model_name: str) -> str:
        """The model name that caches of this kind are registered under."""
        return model_name + QUERY_SUFFIX if self is LMCacheSDKCacheKind.QUERY else model_name
