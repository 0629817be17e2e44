"""What is found out about vLLM's CPU packings, and how a packing is put into strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.cpu_packing import CpuKernel, Plane, digits, packed_plane, probe_cell
from tests.connector.kernels import KERNELS

ops = pytest.importorskip("vllm._custom_ops")


def test_digits_of_a_plain_stride_are_one_digit() -> None:
    assert digits(3 * torch.arange(10)) == ((10, 3),)
    assert digits(torch.zeros(1, dtype=torch.int64)) == ((1, 1),)


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 50)), min_size=1, max_size=4))
def test_digits_say_where_each_index_is(wanted: list[tuple[int, int]]) -> None:
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in wanted:
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    found = digits(places)
    assert found is not None
    again = torch.zeros(1, dtype=torch.int64)
    for size, stride in found:
        again = (again[:, None] + stride * torch.arange(size)).flatten()
    assert torch.equal(again, places)


def test_places_without_a_rule_have_no_digits() -> None:
    assert digits(torch.tensor([0, 1, 3, 4, 5, 7])) is None
    assert digits(torch.tensor([0, 2, 1, 3, 5, 4])) is None


def test_positions_that_are_no_sum_of_rows_and_columns_make_no_plane() -> None:
    pages = torch.zeros(2, 1, 2, 4)
    crossed = torch.tensor([[0, 1], [3, 2]])
    assert packed_plane(pages, torch.tensor([[0, 1], [2, 3]])) is not None
    assert packed_plane(pages, crossed) is None


def test_slots_are_cut_into_the_same_digits_as_pages() -> None:
    plane = Plane(0, 64, 32, ((2, 16), (4, 1)), ((2, 8), (2, 4)))
    slot = torch.arange(3 * 16 * 2 * 4).view(3, 16, 2, 4)
    cut = plane.of_slot(slot)
    assert cut.shape == (3, 2, 2, 4, 2, 2, 2)
    assert cut[1, 1, 0, 3, 1, 0, 1] == slot[1, 8 + 0 * 4 + 3, 1, 0 * 2 + 1]


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
