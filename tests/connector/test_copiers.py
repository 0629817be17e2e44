"""The attention backend decides what copies a group's pages; one that is unknown, or known to be wrong, is refused."""

from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from lmcache_connector.copiers import make_copiers
from lmcache_connector.gpu_connector import StagedCopier
from lmcache_connector.shapes import EngineGroup, EngineShape
from lmcache_server.protocol.layout import CacheLayout, KernelGroup

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
KV = KernelGroup((0, 1), planes=2, heads=2, head_size=8, dtype="float32")
LATENT = KernelGroup((0, 1), planes=1, heads=1, head_size=24, dtype="float32")


def copiers(monkeypatch: pytest.MonkeyPatch, group: KernelGroup, pages: list[torch.Tensor], backend: Any) -> list[Any]:
    """As if the layers of an engine used `backend`."""
    monkeypatch.setattr(utils, "get_current_attn_backends", lambda *_: [backend])
    shape = EngineShape((EngineGroup(LAYERS, 0, 16),), CacheLayout((group,)), 1, 1)
    engine: Any = object()
    return list(make_copiers(engine, shape, dict(zip(LAYERS, pages, strict=True))))


def test_pages_that_hold_keys_and_values_are_copied_by_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = list(torch.zeros(2, 4, 2, 16, 16))
    (copier,) = copiers(monkeypatch, KV, pages, FlexAttentionBackend)
    assert isinstance(copier, StagedCopier)


def test_pages_of_latents_need_no_dimension_for_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for pages in (torch.zeros(2, 4, 16, 24), torch.zeros(2, 4, 1, 16, 24)):
        (copier,) = copiers(monkeypatch, LATENT, list(pages), TritonMLABackend)
        assert isinstance(copier, StagedCopier)


@pytest.mark.parametrize("backend", [AMXMLABackend, CPUMLABackend])
def test_a_backend_whose_answers_depend_on_what_is_cached_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    with pytest.raises(ValueError, match=rf"layer {LAYERS[0]}: the attention backend {backend.get_name()} computes"):
        copiers(monkeypatch, LATENT, list(torch.zeros(2, 4, 16, 24)), backend)


@pytest.mark.parametrize("group", [KV, LATENT])
def test_a_backend_that_we_do_not_know_is_refused_with_those_that_we_know(
    monkeypatch: pytest.MonkeyPatch, group: KernelGroup
) -> None:
    class Unheard(FlexAttentionBackend):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return "UNHEARD"

    with pytest.raises(ValueError, match=r"does not know how attention backend UNHEARD .* --attention-backend"):
        copiers(monkeypatch, group, list(torch.zeros(2, 4, 2, 16, 16)), Unheard)


def test_layers_that_share_a_cache_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    page = torch.zeros(4, 2, 16, 16)
    with pytest.raises(ValueError, match=f"layer {LAYERS[1]} shares its KV cache with layer {LAYERS[0]}"):
        copiers(monkeypatch, KV, [page, page], FlexAttentionBackend)
