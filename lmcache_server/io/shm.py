"""The pool's memory: one POSIX shared-memory segment owned by this process, or private memory with the same face.

    [ pool: pool_bytes ][ generations: one uint64 little-endian per align_bytes of the pool ][ mark: 16 bytes ]

Rules. The segment is created with the mode that was asked for, never adopted; it gets its name when it is complete, so
a server that is killed before leaves nothing. The owner holds an exclusive flock on it as long as it lives, which the
kernel drops with the process: a marked segment whose lock is free belongs to nobody and may be reclaimed, anything else
under the same name is refused. Clients map it and never unlink it.
"""

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["Pool", "PoolError", "create_private_pool", "create_shared_pool", "progress_bar", "reclaim_orphans"]

SHM_ROOT = Path("/dev/shm")
_MARK = b"lmcache-pool-v1\0"
_STEP = 64 * 2**20
GIB = 2**30


class PoolError(Exception):
    """The pool cannot be made as it was asked for: one sentence that says why and what would help."""


class Pool:
    """Mapped memory: `data` is the pool, `generations` the table that readers check, `name` the segment's ("" if
    private).
    """

    def __init__(self, mapping: mmap.mmap, pool_bytes: int, align_bytes: int, name: str, fd: int) -> None:
        table = pool_bytes // align_bytes * 8
        whole = memoryview(mapping)
        self.name = name
        self.data = whole[:pool_bytes]
        self.generations = whole[pool_bytes : pool_bytes + table].cast("Q")
        self._mapping = mapping
        self._fd = fd

    def close(self) -> None:
        """Unmap the memory and, if it is a segment, remove it. Safe to call twice."""
        if self.name:
            with contextlib.suppress(FileNotFoundError):
                path = SHM_ROOT / self.name
                if os.path.samestat(os.fstat(self._fd), os.stat(path)):
                    path.unlink()
            self.name = ""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.data.release()
        self.generations.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()


def create_private_pool(pool_bytes: int, align_bytes: int, progress: Callable[[float], None] | None) -> Pool:
    """A pool that no other process can map; its bytes travel as frames. With `progress`, every page is taken now.
    Raises PoolError.
    """
    size = _segment_bytes(pool_bytes, align_bytes)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise PoolError(
            f"the pool needs {size / GIB:.2f} GiB of memory, this machine has {memory / GIB:.2f} GiB; "
            "make --l1-size-gb smaller"
        )
    fd = os.memfd_create("lmcache pool")
    try:
        os.ftruncate(fd, size)
        if progress is not None:
            _take_pages(fd, size, progress)
        mapping = mmap.mmap(fd, size)
    except OSError as error:
        raise PoolError(f"{size} bytes of memory cannot be taken: {error.strerror}") from error
    finally:
        os.close(fd)
    return Pool(mapping, pool_bytes, align_bytes, "", -1)


def create_shared_pool(
    name: str, pool_bytes: int, align_bytes: int, mode: int, progress: Callable[[float], None] | None
) -> Pool:
    """A pool in a new segment; with `progress`, every page is taken now. Raises PoolError."""
    size, path = _segment_bytes(pool_bytes, align_bytes), SHM_ROOT / name
    _check_space(name, size)
    if not _reclaim(path) and path.is_symlink() | path.exists():
        raise _name_is_taken(path)
    fd = -1
    try:
        fd = os.open(SHM_ROOT, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
        os.fchmod(fd, mode)
        os.ftruncate(fd, size)
        os.pwrite(fd, _MARK, size - len(_MARK))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if progress is not None:
            _take_pages(fd, size, progress)
        mapping = mmap.mmap(fd, size)
        # Naming the directory makes the call follow the link to the file itself.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, FileExistsError):
            raise _name_is_taken(path) from error
        raise PoolError(f"shared memory {path} of {size} bytes cannot be made: {error.strerror}") from error
    return Pool(mapping, pool_bytes, align_bytes, name, fd)


def reclaim_orphans(prefix: str) -> list[str]:
    """Remove every abandoned pool whose name begins with `prefix`; which they were."""
    return [path.name for path in sorted(SHM_ROOT.glob(prefix + "*")) if _reclaim(path)]


def _name_is_taken(path: Path) -> PoolError:
    return PoolError(
        f"shared memory {path} exists and is not an abandoned pool of this server: "
        "another server uses it, or it is foreign; choose another --shm-name or remove the file"
    )


def _segment_bytes(pool_bytes: int, align_bytes: int) -> int:
    return pool_bytes + pool_bytes // align_bytes * 8 + len(_MARK)


def _check_space(name: str, size: int) -> None:
    """A mapping larger than the file system would end in SIGBUS at some later write."""
    existing = SHM_ROOT / name
    reclaimable = existing.stat().st_blocks * 512 if existing.exists() else 0
    free = os.statvfs(SHM_ROOT)
    available = max(0, free.f_bavail * free.f_frsize + reclaimable - _promised(name))
    if size > available:
        raise PoolError(
            f"the pool needs {size / GIB:.2f} GiB of shared memory, {SHM_ROOT} has {available / GIB:.2f} GiB free; "
            "make --l1-size-gb smaller, enlarge /dev/shm (docker: --shm-size), or serve without it (--shm-name '')"
        )


def _promised(name: str) -> int:
    """Bytes that the pools of other servers will still take: their pages come at first use."""
    total = 0
    for path in SHM_ROOT.iterdir():
        fd = _open_pool(path) if path.name != name else None
        if fd is not None:
            facts = os.fstat(fd)
            total += max(0, facts.st_size - facts.st_blocks * 512)
            os.close(fd)
    return total


def _reclaim(path: Path) -> bool:
    """Unlink an abandoned pool: marked as ours, and its owner's lock is free."""
    fd = _open_pool(path)
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the two calls another server may have reclaimed it and made its own pool of that name.
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            return False
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _open_pool(path: Path) -> int | None:
    """The descriptor of `path` if it is a pool of a server, else None."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        end = os.fstat(fd).st_size
        if end >= len(_MARK) and os.pread(fd, len(_MARK), end - len(_MARK)) == _MARK:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _take_pages(fd: int, size: int, progress: Callable[[float], None]) -> None:
    for start in range(0, size, _STEP):
        os.posix_fallocate(fd, start, min(_STEP, size - start))
        progress(min(1.0, (start + _STEP) / size))


def progress_bar(label: str) -> Callable[[float], None]:
    """A bar on the terminal's last line; nothing where stderr is not a terminal."""

    def show(share: float) -> None:
        if sys.stderr.isatty():
            filled = int(share * 40)
            end = "\n" if share >= 1 else ""
            print(f"\r{label} [{'#' * filled}{'.' * (40 - filled)}] {share:4.0%}", end=end, file=sys.stderr, flush=True)

    return show
