"""`lmcache COMMAND`: the parser and the way to each command.

A mistake of the caller is one sentence and exit code 2.
"""

import argparse
import sys
from collections.abc import Sequence

from lmcache_server import __version__
from lmcache_server.cli import client, server

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="lmcache", description="A KV cache server for LLM inference: run it, ask it.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"lmcache-server {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    server.add_parser(commands)
    client.add_parsers(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # said by the command itself, whose usage lists what it knows
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
