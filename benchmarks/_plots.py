"""Pictures of what a picture shows better, each made from the JSON document of one benchmark."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def drawn(documents: list[Facts], folder: Path) -> list[str]:
    """Draw what there are documents for, into `folder`; the names of the pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    for document in documents:
        benchmark = document["benchmark"].split(",")[0]
        if benchmark in PICTURES:
            figure, axes = pyplot.subplots(figsize=(9, 4.5))
            PICTURES[benchmark](axes, {name: facts for name, facts in document.items() if name != "benchmark"})
            axes.legend()
            figure.tight_layout()
            names.append(f"{benchmark.replace(' ', '_')}.png")
            figure.savefig(folder / names[-1], dpi=110)
            pyplot.close(figure)
    return names


def budgets(axes: Any, facts: Facts) -> None:
    """Each budget's row as a share of its limit."""
    names = list(facts)
    for offset, side, label in ((0.2, "ours", "this server"), (-0.2, "peer", "LMCache 0.5.6")):
        shown = [name for name in names if side in facts[name]]
        if shown:
            values = [facts[name][side] / facts[name]["budget"] for name in shown]
            axes.barh([names.index(name) + offset for name in shown], values, 0.38, label=label)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("share of the budget (rates: more is better; times and sizes: less is better)")


def wire(axes: Any, facts: Facts) -> None:
    """Round trips per second by the number of clients."""
    ways = dict.fromkeys(name.rpartition(", ")[0] for name in facts)
    for way in ways:
        points = [(int(name.rpartition(", ")[2]), fact["per_second"]) for name, fact in facts.items() if way in name]
        axes.plot(*zip(*points, strict=True), marker="o", label=way)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients")
    axes.set_ylabel("round trips per second")


def sharing(axes: Any, facts: Facts) -> None:
    """Times to the first token of all requests, shortest first."""
    for name, fact in facts.items():
        axes.plot(sorted(fact["ttft_ms"]), marker=".", label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests, quickest first")
    axes.set_ylabel("ms to the first token")


def dropping(axes: Any, facts: Facts) -> None:
    """Decoded tokens per second by the share of KV that was kept."""
    shares = [float(name) for name in facts]
    axes.plot(shares, [fact["tokens_per_second"] for fact in facts.values()], marker="o", label="all streams together")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("kept share of the KV")
    axes.set_ylabel("decoded tokens per second")


PICTURES: dict[str, Callable[[Any, Facts], None]] = {
    "budgets": budgets,
    "wire round trips": wire,
    "sharing": sharing,
    "token dropping": dropping,
}
