"""The server and the SDK on a machine without an engine: copies beside memcpy, lookups, start and memory; with --peer
an unmodified LMCache 0.5.6 does the same work in the same run.

Why: these are the budgets that need no engine, and a number is worth little without its neighbour's. Both sides work in
processes of their own (side_ours.py, side_peer.py), in turn, `--rounds` times; ratios are taken within a round.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._budgets import COLUMNS, table
from benchmarks._measure import report
from benchmarks._peer import ENVIRONMENT, PYTHON, require_peer
from benchmarks._side_work import add_options, chosen

ROOT = Path(__file__).resolve().parents[1]


def run(side: str, arguments: list[str]) -> dict[str, float]:
    """One run of one side."""
    if side == "peer":
        command, environment = [str(PYTHON), str(ROOT / "benchmarks" / "side_peer.py")], {**os.environ, **ENVIRONMENT}
    else:
        command, environment = [sys.executable, "-m", "benchmarks.side_ours"], dict(os.environ)
    folder = "/" if side == "peer" else ROOT
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {side} side failed with {done.returncode}:\n{done.stderr[-3000:]}")
    facts: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def by_side(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Fact -> side -> its value in each round; a side that does not have a fact is left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in rounds:
        for side, facts in one.items():
            for name, value in facts.items():
                found.setdefault(name, {}).setdefault(side, []).append(value)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="run LMCache 0.5.6 too (needs `make interop`)")
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    options = parser.parse_args(arguments)
    require_peer(options.peer)
    sides = ["ours", "peer"] if options.peer else ["ours"]
    found = by_side([{side: run(side, chosen(options)) for side in sides} for _ in range(options.rounds)])
    report("server and SDK", COLUMNS, table(found), {"budgets": found})


if __name__ == "__main__":
    main()
