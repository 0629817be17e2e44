from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shapes import listed
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind, slot_bytes, slot_shape
from tests.lmcache_sdk.layouts import equal_bits, layouts, part_of, random_tensors

FULL = KernelGroup((2, 5), planes=2, heads=2, head_size=4, dtype="float32")
SLIDING = KernelGroup((0, 1, 3, 4), planes=2, heads=2, head_size=4, dtype="float32", window=64)
NARROW = KernelGroup((0, 1), planes=2, heads=1, head_size=4, dtype="bfloat16", window=64)


def geometry(*groups: KernelGroup, tokens: int = 4, shards: int = 1) -> ChunkGeometry:
    return ChunkGeometry.of(CacheLayout(groups), tokens, shards)


def plain(planes: int, layers: int, hidden: int) -> KernelGroup:
    return KernelGroup(tuple(range(layers)), planes, 1, hidden, "float32")


def as_cached(tensors: list[torch.Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def empty_slots(layout: CacheLayout, tokens: int, shards: int, chunks: int) -> list[torch.Tensor]:
    sizes = [slot_bytes(group, tokens) for group in layout.groups] * shards * chunks
    return [torch.full((size,), 0xA5, dtype=torch.uint8) for size in sizes]


@settings(max_examples=80)
@given(layouts(3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), st.integers(0, 4))
def test_each_part_is_what_the_layout_says_and_joining_the_parts_changes_no_bit(
    layout: CacheLayout, shards: int, size: int, chunks: int, tail: int
) -> None:
    of = ChunkGeometry.of(layout, size, shards)
    tensors = random_tensors(layout, chunks * size + tail, shards)
    slots = empty_slots(layout, size, shards, chunks)
    of.check(as_cached(tensors), "kv")
    of.split(as_cached(tensors), range(chunks), slots)
    parts = len(layout.groups) * shards
    for i, slot in enumerate(slots):
        assert slot.numpy().tobytes() == part_of(layout, tensors, size, i // parts, i % parts)
    out = random_tensors(layout, chunks * size + tail, shards)
    before = [tensor.clone() for tensor in out]
    of.join(slots, as_cached(out))
    for result, source, old in zip(out, tensors, before, strict=True):
        assert equal_bits(result[:, :, : chunks * size], source[:, :, : chunks * size])
        assert equal_bits(result[:, :, chunks * size :], old[:, :, chunks * size :])
    for chunk in range(chunks):
        for seen, source in zip(listed(of.chunk(slots[chunk * parts : (chunk + 1) * parts])), tensors, strict=True):
            assert equal_bits(seen, source[:, :, chunk * size : (chunk + 1) * size])


@settings(max_examples=30)
@given(layouts(), st.integers(0, 2), st.data())
def test_only_the_chunks_asked_for_are_split_and_empty_slots_are_left_out(
    layout: CacheLayout, chunk: int, data: st.DataObject
) -> None:
    tensors = random_tensors(layout, 12, 2)
    slots = empty_slots(layout, 4, 2, 1)
    resident = data.draw(st.integers(0, len(slots) - 1))
    slots[resident] = slots[resident][:0]
    ChunkGeometry.of(layout, 4, 2).split(as_cached(tensors), [chunk], slots)
    for i, slot in enumerate(slots):
        expected = b"" if i == resident else part_of(layout, tensors, 4, chunk, i)
        assert slot.numpy().tobytes() == expected


@settings(max_examples=80)
@given(layouts(2), st.integers(1, 2), st.integers(1, 4), st.data())
def test_wherever_slots_lie_in_one_memory_each_gets_its_own_bytes(
    layout: CacheLayout, shards: int, size: int, data: st.DataObject
) -> None:
    chunks = sorted(data.draw(st.sets(st.integers(0, 5), min_size=1)))
    sizes = [slot_bytes(group, size) for group in layout.groups] * shards
    room = -(-max(sizes) // 8) * 8
    count = len(chunks) * len(sizes)
    order = st.permutations(range(count)) | st.sampled_from([range(count), range(count - 1, -1, -1)])
    places = data.draw(order)
    empty = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    pool = torch.full((count * room,), 0xA5, dtype=torch.uint8)
    slots = [pool[place * room :][: 0 if i in empty else sizes[i % len(sizes)]] for i, place in enumerate(places)]
    tensors = random_tensors(layout, 6 * size, shards)
    of = ChunkGeometry.of(layout, size, shards)
    of.split(as_cached(tensors), chunks, slots)
    used = torch.zeros_like(pool, dtype=torch.bool)
    for i, slot in enumerate(slots):
        expected = part_of(layout, tensors, size, chunks[i // len(sizes)], i % len(sizes))
        assert slot.numpy().tobytes() == (b"" if i in empty else expected)
        used[places[i] * room :][: len(slot)] = True
    assert (pool[~used] == 0xA5).all()
    if not empty:
        out = random_tensors(layout, len(chunks) * size, shards)
        of.join(slots, as_cached(out))
        for result, source in zip(out, tensors, strict=True):
            for i, chunk in enumerate(chunks):
                expected_chunk = source[:, :, chunk * size : (chunk + 1) * size]
                assert equal_bits(result[:, :, i * size : (i + 1) * size], expected_chunk)


def test_slots_at_even_distances_are_copied_in_one_go() -> None:
    of = geometry(plain(1, 1, 2), plain(1, 1, 4), tokens=2)
    pool, other = (torch.zeros(1024, dtype=torch.uint8) for _ in range(2))
    small, large = [pool[i * 48 :][:16] for i in range(5)], [pool[i * 48 + 16 :][:32] for i in range(5)]

    def stretches(chunks: list[int], first: list[torch.Tensor], second: list[torch.Tensor]) -> list[tuple[int, int]]:
        slots = [slot for pair in zip(first, second, strict=True) for slot in pair]
        return [(chunk, len(stretch)) for _, stretch, chunk in of._stretches(chunks, slots)]

    assert stretches([0, 1, 2, 3, 4], small, large) == [(0, 5), (0, 5)]
    assert stretches([0, 1, 3, 4, 5], small, large) == [(0, 2), (3, 3)] * 2
    assert stretches([0, 1, 2], small[2::-1], large[:3]) == [(0, 1), (1, 1), (2, 1), (0, 3)]
    assert stretches([0, 1, 2], [small[0], small[2], small[3]], large[:3]) == [(0, 2), (2, 1), (0, 3)]
    assert stretches([0, 1, 2], [small[0], small[1][:0], small[2]], large[:3]) == [(0, 1), (2, 1), (0, 3)]
    assert stretches([0, 1, 2], [small[0], small[1], other[96:][:16]], large[:3]) == [(0, 2), (2, 1), (0, 3)]


def test_any_strides_are_split_and_joined() -> None:
    of = geometry(plain(2, 3, 5))
    tensor = torch.randn(5, 8, 3, 2).permute(3, 2, 1, 0)
    slots = empty_slots(CacheLayout((plain(2, 3, 5),)), 4, 1, 2)
    of.split(tensor, range(2), slots)
    out = torch.zeros(2, 3, 16, 5)[:, :, ::2]
    of.join(slots, out)
    assert equal_bits(out, tensor)


def test_tensors_that_require_a_gradient_are_copied_like_any_other() -> None:
    of = geometry(plain(1, 1, 2), tokens=2)
    pool = torch.zeros(16, dtype=torch.uint8)
    of.split(torch.ones(1, 1, 2, 2, requires_grad=True), [0], [pool])
    out = torch.zeros(1, 1, 2, 2, requires_grad=True)
    of.join([pool], out)
    assert out.detach().sum() == 4
    assert not pool.requires_grad


@pytest.mark.parametrize(("planes", "kind"), [(2, Kind.KV), (1, Kind.KV), (1, Kind.QUERY)])
def test_a_geometry_is_the_canonical_shape_of_its_layout(planes: int, kind: Kind) -> None:
    group = KernelGroup((0, 2, 4), planes, 2, 8, "bfloat16")
    of = geometry(group, tokens=16, shards=2)
    assert [shape.of(32) for shape in of.shapes] == [(planes, 3, 32, 32)]
    assert [part.shape for part in of.parts] == [(planes, 3, 16, 16)] * 2
    slot = torch.zeros(slot_bytes(group, 16), dtype=torch.uint8)
    assert of.parts[0].view(slot).numel() == torch.Size(slot_shape(group, kind, 16)).numel()


def test_layers_at_equal_distances_are_copied_in_one_go() -> None:
    joined = geometry(FULL, SLIDING)
    assert [part.runs for part in joined.parts] == [
        ((slice(0, 2), slice(2, 6, 3)),),
        ((slice(0, 2), slice(0, 2, 1)), (slice(2, 4), slice(3, 5, 1))),
    ]


def test_a_chunk_that_lies_in_one_slot_is_not_copied() -> None:
    of = geometry(NARROW, FULL)
    slots = empty_slots(CacheLayout((NARROW, FULL)), 4, 1, 1)
    narrow, full = of.chunk(slots)
    assert [narrow.data_ptr(), full.data_ptr()] == [slot.data_ptr() for slot in slots]
    assert geometry(FULL, SLIDING).chunk([slots[1], slots[1].repeat(2)]).data_ptr() != slots[1].data_ptr()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 3, 8, 10, dtype=torch.float16), "kv: expected dtype torch.float32, got torch.float16"),
        (torch.zeros(1, 3, 8, 10), r"kv: expected shape \[2, 3, T, 10\], got \[1, 3, 8, 10\]"),
        (torch.zeros(2, 4, 8, 10), r"expected shape \[2, 3, T, 10\], got \[2, 4, 8, 10\]"),
        (torch.zeros(2, 3, 8, 5), r"expected shape \[2, 3, T, 10\], got \[2, 3, 8, 5\]"),
        (torch.zeros(2, 3, 10), r"expected shape \[2, 3, T, 10\], got \[2, 3, 10\]"),
        (torch.zeros(2, 3, 8, 10, device="meta"), "kv: expected a tensor on the CPU, got one on meta"),
        ([1, 2], "kv: expected a torch.Tensor, got list"),
        ((torch.zeros(2, 3, 8, 10),), "kv: expected a torch.Tensor, got tuple"),
    ],
)
def test_a_tensor_that_does_not_fit_is_told_what_would(tensor: Any, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        geometry(plain(2, 3, 5), shards=2).check(tensor, "kv")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            torch.zeros(2, 2, 8, 4),
            r"kv: expected a tuple of 2 tensors, \[2, 2, T, 4\] torch.bfloat16 and \[2, 2, T, 8\] torch.float32 \(the "
            r"layers of this model differ in shape\), got Tensor",
        ),
        ((torch.zeros(2, 2, 8, 8),), "kv: expected a tuple of 2 tensors, .*, got 1 of them"),
        ((torch.zeros(2, 2, 8, 4),) * 2, r"kv\[0\]: expected dtype torch.bfloat16, got torch.float32"),
        (
            [torch.zeros(2, 2, 8, 4, dtype=torch.bfloat16), torch.zeros(2, 2, 8, 4)],
            r"kv\[1\]: expected shape \[2, 2, T, 8\], got \[2, 2, 8, 4\]",
        ),
        (
            (torch.zeros(2, 2, 8, 4, dtype=torch.bfloat16), torch.zeros(2, 2, 9, 8)),
            r"kv: expected tensors of equally many tokens, got \[8, 9\]",
        ),
        (None, "kv: expected a tuple of 2 tensors, .*, got NoneType"),
    ],
)
def test_tensors_that_do_not_fit_are_told_what_would(tensors: Any, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        geometry(NARROW, FULL).check(tensors, "kv")


def test_a_tensor_that_fits_may_have_any_number_of_tokens() -> None:
    for tokens in (0, 1, 7):
        geometry(plain(2, 3, 5), shards=2).check(torch.zeros(2, 3, tokens, 10), "kv")
        geometry(NARROW, FULL).check(geometry(NARROW, FULL).empty(tokens), "kv")
