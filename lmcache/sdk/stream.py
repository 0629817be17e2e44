"""Request streams, older names."""

from lmcache_sdk.stream import (
    LMCacheStream,
    LMCacheStreamError,
    PostCompletion,
    StreamPerfMetrics,
    TokenEvent,
    create_request,
)

__all__ = ["LMCacheStream", "LMCacheStreamError", "PostCompletion", "StreamPerfMetrics", "TokenEvent", "create_request"]
