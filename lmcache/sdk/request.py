"""Request streams."""

from lmcache_sdk.request import (
    LMCacheRequestStream,
    LMCacheRequestStreamError,
    PostCompletion,
    StreamPerfMetrics,
    TokenEvent,
    create_request,
)

__all__ = [
    "LMCacheRequestStream",
    "LMCacheRequestStreamError",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
]
