"""Compiled copies of tiles, which transpose on the way: the inner loops of the copies between chunks and packed cells.

A tile is a few tokens by a few words that lie side by side in each token's row. In a cell it lies the other way round:
all tokens' first words, then all tokens' second words, and so on. The rows of a tile are loaded as vectors, zipped with
each other until they are columns, and stored; the other way, columns are unzipped until they are rows. numba compiles
this for the machine at hand, by way of LLVM's vectors, since no loop over single words comes near a plain copy.

    rows (tokens)       a0 a1 a2 a3     zip with the rows half way down     a0 c0 a1 c1 a2 c2 a3 c3
                        b0 b1 b2 b3                                         b0 d0 b1 d1 b2 d2 b3 d3
                        c0 c1 c2 c3     and again                           a0 b0 c0 d0 a1 b1 c1 d1 ... d3
                        d0 d1 d2 d3

The compiled functions take addresses and check nothing: see `cpu_connector` for who says that they are right. They do
not hold the GIL.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = ["Addresses", "Copy", "Tile", "compile_read", "compile_write"]

Addresses = NDArray[Any]
"""`[n]`, int64, contiguous: addresses, or distances between such, in bytes."""
Copy = Callable[[Addresses, Addresses, Addresses, Addresses, int, int], None]
"""Copies, for each i and j, the tile at `cells[i] + in_cell[j]` from or to the one at `values[i] + in_values[j]`.

Its arguments are `cells`, `values`, `in_cell`, `in_values`, then how far the tile's vectors are from each other in the
cell, and its rows. All in bytes.
"""


class Tile(NamedTuple):
    """What is transposed at a time."""

    rows: int
    """Tokens; a power of two."""
    columns: int
    """Words of each; a power of two, at least two if there are several rows."""
    bits: int
    """Of a word."""


@cache
def compile_write(tile: Tile) -> Copy:
    """The copy from rows to cells. Takes a second, once per process and tile."""

    def write(builder: ir.IRBuilder, cell: list[ir.Value], rows: list[ir.Value], align: int) -> None:
        columns = _columns(builder, [[builder.load(row, align=align)] for row in rows])
        for vector, place in zip(columns, cell, strict=True):
            builder.store(vector, place, align=align)

    return _compiled(tile, write)


@cache
def compile_read(tile: Tile) -> Copy:
    """The copy from cells to rows. Takes a second, once per process and tile."""

    def read(builder: ir.IRBuilder, cell: list[ir.Value], rows: list[ir.Value], align: int) -> None:
        loaded = _rows(builder, [builder.load(place, align=align) for place in cell], len(rows))
        for vector, row in zip(loaded, rows, strict=True):
            builder.store(vector, row, align=align)

    return _compiled(tile, read)


def _compiled(tile: Tile, body: Callable[[ir.IRBuilder, list[ir.Value], list[ir.Value], int], None]) -> Copy:
    vector = ir.VectorType(ir.IntType(tile.bits), tile.columns).as_pointer()
    number, numbers = types.int64, types.int64[::1]

    def vectors(builder: ir.IRBuilder, first: ir.Value, step: ir.Value) -> list[ir.Value]:
        starts = (builder.add(first, builder.mul(step, ir.Constant(step.type, row))) for row in range(tile.rows))
        return [builder.inttoptr(start, vector) for start in starts]

    @intrinsic  # type: ignore[untyped-decorator]
    def move(_typing: Any, cell: Any, step: Any, value: Any, row: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
            cell, step, value, row = arguments
            body(builder, vectors(builder, cell, step), vectors(builder, value, row), tile.bits // 8)
            return context.get_dummy_value()

        return types.void(number, number, number, number), emit

    @njit([types.void(*[numbers] * 4, number, number)], nogil=True)  # type: ignore[untyped-decorator]
    def copy(
        cells: Addresses, values: Addresses, in_cell: Addresses, in_values: Addresses, step: int, row: int
    ) -> None:
        for i in range(len(cells)):
            for j in range(len(in_cell)):
                move(cells[i] + in_cell[j], step, values[i] + in_values[j], row)

    return copy  # type: ignore[no-any-return]


def _columns(builder: ir.IRBuilder, rows: list[list[ir.Value]]) -> list[ir.Value]:
    """Vectors that hold all first words, then all second words, and so on, of rows cut into vectors."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [_zipped(builder, *pair) for pair in zip(rows[:half], rows[half:], strict=True)]
    return rows[0]


def _rows(builder: ir.IRBuilder, columns: list[ir.Value], count: int) -> list[ir.Value]:
    """The `count` rows whose `_columns` these are."""
    if count == 1:
        return columns
    even, odd = (_rows(builder, _every_other(builder, columns, first), count // 2) for first in (0, 1))
    return [row for pair in zip(even, odd, strict=True) for row in pair]


def _zipped(builder: ir.IRBuilder, left: list[ir.Value], right: list[ir.Value]) -> list[ir.Value]:
    """Words of both in turn."""
    size = left[0].type.count
    halves = range(size // 2), range(size // 2, size)
    masks = [[i + side for i in half for side in (0, size)] for half in halves]
    pairs = zip(left, right, strict=True)
    return [builder.shuffle_vector(one, other, _mask(mask)) for one, other in pairs for mask in masks]


def _every_other(builder: ir.IRBuilder, vectors: list[ir.Value], first: int) -> list[ir.Value]:
    """Every second word, from word `first` on."""
    mask = _mask(list(range(first, 2 * vectors[0].type.count, 2)))
    return [builder.shuffle_vector(*pair, mask) for pair in zip(vectors[::2], vectors[1::2], strict=True)]


def _mask(words: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(words)), words)


def _spare_vllm_the_names_of_llvm() -> None:
    """llvmlite's library object has every attribute that it is asked for, `__dict__` too. vLLM 0.32 asks each value in
    each module for that one when an engine starts, and the second engine of a process would fail at what it gets.
    """
    library = type(llvmlite.binding.ffi.lib)
    find = library.__getattr__

    def __getattr__(self: object, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = __getattr__


_spare_vllm_the_names_of_llvm()
