"""The queue of leaves: least recently used first, and only what may go."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.core.eviction import LeafLRU


@dataclass(eq=False)
class Leaf:
    name: str
    may_go: bool = True
    tick: int = 0
    queued: bool = False


def queue(*leaves: Leaf) -> LeafLRU[Leaf]:
    lru: LeafLRU[Leaf] = LeafLRU(lambda leaf: leaf.may_go)
    for leaf in leaves:
        lru.touch(leaf)
        lru.offer(leaf)
    return lru


def taken(lru: LeafLRU[Leaf]) -> str:
    names = ""
    while (leaf := lru.take()) is not None:
        names += leaf.name
    return names


def test_the_least_recently_used_leaf_goes_first() -> None:
    a, b, c = (Leaf(name) for name in "abc")
    lru = queue(a, b, c)
    lru.touch(a)
    assert taken(lru) == "bca"
    assert len(lru) == 0


def test_a_leaf_that_may_not_go_is_passed_over_until_it_is_offered_again() -> None:
    a, b = Leaf("a"), Leaf("b")
    lru = queue(a, b)
    a.may_go = False
    assert taken(lru) == "b"
    assert not a.queued
    a.may_go = True
    assert taken(lru) == ""
    lru.offer(a)
    assert taken(lru) == "a"


def test_a_leaf_stands_in_the_queue_once() -> None:
    a = Leaf("a")
    lru = queue(a, a, a)
    assert len(lru) == 1
    assert taken(lru) == "a"


def test_what_may_not_go_is_not_queued() -> None:
    assert len(queue(Leaf("a", may_go=False))) == 0


def test_a_taken_leaf_can_come_back() -> None:
    a = Leaf("a")
    lru = queue(a)
    assert lru.take() is a and lru.take() is None
    lru.offer(a)
    assert lru.take() is a


def test_entries_of_leaves_that_are_gone_do_not_pile_up() -> None:
    lru = queue(Leaf("kept"))
    for _ in range(10_000):
        leaf = Leaf("x")
        lru.touch(leaf)
        lru.offer(leaf)
        leaf.may_go = False
    assert len(lru) <= 64
    assert taken(lru) == "kept"


@given(st.lists(st.tuples(st.sampled_from("toxg"), st.integers(0, 5)), max_size=60))
def test_any_walk_takes_the_oldest_of_those_that_may_go(steps: list[tuple[str, int]]) -> None:
    leaves = [Leaf(str(i), may_go=False) for i in range(6)]
    lru = queue()
    for step, i in steps:
        leaf = leaves[i]
        if step == "t":
            lru.touch(leaf)
        elif step == "x":
            leaf.may_go = False
        elif step == "o":
            leaf.may_go = True
            lru.offer(leaf)
        else:
            ready = [leaf for leaf in leaves if leaf.may_go]
            oldest = lru.take()
            assert (oldest is None) == (not ready)
            if oldest is not None:
                assert oldest.tick == min(leaf.tick for leaf in ready)
                oldest.may_go = False
    assert sorted(taken(lru)) == sorted(leaf.name for leaf in leaves if leaf.may_go)
