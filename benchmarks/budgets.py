"""Every budget of the server and the SDK in one run: ours, the limit, and with --peer an unmodified LMCache 0.5.6
beside it.

Both sides do the same work in processes of their own, in turn, `--rounds` times. Ratios are taken within a round;
the table shows their medians and, in brackets, the lowest and the highest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._measure import report

ROOT = Path(__file__).resolve().parents[1]
PEER_PYTHON = ROOT / ".venv-interop" / "bin" / "python"

BUDGETS: dict[str, tuple[str, str, float]] = {
    "store": ("SDK store, share of memcpy", ">=", 0.8),
    "retrieve": ("SDK retrieve into a given buffer, share of memcpy", ">=", 0.8),
    "view_ms": ("SDK view, ms", "<=", 1.0),
    "lookup_ms_4096": ("lookup hit of 4k tokens, ms", "<=", 0.25),
    "lookup_ms_32768": ("lookup hit of 32k tokens, ms", "<=", 0.5),
    "lookup_ms_131072": ("lookup hit of 128k tokens, ms", "<=", 1.5),
    "lookups_per_second_1": ("lookups per second, 8k tokens, one client", ">=", 3000.0),
    "lookups_per_second_4": ("lookups per second, 8k tokens, four clients", ">=", 5000.0),
    "start_seconds": ("server start to healthy, s", "<=", 1.0),
    "resident_mb": ("resident memory beside the pool, MB", "<=", 80.0),
}
"""Fact -> what it is, which way is good, the budget."""


def run(side: str, arguments: list[str]) -> dict[str, float]:
    """One run of one side."""
    environment = os.environ | {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
    if side == "peer":
        environment.pop("PYTHONPATH", None)  # its packages, not ours of the same names
        command = [str(PEER_PYTHON), "-P", str(ROOT / "benchmarks" / "side_peer.py"), *arguments]
    else:
        command = [sys.executable, "-m", "benchmarks.side_ours", *arguments]
    done = subprocess.run(command, cwd="/" if side == "peer" else ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the {side} side failed with {done.returncode}:\n{done.stderr[-3000:]}")
    facts: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="run LMCache 0.5.6 too (needs `make interop`)")
    parser.add_argument("--rounds", type=int, default=3)
    options, arguments = parser.parse_known_args()
    if options.peer and not PEER_PYTHON.exists():
        raise SystemExit("there is no .venv-interop; run `make interop` first")
    sides = ["ours", "peer"] if options.peer else ["ours"]
    rounds = [{side: run(side, arguments) for side in sides} for _ in range(options.rounds)]
    rows, facts = [], {}
    for name, (text, way, budget) in BUDGETS.items():
        ours = [one["ours"][name] for one in rounds]
        value = statistics.median(ours)
        met = value >= budget if way == ">=" else value <= budget
        facts[name] = {"ours": value, "budget": budget, "met": met}
        row: list[Any] = [text, f"{way} {budget:g}", spread(ours), "yes" if met else "NO"]
        if options.peer:
            row += compared(name, way, rounds, facts[name])
        rows.append(row)
    columns = ["what", "budget", "ours", "met"] + (["LMCache 0.5.6", "times better"] if options.peer else [])
    report("budgets", columns, rows, facts)


def compared(name: str, way: str, rounds: list[dict[str, dict[str, float]]], facts: dict[str, Any]) -> list[str]:
    """The peer's number, and how many times better ours is."""
    if name not in rounds[0]["peer"]:
        return ["-", "-"]
    peer = [one["peer"][name] for one in rounds]
    better = [one["ours"][name] / one["peer"][name] for one in rounds]
    if way == "<=":
        better = [1 / ratio for ratio in better]
    facts |= {"peer": statistics.median(peer), "times_better": statistics.median(better)}
    return [spread(peer), spread(better)]


if __name__ == "__main__":
    main()
