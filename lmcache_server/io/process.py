"""Is that process gone? Answered from /proc, and only for processes of our own pid namespace."""

import os
from pathlib import Path

from lmcache_server.protocol.messages import ProcessId

__all__ = ["process_gone"]


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or a zombie. Raises PermissionError."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def process_gone(process: ProcessId) -> bool | None:
    """Whether the process has ended; None if it cannot be seen from here: it lives in another pid namespace, or is
    hidden from this user.
    """
    if process.namespace != _namespace():
        return None
    try:
        return _started(process.pid) != process.started
    except PermissionError:
        return None
