"""Statistics add up over ranks, halves and steps; the log line and Prometheus show what was counted."""

import dataclasses
import random
import threading
from collections import Counter as Tally
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_connector.metrics import METRICS, PREFIX
from lmcache_connector.plugin import register
from lmcache_connector.stats import CacheProm, CacheStats, Recorder
from lmcache_server.protocol.layout import slot_bytes
from tests.connector.rig import Rig, rig_config
from tests.servers import CacheServer, running_server

TRANSFER = KVTransferConfig(kv_connector="LMCacheMPConnector", kv_role="kv_both")


def recorded(durations: dict[str, float] | None = None, **counts: int) -> CacheStats | None:
    recorder = Recorder()
    recorder.add(durations, **counts)
    return recorder.take()


def first_rank(tokens: int, seconds: float) -> CacheStats | None:
    return recorded({"load_seconds": seconds}, loaded_tokens=tokens, loaded_bytes=1000 * tokens)


def other_rank(tokens: int) -> CacheStats | None:
    return recorded(loaded_bytes=1000 * tokens)


def test_every_metric_has_a_name_of_its_own_that_says_what_it_is() -> None:
    assert len({metric.name for metric in METRICS}) == len({metric.key for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_seconds" if metric.kind == "histogram" else "_total")
        assert metric.key.endswith("_seconds") == (metric.kind == "histogram")
    assert PREFIX + "lookup_duration_seconds" in {PREFIX + metric.name for metric in METRICS}


def test_what_is_taken_is_not_taken_again_and_nothing_is_nothing() -> None:
    recorder = Recorder()
    assert recorder.take() is None
    recorder.add(skipped_loads=0)
    assert recorder.take() is None
    recorder.add({"load_seconds": 0.5}, loaded_tokens=7)
    taken = recorder.take()
    assert taken is not None and taken.data == {"load_seconds": [0.5], "loaded_tokens": 7}
    assert recorder.take() is None


def test_no_count_of_any_thread_is_lost() -> None:
    recorder, taken = Recorder(), CacheStats()

    def count() -> None:
        for _ in range(1000):
            recorder.add({"load_seconds": 1.0}, loaded_tokens=3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.aggregate(recorder.take() or CacheStats())
    taken.aggregate(recorder.take() or CacheStats())
    assert (len(taken.data["load_seconds"]), taken.data["loaded_tokens"]) == (4000, 12000)


def test_a_load_by_two_ranks_is_one_load_of_its_tokens_and_of_both_ranks_bytes() -> None:
    outputs = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_stats=stats))
        for stats in (first_rank(512, 0.001), other_rank(512), None)
    ]
    combined = KVOutputAggregator(3).aggregate(outputs)
    assert combined is not None and combined.kv_connector_output is not None
    stats = combined.kv_connector_output.kv_connector_stats
    assert stats is not None
    assert stats.data == {"load_seconds": [0.001], "loaded_tokens": 512, "loaded_bytes": 1_024_000}
    assert stats.reduce()["loads"] == 1
    assert stats.reduce()["load GB/s"] == 1.02


def test_the_order_in_which_things_are_added_up_changes_nothing() -> None:
    chance = random.Random(1)
    parts: list[dict[str, Any]] = [
        {"load_seconds": [chance.random()], "loaded_tokens": chance.randint(1, 9)},
        {"loaded_tokens": 5, "loaded_bytes": 11},
        {"lookup_seconds": [0.1, 0.2], "asked_tokens": 40, "hit_tokens": 16},
        {"bypassed_requests": 2},
        {},
    ]
    sums = []
    for _ in range(10):
        chance.shuffle(parts)
        total = CacheStats()
        for part in parts:
            total.aggregate(CacheStats({k: list(v) if isinstance(v, list) else v for k, v in part.items()}))
        sums.append({k: sorted(v) if isinstance(v, list) else v for k, v in total.data.items()})
    assert all(one == sums[0] for one in sums)
    assert Tally(sums[0].keys()) == Tally(key for key in {key for part in parts for key in part})


def test_statistics_travel_as_plain_values() -> None:
    stats = first_rank(512, 0.001)
    assert stats is not None
    payload = stats.to_dict()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload)) == payload


def test_the_log_line_says_tokens_speed_hit_rate_and_latency_once_per_interval() -> None:
    register()
    logging = KVConnectorLogging(TRANSFER)
    steps = [
        {"load_seconds": [0.25, 0.25], "loaded_tokens": 300, "loaded_bytes": 10**9},
        {"store_seconds": [0.5], "stored_tokens": 256, "stored_bytes": 2 * 10**9, "skipped_loads": 2},
        {"lookup_seconds": [0.001, 0.002], "asked_tokens": 1000, "hit_tokens": 256},
    ]
    for step in steps:
        logging.observe(step)
    lines: list[str] = []
    for _ in range(2):
        logging.log(lambda text, *values: lines.append(text % values))
    assert lines == [
        "KV Transfer metrics: loads=2, loaded tokens=300, load GB/s=2.0, stores=1, stored tokens=256, store GB/s=4.0, "
        "lookups=2, hit rate (%)=25.6, lookup (ms)=1.5, skipped loads=2"
    ]
    assert steps[0]["load_seconds"] == [0.25, 0.25], "what others are shown is not changed"


def test_prometheus_shows_every_metric_with_the_engines_label() -> None:
    forget_metrics()  # of an engine that ran in this process
    labels = {0: ["a/model", "0"], 1: ["a/model", "1"]}
    prom = CacheProm(
        _Config(), {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["model_name", "engine"], labels
    )  # type: ignore[arg-type]
    try:
        everything: dict[str, Any] = {
            metric.key: [0.002, 0.02] if metric.kind == "histogram" else i for i, metric in enumerate(METRICS)
        }
        prom.observe(everything, 1)
        prom.observe({"loaded_tokens": 100}, 1)
        for i, metric in enumerate(METRICS):
            mine, others = ({"model_name": "a/model", "engine": engine} for engine in ("1", "0"))
            name = PREFIX + metric.name + ("_count" if metric.kind == "histogram" else "")
            expected = 2 if metric.kind == "histogram" else i + 100 * (metric.key == "loaded_tokens")
            assert REGISTRY.get_sample_value(name, mine) == expected
            assert REGISTRY.get_sample_value(name, others) == 0
        assert REGISTRY.get_sample_value(PREFIX + "load_duration_seconds_sum", mine) == 0.022
    finally:
        forget_metrics()


def forget_metrics() -> None:
    names = {name for name in REGISTRY._names_to_collectors if name.startswith(PREFIX)}
    for collector in {REGISTRY._names_to_collectors[name] for name in names}:
        REGISTRY.unregister(collector)


class _Config:
    kv_transfer_config = TRANSFER


# --- what both halves count ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as running:
        yield running


def counts(stats: CacheStats | None) -> dict[str, Any]:
    """The counts, and how many durations."""
    data = stats.data if stats is not None else {}
    return {key: len(value) if isinstance(value, list) else value for key, value in data.items()}


@pytest.mark.process
def test_two_ranks_count_what_they_store_and_load_once_and_their_bytes_each(server: CacheServer) -> None:
    with Rig(rig_config(server.url, model="two ranks", shards=2)) as rig:
        token = sum(slot_bytes(group, 1) for group in rig.groups)
        rig.serve("cold", range(70))
        stored = [counts(rank.half.stats.take()) for rank in rig.ranks]
        assert stored == [
            {"store_seconds": 1, "stored_tokens": 64, "stored_bytes": 64 * token},
            {"stored_bytes": 64 * token},
        ]
        rig.serve("warm", range(64))
        loaded = [counts(rank.half.stats.take()) for rank in rig.ranks]
        assert loaded == [
            {"load_seconds": 1, "loaded_tokens": 63, "loaded_bytes": 63 * token},
            {"loaded_bytes": 63 * token},
        ]
        assert counts(rig.scheduler.stats.take()) == {"lookup_seconds": 2, "asked_tokens": 134, "hit_tokens": 64}


@pytest.mark.process
def test_a_rank_that_holds_the_same_as_the_first_counts_what_it_loads_and_stores_nothing(server: CacheServer) -> None:
    with Rig(rig_config(server.url, model="replicas", replicas=2)) as rig:
        token = sum(slot_bytes(group, 1) for group in rig.groups)
        rig.serve("cold", range(64))
        rig.serve("warm", range(64))
        assert counts(rig.ranks[1].half.stats.take()) == {"loaded_bytes": 63 * token}


@pytest.mark.process
def test_a_window_that_has_moved_on_loads_fewer_bytes(server: CacheServer) -> None:
    with Rig(rig_config(server.url, model="window", windows=(0, 32))) as rig:
        token = slot_bytes(rig.groups[0], 1)
        rig.serve("cold", range(160))
        rig.worker.stats.take()
        served = rig.serve("warm", range(160))
        assert served.external == 159
        gone = (159 - 32 + 1) // 16 * 16
        assert counts(rig.worker.stats.take())["loaded_bytes"] == (159 + 159 - gone) * token


@pytest.mark.process
def test_hits_that_are_not_loaded_loads_that_are_aborted_or_fail_and_bypasses_are_counted(server: CacheServer) -> None:
    with Rig(rig_config(server.url, model="accidents", block_size=8)) as rig:
        rig.serve("cold", range(64))
        rig.scheduler.stats.take()

        no_room = rig.arrive("no room", range(64))
        rig.matched(no_room)
        rig.allocate(no_room, 0)
        gave_up = rig.arrive("gave up", range(64))
        rig.matched(gave_up)
        for served in (no_room, gave_up):
            rig.finish(served)
        assert counts(rig.scheduler.stats.take()) == {
            "lookup_seconds": 2, "asked_tokens": 128, "hit_tokens": 128, "skipped_loads": 2,
        }  # fmt: skip

        aborted = rig.arrive("aborted", range(64))
        rig.allocate(aborted, rig.matched(aborted))
        plan = rig.plan({})
        rig.scheduler.finished(aborted.request)
        rig.report(plan)
        asked = {"lookup_seconds": 1, "asked_tokens": 64, "hit_tokens": 64}
        assert counts(rig.scheduler.stats.take()) == {**asked, "aborted_loads": 1}

        failed = rig.arrive("failed", range(64))
        rig.allocate(failed, rig.matched(failed))
        plan = rig.plan({})
        (job,) = plan.loads
        rig.report(dataclasses.replace(plan, loads=(dataclasses.replace(job, incarnation=job.incarnation + 1),)))
        assert counts(rig.scheduler.stats.take()) == {**asked, "failed_loads": 1, "failed_blocks": 8}
        rig.finish(failed)

        rig.scheduler.finished(rig.arrive("bypass", range(64), cache_salt="a/b").request)
        assert counts(rig.scheduler.stats.take()) == {"bypassed_requests": 1}
