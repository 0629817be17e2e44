"""The banner."""

from lmcache_sdk.logs import print_banner_once

__all__ = ["print_banner_once"]
