import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.views import HUGE_BYTES, ChunkGeometry
from lmcache_server.protocol.layout import ITEM_BYTES, CacheLayout, KernelGroup, Kind, slot_bytes, slot_shape

geometries = st.builds(
    ChunkGeometry,
    dtype=st.sampled_from([getattr(torch, name) for name in ITEM_BYTES]),
    planes=st.sampled_from([1, 2]),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 5),
    hidden=st.integers(1, 6),
    shards=st.integers(1, 3),
)


def random_bytes(geometry: ChunkGeometry, tokens: int) -> torch.Tensor:
    shape = geometry.shape(tokens)
    raw = torch.randint(0, 256, (*shape[:3], shape[3] * geometry.dtype.itemsize), dtype=torch.uint8)
    return raw.view(geometry.dtype)


def empty_slots(geometry: ChunkGeometry, chunks: int) -> list[torch.Tensor]:
    size = geometry.planes * geometry.layers * geometry.tokens * geometry.hidden * geometry.dtype.itemsize
    return [torch.full((size,), 0xA5, dtype=torch.uint8) for _ in range(chunks * geometry.shards)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@settings(max_examples=60)
@given(geometries, st.integers(0, 4), st.integers(0, 4))
def test_splitting_and_joining_changes_no_bit(geometry: ChunkGeometry, chunks: int, tail: int) -> None:
    tensor = random_bytes(geometry, chunks * geometry.tokens + tail)
    slots = empty_slots(geometry, chunks)
    geometry.split(tensor, range(chunks), slots)
    out = random_bytes(geometry, chunks * geometry.tokens + tail)
    before = out.clone()
    geometry.join(slots, out)
    assert same(out[:, :, : chunks * geometry.tokens], tensor[:, :, : chunks * geometry.tokens])
    assert same(out[:, :, chunks * geometry.tokens :], before[:, :, chunks * geometry.tokens :])


@settings(max_examples=60)
@given(geometries, st.data())
def test_each_element_of_a_slot_is_where_the_layout_says(geometry: ChunkGeometry, data: st.DataObject) -> None:
    chunk = data.draw(st.integers(0, 2))
    tensor = random_bytes(geometry, 3 * geometry.tokens)
    slots = empty_slots(geometry, 1)
    geometry.split(tensor, [chunk], slots)
    plane, layer, token, column = (data.draw(st.integers(0, n - 1)) for n in geometry.shape(geometry.tokens))
    shard, inner = divmod(column, geometry.hidden)
    place = ((plane * geometry.layers + layer) * geometry.tokens + token) * geometry.hidden + inner
    item = geometry.dtype.itemsize
    expected = tensor[plane, layer, chunk * geometry.tokens + token, column].reshape(1).view(torch.uint8)
    assert same(slots[shard][place * item : (place + 1) * item], expected)


def test_any_strides_are_split_and_joined() -> None:
    geometry = ChunkGeometry(torch.float32, 2, 3, 4, 5, 1)
    tensor = torch.randn(5, 8, 3, 2).permute(3, 2, 1, 0)
    slots = empty_slots(geometry, 2)
    geometry.split(tensor, range(2), slots)
    out = torch.zeros(2, 3, 16, 5)[:, :, ::2]
    geometry.join(slots, out)
    assert same(out, tensor)


def test_tensors_that_require_a_gradient_are_copied_like_any_other() -> None:
    geometry = ChunkGeometry(torch.float32, 1, 1, 2, 2, 1)
    pool = torch.zeros(16, dtype=torch.uint8)
    geometry.split(torch.ones(1, 1, 2, 2, requires_grad=True), [0], [pool])
    out = torch.zeros(1, 1, 2, 2, requires_grad=True)
    geometry.join([pool], out)
    assert out.detach().sum() == 4
    assert not pool.requires_grad


@pytest.mark.parametrize(("planes", "kind"), [(2, Kind.KV), (1, Kind.KV), (1, Kind.QUERY)])
def test_a_geometry_is_the_canonical_shape_of_its_layout(planes: int, kind: Kind) -> None:
    group = KernelGroup((0, 2, 4), planes, 2, 8, "bfloat16")
    geometry = ChunkGeometry.of(CacheLayout((group,)), 16, 2)
    assert geometry.shape(32) == (planes, 3, 32, 32)
    assert (
        geometry.view(torch.zeros(slot_bytes(group, 16), dtype=torch.uint8)).numel()
        == torch.Size(slot_shape(group, kind, 16)).numel()
    )


def test_several_kernel_groups_are_refused_by_name() -> None:
    layout = CacheLayout((KernelGroup((0,), 2, 1, 8, "float32"), KernelGroup((1, 2), 2, 2, 8, "float16")))
    with pytest.raises(LMCacheSDKError, match=r"2 kernel groups \(1 layers of 8 float32, 2 layers of 16 float16\)"):
        ChunkGeometry.of(layout, 16, 1)


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
    ],
)
def test_a_tensor_that_does_not_fit_is_told_what_would(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        ChunkGeometry(torch.float32, 2, 3, 4, 5, 2).check(tensor, "kv")


def test_a_tensor_that_fits_may_have_any_number_of_tokens() -> None:
    for tokens in (0, 1, 7):
        ChunkGeometry(torch.float32, 2, 3, 4, 5, 2).check(torch.zeros(2, 3, tokens, 10), "kv")


@pytest.mark.parametrize("tokens", [1, HUGE_BYTES // 64])
def test_a_new_tensor_can_be_written_all_over(tokens: int) -> None:
    tensor = ChunkGeometry(torch.bfloat16, 2, 4, 4, 8, 1).empty(tokens)
    assert tensor.shape == (2, 4, tokens, 8)
    assert tensor.fill_(3).sum(dtype=torch.float32) == 3 * tensor.numel()
