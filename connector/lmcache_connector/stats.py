"""What the connector counts between two reports, in the form that vLLM collects, logs and shows to Prometheus.

    worker, scheduler half    a Recorder; vLLM takes what it has after each step
    vLLM                      adds up ranks, halves and steps with `aggregate`, logs `reduce` once per interval

Everything adds up by sums, whatever is added to what: the first rank alone tells numbers, tokens and durations, which
are the same for all ranks, each rank its own bytes, and the scheduler half whatever concerns whole requests. So a load
by two ranks is one load of its tokens, and of both ranks' bytes.
"""

import threading
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from lmcache_connector.metrics import BUCKETS, METRICS, PREFIX

__all__ = ["CacheProm", "CacheStats", "Recorder"]

Number = int | float

OCCASIONAL = ("failed_loads", "failed_blocks", "skipped_loads", "aborted_loads", "skipped_queries", "bypassed_requests")
"""In the log line only if there were any."""


class CacheStats(KVConnectorStats):  # type: ignore[misc]
    """`data` maps a key of the table of metrics to a number, or to a list of durations; what is 0 is not there."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Start again from nothing."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "CacheStats":
        """Add what another rank, half or step counted to this."""
        for key, value in other.data.items():
            if isinstance(value, list):
                self.data.setdefault(key, []).extend(value)
            else:
                self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, Number]:
        """The numbers of the log line: how much was moved, how fast, what lookups found and how long they took."""
        lookups, asked = self.data.get("lookup_seconds", []), self.data.get("asked_tokens", 0)
        line: dict[str, Number] = {
            **self._moved("load", "loaded"),
            **self._moved("store", "stored"),
            "lookups": len(lookups),
            "hit rate (%)": round(100 * self.data.get("hit_tokens", 0) / asked, 1) if asked else 0.0,
            "lookup (ms)": round(1000 * sum(lookups) / len(lookups), 3) if lookups else 0.0,
        }
        return line | {key.replace("_", " "): self.data[key] for key in OCCASIONAL if key in self.data}

    def _moved(self, what: str, done: str) -> dict[str, Number]:
        seconds = self.data.get(f"{what}_seconds", [])
        total = sum(seconds)
        speed = self.data.get(f"{done}_bytes", 0) / total / 1e9 if total else 0.0
        return {
            f"{what}s": len(seconds),
            f"{done} tokens": self.data.get(f"{done}_tokens", 0),
            f"{what} GB/s": round(speed, 2),
        }


class Recorder:
    """Counts, from any thread, until the numbers are taken."""

    def __init__(self, *, first: bool = True) -> None:
        """`first` says whether this is the rank that speaks for all of them."""
        self._first = first
        self._lock = threading.Lock()
        self._stats = CacheStats()

    def add(self, durations: Mapping[str, float] | None = None, **counts: int) -> None:
        """Note durations in seconds and counts by their keys, all at once."""
        with self._lock:
            for key, seconds in (durations or {}).items():
                self._stats.data.setdefault(key, []).append(seconds)
            for key, count in counts.items():
                if count:
                    self._stats.data[key] = self._stats.data.get(key, 0) + count

    def loaded(self, tokens: int, size: int, seconds: float) -> None:
        """One request's load brought `tokens` tokens, `size` bytes of them to this rank."""
        if self._first:
            self.add({"load_seconds": seconds}, loaded_tokens=tokens, loaded_bytes=size)
        else:
            self.add(loaded_bytes=size)

    def stored(self, tokens: int, size: int, seconds: float) -> None:
        """One step's stores published `tokens` tokens, `size` bytes of them by this rank."""
        if self._first:
            self.add({"store_seconds": seconds}, stored_tokens=tokens, stored_bytes=size)
        else:
            self.add(stored_bytes=size)

    def skipped_queries(self) -> None:
        """The ring had no room for a request's queries; it has not on any rank."""
        if self._first:
            self.add(skipped_queries=1)

    def take(self) -> CacheStats | None:
        """What was counted since the last call; None if nothing was."""
        with self._lock:
            taken, self._stats = self._stats, CacheStats()
        return None if taken.is_empty() else taken


class CacheProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """The table of metrics in Prometheus' registry, with vLLM's labels, one child per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for metric in METRICS:
            described = {"name": PREFIX + metric.name, "documentation": metric.text, "labelnames": labelnames}
            made = (
                self._histogram_cls(**described, buckets=BUCKETS)
                if metric.kind == "histogram"
                else self._counter_cls(**described)
            )
            self._metrics[metric.key] = create_metric_per_engine(made, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one step counted."""
        for key, value in transfer_stats_data.items():
            child = self._metrics[key][engine_idx]
            if isinstance(value, list):
                for seconds in value:
                    child.observe(seconds)
            else:
                child.inc(value)
