"""The invariants of the L1, as one call: every byte, reference and lease is accounted for, or an AssertionError says
which not.

Costs a walk over all that is resident; for tests, and for a quiet moment.
"""

from lmcache_server.core.l1_cache import L1Cache
from lmcache_server.core.memory_obj import MemoryObj, State
from lmcache_server.core.records import ChunkNode

__all__ = ["check_integrity"]


def check_integrity(cache: L1Cache) -> None:
    """Raise AssertionError unless everything in `cache` adds up."""
    cache.allocator.check_integrity()
    cache.reads.check_integrity()
    cache.writes.check_integrity()
    cache.lost.check_integrity()
    reachable = [node for _, node in cache.index.nodes()]
    assert len(reachable) == cache.index.size, f"index says {cache.index.size} nodes, there are {len(reachable)}"
    for node in reachable:
        _check_node(cache, node)
    parts = [part for node in _all_nodes(cache, reachable) for part in node.parts if part is not None]
    _check_bytes(cache, parts + _quarantined(cache))
    held = sum(len(lease.subject.nodes[-1].parts) for lease in cache.reads)
    assert sum(part.refs for part in parts) == held, f"references differ from the {held} that leases stand for"


def _check_node(cache: L1Cache, node: ChunkNode) -> None:
    assert not node.empty, "a chunk without any object stays in the index"
    sealed = sum(part is not None and part.state is State.SEALED for part in node.parts)
    assert node.missing == len(node.parts) - sealed, "a chunk miscounts its missing parts"
    slots = [part.slot for part in node.parts if part is not None]
    assert node.missing or node.slots == b"".join(slots), "a complete chunk does not say where its objects are"
    assert node.queued or not cache.is_evictable(node), "an evictable chunk is not in the eviction queue"
    for above in (node, node.root):
        single = len(above.children) == 1
        assert list(above.children.values()) == [above.only] if single else above.only is None, "a stale only child"


def _all_nodes(cache: L1Cache, reachable: list[ChunkNode]) -> list[ChunkNode]:
    """Reachable nodes, and those of cleared trees that a lease still needs."""
    nodes = {id(node): node for node in reachable}
    leased = [lease.subject.nodes[-1] for lease in cache.reads]
    leased += [node for lease in cache.writes for _, node, _ in lease.subject.entries]
    for node in leased:
        nodes |= {id(above): above for above in node.path()}
    return list(nodes.values())


def _quarantined(cache: L1Cache) -> list[MemoryObj]:
    """Objects in no chunk any more that a writer may still touch: of lost reservations, or lost with a parent chunk."""
    leases = [*cache.lost, *cache.writes]
    objects = [obj for lease in leases for _, _, taken in lease.subject.entries for _, obj in taken]
    return [obj for obj in objects if obj.state is State.QUARANTINED]


def _check_bytes(cache: L1Cache, objects: list[MemoryObj]) -> None:
    align = cache.limits.align_bytes
    assert len(objects) == cache.objects, f"{cache.objects} objects counted, {len(objects)} found"
    used = sum(-(-obj.length // align) * align for obj in objects)
    assert used == cache.allocator.used, f"{cache.allocator.used} bytes used, objects hold {used}"
    quarantined = sum(obj.length for obj in objects if obj.state is State.QUARANTINED)
    assert quarantined == cache.quarantined_bytes, f"{cache.quarantined_bytes} bytes quarantined, found {quarantined}"
    for obj in objects:
        assert cache.generations[obj.offset // align] == obj.generation, f"{obj!r} has a stale generation"
