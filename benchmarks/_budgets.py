"""The budgets, each with its limit, and the one table that sets what was measured beside them.

A benchmark that measures some of them has `{"budgets": {name: {"ours": [...], "peer": [...]}}}` in its JSON document:
one value per round, and the same round's of both sides at the same place, so that their ratio is one of work that was
done at the same time. "peer" is an unmodified LMCache 0.5.6 with its own clients; it is missing where it was not run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._measure import Spread

Rounds = Mapping[str, Sequence[float]]
"""Side -> its value in each round."""


class Budget(NamedTuple):
    """What is measured, which way is good (">=" or "<="), and its limit."""

    text: str
    way: str
    limit: float

    def met(self, value: float) -> bool:
        return value >= self.limit if self.way == ">=" else value <= self.limit

    def better(self, ours: float, peer: float) -> float:
        """How many times better ours is."""
        return ours / peer if self.way == ">=" else peer / ours


BUDGETS = {
    "store": Budget("SDK store, share of memcpy", ">=", 0.8),
    "retrieve": Budget("SDK retrieve into a given buffer, share of memcpy", ">=", 0.8),
    "view_ms": Budget("SDK view, ms", "<=", 1.0),
    "lookup_ms_4096": Budget("lookup hit of 4k tokens, ms", "<=", 0.25),
    "lookup_ms_32768": Budget("lookup hit of 32k tokens, ms", "<=", 0.5),
    "lookup_ms_131072": Budget("lookup hit of 128k tokens, ms", "<=", 1.5),
    "lookups_per_second_1": Budget("lookups per second, 8k tokens, one client", ">=", 3000.0),
    "lookups_per_second_4": Budget("lookups per second, 8k tokens, four clients", ">=", 5000.0),
    "external_over_local": Budget("vLLM, 8k tokens: external hit over local hit", "<=", 1.4),
    "gpu_copies": Budget("the connector's copies to and from a GPU, share of one pinned copy", ">=", 0.9),
    "storing_over_none": Budget("vLLM, 8k tokens: prefill throughput, storing over no connector", ">=", 0.985),
    "start_seconds": Budget("server start to healthy, s", "<=", 1.0),
    "resident_mb": Budget("resident memory beside the pool, MB", "<=", 80.0),
    "lookup_growth": Budget("lookup cost at 1,000,000 resident chunks over 1,000", "<=", 1.3),
}

COLUMNS = ("what", "budget", "ours", "met", "LMCache 0.5.6", "times better")


def measured(documents: Iterable[Mapping[str, Any]]) -> dict[str, Rounds]:
    """Budget -> its rounds, of all documents."""
    return {name: rounds for document in documents for name, rounds in document.get("budgets", {}).items()}


def table(found: Mapping[str, Rounds], missing: Mapping[str, str] | None = None) -> list[list[object]]:
    """The rows of what was found, in the order of the budgets; of `missing`, with the text that says why."""
    missing = missing or {}
    rows: list[list[object]] = []
    for name, budget in BUDGETS.items():
        if name in found:
            rows.append([budget.text, f"{budget.way} {budget.limit:g}", *_beside(budget, found[name])])
        elif name in missing:
            rows.append([budget.text, f"{budget.way} {budget.limit:g}", missing[name], "-", "-", "-"])
    return rows


def summary(found: Mapping[str, Rounds]) -> dict[str, dict[str, Any]]:
    """The same as numbers."""
    facts = {}
    for name, rounds in found.items():
        budget, ours = BUDGETS[name], Spread.of(rounds["ours"]).median
        facts[name] = {"ours": ours, "budget": budget.limit, "met": budget.met(ours)}
        if "peer" in rounds:
            peer, better = Spread.of(rounds["peer"]).median, Spread.of(_better(budget, rounds)).median
            facts[name] |= {"peer": peer, "times_better": better}
    return facts


def _beside(budget: Budget, rounds: Rounds) -> list[str]:
    ours = Spread.of(rounds["ours"])
    cells = [str(ours), "yes" if budget.met(ours.median) else "NO"]
    if "peer" not in rounds:
        return [*cells, "-", "-"]
    return [*cells, str(Spread.of(rounds["peer"])), str(Spread.of(_better(budget, rounds)))]


def _better(budget: Budget, rounds: Rounds) -> list[float]:
    return [budget.better(ours, peer) for ours, peer in zip(rounds["ours"], rounds["peer"], strict=True)]
