"""The tensors that people see and edit: all chunks, all shards and all layers of one shape as one tensor

    [planes, L, tokens, D]      planes: 2 (keys, values), or 1 (an MLA latent, queries)
                                L: layers in the model's order, whatever kernel groups an engine puts them in
                                D: the heads of all shards side by side

Most models have one such shape: their cache is a torch.Tensor. Where layers differ in planes, heads, head size or
dtype, no one tensor holds them all, and their cache is a tuple with a tensor per shape. Which of the two it is is a
fact about the model, told by `LMCacheSDKContext.shapes`, and the same for all that goes in and comes out.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_server.protocol.layout import KernelGroup

__all__ = [
    "CachedTensors",
    "TensorShape",
    "described",
    "first_tokens",
    "listed",
    "one_tensor",
    "tensor_shapes",
    "token_count",
]

CachedTensors = torch.Tensor | Any
"""A tensor, or a tuple of tensors with equal numbers of tokens where a model's layers differ in shape. The tuple goes
as Any: code for models of one shape, nearly all code, has nothing to tell apart.
"""

HUGE_BYTES = 8 * 2**20
"""From here on a tensor is worth a mapping of its own."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor, whatever its number of tokens: `[planes, len(layers), tokens, heads * head_size]` of `dtype`."""

    dtype: torch.dtype
    planes: int
    layers: tuple[int, ...]
    """Which of the model's layers they are, ascending."""
    windows: tuple[int, ...]
    """How many tokens each of these layers attends to; 0: all before it."""
    heads: int
    """Of all shards."""
    head_size: int

    def of(self, tokens: int) -> tuple[int, int, int, int]:
        """The shape of `tokens` tokens."""
        return (self.planes, len(self.layers), tokens, self.heads * self.head_size)

    def empty(self, tokens: int) -> torch.Tensor:
        """A new tensor for `tokens` tokens, its contents undefined.

        Large ones lie in huge pages where the system has them: first touches cost more than the copy that they serve.
        """
        size = math.prod(self.of(tokens)) * self.dtype.itemsize
        if size < HUGE_BYTES:
            return torch.empty(self.of(tokens), dtype=self.dtype)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(self.of(tokens))

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raise LMCacheSDKError unless `tensor` has this dtype and shape, whatever its number of tokens, on the CPU."""
        if not isinstance(tensor, torch.Tensor):
            raise LMCacheSDKError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != self.dtype:
            raise LMCacheSDKError(f"{name}: expected dtype {self.dtype}, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            raise LMCacheSDKError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
        if tensor.dim() != 4 or tuple(tensor.shape) != self.of(tensor.shape[2]):
            raise LMCacheSDKError(f"{name}: expected shape {self._any_tokens()}, got {list(tensor.shape)}")

    def __str__(self) -> str:
        return f"{self._any_tokens()} {self.dtype}"

    def _any_tokens(self) -> str:
        planes, layers, _, hidden = self.of(0)
        return f"[{planes}, {layers}, T, {hidden}]"


def tensor_shapes(groups: Sequence[KernelGroup], shards: int) -> tuple[tuple[TensorShape, ...], tuple[int, ...]]:
    """The tensors that hold `groups`, and for each group which of them holds it.

    Groups of one shape share a tensor; two that cache the same layer (attention to itself and to an encoder) do not.
    """
    members: list[list[KernelGroup]] = []
    holders: list[int] = []
    for group in groups:
        fitting = (i for i, others in enumerate(members) if all(_fit_together(group, other) for other in others))
        holder = next(fitting, len(members))
        if holder == len(members):
            members.append([])
        members[holder].append(group)
        holders.append(holder)
    return tuple(_shape(each, shards) for each in members), tuple(holders)


def _fit_together(one: KernelGroup, other: KernelGroup) -> bool:
    same = ("planes", "heads", "head_size", "dtype")
    return all(getattr(one, name) == getattr(other, name) for name in same) and not {*one.layers} & {*other.layers}


def _shape(groups: Sequence[KernelGroup], shards: int) -> TensorShape:
    windows = {layer: group.window for group in groups for layer in group.layers}
    layers = tuple(sorted(windows))
    first, dtype = groups[0], getattr(torch, groups[0].dtype)
    in_order = tuple(windows[layer] for layer in layers)
    return TensorShape(dtype, first.planes, layers, in_order, first.heads * shards, first.head_size)


def listed(cached: CachedTensors) -> Sequence[torch.Tensor]:
    """Its tensors, one or several."""
    return (cached,) if isinstance(cached, torch.Tensor) else tuple(cached)


def token_count(cached: CachedTensors) -> int:
    """T: how many tokens it is the cache of."""
    return listed(cached)[0].shape[2]


def first_tokens(cached: CachedTensors, tokens: int) -> CachedTensors:
    """The cache of the first `tokens` tokens, without a copy."""
    if isinstance(cached, torch.Tensor):
        return cached.narrow(2, 0, tokens)
    return tuple(tensor.narrow(2, 0, tokens) for tensor in cached)


def described(cached: CachedTensors) -> str:
    """The shapes of its tensors, for messages."""
    return " and ".join(str(list(tensor.shape)) for tensor in listed(cached))


def one_tensor(cached: CachedTensors, name: str) -> torch.Tensor:
    """`cached`, which must be one tensor. Raises LMCacheSDKError for a tuple, saying what to do with it."""
    if isinstance(cached, torch.Tensor):
        return cached
    if isinstance(cached, tuple | list) and all(isinstance(tensor, torch.Tensor) for tensor in cached):
        raise LMCacheSDKError(
            f"{name}: expected one tensor, got {len(cached)} ({described(cached)}): the layers of this model differ in "
            "shape; edit the tensors one by one and return a tuple of the results"
        )
    raise LMCacheSDKError(f"{name}: expected a torch.Tensor, got {type(cached).__name__}")
