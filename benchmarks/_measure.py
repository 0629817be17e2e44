"""How everything here is measured: medians of interleaved repeats, ratios within one run, a table, then one JSON line.

The machines are noisy, so a number alone says little. What is compared is run in turn (a b a b ...), each repeat gives
one ratio, and the median ratio is reported with its quartiles.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Seconds per call of each repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, other: "Sample") -> "Spread":
        """Ratio of this to `other`, repeat by repeat."""
        ratios = sorted(a / b for a, b in zip(self.seconds, other.seconds, strict=True))
        return Spread(statistics.median(ratios), _quantile(ratios, 0.25), _quantile(ratios, 0.75))


@dataclass(frozen=True)
class Spread:
    """A median ratio and its quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


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


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], facts: dict[str, Any]) -> None:
    """A table on stderr-free stdout, and as the last line one JSON document with `facts`."""
    table = [list(columns), *[[_shown(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    print(f"\n{title}")
    for i, row in enumerate(table):
        name, *values = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([name, *(value.rstrip().rjust(len(value)) for value in values)]))
        if i == 0:
            print("  ".join("-" * width for width in widths))
    print(json.dumps({"benchmark": title, **facts}))
    sys.stdout.flush()


def _shown(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
