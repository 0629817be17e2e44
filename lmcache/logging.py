"""Loggers."""

from lmcache_sdk.logs import init_logger

__all__ = ["init_logger"]
