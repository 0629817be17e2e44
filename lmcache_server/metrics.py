"""One table of metric names, and their Prometheus text. A counter is read where it is counted; nothing is kept here."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Metric", "render"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One name: what it counts, in which unit, and how to read it now."""

    name: str
    kind: str
    text: str
    read: Callable[[], float]


def render(metrics: list[Metric]) -> str:
    """The Prometheus text exposition of `metrics`."""
    lines = []
    for metric in metrics:
        name = f"lmcache_mp_{metric.name}"
        lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", f"{name} {metric.read():.17g}"]
    return "\n".join(lines) + "\n"
