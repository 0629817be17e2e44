"""The documents are read off the live parts, in the shapes that clients read."""

import dataclasses
from array import array
from typing import Any

import msgspec
import pytest

from lmcache_server.config import Settings
from lmcache_server.core.instances import InstanceTable
from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.records import Limits
from lmcache_server.core.sessions import SessionTable
from lmcache_server.metrics import METRICS
from lmcache_server.protocol.codec import from_map
from lmcache_server.protocol.keys import ChunkHasher
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind, fingerprint
from lmcache_server.protocol.messages import HelloReply, Prompt, Register, SessionId, Transport
from lmcache_server.status import Status

SETTINGS = Settings(l1_size_gb=0.001, chunk_size=64, port=6555, shm_name="x", instance_id="id")
KV = CacheLayout((KernelGroup((0, 1), 2, 4, 16, "bfloat16"), KernelGroup((2,), 1, 1, 8, "float32")), "fp8")
TRAFFIC = {
    "requests": 9, "refusals": 2, "faults": 1, "bytes_read": 3, "bytes_written": 4, "dropped_replies": 5,
}  # fmt: skip


@pytest.fixture
def status() -> Status:
    hello = HelloReply(
        1, "0.1", "id", 7, 64, "xxh3_128", Transport.SHM, SETTINGS.segment_name, SETTINGS.pool_bytes, 4096, 1, 120.0,
        300.0,
    )  # fmt: skip
    pages = SETTINGS.pool_bytes // 4096
    limits = Limits(pages * 4096, 4096, 0.8, 0.2, 300, 600)
    return Status(
        SETTINGS,
        hello,
        L1Cache(ChunkHasher(64), limits, array("Q", bytes(8 * pages))),
        InstanceTable(64),
        SessionTable(600),
        lambda: {"is_healthy": True, "seconds_since_heartbeat": {"leases": 0.1}},
        lambda: dict(TRAFFIC),
    )


def register(status: Status, **changes: Any) -> int:
    fields: dict[str, Any] = {
        "role": "worker", "model_name": "a/model", "revision": "r", "kind": Kind.KV, "world_size": 2, "worker_id": 1,
        "layout": KV, "block_size": 48,
    }  # fmt: skip
    return status.instances.register(Register(**(fields | changes)), 0.0).id


def test_the_status_names_server_transport_and_health(status: Status) -> None:
    document = status.status()
    assert (document["is_healthy"], document["engine_type"], document["server_id"]) == (True, "MPCacheServer", "id")
    assert (document["transport"], document["incarnation"], document["chunk_size"]) == ("shm", 7, 64)
    assert document["worker_liveness"] == {"enabled": True, "reap_timeout_seconds": 120.0, "tracked_instances": 0}
    assert document["storage_manager"]["l1_eviction_controller"]["eviction_policy"] == "LRU"
    assert document["storage_manager"]["num_l2_adapters"] == 0


def test_the_status_counts_what_is_in_the_pool_and_who_holds_it(status: Status) -> None:
    register(status)
    (instance,) = status.instances
    prompt = Prompt(SessionId("r"), bytes(64 * 4 * 3))
    reserved = status.cache.reserve(instance.view, prompt, 0.0)
    status.sessions.use(instance.id, prompt.session, 0.0)
    document, l1 = status.status(), status.status()["storage_manager"]["l1_manager"]
    assert (document["reservations"], document["read_leases"], document["active_sessions"]) == (1, 0, 1)
    assert (l1["total_object_count"], l1["write_locked_count"], l1["memory_used_bytes"]) == (6, 1, 3 * (32768 + 4096))
    assert l1["memory_usage_ratio"] == l1["memory_used_bytes"] / l1["memory_total_bytes"]
    assert document["counters"]["reserved_chunks"] == len(reserved.chunks) == 3
    assert document["counters"]["dropped_replies"] == 5


def test_every_registered_worker_is_described_with_its_layout(status: Status) -> None:
    worker = register(status)
    register(status, role="scheduler", worker_id=None)
    meta = status.status()["cache_context_meta"]
    assert set(meta) == {str(worker)}
    engine = meta[str(worker)]
    assert (engine["model_name"], engine["revision"], engine["kind"]) == ("a/model", "r", "kv")
    assert (engine["world_size"], engine["worker_id"], engine["block_size"]) == (2, 1, 48)
    assert engine["fingerprint"] == fingerprint(KV)
    assert from_map(CacheLayout, engine["layout"]) == KV
    layout = engine["kv_cache_layout"]
    assert (layout["num_layers"], layout["cache_size_per_token"]) == (3, 2 * 2 * 64 * 2 + 8 * 4)
    shapes = [(g["engine_kv_concrete_shape"], g["engine_kv_format"], g["is_mla"]) for g in layout["kernel_groups"]]
    assert shapes == [
        ("2 x [2, 1, 16, 4, 16]", "NL_X_TWO_NB_BS_NH_HS", False),
        ("1 x [1, 16, 8]", "NL_X_NB_BS_HS", True),
    ]
    first = layout["kernel_groups"][0]
    assert (first["dtype"], first["item_bytes"], first["layer_indices"]) == ("torch.bfloat16", 2, [0, 1])


def test_the_bytes_per_token_are_those_of_one_shard_even_for_who_sees_all(status: Status) -> None:
    one, every = register(status), register(status, worker_id=None)
    meta = status.status()["cache_context_meta"]
    sizes = [meta[str(instance)]["kv_cache_layout"]["cache_size_per_token"] for instance in (one, every)]
    assert sizes[0] == sizes[1]


def test_a_query_cache_is_no_latent_one(status: Status) -> None:
    layout = CacheLayout((KernelGroup((0,), 1, 4, 16, "float32"),))
    worker = register(status, kind=Kind.QUERY, layout=layout)
    (group,) = status.status()["cache_context_meta"][str(worker)]["kv_cache_layout"]["kernel_groups"]
    assert not group["is_mla"]


def test_the_configuration_says_how_to_connect(status: Status) -> None:
    document = status.config()
    assert (document["mp"]["port"], document["mp"]["chunk_size"]) == (6555, 64)
    assert document["mp"]["shm_name"] == "lmcache_l1_pool_x"
    memory = document["storage_manager"]["l1_manager_config"]["memory_config"]
    assert (memory["size_in_bytes"], memory["align_bytes"]) == (SETTINGS.pool_bytes, 4096)
    assert document["http"] == {"host": "127.0.0.1", "port": 8080}


def test_a_server_without_shared_memory_names_none(status: Status) -> None:
    hello = msgspec.structs.replace(status.hello, shm_name="", transport=Transport.FRAMES)
    without = dataclasses.replace(status, hello=hello)
    assert without.config()["mp"]["shm_name"] == ""
    assert without.status()["transport"] == "frames"


def test_every_metric_has_its_number(status: Status) -> None:
    numbers = status.numbers()
    assert {metric.number for metric in METRICS} == numbers.keys()
    assert {name: numbers[name] for name in TRAFFIC} == TRAFFIC
    assert (numbers["usage_ratio"], numbers["instances"]) == (0, 0)
