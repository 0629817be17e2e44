"""The server's pool, mapped into this process.

    [ pool: pool_bytes ][ generations: one uint64 little-endian per align_bytes of the pool ][ mark: 16 bytes ]

The segment is the server's: it is opened by name, checked to be a pool of the size that the server told, mapped, and
never unlinked here. A mapping is given back when the last tensor over it is gone, so that no view ever points nowhere,
whatever the order of closing; a segment that the server has replaced stays readable to whoever still looks at it.

It is mapped twice: once to copy from and to, and once read-only, to be shown. A tensor cannot say that it must not be
written to, but its memory can: a write to what is shown ends the process that writes (SIGSEGV), not the cache of all.
"""

import errno
import mmap
import os
import stat
import warnings
from typing import Any

import numpy as np
import torch

from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["Integers", "PoolForbidden", "SharedPool"]

SHM_ROOT = "/dev/shm"
MARK = b"lmcache-pool-v1\0"
GENERATION_BYTES = 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; the mmap module has no name for it


Integers = np.ndarray[Any, Any]
"""One dimension of offsets, lengths or generations: NumPy's, whose calls cost a tenth of torch's."""


class PoolForbidden(LMCacheSDKError):
    """The segment is there, but this user may not open it."""


class SharedPool:
    """A mapped pool: `tensor` is all of it as bytes, without a copy, and `shown` is the same, read-only."""

    def __init__(self, name: str, mapping: mmap.mmap, shown: mmap.mmap, pool_bytes: int, align_bytes: int) -> None:
        units = pool_bytes // align_bytes
        self.name = name
        self.align_bytes = align_bytes
        self.tensor: torch.Tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=pool_bytes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.shown: torch.Tensor = torch.frombuffer(shown, dtype=torch.uint8, count=pool_bytes)
        self._table: Integers = np.frombuffer(mapping, dtype="<u8", count=units, offset=pool_bytes)
        self._mapping = mapping
        self._touched: Integers = np.zeros(units, dtype=np.bool_)

    @classmethod
    def attach(cls, name: str, pool_bytes: int, align_bytes: int) -> "SharedPool":
        """Map the segment `name`, which must be a pool of `pool_bytes` bytes with an entry per `align_bytes`.

        Raises PoolForbidden if this user may not open it, LMCacheSDKError if it is missing or not such a pool.
        """
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise LMCacheSDKError(f"shm_name: expected the name of a file in {SHM_ROOT}, got {name!r}")
        if not 0 < align_bytes <= pool_bytes:
            raise LMCacheSDKError(f"pool: {pool_bytes} bytes in units of {align_bytes} bytes cannot be mapped")
        fd = _open(name)
        try:
            size = _check(fd, name, pool_bytes, align_bytes)
            mapping, shown = mmap.mmap(fd, size), mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise LMCacheSDKError(f"{SHM_ROOT}/{name} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return cls(name, mapping, shown, pool_bytes, align_bytes)

    def generations(self, offsets: Integers) -> Integers:
        """The generations (uint64) of the objects that start at `offsets` now; 0 where there is none."""
        generations: Integers = self._table[offsets // self.align_bytes]
        return generations

    def touch(self, offsets: Integers, lengths: Integers) -> None:
        """Map the pages of objects that this process has not used yet: one call each instead of a fault per page.

        Raises LMCacheSDKError if there is no memory behind them (a write would end the process with SIGBUS).
        """
        units = offsets // self.align_bytes
        fresh = ~self._touched[units]
        if not fresh.any():
            return
        for offset, length in zip(offsets[fresh].tolist(), lengths[fresh].tolist(), strict=True):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._mapping.madvise(_POPULATE_WRITE, start, offset + length - start)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return  # an older kernel: the pages come one by one, as they are used
                raise LMCacheSDKError(
                    f"{SHM_ROOT} has no memory left for the pool {self.name} ({error.strerror})"
                ) from error
        self._touched[units] = True


def _open(name: str) -> int:
    path = f"{SHM_ROOT}/{name}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError as error:
        raise PoolForbidden(
            f"{path} belongs to another user and its mode does not let this one in; run both as one user, "
            "or start the server with --shm-mode 0660 and a common group"
        ) from error
    except OSError as error:
        raise LMCacheSDKError(
            f"{path} cannot be opened ({error.strerror}); server and client must share one /dev/shm "
            "(containers: one IPC namespace or a common mount)"
        ) from error


def _check(fd: int, name: str, pool_bytes: int, align_bytes: int) -> int:
    facts = os.fstat(fd)
    expected = pool_bytes + pool_bytes // align_bytes * GENERATION_BYTES + len(MARK)
    if not stat.S_ISREG(facts.st_mode):
        raise LMCacheSDKError(f"{SHM_ROOT}/{name} is not a regular file")
    if facts.st_size < expected:
        raise LMCacheSDKError(f"{SHM_ROOT}/{name} has {facts.st_size} bytes, expected {expected}: it is another pool")
    if os.pread(fd, len(MARK), expected - len(MARK)) != MARK:
        raise LMCacheSDKError(f"{SHM_ROOT}/{name} is not the pool of a cache server: its mark is missing")
    return expected
