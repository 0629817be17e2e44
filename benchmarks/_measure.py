"""How everything here is measured: medians of interleaved repeats, ratios within one run, a table, then one JSON line.

The machines are noisy, so a number alone says little. What is compared is run in turn (a b a b ...), each repeat gives
one ratio, and the median ratio is reported with its quartiles, which of three repeats are the lowest and the highest.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        return cls(statistics.median(ordered), _quantile(ordered, 0.25), _quantile(ordered, 0.75))

    def __str__(self) -> str:
        return f"{_number(self.median)} ({_number(self.low)}-{_number(self.high)})"


@dataclass(frozen=True)
class Sample:
    """Seconds per call of each repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, other: "Sample") -> list[float]:
        """This over `other`, repeat by repeat."""
        return [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]

    def over(self, other: "Sample") -> Spread:
        """The spread of the ratios."""
        return Spread.of(self.ratios(other))


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int, inner: int = 1, warm: int = 1) -> dict[str, Sample]:
    """Run each call in turn, `repeats` times over; each time `inner` calls are timed as one."""
    for call in calls.values():
        for _ in range(warm):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(inner):
                call()
            seconds[name].append((time.perf_counter() - begin) / inner)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def rendered(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table under its title; numbers stand on the right."""
    cells = [list(columns), *[[_shown(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], facts: dict[str, Any]) -> None:
    """A table on stdout, and as its last line one JSON document with `facts`."""
    print(f"\n{rendered(title, columns, rows)}")
    print(json.dumps({"benchmark": title, **facts}))
    sys.stdout.flush()


def refuse(sentence: str) -> NoReturn:
    """Say why nothing was started, and end with 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def require_cuda(wanted: bool) -> None:
    """Refuse --gpu where there is no CUDA."""
    import torch

    if wanted and not torch.cuda.is_available():
        refuse("--gpu needs a CUDA device and a torch that is built for it; there is none here")


def _shown(cell: Any) -> str:
    return _number(cell) if isinstance(cell, float) else str(cell)


def _number(value: float) -> str:
    """Three digits, and no power of ten for thousands."""
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
