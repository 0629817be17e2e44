"""One table of metric names, and their Prometheus text. A number is read where it is counted; nothing is kept here."""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["METRICS", "PREFIX", "Metric", "render"]

PREFIX = "lmcache_mp_"


class Metric(NamedTuple):
    """One name: its type, what it counts, and the number of the server that it shows."""

    name: str
    kind: str
    text: str
    number: str


METRICS = (
    Metric("lookups_requests_total", "counter", "Prompts that were looked up", "lookups"),
    Metric("lookup_requested_tokens_total", "counter", "Tokens of the prompts that were looked up", "requested_tokens"),
    Metric("lookup_hit_tokens_total", "counter", "Tokens of those that were cached", "hit_tokens"),
    Metric("l1_reserved_chunks_total", "counter", "Chunks reserved for writing", "reserved_chunks"),
    Metric("l1_write_chunks_total", "counter", "Chunks committed", "committed_chunks"),
    Metric("l1_aborted_chunks_total", "counter", "Reserved chunks given up", "aborted_chunks"),
    Metric("l1_lost_chunks_total", "counter", "Reserved chunks whose writer did not answer in time", "lost_chunks"),
    Metric("l1_refused_chunks_total", "counter", "Chunks for which there was no room", "refused_chunks"),
    Metric("l1_evicted_chunks_total", "counter", "Chunks evicted", "evicted_chunks"),
    Metric("l1_cleared_objects_total", "counter", "Objects freed by clear", "cleared_objects"),
    Metric("l1_expired_reads_total", "counter", "Read leases that ran out", "expired_reads"),
    Metric("stray_releases_total", "counter", "Releases of leases that had ended or were another's", "stray_releases"),
    Metric("requests_total", "counter", "Messages of our own dialect that were answered", "requests"),
    Metric("refusals_total", "counter", "Messages answered with an error", "refusals"),
    Metric("faults_total", "counter", "Messages that met a fault of the server", "faults"),
    Metric("dropped_replies_total", "counter", "Replies whose receiver was gone", "dropped_replies"),
    Metric("kv_events_dropped_total", "counter", "Events that a follower was too slow to fetch", "dropped_events"),
    Metric("frame_bytes_read_total", "counter", "Bytes sent as frames", "bytes_read"),
    Metric("frame_bytes_written_total", "counter", "Bytes received as frames", "bytes_written"),
    Metric("l1_memory_usage_bytes", "gauge", "Bytes of the pool in use", "used_bytes"),
    Metric("l1_usage_ratio", "gauge", "Share of the pool in use", "usage_ratio"),
    Metric("l1_quarantined_bytes", "gauge", "Bytes that a lost writer may still touch", "quarantined_bytes"),
    Metric("l1_objects", "gauge", "Objects in the pool", "objects"),
    Metric("read_leases", "gauge", "Read leases held", "read_leases"),
    Metric("reservations", "gauge", "Reservations open", "reservations"),
    Metric("active_sessions", "gauge", "Sessions under way", "active_sessions"),
    Metric("kv_events_log_depth", "gauge", "Events that some follower has not fetched yet", "kept_events"),
    Metric("kv_events_followers", "gauge", "Instances that follow the events", "event_followers"),
    Metric("instances", "gauge", "Registered instances", "instances"),
)


def render(numbers: Mapping[str, float]) -> str:
    """The Prometheus text exposition of every metric, out of the server's numbers."""
    lines = []
    for metric in METRICS:
        name = PREFIX + metric.name
        lines += [
            f"# HELP {name} {metric.text}",
            f"# TYPE {name} {metric.kind}",
            f"{name} {numbers[metric.number]:.17g}",
        ]
    return "\n".join(lines) + "\n"
