"""Extents are aligned and disjoint, holes merge, and free + used is the pool after every step."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_server.core.allocator import Allocator


def test_bytes_are_rounded_up_to_the_alignment() -> None:
    allocator = Allocator(10, 2)
    assert [allocator.allocate(n) for n in (1, 2, 3)] == [0, 2, 4]
    assert allocator.used == 8
    assert allocator.allocate(3) is None
    assert allocator.allocate(1) == 8
    assert repr(allocator) == "<Allocator used=10 size=10 extents=4 holes=0>"


def test_the_pool_is_rounded_down_to_the_alignment() -> None:
    allocator = Allocator(11, 4)
    assert allocator.size == 8
    assert allocator.allocate(9) is None
    assert allocator.allocate(8) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_holes_merge_whatever_the_order_of_freeing(order: tuple[int, ...]) -> None:
    allocator = Allocator(6, 1)
    starts = [allocator.allocate(2) for _ in range(3)]
    for i in order:
        allocator.free(starts[i])
        allocator.check_integrity()
    assert allocator.allocate(6) == 0


def test_the_smallest_hole_that_fits_is_taken() -> None:
    allocator = Allocator(10, 1)
    for start, size in ((0, 4), (4, 1), (5, 2), (7, 1)):
        assert allocator.allocate(size) == start
    allocator.free(0)
    allocator.free(5)
    assert allocator.allocate(2) == 5
    assert allocator.allocate(2) == 8


def test_nothing_is_handed_out_for_nothing() -> None:
    assert Allocator(4, 2).allocate(0) is None
    assert Allocator(1, 2).allocate(1) is None


def test_an_extent_is_freed_once() -> None:
    allocator = Allocator(4, 2)
    allocator.allocate(2)
    for offset in (2, 1):
        with pytest.raises(KeyError):
            allocator.free(offset)
    allocator.free(0)
    with pytest.raises(KeyError):
        allocator.free(0)


class AllocatorMachine(RuleBasedStateMachine):
    """A pool of 32 units against a model of which units are taken."""

    @initialize(align=st.sampled_from([1, 4]))
    def start(self, align: int) -> None:
        self.align = align
        self.allocator = Allocator(32 * align + align // 2, align)
        self.taken: dict[int, int] = {}

    @rule(units=st.integers(1, 12), less=st.integers(0, 3))
    def allocate(self, units: int, less: int) -> None:
        length = max(1, units * self.align - min(less, self.align - 1))
        offset = self.allocator.allocate(length)
        size = -(-length // self.align) * self.align
        if offset is None:
            assert self.largest_hole() < size
        else:
            assert offset % self.align == 0 and 0 <= offset <= self.allocator.size - size
            assert all(offset + size <= start or start + other <= offset for start, other in self.taken.items())
            self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.allocator.free(offset)

    def largest_hole(self) -> int:
        edges = [
            0,
            *sorted(x for start, size in self.taken.items() for x in (start, start + size)),
            self.allocator.size,
        ]
        return max(end - start for start, end in zip(edges[::2], edges[1::2], strict=True))

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check_integrity()
            assert self.allocator.used == sum(self.taken.values())


TestAllocatorMachine = AllocatorMachine.TestCase
