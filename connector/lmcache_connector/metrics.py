"""One table of what the connector counts, as vLLM's Prometheus endpoint shows it. No vLLM in here.

A duration is observed once per load, store or lookup, so a histogram's `_count` is how many there were. Tokens and
durations are told by one rank, bytes by each of them.
"""

from typing import NamedTuple

__all__ = ["BUCKETS", "METRICS", "PREFIX", "Metric"]

PREFIX = "vllm:lmcache_mp_"

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds: from a lookup over the loopback to the longest that a hook may wait."""


class Metric(NamedTuple):
    """One name: its type, what it counts, and the key of the statistics that it shows."""

    name: str
    kind: str
    text: str
    key: str


METRICS = (
    Metric("lookup_duration_seconds", "histogram", "From a question to the server to its answer", "lookup_seconds"),
    Metric("load_duration_seconds", "histogram", "One request's copy out of the cache", "load_seconds"),
    Metric("store_duration_seconds", "histogram", "One step's copies into the cache", "store_seconds"),
    Metric("asked_tokens_total", "counter", "Tokens of the prompts that were looked up", "asked_tokens"),
    Metric("hit_tokens_total", "counter", "Tokens of those that the cache had", "hit_tokens"),
    Metric("loaded_tokens_total", "counter", "Tokens loaded", "loaded_tokens"),
    Metric("loaded_bytes_total", "counter", "Bytes loaded, of all ranks", "loaded_bytes"),
    Metric("stored_tokens_total", "counter", "Tokens stored", "stored_tokens"),
    Metric("stored_bytes_total", "counter", "Bytes stored, of all ranks", "stored_bytes"),
    Metric("failed_loads_total", "counter", "Loads of which a part did not arrive and was computed", "failed_loads"),
    Metric("failed_blocks_total", "counter", "Blocks that were to be loaded and were not", "failed_blocks"),
    Metric("skipped_loads_total", "counter", "Hits of which nothing was loaded", "skipped_loads"),
    Metric("aborted_loads_total", "counter", "Loads whose request ended before they did", "aborted_loads"),
    Metric("skipped_queries_total", "counter", "Requests whose queries the ring had no room for", "skipped_queries"),
    Metric("bypassed_requests_total", "counter", "Requests that the cache cannot be used for", "bypassed_requests"),
)
