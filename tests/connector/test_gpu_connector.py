"""Batched copies of declared pages, on CPU tensors, against addresses that follow from the layouts' definitions.

The pages are vLLM's own views of random memory, and the whole memory is compared: paddings, blocks of other requests
and tokens beside the promised ones are all canaries.
"""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_connector.gpu_connector import StagedCopier, slot_planes
from lmcache_server.protocol.layout import KernelGroup, Kind, slot_shape
from tests.connector.kernels import NO_AMX
from tests.connector.pages import Paged, Shape, copies, flat_tokens, new_slots

LAYOUTS = [layout.name for layout in KVCacheLayout]
DTYPES = ["float32", "bfloat16", "float16", "uint8", "float8_e4m3fn", "float8_e5m2"]
KV = KernelGroup(layers=(0, 1), planes=2, heads=3, head_size=4, dtype="bfloat16")
MLA = KernelGroup(layers=(0, 1, 5), planes=1, heads=1, head_size=12, dtype="bfloat16")


def copier_of(paged: Paged) -> StagedCopier:
    return StagedCopier(paged.pages, paged.shape.group, paged.shape.block_size)


def check_gather(paged: Paged, chunk_size: int, chunks: int, block_ids: list[int]) -> None:
    before = [memory.clone() for memory in paged.memories]
    group, tokens = paged.shape.group, chunk_size * chunks
    slots = new_slots(group, chunk_size, chunks)
    copier_of(paged).gather(copies(slots, 0, tokens, chunk_size, paged.shape.block_size, block_ids))
    assert torch.equal(flat_tokens(slots, group, 0, tokens), paged.read(0, tokens, block_ids))
    assert all(map(torch.equal, paged.memories, before)), "gathering changes nothing in the pages"


def check_scatter(paged: Paged, chunk_size: int, chunks: int, first: int, end: int, block_ids: list[int]) -> None:
    group = paged.shape.group
    slots = new_slots(group, chunk_size, chunks)
    kept = [slot.clone() for slot in slots]
    expected = Paged(paged.shape, paged.cuts, paged.lead)
    expected.memories = [memory.clone() for memory in paged.memories]
    expected.write(first, end, block_ids, flat_tokens(slots, group, first, end))
    copier_of(paged).scatter(copies(slots, first, end, chunk_size, paged.shape.block_size, block_ids))
    assert all(map(torch.equal, paged.memories, expected.memories)), "the promised tokens and nothing else"
    assert all(map(torch.equal, slots, kept))


@pytest.mark.parametrize("group", [KV, replace(KV, heads=1), MLA], ids=["kv", "one-head", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_vllm_is_gathered_and_scattered(layout: str, group: KernelGroup) -> None:
    paged = Paged(Shape(layout, group, blocks=9, block_size=4))
    ids = [7, 2, 8, 0, 5, 1, 3, 6]
    check_gather(paged, 16, 2, ids)
    check_scatter(paged, 16, 2, 5, 31, ids)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("padding", [2, 8, 96])
def test_padding_between_pages_is_neither_read_nor_written(layout: str, padding: int) -> None:
    paged = Paged(Shape(layout, KV, blocks=5, block_size=4, padding=padding))
    check_gather(paged, 8, 2, [3, 0, 4, 1])
    check_scatter(paged, 8, 2, 1, 15, [3, 0, 4, 1])


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("kernel_blocks", [2, 4])
def test_blocks_that_the_kernels_cut_are_still_the_blocks_of_the_engine(layout: str, kernel_blocks: int) -> None:
    paged = Paged(Shape(layout, KV, blocks=5, block_size=8, kernel_blocks=kernel_blocks))
    assert paged.pages[0].shape[:3] == (5 * kernel_blocks, 3, 8 // kernel_blocks)
    check_gather(paged, 16, 2, [3, 0, 4, 1])
    check_scatter(paged, 16, 2, 3, 29, [3, 0, 4, 1])


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)])
def test_layers_may_lie_in_allocations_of_their_own(cuts: tuple[int, ...]) -> None:
    paged = Paged(Shape("LBNHC", replace(KV, layers=(0, 1, 2)), blocks=5, block_size=4), cuts)
    check_gather(paged, 8, 2, [3, 0, 4, 1])
    check_scatter(paged, 8, 2, 1, 15, [3, 0, 4, 1])


def test_layers_may_lie_at_any_distances_and_in_any_order() -> None:
    whole = Paged(Shape("BLHNC", replace(KV, layers=tuple(range(6))), blocks=5, block_size=4))
    chosen = [4, 0, 1, 5]
    group = replace(KV, layers=tuple(range(len(chosen))))
    slots = new_slots(group, 8, 2)
    copier = StagedCopier([whole.pages[layer] for layer in chosen], group, 4)
    copier.gather(copies(slots, 0, 16, 8, 4, [3, 0, 4, 1]))
    assert torch.equal(flat_tokens(slots, group, 0, 16), whole.read(0, 16, [3, 0, 4, 1])[:, chosen])
    slots = new_slots(group, 8, 2)
    before = whole.read(0, 16, [3, 0, 4, 1])
    copier.scatter(copies(slots, 0, 16, 8, 4, [3, 0, 4, 1]))
    before[:, chosen] = flat_tokens(slots, group, 0, 16)
    assert torch.equal(whole.read(0, 16, [3, 0, 4, 1]), before)


def test_a_load_leaves_the_blocks_that_the_request_shares_with_another_as_they_are() -> None:
    """A local hit of two blocks that ends inside a chunk; a second request lives in the same two blocks."""
    paged = Paged(Shape("LBNHC", KV, blocks=8, block_size=16))
    shared, own, others = [5, 2], [7, 0, 3, 4], [5, 2, 6, 1]
    before = paged.read(0, 64, others)
    slots = new_slots(KV, 48, 2)
    copier_of(paged).scatter(copies(slots, 32, 95, 48, 16, shared + own))
    assert torch.equal(paged.read(0, 64, others), before)
    assert torch.equal(paged.read(32, 95, shared + own), flat_tokens(slots, KV, 32, 95))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_pages_any_chunks_any_range(data: st.DataObject) -> None:
    draw = data.draw
    layers, planes = draw(st.integers(1, 4)), draw(st.sampled_from([2, 2, 1]))
    heads = draw(st.integers(1, 3)) if planes == 2 else 1
    group = KernelGroup(tuple(range(layers)), planes, heads, draw(st.integers(1, 9)), draw(st.sampled_from(DTYPES)))
    layout = draw(st.sampled_from(LAYOUTS))
    kernel_size, kernel_blocks = draw(st.integers(1, 6)), 1
    item, padding = getattr(torch, group.dtype).itemsize, 0
    if layout in ("LBHNC", "LBNHC"):
        kernel_blocks = draw(st.integers(1, 3))
    if kernel_blocks == 1 and (heads == 1 or layout not in ("LHBNC", "BHLNC")):
        padding = item * draw(st.integers(0, 20))
    block_size, chunk_size, chunks = kernel_size * kernel_blocks, draw(st.integers(1, 12)), draw(st.integers(1, 3))
    needed = -(-chunk_size * chunks // block_size)
    blocks = needed + draw(st.integers(0, 3))
    ids = random.Random(draw(st.integers(0, 99))).sample(range(blocks), needed)
    cuts = tuple(sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2)))) if layers > 1 else ()
    lead = item * draw(st.integers(0, 20))
    paged = Paged(Shape(layout, group, blocks, block_size, kernel_blocks, padding), cuts, lead)
    check_gather(paged, chunk_size, chunks, ids)
    first = draw(st.integers(0, chunk_size * chunks))
    check_scatter(paged, chunk_size, chunks, first, draw(st.integers(first, chunk_size * chunks)), ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 2}, "layer 0: expected a KV cache"),
        ({"planes": 1}, "layer 0: expected a KV cache"),
        ({"dtype": "float32"}, "of float32, got .* of torch.bfloat16"),
        ({"layers": (0, 1, 2)}, "KV caches of 3 layers, got 2"),
    ],
)
def test_pages_that_do_not_fit_the_group_are_refused(change: dict[str, object], message: str) -> None:
    paged = Paged(Shape("LBNHC", KV, blocks=3, block_size=8))
    with pytest.raises(ValueError, match=message):
        StagedCopier(paged.pages, replace(KV, **change), 8)  # type: ignore[arg-type]


def test_kernel_blocks_that_do_not_divide_a_block_are_refused() -> None:
    paged = Paged(Shape("LBNHC", KV, blocks=3, block_size=6))
    with pytest.raises(ValueError, match="8 or a divisor of it"):
        StagedCopier(paged.pages, KV, 8)


def test_vectors_whose_elements_lie_apart_are_refused() -> None:
    apart = torch.zeros(2, 3, 3, 4, 16, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match="last stride is 1"):
        StagedCopier(list(apart.unbind(0)), KV, 4)


@pytest.mark.parametrize("group", [KV, MLA])
def test_a_slot_is_seen_in_its_canonical_shape(group: KernelGroup) -> None:
    (slot,) = new_slots(group, 16, 1)
    planes = slot_planes(slot, group)
    assert planes.shape == (group.planes, len(group.layers), 16, group.heads, group.head_size)
    canonical = slot.view(torch.bfloat16).view(slot_shape(group, Kind.KV, 16))
    assert torch.equal(planes.flatten(3).reshape(canonical.shape).view(torch.int16), canonical.view(torch.int16))


def write_as_cpu_mla(latents: torch.Tensor, rope: torch.Tensor, page: torch.Tensor, places: torch.Tensor) -> None:
    CPUMLAImpl.do_kv_cache_update(None, latents, rope[:, None], page.squeeze(1), places, "auto", torch.ones(1))


def write_as_amx_mla(latents: torch.Tensor, rope: torch.Tensor, page: torch.Tensor, places: torch.Tensor) -> None:
    AMXMLAImpl.do_kv_cache_update(None, latents, rope[:, None], page.squeeze(1), places, "auto", torch.ones(1))


@pytest.mark.parametrize("write", [write_as_cpu_mla, pytest.param(write_as_amx_mla, marks=NO_AMX)])
def test_the_latents_of_the_cpu_backends_are_plain(write: Callable[..., None]) -> None:
    """A latent vector, then its rope part, side by side, whichever backend writes them."""
    group = replace(MLA, head_size=576)
    paged = Paged(Shape("LBNHC", group, blocks=5, block_size=32))
    latents, rope = torch.randn(3, 160, 512).bfloat16(), torch.randn(3, 160, 64).bfloat16()
    for layer, page in enumerate(paged.pages):
        write(latents[layer], rope[layer], page, torch.arange(160))
    slots = new_slots(group, 64, 2)
    copier_of(paged).gather(copies(slots, 0, 128, 64, 32, [3, 0, 4, 1]))
    places = torch.tensor([3, 0, 4, 1]).repeat_interleave(32) * 32 + torch.arange(32).repeat(4)
    expected = torch.cat([latents, rope], dim=-1)[None, :, places].view(torch.uint8)
    assert torch.equal(flat_tokens(slots, group, 0, 128), expected)
