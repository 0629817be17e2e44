"""How bytes travel, under its documented name."""

from lmcache_sdk.transfer import Transfer as ContiguousTransferWrapper

__all__ = ["ContiguousTransferWrapper"]
