"""vLLM's packed CPU pages: copies against what vLLM's own kernel was given, wrote and would write."""

import pytest
import torch

from lmcache_connector.cpu_connector import PackedCopier
from lmcache_connector.cpu_packing import CpuKernel
from lmcache_connector.gpu_connector import ChunkCopy
from lmcache_connector.layout import Piece
from lmcache_server.protocol.layout import KernelGroup
from tests.connector.kernels import KERNELS
from tests.connector.pages import copies, flat_tokens, new_slots

ops = pytest.importorskip("vllm._custom_ops")

LAYERS = 3
TOKENS = 128


class Pages:
    """A CPU cache of some layers that vLLM's kernel fills with known keys and values, token by token."""

    def __init__(self, kernel: CpuKernel, group: KernelGroup, blocks: int, block_size: int) -> None:
        self.kernel, self.group = kernel, group
        shape = (LAYERS, blocks, group.heads, block_size, 2 * group.head_size)
        self.memory = torch.randint(0, 256, (*shape[:-1], shape[-1] * kernel.cache_dtype.itemsize), dtype=torch.uint8)
        self.pages = list(self.memory.view(kernel.cache_dtype).unbind(0))
        tokens = blocks * block_size
        self.kv = torch.randn(LAYERS, 2, tokens, group.heads, group.head_size).to(kernel.dtype)

    def write(self, tokens: torch.Tensor) -> None:
        """Have the kernel write the known values of `tokens` (numbered through all blocks)."""
        for page, kv in zip(self.pages, self.kv, strict=True):
            caches = page.view(len(page), self.group.heads, -1, self.group.head_size).chunk(2, dim=2)
            keys, values = (kv[plane, tokens].contiguous() for plane in (0, 1))
            ops.cpu_attn_reshape_and_cache(
                keys, values, *caches, tokens, self.kernel.isa, kv_cache_dtype=self.kernel.kv_cache_dtype
            )

    def cached(self, tokens: torch.Tensor) -> torch.Tensor:
        """What of the known values of `tokens` can be in the cache, as bytes `[2, LAYERS, tokens, heads * row]`."""
        kv = self.kv[:, :, tokens].transpose(0, 1)
        if self.kernel.quantises:
            kv = self.quantised(kv)
        return kv.contiguous().view(torch.uint8).flatten(3)

    def quantised(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes that the kernel makes of each value, found by writing it to a whole block."""
        every = values.flatten().unique()
        codes = [self.kernel.written(torch.full((1, 2, 32, 32), float(value))).unique() for value in every]
        assert all(len(code) == 1 for code in codes)
        return torch.cat(codes)[torch.searchsorted(every, values.contiguous())]


def group_of(kernel: CpuKernel, head_size: int, heads: int = 2) -> KernelGroup:
    dtype = str(kernel.cache_dtype).removeprefix("torch.")
    return KernelGroup(tuple(range(LAYERS)), planes=2, heads=heads, head_size=head_size, dtype=dtype)


def places(tokens: range, block: int, ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids[token // block] * block + token % block for token in tokens])


@pytest.mark.parametrize(("chunk", "block", "heads"), [(32, 32, 1), (16, 64, 3), (64, 32, 3)])
@pytest.mark.parametrize(("kernel", "head_size"), KERNELS)
def test_gathered_slots_hold_what_the_kernel_was_given(
    kernel: CpuKernel, head_size: int, chunk: int, block: int, heads: int
) -> None:
    group = group_of(kernel, head_size, heads)
    cache = Pages(kernel, group, blocks=5, block_size=block)
    if kernel.quantises:
        cache.kv = (cache.kv * 4).round() / 4  # few values, so that each can be asked for
    cache.write(torch.arange(5 * block))
    ids = [3, 0, 4, 1][: TOKENS // block]
    slots = new_slots(group, chunk, TOKENS // chunk)
    before = cache.memory.clone()
    PackedCopier(cache.pages, group, block, kernel).gather(copies(slots, 0, TOKENS, chunk, block, ids))
    assert torch.equal(flat_tokens(slots, group, 0, TOKENS), cache.cached(places(range(TOKENS), block, ids)))
    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize(("first", "end"), [(0, 127), (32, 128), (64, 65)])
@pytest.mark.parametrize(("chunk", "block"), [(16, 64), (64, 32)])
@pytest.mark.parametrize(("kernel", "head_size"), KERNELS)
def test_scattering_writes_what_the_kernel_would_and_nothing_else(
    kernel: CpuKernel, head_size: int, chunk: int, block: int, first: int, end: int
) -> None:
    """What was gathered from a cache that the kernel filled is written to a second one, beside what is in it."""
    group = group_of(kernel, head_size)
    ids = [3, 0, 4, 1][: TOKENS // block]
    full, other = (Pages(kernel, group, blocks=5, block_size=block) for _ in range(2))
    full.write(torch.arange(5 * block))
    slots = new_slots(group, chunk, TOKENS // chunk)
    PackedCopier(full.pages, group, block, kernel).gather(copies(slots, 0, TOKENS, chunk, block, ids))
    before = other.memory.clone()
    other.kv = full.kv
    other.write(places(range(first, end), block, ids))
    expected = other.memory.clone()
    other.memory.copy_(before)
    PackedCopier(other.pages, group, block, kernel).scatter(copies(slots, first, end, chunk, block, ids))
    assert torch.equal(other.memory, expected)


@pytest.mark.parametrize(("kernel", "head_size"), KERNELS)
def test_blocks_that_the_kernel_cuts_are_still_the_blocks_of_the_engine(kernel: CpuKernel, head_size: int) -> None:
    group = group_of(kernel, head_size)
    cache = Pages(kernel, group, blocks=10, block_size=32)
    cache.memory.random_(0, 256)
    uncut, cut = (new_slots(group, 32, 4) for _ in range(2))
    by_kernel = PackedCopier(cache.pages, group, 32, kernel)
    by_kernel.gather(copies(uncut, 0, TOKENS, 32, 32, [6, 7, 2, 3]))
    by_engine = PackedCopier(cache.pages, group, 64, kernel)
    by_engine.gather(copies(cut, 0, TOKENS, 32, 64, [3, 1]))
    assert all(map(torch.equal, cut, uncut))
    before = cache.memory.clone()
    by_kernel.scatter(copies(cut, 5, 100, 32, 32, [8, 9, 0, 1]))
    expected = cache.memory.clone()
    cache.memory.copy_(before)
    by_engine.scatter(copies(cut, 5, 100, 32, 64, [4, 0]))
    assert torch.equal(cache.memory, expected)
    assert not torch.equal(cache.memory, before)


@pytest.mark.parametrize("chosen", [[2, 0, 1], [0, 2], [0, 1, 3]])
def test_layers_may_lie_at_any_distances(chosen: list[int]) -> None:
    kernel = CpuKernel("vec", torch.float32)
    memory = torch.randn(4, 5, 2, 32, 128)
    group = KernelGroup(tuple(range(len(chosen))), planes=2, heads=2, head_size=64, dtype="float32")
    one = KernelGroup((0,), planes=2, heads=2, head_size=64, dtype="float32")
    slots = new_slots(group, 32, 2)
    PackedCopier([memory[layer] for layer in chosen], group, 32, kernel).gather(copies(slots, 0, 64, 32, 32, [3, 1]))
    for index, layer in enumerate(chosen):
        alone = new_slots(one, 32, 2)
        PackedCopier([memory[layer]], one, 32, kernel).gather(copies(alone, 0, 64, 32, 32, [3, 1]))
        assert torch.equal(flat_tokens(slots, group, 0, 64)[:, [index]], flat_tokens(alone, one, 0, 64))


def test_pages_with_holes_inside_a_block_are_refused() -> None:
    kernel = CpuKernel("vec", torch.float32)
    holey = torch.zeros(LAYERS, 2, 2, 32, 130)[..., :128]
    with pytest.raises(ValueError, match="dense blocks"):
        PackedCopier(list(holey.unbind(0)), group_of(kernel, 64), 32, kernel)


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_that_the_pages_do_not_have_is_refused_before_anything_is_touched(block: int) -> None:
    kernel = CpuKernel("vec", torch.float32)
    group = group_of(kernel, 64)
    cache = Pages(kernel, group, blocks=5, block_size=32)
    before = cache.memory.clone()
    copier = PackedCopier(cache.pages, group, 32, kernel)
    slots = new_slots(group, 32, 2)
    for copy in (copier.gather, copier.scatter):
        with pytest.raises(IndexError, match="expected blocks from 0 to 4"):
            copy(copies(slots, 0, 64, 32, 32, [1, block]))
    assert torch.equal(cache.memory, before)


def test_a_slot_that_is_too_small_for_its_tokens_is_refused() -> None:
    kernel = CpuKernel("vec", torch.float32)
    group = group_of(kernel, 64)
    copier = PackedCopier(Pages(kernel, group, blocks=5, block_size=32).pages, group, 32, kernel)
    for slots in (new_slots(group, 31, 2), [torch.zeros(7, dtype=torch.uint8)]):
        with pytest.raises(ValueError, match="expected slots of at least 32 whole tokens"):
            copier.gather([ChunkCopy(slots[0], [Piece(0, 1, 0, 32)])])
    one, other = *new_slots(group, 32, 1), *new_slots(group, 64, 1)
    with pytest.raises(ValueError, match="one size"):
        copier.gather([ChunkCopy(slot, [Piece(0, 1, 0, 32)]) for slot in (one, other)])
