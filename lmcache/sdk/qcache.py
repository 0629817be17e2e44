"""Contexts for query caches."""

from lmcache_sdk.qcache import connect

__all__ = ["connect"]
