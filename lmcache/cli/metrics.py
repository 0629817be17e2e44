"""Reports."""

from lmcache_server.report import FileHandler, Metrics, Section, StreamHandler, get_formatter

__all__ = ["FileHandler", "Metrics", "Section", "StreamHandler", "get_formatter"]
