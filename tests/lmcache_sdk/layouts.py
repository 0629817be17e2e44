"""Layouts of several kernel groups, and what the parts of their chunks must be: said here once more, in plain loops.

A part is one shard of one kernel group: plane by plane, layer by layer as the group lists them, token by token. The
reference takes them from tensors [planes, L, T, D] that hold all layers of one shape in the model's order.
"""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from lmcache_server.protocol.layout import ITEM_BYTES, CacheLayout, KernelGroup

__all__ = ["equal_bits", "layouts", "part_of", "random_tensors", "tensor_of_group"]

SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from(sorted(ITEM_BYTES)))
"""Planes, heads, head size, dtype."""


@st.composite
def layouts(draw: st.DrawFn, shapes: int = 2) -> CacheLayout:
    """Up to 8 layers in up to 4 kernel groups of up to `shapes` shapes, in any order."""
    layers = draw(st.permutations(range(draw(st.integers(1, 8)))))
    choices = draw(st.lists(SHAPES, min_size=1, max_size=shapes))
    ends = sorted({len(layers), *draw(st.lists(st.integers(1, len(layers)), max_size=3))})
    groups = []
    for start, end in zip([0, *ends], ends, strict=False):
        window = draw(st.sampled_from([0, 64]))
        groups.append(KernelGroup(tuple(layers[start:end]), *draw(st.sampled_from(choices)), window=window))
    return CacheLayout(tuple(groups))


def _shape_of(group: KernelGroup) -> tuple[int, int, int, str]:
    return group.planes, group.heads, group.head_size, group.dtype


def tensor_of_group(layout: CacheLayout, number: int) -> tuple[int, list[int]]:
    """Which tensor a group is in, and the model's layers in that tensor; for groups that share no layer."""
    shapes = list(dict.fromkeys(map(_shape_of, layout.groups)))
    shape = _shape_of(layout.groups[number])
    layers = sorted(layer for group in layout.groups if _shape_of(group) == shape for layer in group.layers)
    return shapes.index(shape), layers


def random_tensors(layout: CacheLayout, tokens: int, shards: int) -> list[torch.Tensor]:
    """The tensors of `tokens` tokens, of random bytes."""
    tensors: dict[int, torch.Tensor] = {}
    for number, group in enumerate(layout.groups):
        index, layers = tensor_of_group(layout, number)
        width = group.heads * group.head_size * shards * ITEM_BYTES[group.dtype]
        raw = torch.randint(0, 256, (group.planes, len(layers), tokens, width), dtype=torch.uint8)
        tensors[index] = raw.view(getattr(torch, group.dtype))
    return [tensors[index] for index in sorted(tensors)]


def part_of(layout: CacheLayout, tensors: Sequence[torch.Tensor], chunk_size: int, chunk: int, part: int) -> bytes:
    """The bytes of one part of one chunk: parts go shard by shard, and within a shard group by group."""
    shard, number = divmod(part, len(layout.groups))
    group = layout.groups[number]
    index, layers = tensor_of_group(layout, number)
    width = group.heads * group.head_size
    pieces = []
    for plane in range(group.planes):
        for layer in group.layers:
            tokens = tensors[index][plane][layers.index(layer)][chunk * chunk_size : (chunk + 1) * chunk_size]
            columns = tokens[:, shard * width : (shard + 1) * width]
            pieces.append(columns.contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(pieces)


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, NaNs included."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
