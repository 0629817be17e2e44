"""Offsets of a pool: which are free, which are taken, how much of each.

Best fit over exact sizes: the free extents of one size form a stack, the sizes present are kept sorted, and an
extent is merged with its neighbours the moment it is freed. Chunks of one model are all of one size, so the common
case is a pop from one stack. Sizes are rounded up to `align`; `used` counts the rounded bytes.
"""

from bisect import bisect_left, insort

__all__ = ["Allocator"]


class Allocator:
    """Hands out aligned, disjoint extents of `size` bytes (rounded down to `align`)."""

    def __init__(self, size: int, align: int) -> None:
        self.align = align
        self.size = size - size % align
        self.used = 0
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        if self.size:
            self._add_free(0, self.size)

    def __repr__(self) -> str:
        return f"<Allocator used={self.used} size={self.size} extents={len(self._taken)} holes={len(self._free)}>"

    def allocate(self, length: int) -> int | None:
        """The offset of `length` fresh bytes, or None if no hole is large enough."""
        need = -(-length // self.align) * self.align
        position = bisect_left(self._sizes, need)
        if need == 0 or position == len(self._sizes):
            return None
        size = self._sizes[position]
        start = next(reversed(self._starts[size]))
        self._remove_free(start, size)
        if size > need:
            self._add_free(start + need, size - need)
        self._taken[start] = need
        self.used += need
        return start

    def free(self, offset: int) -> None:
        """Take back the extent at `offset`; KeyError if it is not taken."""
        size = self._taken.pop(offset)
        self.used -= size
        start, end = offset, offset + size
        before = self._free_by_end.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start = before
        after = self._free.get(end)
        if after is not None:
            self._remove_free(end, after)
            end += after
        self._add_free(start, end - start)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and taken extents tile the pool, and no two holes touch."""
        extents = sorted(
            [(s, n, True) for s, n in self._taken.items()] + [(s, n, False) for s, n in self._free.items()]
        )
        cursor, last_taken = 0, True
        for start, size, taken in extents:
            assert start == cursor and size > 0, f"extent at {start}, expected at {cursor}"
            assert taken or last_taken, f"two neighbouring holes at {start}"
            cursor, last_taken = start + size, taken
        assert cursor == self.size, f"extents end at {cursor}, pool at {self.size}"
        assert self.used == sum(self._taken.values()), f"used {self.used}, taken {sum(self._taken.values())}"
        assert self._sizes == sorted(self._starts), "the list of hole sizes is stale"

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_by_end[start + size] = start
        starts = self._starts.get(size)
        if starts is None:
            self._starts[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _remove_free(self, start: int, size: int) -> None:
        del self._free[start]
        del self._free_by_end[start + size]
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
