import pytest
import torch

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shapes import HUGE_BYTES, TensorShape, first_tokens, one_tensor, tensor_shapes, token_count
from lmcache_server.protocol.layout import KernelGroup

FULL = KernelGroup((5, 2), planes=2, heads=2, head_size=4, dtype="float32")
SLIDING = KernelGroup((0, 1, 3, 4), planes=2, heads=2, head_size=4, dtype="float32", window=64)


def changed(group: KernelGroup, **fields: object) -> KernelGroup:
    usual = {name: getattr(group, name) for name in ("layers", "planes", "heads", "head_size", "dtype", "window")}
    return KernelGroup(**(usual | fields))


def test_groups_of_one_shape_are_one_tensor_with_the_layers_in_the_order_of_the_model() -> None:
    shapes, holders = tensor_shapes([FULL, SLIDING], shards=3)
    assert shapes == (TensorShape(torch.float32, 2, (0, 1, 2, 3, 4, 5), (64, 64, 0, 64, 64, 0), 6, 4),)
    assert holders == (0, 0)
    assert shapes[0].of(7) == (2, 6, 7, 24)


@pytest.mark.parametrize("field", [{"planes": 1}, {"heads": 4}, {"head_size": 8}, {"dtype": "float16"}])
def test_groups_that_differ_in_shape_are_a_tensor_each_and_like_ones_join(field: dict[str, object]) -> None:
    late = changed(FULL, layers=(7, 6))
    shapes, holders = tensor_shapes([FULL, changed(SLIDING, **field), late], shards=1)
    assert holders == (0, 1, 0)
    assert [shape.layers for shape in shapes] == [(2, 5, 6, 7), (0, 1, 3, 4)]


def test_as_many_elements_in_other_heads_are_another_shape() -> None:
    shapes, _ = tensor_shapes([FULL, changed(SLIDING, heads=4, head_size=2)], shards=1)
    assert [(shape.heads, shape.head_size) for shape in shapes] == [(2, 4), (4, 2)]


def test_groups_of_one_shape_that_cache_the_same_layer_stay_apart() -> None:
    shapes, holders = tensor_shapes([FULL, changed(FULL, layers=(5,)), SLIDING], shards=1)
    assert holders == (0, 1, 0)
    assert [shape.layers for shape in shapes] == [(0, 1, 2, 3, 4, 5), (5,)]


@pytest.mark.parametrize("tokens", [1, HUGE_BYTES // 64])
def test_a_new_tensor_can_be_written_all_over(tokens: int) -> None:
    tensor = TensorShape(torch.bfloat16, 2, (0, 1, 2, 3), (0,) * 4, 2, 4).empty(tokens)
    assert tensor.shape == (2, 4, tokens, 8)
    assert tensor.fill_(3).sum(dtype=torch.float32) == 3 * tensor.numel()


def test_the_first_tokens_of_a_cache_are_those_of_each_of_its_tensors_and_no_copy() -> None:
    one, other = torch.randn(2, 3, 8, 4), torch.randn(2, 1, 8, 2)
    assert (token_count(one), token_count((one, other))) == (8, 8)
    front = first_tokens((one, other), 5)
    assert [tensor.data_ptr() for tensor in front] == [one.data_ptr(), other.data_ptr()]
    assert token_count(first_tokens(one, 5)) == token_count(front) == 5
    assert torch.equal(front[1], other[:, :, :5])


def test_who_needs_one_tensor_says_what_to_do_with_several() -> None:
    one, other = torch.zeros(2, 3, 8, 4), torch.zeros(2, 1, 8, 2)
    assert one_tensor(one, "kv") is one
    with pytest.raises(
        LMCacheSDKError,
        match=r"kv: expected one tensor, got 2 \(\[2, 3, 8, 4\] and \[2, 1, 8, 2\]\): the layers of this model differ "
        "in shape; edit the tensors one by one and return a tuple of the results",
    ):
        one_tensor((one, other), "kv")
    with pytest.raises(LMCacheSDKError, match=r"kv: expected a torch.Tensor, got int"):
        one_tensor(5, "kv")
