"""What is found out about vLLM's CPU packings, and how a packing is cut into tiles."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.cpu_packing import CpuKernel, Tiling, probe_cell, tile_cell
from lmcache_connector.cpu_tiles import Tile
from tests.connector.kernels import KERNELS, NO_AMX

ops = pytest.importorskip("vllm._custom_ops")


def tiled(tiling: Tiling, tokens: int, elements: int, itemsize: int) -> np.ndarray:
    """`[tokens, elements]`: where each element is in its cell, by the tiles alone; -1 if in none."""
    rows, columns, bits = tiling.tile
    word = bits // 8
    apart = tiling.step if rows == columns else rows * word
    places = np.full(tokens * elements, -1)
    for cell, values in zip(tiling.in_cell, tiling.in_values, strict=True):
        for row, column, byte in product(range(rows), range(columns), range(0, word, itemsize)):
            at, offset = divmod(int(values) + row * tiling.row + column * word + byte, tiling.row)
            place = int(cell) + row * word + column * apart + byte
            index = at * elements + offset // itemsize
            assert places[index] == -1 and place % itemsize == 0
            places[index] = place // itemsize
    return places.reshape(tokens, elements)


@st.composite
def packings(draw: st.DrawFn) -> np.ndarray:
    """Tokens and elements whose index bits lie in any order in the cell; sometimes two elements have changed places."""
    token_bits, element_bits = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    order = draw(st.permutations(range(token_bits + element_bits)))
    index = np.arange(1 << (token_bits + element_bits))
    places = sum(((index >> bit) & 1) << place for bit, place in enumerate(order))
    places = np.asarray(places + np.zeros_like(index))
    if draw(st.booleans()):
        one, other = (draw(st.integers(0, len(index) - 1)) for _ in range(2))
        places[[one, other]] = places[[other, one]]
    return places.reshape(1 << token_bits, 1 << element_bits)


@given(packings(), st.sampled_from([1, 2, 4, 8]))
def test_tiles_say_where_each_element_is_whatever_the_packing(positions: np.ndarray, itemsize: int) -> None:
    tokens, elements = positions.shape
    tiling = tile_cell(positions, itemsize, 3 * elements * itemsize)
    assert np.array_equal(tiled(tiling, tokens, elements, itemsize), positions)


@pytest.mark.parametrize(("rows", "columns"), [(3, 40), (48, 5), (5, 7), (20, 24)], ids=lambda value: str(value))
def test_sizes_that_are_no_powers_of_two_have_smaller_tiles(rows: int, columns: int) -> None:
    transposed = np.arange(rows * columns).reshape(columns, rows).T
    tiling = tile_cell(transposed, 2, 2 * columns)
    assert np.array_equal(tiled(tiling, rows, columns, 2), transposed)


@pytest.mark.parametrize(
    ("kernel", "tiles"),
    [
        pytest.param(CpuKernel("vec", torch.float32), [Tile(16, 16, 32), Tile(1, 8, 64)], id="vec-float32"),
        pytest.param(CpuKernel("vec", torch.bfloat16), [Tile(16, 16, 16), Tile(1, 8, 64)], id="vec-bfloat16"),
        pytest.param(
            CpuKernel("amx", torch.bfloat16), [Tile(16, 16, 32), Tile(2, 16, 16)], id="amx-bfloat16", marks=NO_AMX
        ),
    ],
)
def test_the_packings_of_this_vllm_have_large_tiles(kernel: CpuKernel, tiles: list[Tile]) -> None:
    planes = probe_cell(32, 64, kernel).numpy()
    assert [tile_cell(plane, kernel.cache_dtype.itemsize, 1).tile for plane in planes] == tiles


@pytest.mark.parametrize(("kernel", "head_size"), KERNELS)
def test_the_probed_packing_is_a_permutation_of_the_cell(kernel: CpuKernel, head_size: int) -> None:
    positions = probe_cell(32, head_size, kernel)
    assert positions.shape == (2, 32, head_size)
    assert torch.equal(positions.flatten().sort().values, torch.arange(2 * 32 * head_size))


@pytest.mark.parametrize("kernel", [CpuKernel("vec", torch.float32), CpuKernel("vec", torch.float32, "fp8_e5m2")])
def test_the_vec_packing_is_transposed_keys_then_plain_values(kernel: CpuKernel) -> None:
    keys, values = probe_cell(32, 64, kernel)
    assert torch.equal(keys, torch.arange(64) * 32 + torch.arange(32)[:, None])
    assert torch.equal(values, 32 * 64 + torch.arange(32)[:, None] * 64 + torch.arange(64))


def nothing(*_: object, **__: object) -> None:
    """Writes nothing."""


def flat(keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
         places: torch.Tensor, *_: object, **__: object) -> None:  # fmt: skip
    """Writes every key where the first one belongs."""
    key_cache[1, :, 0], value_cache[1, :, 0] = keys[0], values[0]


@pytest.mark.parametrize("kernel", [nothing, flat])
def test_a_kernel_that_is_no_permutation_is_refused(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", kernel)
    with pytest.raises(ValueError, match="does not know"):
        probe_cell.__wrapped__(32, 64, CpuKernel("vec", torch.float32))
