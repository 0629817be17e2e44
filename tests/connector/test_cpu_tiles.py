"""Compiled tiles against the same copy written word by word."""

import llvmlite.binding
import numpy as np
import pytest

from lmcache_connector.cpu_tiles import Addresses, Tile, compile_read, compile_write

TILES = [
    Tile(16, 16, 32),
    Tile(16, 16, 16),
    Tile(16, 32, 16),
    Tile(8, 4, 64),
    Tile(2, 16, 8),
    Tile(2, 2, 16),
    Tile(4, 4, 8),
    Tile(1, 8, 64),
    Tile(1, 1, 8),
]
TOKENS, WORDS = 32, 64


def layout(tile: Tile, apart: int) -> tuple[Addresses, Addresses, np.ndarray]:
    """Where the tiles of `[TOKENS, WORDS]` are in a cell and in rows, in words, and where each word is in the cell.

    `apart`: from column to column of a tile.
    """
    rows, columns, _ = tile
    in_cell, in_rows, places = [], [], np.zeros((TOKENS, WORDS), dtype=np.int64)
    for token in range(0, TOKENS, rows):
        for word in range(0, WORDS, columns):
            first = token * WORDS + word * rows if apart == rows else word * TOKENS + token
            places[token : token + rows, word : word + columns] = (
                first + np.arange(rows)[:, None] + apart * np.arange(columns)
            )
            in_cell.append(first)
            in_rows.append(token * WORDS + word)
    assert np.array_equal(np.sort(places.ravel()), np.arange(TOKENS * WORDS))
    return np.array(in_cell), np.array(in_rows), places


CASES = [(tile, tile.rows) for tile in TILES] + [(tile, TOKENS) for tile in TILES if tile.rows == tile.columns > 1]


@pytest.mark.parametrize(("tile", "apart"), CASES)
def test_tiles_are_where_word_by_word_they_would_be(tile: Tile, apart: int) -> None:
    size = tile.bits // 8
    in_cell, in_rows, places = layout(tile, apart)
    step = (apart if tile.rows == tile.columns else tile.columns) * size
    rows = np.random.default_rng(0).integers(0, 256, (3, TOKENS * WORDS * size), dtype=np.uint8)
    cells = np.zeros((3, TOKENS * WORDS * size + 1), dtype=np.uint8)[:, 1:]  # no address is a multiple of anything
    froms = np.array([one.ctypes.data for one in rows])
    tos = np.array([one.ctypes.data for one in cells])
    compile_write(tile)(tos, froms, in_cell * size, in_rows * size, step, WORDS * size)
    words = [np.ascontiguousarray(one).reshape(-1, size) for one in (*rows, *cells)]
    for given, found in zip(words[:3], words[3:], strict=True):
        assert np.array_equal(found[places.ravel()], given)
    again = np.zeros_like(rows)
    compile_read(tile)(
        tos, np.array([one.ctypes.data for one in again]), in_cell * size, in_rows * size, step, WORDS * size
    )
    assert np.array_equal(again, rows)


def test_nothing_is_copied_where_there_are_no_cells() -> None:
    none, one = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    compile_write(Tile(2, 2, 16))(none, none, one, one, 4, 4)
    compile_read(Tile(2, 2, 16))(none, none, one, one, 4, 4)


def test_vllm_can_look_into_llvms_library_when_another_engine_starts() -> None:
    assert not hasattr(llvmlite.binding.ffi.lib, "__dict__")
    assert llvmlite.binding.ffi.lib.LLVMPY_GetVersionInfo() > 0, "and it is still found what is there"
