"""Loggers and the banner under the names that scripts written against the documents import."""

import functools
import logging
import sys

__all__ = ["init_logger", "print_banner_once"]


def init_logger(name: str) -> logging.Logger:
    """The logger of that name; what it prints and where is the application's to say."""
    return logging.getLogger(name)


@functools.cache
def print_banner_once() -> None:
    """One line on stderr, the first time only, and only on a terminal."""
    if sys.stderr.isatty():
        print("lmcache-server: KV cache for LLM inference", file=sys.stderr)
