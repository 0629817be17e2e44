"""The check sees each sort of damage."""

from collections.abc import Callable

import pytest

from lmcache_server.core.index import Node
from lmcache_server.core.integrity import check_integrity
from lmcache_server.core.leases import LeaseTable
from lmcache_server.core.memory_obj import MemoryObj, State
from tests.lmcache_server.core.small_cache import WRITE_TTL, SmallCache


def busy_cache() -> SmallCache:
    """Two chunks resident and held, one being written, one quarantined."""
    cache = SmallCache()
    cache.store(1, "ab")
    cache.acquire(1, "ab")
    cache.reserve(1, "z")
    cache.wait(WRITE_TTL)
    cache.acquire(1, "ab")
    cache.reserve(1, "abc", "w")
    return cache


def nodes(cache: SmallCache) -> list[Node[MemoryObj]]:
    return [node for _, node in cache.l1.index.nodes()]


def part(cache: SmallCache) -> MemoryObj:
    found = nodes(cache)[0].parts[0]
    assert found is not None
    return found


def forget_reads(cache: SmallCache) -> None:
    cache.l1.reads = LeaseTable()


def forget_lost(cache: SmallCache) -> None:
    cache.l1.lost = LeaseTable()


def leak_bytes(cache: SmallCache) -> None:
    cache.l1.allocator.allocate(1)


def lose_a_reference(cache: SmallCache) -> None:
    part(cache).refs += 1


def miscount_objects(cache: SmallCache) -> None:
    cache.l1.objects += 1


def miscount_nodes(cache: SmallCache) -> None:
    cache.l1.index.size += 1


def miscount_quarantine(cache: SmallCache) -> None:
    cache.l1.quarantined_bytes += 1


def miscount_missing(cache: SmallCache) -> None:
    nodes(cache)[0].missing = 1


def stale_generation(cache: SmallCache) -> None:
    cache.generations[part(cache).offset] += 1


def forget_in_queue(cache: SmallCache) -> None:
    cache.store(2, "x")
    node = next(node for node in nodes(cache) if cache.text(node) == "x")
    node.queued = False


def unsealed_in_place(cache: SmallCache) -> None:
    part(cache).state = State.RESERVED


def misplace_slots(cache: SmallCache) -> None:
    nodes(cache)[0].slots = nodes(cache)[1].slots


def forget_an_only_child(cache: SmallCache) -> None:
    nodes(cache)[0].only = None


def keep_an_only_child(cache: SmallCache) -> None:
    cache.store(2, "y")
    cache.store(2, "x")
    root = nodes(cache)[0].root
    root.only = nodes(cache)[0]


def list_a_lease_nowhere(cache: SmallCache) -> None:
    cache.l1.reads._by_owner.clear()


@pytest.mark.parametrize(
    "damage",
    [
        forget_reads, forget_lost, leak_bytes, lose_a_reference, miscount_objects, miscount_nodes, miscount_quarantine,
        miscount_missing, stale_generation, forget_in_queue, unsealed_in_place, misplace_slots, forget_an_only_child,
        keep_an_only_child, list_a_lease_nowhere,
    ],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_every_sort_of_damage_is_seen(damage: Callable[[SmallCache], None]) -> None:
    cache = busy_cache()
    check_integrity(cache.l1)
    damage(cache)
    with pytest.raises(AssertionError):
        check_integrity(cache.l1)
