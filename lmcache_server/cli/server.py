"""`lmcache server`: settings from flags, environment and file, then serve until told to stop."""

import argparse
import logging
import os
import sys
from typing import Any

from lmcache_server.config import Settings, SettingsError, add_flags, load

__all__ = ["add_parser"]

_EXAMPLE = """example:
  lmcache server --l1-size-gb 8 --chunk-size 256 --port 6555 --http-port 8080

Each setting may also be given as an environment variable (--chunk-size is LMCACHE_CHUNK_SIZE) or as a line of the file
that --config names. The server listens on this machine only unless --host and --http-host say otherwise; it sends no
telemetry.
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "server",
        help="run the cache server",
        description="Keep the KV cache of this node's inference engines in one pool of shared memory.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve; 0 after a graceful stop, 2 if the settings cannot work."""
    import uvloop

    from lmcache_server.app import serve
    from lmcache_server.io.shm import PoolError
    from lmcache_server.io.zmq_server import BindError

    try:
        settings = load(options, os.environ)
        _set_up_logging(settings)
        uvloop.run(serve(settings))
    except (SettingsError, BindError, PoolError) as error:
        print(f"lmcache server: error: {error}", file=sys.stderr)
        return 2
    return 0


def _set_up_logging(settings: Settings) -> None:
    level = logging.CRITICAL + 1 if settings.log_level == "silent" else getattr(logging, settings.log_level.upper())
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # What uvicorn says at info level repeats our own lines.
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))
