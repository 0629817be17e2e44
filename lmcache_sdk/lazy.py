"""A sequence of what is made when it is asked for: who looks at one item of thousands does not pay for all."""

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

__all__ = ["Lazy"]

T = TypeVar("T")


class Lazy(Sequence[T]):
    """`length` items; item i is `make(i)`, anew each time."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._indices = range(length)
        self._make = make

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """One item, or some."""
        if isinstance(index, slice):
            return [self._make(i) for i in self._indices[index]]
        return self._make(self._indices[index])

    def __len__(self) -> int:
        """How many there are."""
        return len(self._indices)
