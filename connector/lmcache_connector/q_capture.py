"""Queries on their way into attention are copied to the ring. vLLM is not patched: a module may have a pre-hook.

vLLM's attention modules receive the queries of a step after their rotary embedding, one row per token, in an order that
is the engine's own affair. Which row is which token is told by the step's `slot_mapping` alone: it has, for each row,
the slot of the engine's pages that the token's KV goes to, and a slot belongs to one token of one request. The hooks
run only where Python does, so the engine must run eagerly.

Nothing here waits for the device: rows are found on it, and whether all of them were there is asked afterwards.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lmcache_connector.q_ring import QRingBuffer
from lmcache_connector.shapes import EngineShape
from lmcache_server.protocol.layout import CacheLayout, KernelGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig


__all__ = ["QueryCapture", "attention_modules", "cached_layers", "query_layout"]


def cached_layers(shape: EngineShape) -> dict[str, int]:
    """The layers whose KV is cached, of all groups: their names and indices, in the model's order."""
    groups = zip(shape.groups, shape.layout.groups, strict=True)
    named = [pair for group, kernel in groups for pair in zip(group.layers, kernel.layers, strict=True)]
    return dict(sorted(named, key=lambda pair: pair[1]))


def attention_modules(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, Any]:
    """The attention modules of these layers, by name; raises ValueError if one does not receive plain queries."""
    from vllm.model_executor.layers.attention import Attention

    found = vllm_config.compilation_config.static_forward_context
    modules = {layer: found[layer] for layer in layers}
    for layer, module in modules.items():
        if not isinstance(module, Attention):
            raise ValueError(
                f"layer {layer}: the queries of {type(module).__name__} cannot be captured; "
                "remove lmcache.mp.transfer_intermediate_tensors"
            )
    return modules


def query_layout(modules: Mapping[str, Any], layers: Iterable[int]) -> CacheLayout:
    """The layout of the queries of these attention modules, which are the model's `layers`.

    Raises ValueError, naming the layer, unless all of them have the same heads.
    """
    shapes = {name: (module.num_heads, module.head_size, module.dtype) for name, module in modules.items()}
    (first, shape), *_ = shapes.items()
    for name, other in shapes.items():
        if other != shape:
            raise ValueError(
                f"layer {name} has queries of {other[0]} heads of {other[1]} ({other[2]}), layer {first} of {shape[0]} "
                f"of {shape[1]} ({shape[2]}): such queries cannot be captured; "
                "remove lmcache.mp.transfer_intermediate_tensors"
            )
    heads, head_size, dtype = shape
    return CacheLayout((KernelGroup(tuple(layers), 1, heads, head_size, str(dtype).removeprefix("torch.")),))


@dataclass(slots=True, eq=False)
class Expected:
    """The tokens of one step: they are computed into the engine's `slots`, their queries go to the ring's `places`."""

    slots: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor | None = None
    """Where the tokens are in the batch; known from the first layer on."""
    seen: torch.Tensor | None = None
    """Whether each token was there at all."""
    layers: set[int] = field(default_factory=set)


class QueryCapture:
    """Hooks on attention modules that copy the expected queries of a step to the ring."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], ring: QRingBuffer, guide: str) -> None:
        """`modules` are by layer, in the order of the ring's layers; layer `guide`'s slots are those that are expected.

        Layers with other block tables have other slots, but all have the same rows.
        """
        self._ring = ring
        self._guide = guide
        self._expected: Expected | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, module in enumerate(modules.values())
        ]

    def expect(self, slots: torch.Tensor, places: torch.Tensor) -> None:
        """In the coming forward pass, copy the queries of the tokens of these slots to these places of the ring."""
        device = self._ring.device
        self._expected = Expected(slots.to(device, non_blocking=True), places.to(device, non_blocking=True))

    def take(self) -> list[bool]:
        """After the forward pass: which of the expected tokens were captured, in every layer."""
        expected, self._expected = self._expected, None
        if expected is None:
            return []
        if expected.seen is None or len(expected.layers) != self._ring.layers:
            return [False] * len(expected.slots)
        return [bool(seen) for seen in expected.seen.tolist()]

    def close(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[..., None]:
        def copy_queries(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._expected is not None:
                self._copy(self._expected, layer, args[0] if args else kwargs["query"])

        return copy_queries

    def _copy(self, expected: Expected, layer: int, queries: torch.Tensor) -> None:
        if expected.rows is None:
            mapping = _slot_mapping(self._guide)
            if mapping is None:
                return
            expected.rows, expected.seen = find_rows(mapping, expected.slots)
        self._ring.write(layer, queries.flatten(1).index_select(0, expected.rows), expected.places)
        expected.layers.add(layer)


def find_rows(mapping: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `slots`, the row of the batch that has it in `mapping`, and whether there is one (else any row)."""
    slots = slots.to(mapping.dtype)
    ordered, order = mapping.sort()
    rows = order[torch.searchsorted(ordered, slots).clamp(max=len(mapping) - 1)]
    return rows, mapping[rows] == slots


def _slot_mapping(layer: str) -> torch.Tensor | None:
    """The slots of this step's rows; None where vLLM runs the model without a batch, or in parts."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata[layer].slot_mapping if isinstance(metadata, dict) else None
