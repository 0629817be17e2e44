"""Contexts for KV caches."""

from lmcache_sdk.kvcache import close, connect, retrieve, store

__all__ = ["close", "connect", "retrieve", "store"]
