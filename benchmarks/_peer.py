"""Where the peer is, an unmodified LMCache 0.5.6: `make interop` installs it into an environment of its own.

It is a black box: its server, its SDK and its vLLM adapter are started and asked, and never looked into.
"""

from contextlib import AbstractContextManager

from benchmarks._measure import refuse
from benchmarks._peer_server import PeerServer, peer_serving
from tests.interop.peer import ENVIRONMENT, PYTHON, VENV

__all__ = ["ENVIRONMENT", "PYTHON", "peer_version", "require_peer", "serving_peer"]


def require_peer(wanted: bool) -> None:
    """Refuse --peer where it is not installed."""
    if wanted and not (VENV / ".installed").exists():
        refuse("--peer needs LMCache 0.5.6, which is not installed here: run `make interop` first")


def peer_version() -> str | None:
    """The version that is installed; None where there is none."""
    names = [path.name for path in VENV.glob("lib/python*/site-packages/lmcache-*.dist-info")]
    return names[0].removeprefix("lmcache-").removesuffix(".dist-info") if names else None


def serving_peer(gib: float) -> AbstractContextManager[PeerServer]:
    """The peer's server with a pool of `gib` GiB."""
    return peer_serving(gib, PYTHON, ENVIRONMENT)
