"""vLLM's packed CPU pages: the packing that is probed, and copies against what vLLM's own kernel wrote and reads."""

import pytest
import torch

from lmcache_connector.cpu_connector import IndexedReader, PackedCopier, StridedReader
from lmcache_connector.cpu_packing import probe_cell
from lmcache_server.protocol.layout import KernelGroup
from tests.connector.pages import copies, new_slots, value_in_slots

ops = pytest.importorskip("vllm._custom_ops")

ISAS = [
    pytest.param("vec", "float32", 64, id="vec-float32"),
    pytest.param("vec", "bfloat16", 64, id="vec-bfloat16"),
    pytest.param("vec16", "float16", 80, id="vec16-float16"),
    pytest.param(
        "amx", "bfloat16", 32, id="amx-bfloat16",
        marks=pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this machine has no AMX"),
    ),
]  # fmt: skip
LAYERS = 3


class Pages:
    """A CPU cache of some layers that vLLM's kernel filled with known keys and values, token by token."""

    def __init__(self, isa: str, group: KernelGroup, blocks: int, block_size: int) -> None:
        self.isa, self.group, self.block_size = isa, group, block_size
        dtype = getattr(torch, group.dtype)
        shape = (LAYERS, blocks, group.heads, block_size, 2 * group.head_size)
        self.memory = torch.randn(shape).to(dtype)
        self.pages = list(self.memory.unbind(0))
        tokens = blocks * block_size
        self.kv = torch.randn(LAYERS, 2, tokens, group.heads, group.head_size).to(dtype)

    def write(self, layer: int, tokens: torch.Tensor) -> None:
        """Have the kernel write the known values of `tokens` (numbered through all blocks) of a layer."""
        page = self.pages[layer]
        keys, values = page.view(len(page), self.group.heads, -1, self.group.head_size).chunk(2, dim=2)
        k, v = self.kv[layer][:, tokens]
        ops.cpu_attn_reshape_and_cache(k.contiguous(), v.contiguous(), keys, values, tokens, self.isa)


def group_of(dtype: str, head_size: int, heads: int = 2) -> KernelGroup:
    return KernelGroup(tuple(range(LAYERS)), planes=2, heads=heads, head_size=head_size, dtype=dtype)


@pytest.mark.parametrize(("isa", "dtype", "head_size"), ISAS)
def test_the_probed_packing_is_a_permutation_of_the_cell(isa: str, dtype: str, head_size: int) -> None:
    positions = probe_cell(32, head_size, getattr(torch, dtype), isa)
    assert positions.shape == (2, 32, head_size)
    assert torch.equal(positions.flatten().sort().values, torch.arange(2 * 32 * head_size))


def test_the_vec_packing_is_transposed_keys_then_plain_values() -> None:
    keys, values = probe_cell(32, 64, torch.float32, "vec")
    assert torch.equal(keys, torch.arange(64) * 32 + torch.arange(32)[:, None])
    assert torch.equal(values, 32 * 64 + torch.arange(32)[:, None] * 64 + torch.arange(64))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("chunk", "block"), [(32, 32), (16, 64), (8, 32), (64, 32)])
@pytest.mark.parametrize(("isa", "dtype", "head_size"), ISAS)
def test_gathered_slots_hold_what_the_kernel_was_given(
    isa: str, dtype: str, head_size: int, chunk: int, block: int, heads: int
) -> None:
    group = group_of(dtype, head_size, heads)
    cache = Pages(isa, group, blocks=5, block_size=block)
    for layer in range(LAYERS):
        cache.write(layer, torch.arange(5 * block))
    ids = [3, 0, 4, 1][: 128 // block]
    slots = new_slots(group, chunk, 128 // chunk, fill="zeros")
    before = cache.memory.clone()
    PackedCopier(cache.pages, group, isa).gather(copies(slots, 0, 128, chunk, block, ids))
    for token in range(0, 128, 7):
        place = ids[token // block] * block + token % block
        for layer in range(LAYERS):
            for plane in range(2):
                for head, element in ((0, 0), (heads - 1, head_size - 1), (0, head_size // 2 + 1)):
                    stored = value_in_slots(slots, group, chunk, layer, plane, token, head, element)
                    assert stored == cache.kv[layer, plane, place, head, element].item()
    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize(("first", "end"), [(0, 128), (0, 127), (32, 128), (64, 65)])
@pytest.mark.parametrize(("chunk", "block"), [(32, 32), (16, 64), (64, 32)])
@pytest.mark.parametrize(("isa", "dtype", "head_size"), ISAS)
def test_scattering_writes_what_the_kernel_would_and_nothing_else(
    isa: str, dtype: str, head_size: int, chunk: int, block: int, first: int, end: int
) -> None:
    group = group_of(dtype, head_size)
    cache = Pages(isa, group, blocks=5, block_size=block)
    ids = [3, 0, 4, 1][: 128 // block]
    slots = new_slots(group, chunk, 128 // chunk)
    before = cache.memory.clone()
    tokens = torch.tensor([ids[t // block] * block + t % block for t in range(first, end)])
    flat = torch.cat([slot.view(getattr(torch, dtype)).view(2, LAYERS, chunk, 2, head_size) for slot in slots], dim=2)
    cache.kv[:, :, tokens] = flat[:, :, first:end].transpose(0, 1)
    for layer in range(LAYERS):
        cache.write(layer, tokens)
    expected = cache.memory.clone()
    cache.memory.copy_(before)
    PackedCopier(cache.pages, group, isa).scatter(copies(slots, first, end, chunk, block, ids))
    assert torch.equal(cache.memory.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("isa", "dtype", "head_size"), ISAS)
def test_reading_by_strides_and_by_index_is_the_same(isa: str, dtype: str, head_size: int) -> None:
    group = group_of(dtype, head_size)
    cache = Pages(isa, group, blocks=3, block_size=32)
    cache.memory.view(torch.uint8).random_()
    positions = probe_cell(32, head_size, getattr(torch, dtype), isa)
    copier = PackedCopier(cache.pages, group, isa)
    for reader, table in zip(copier._readers, positions, strict=True):
        assert isinstance(reader, StridedReader), "every packing of this vLLM is strided"
        by_strides, by_index = (torch.zeros(LAYERS, 32, 2, head_size, dtype=getattr(torch, dtype)) for _ in range(2))
        reader.read(1, by_strides)
        IndexedReader(cache.pages, table).read(1, by_index)
        assert torch.equal(by_strides.view(torch.uint8), by_index.view(torch.uint8))


def test_a_kernel_that_is_no_permutation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", lambda *_: None)
    with pytest.raises(ValueError, match="does not know"):
        probe_cell(32, 64, torch.float32, "vec")


def test_pages_with_holes_inside_a_block_are_refused() -> None:
    group = group_of("float32", 64)
    holey = torch.zeros(LAYERS, 2, 2, 32, 130)[..., :128]
    with pytest.raises(ValueError, match="dense blocks"):
        PackedCopier(list(holey.unbind(0)), group, "vec")
