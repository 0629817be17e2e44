"""Ids that nobody can guess or share, views of chunks, and who is silent."""

from lmcache_server.core.instances import InstanceTable, view_of
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind, fingerprint
from lmcache_server.protocol.messages import Register

LAYOUT = CacheLayout((KernelGroup((0, 1), 2, 1, 8, "float16"), KernelGroup((2,), 1, 1, 4, "float32")))
BYTES = (2 * 2 * 16 * 8 * 2, 16 * 4 * 4)


def registration(worker_id: int | None = 0, world_size: int = 1, model: str = "m") -> Register:
    return Register("worker", model, "rev", Kind.KV, world_size, worker_id, LAYOUT, 16)


def test_a_worker_sees_its_own_parts_and_a_client_of_all_shards_sees_all() -> None:
    worker, everything = (view_of(7, registration(shard, 3), 16) for shard in (1, None))
    assert worker.part_bytes == everything.part_bytes == BYTES * 3
    assert (worker.own, everything.own) == (range(2, 4), range(6))
    assert worker.namespace == everything.namespace
    assert worker.namespace.layout == fingerprint(LAYOUT)


def test_two_clients_that_say_the_same_get_different_ids() -> None:
    table = InstanceTable(16)
    ids = {table.register(registration(), 0.0).id for _ in range(100)}
    assert len(ids) == len(table) == 100
    assert all(0 < owner < 2**63 for owner in ids)


def test_whoever_speaks_is_not_silent() -> None:
    table = InstanceTable(16)
    quiet, loud = table.register(registration(), 0.0), table.register(registration(), 0.0)
    assert table.seen(loud.id, 9.0) is loud
    assert table.silent(10.0, 10.0) == []
    assert table.silent(10.1, 10.0) == [quiet]


def test_an_instance_may_be_granted_more_patience() -> None:
    table = InstanceTable(16)
    patient = table.register(registration(), 0.0)
    patient.patience = 100.0
    assert table.silent(50.0, 10.0) == []
    assert table.silent(101.0, 10.0) == [patient]


def test_a_removed_instance_is_not_known_any_more() -> None:
    table = InstanceTable(16)
    instance = table.register(registration(), 0.0)
    assert list(table) == [instance]
    assert table.remove(instance.id) is instance
    assert table.remove(instance.id) is None
    assert table.seen(instance.id, 1.0) is None
