"""Batched copies of strided pages, on CPU tensors, against a reference that reads and writes value by value."""

import itertools

import pytest
import torch

from lmcache_connector.gpu_connector import StagedCopier, slot_planes
from lmcache_server.protocol.layout import KernelGroup
from tests.connector.pages import (
    CANARY,
    canaries,
    copies,
    new_slots,
    strided_pages,
    value_in_pages,
    value_in_slots,
)

SIZES = [(8, 8), (4, 8), (16, 4)]
"""(chunk size, block size): equal, below, above."""
SHAPES = [
    pytest.param(
        chunk, block, heads, tokens_first, padding, id=f"chunk{chunk}-block{block}-{heads}heads-{order}-pad{padding}"
    )
    for chunk, block in SIZES
    for heads in (1, 3)
    for tokens_first, order in ((True, "NHD"), (False, "HND"))
    for padding in (0, 5)
]


def group_of(heads: int, dtype: str = "float32") -> KernelGroup:
    return KernelGroup(layers=(0, 1), planes=2, heads=heads, head_size=3, dtype=dtype)


def places(group: KernelGroup, tokens: range) -> itertools.product:
    return itertools.product(range(2), range(2), tokens, range(group.heads), range(group.head_size))


@pytest.mark.parametrize(("chunk", "block", "heads", "tokens_first", "padding"), SHAPES)
def test_gathered_slots_hold_each_value_where_the_canonical_layout_wants_it(
    chunk: int, block: int, heads: int, tokens_first: bool, padding: int
) -> None:
    group = group_of(heads)
    memory, pages = strided_pages(group, blocks=9, block_size=block, tokens_first=tokens_first, padding=padding)
    before = memory.clone()
    slots = new_slots(group, chunk, 32 // chunk, fill="zeros")
    ids = [7, 2, 8, 0, 5, 1, 3, 6][: 32 // block]
    StagedCopier(pages, group).gather(copies(slots, 0, 32, chunk, block, ids))
    for layer, plane, token, head, element in places(group, range(32)):
        stored = value_in_slots(slots, group, chunk, layer, plane, token, head, element)
        assert stored == value_in_pages(pages, layer, plane, token, head, element, ids)
    assert torch.equal(memory, before), "gathering changes nothing in the pages"


@pytest.mark.parametrize(("first", "end"), [(0, 32), (0, 31), (8, 32), (16, 27), (24, 25)])
@pytest.mark.parametrize(("chunk", "block", "heads", "tokens_first", "padding"), SHAPES)
def test_scattering_writes_the_promised_tokens_and_nothing_else(
    chunk: int, block: int, heads: int, tokens_first: bool, padding: int, first: int, end: int
) -> None:
    group = group_of(heads)
    memory, pages = strided_pages(group, blocks=9, block_size=block, tokens_first=tokens_first, padding=padding)
    expected = memory.clone()
    reference = [page.as_strided(page.shape, page.stride(), page.storage_offset()) for page in pages]
    slots = new_slots(group, chunk, 32 // chunk)
    ids = [7, 2, 8, 0, 5, 1, 3, 6][: 32 // block]
    for layer, plane, token, head, element in places(group, range(first, end)):
        page = reference[layer]
        place = (ids[token // block], head, token % block, plane * group.head_size + element)
        flat = page.storage_offset() + sum(i * s for i, s in zip(place, page.stride(), strict=True))
        expected[flat] = value_in_slots(slots, group, chunk, layer, plane, token, head, element)
    StagedCopier(pages, group).scatter(copies(slots, first, end, chunk, block, ids))
    assert torch.equal(memory, expected)
    assert bool((canaries(memory, group, block, padding) == CANARY).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_are_never_changed(dtype: str) -> None:
    group = group_of(2, dtype)
    memory, pages = strided_pages(group, blocks=4, block_size=8, tokens_first=True, padding=0)
    memory.view(torch.uint8).random_()  # every bit pattern, NaNs included
    before = memory.view(torch.uint8).clone()
    slots = new_slots(group, 16, 2, fill="zeros")
    copier = StagedCopier(pages, group)
    copier.gather(copies(slots, 0, 32, 16, 8, [2, 0, 3, 1]))
    memory.zero_()
    copier.scatter(copies(slots, 0, 32, 16, 8, [2, 0, 3, 1]))
    assert torch.equal(memory.view(torch.uint8), before)


def test_pages_that_no_stride_can_reach_are_refused() -> None:
    group = group_of(2)
    _, pages = strided_pages(group, blocks=2, block_size=8, tokens_first=True, padding=0)
    with pytest.raises(ValueError, match="equal distances in one allocation"):
        StagedCopier([pages[0], pages[1].clone()], group)


def test_a_slot_is_seen_in_its_canonical_shape() -> None:
    group = group_of(2)
    (slot,) = new_slots(group, 16, 1)
    assert slot_planes(slot, group).shape == (2, 2, 16, 2, 3)
