"""Which copier knows the pages of a kernel group: by the attention backend that lays them out, never by their shape."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lmcache_connector.gpu_connector import Copier, StagedCopier
from lmcache_connector.shapes import EngineGroup, EngineShape
from lmcache_server.protocol.layout import KernelGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["make_copiers"]

KV_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
"""Attention backends whose pages `[blocks, heads, tokens, C]` hold K, then V, for each token and head."""
LATENT_BACKENDS = ("FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA")
"""Backends whose pages `[blocks, tokens, C]` hold a latent and the turned part of the key for each token."""
UNSTEADY_BACKENDS = ("AMX_MLA", "CPU_MLA")
"""Backends that answer a prompt differently when others are computed beside it, or a part of it is cached, be it by
vLLM itself: seen with vLLM 0.32. What they would be given back cannot be told from what is wrong.
"""


def make_copiers(vllm_config: "VllmConfig", shape: EngineShape, kv_caches: Mapping[str, torch.Tensor]) -> list[Copier]:
    """For each kernel group what copies from and to its `kv_caches`.

    Raises ValueError, naming layer or backend, if these pages are not of a kind that we know.
    """
    _check_owners(shape, kv_caches)
    return [
        _group_copier(vllm_config, engine_group, group, [kv_caches[layer] for layer in engine_group.layers])
        for engine_group, group in zip(shape.groups, shape.layout.groups, strict=True)
    ]


def _group_copier(
    vllm_config: "VllmConfig", engine_group: EngineGroup, group: KernelGroup, pages: list[torch.Tensor]
) -> Copier:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    backends = get_current_attn_backends(vllm_config, list(engine_group.layers))
    names = sorted({backend.get_name() for backend in backends})
    if names == ["CPU_ATTN"]:
        return _packed_copier(vllm_config, engine_group, group, pages)
    if set(names) & set(UNSTEADY_BACKENDS):
        raise ValueError(
            f"layer {engine_group.layers[0]}: the attention backend {', '.join(names)} computes a prompt differently "
            "when a part of it is cached, by vLLM itself too, so that cached KV cannot be right; serve this model on a "
            "GPU, or without LMCacheMPConnector"
        )
    known = KV_BACKENDS if group.planes == 2 else LATENT_BACKENDS
    if not set(names) <= set(known):
        raise ValueError(
            f"layer {engine_group.layers[0]}: LMCacheMPConnector does not know how attention backend "
            f"{', '.join(names)} lays out its pages; known are CPU_ATTN, {', '.join(known)} (choose one with "
            "--attention-backend)"
        )
    if group.planes == 1:
        pages = [page.unsqueeze(1) if page.dim() == 3 else page for page in pages]
    return StagedCopier(pages, group, engine_group.block_size)


def _packed_copier(
    vllm_config: "VllmConfig", engine_group: EngineGroup, group: KernelGroup, pages: list[torch.Tensor]
) -> Copier:
    # These import numba, which is of no use on a GPU.
    from lmcache_connector.cpu_connector import PackedCopier
    from lmcache_connector.cpu_packing import CpuKernel

    layers = [vllm_config.compilation_config.static_forward_context[layer] for layer in engine_group.layers]
    dtype = vllm_config.model_config.dtype
    kernels = {CpuKernel(layer.isa, dtype, layer.impl.kv_cache_dtype) for layer in layers}
    if len(kernels) != 1:
        raise ValueError(f"the layers' attention writes its cache in several ways {kernels}; expected one")
    return PackedCopier(pages, group, engine_group.block_size, kernels.pop())


def _check_owners(shape: EngineShape, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Layers of one group have caches of their own; those of different groups take turns in the same memory."""
    for group in shape.groups:
        owners: dict[int, str] = {}
        for layer in group.layers:
            if (owner := owners.setdefault(kv_caches[layer].data_ptr(), layer)) != layer:
                raise ValueError(f"layer {layer} shares its KV cache with layer {owner}, which is not supported")
