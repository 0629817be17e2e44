"""Batches of request streams."""

from lmcache_sdk.batch import LMCacheBatchedStream, LMCacheBatchedStreamError

__all__ = ["LMCacheBatchedStream", "LMCacheBatchedStreamError"]
