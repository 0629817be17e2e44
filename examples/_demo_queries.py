"""The queries of a prompt, for methods that need them, computed here instead of captured from the engine.

A connector that captures queries registers a cache for them under `<model>##query` and stores them beside the KV. Until
the engine's connector does, this module stands in for it: `query_cache` registers such a cache as an engine would, and
`queries_of` computes what would be captured by a plain forward pass of the model.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from _demo_setup import Setup
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from lmcache_sdk import LMCacheSDKCacheKind
from lmcache_sdk.attachment import attach
from lmcache_sdk.edits import Rotary
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind


@contextmanager
def query_cache(setup: Setup) -> Iterator[None]:
    """While the block runs: a cache of the model's queries is registered, so that `qcache.connect` finds it."""
    config = json.loads((setup.model / "config.json").read_text())
    layers = tuple(range(config["num_hidden_layers"]))
    group = KernelGroup(layers, 1, config["num_attention_heads"], config["head_dim"], config["dtype"])
    with ServerConnection(setup.url) as connection:
        attachment = attach(
            connection,
            role="worker",
            model_name=LMCacheSDKCacheKind.QUERY.cached_name(setup.model_name),
            revision="",
            kind=Kind.QUERY,
            world_size=1,
            worker_id=0,
            layout=CacheLayout((group,)),
            block_size=16,
        )
        try:
            yield
        finally:
            attachment.detach()


def load_model(path: Path) -> PreTrainedModel:
    """The model in plain torch."""
    logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    return model.eval()


@torch.no_grad()
def queries_of(model: PreTrainedModel, rotary: Rotary, tokens: list[int]) -> torch.Tensor:
    """`[1, layers, tokens, heads * head_size]`: what attention looks for at each token, turned for its position.

    For models that normalise their queries head by head (Qwen3): what comes out of that step only needs to be turned.
    """
    raw: list[torch.Tensor] = []
    norms = [layer.self_attn.q_norm for layer in model.model.layers]
    hooks = [norm.register_forward_hook(lambda _, __, output: raw.append(output)) for norm in norms]
    try:
        model(torch.tensor([tokens]))
    finally:
        for hook in hooks:
            hook.remove()
    # Each is [1, tokens, heads, head_size].
    flat = torch.stack([output[0].flatten(1) for output in raw])
    return rotary.move(flat, [0] * len(tokens), range(len(tokens)))[None]


@torch.no_grad()
def logprobs_after(model: PreTrainedModel, kv: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """`[vocabulary]`: what plain torch says comes after `tokens`, which stand after the cached `kv` `[2, L, T, D]`."""
    past = DynamicCache()
    head_size = model.config.head_dim
    for layer in range(kv.shape[1]):
        keys, values = (plane[layer].unflatten(1, (-1, head_size)).transpose(0, 1)[None] for plane in kv)
        past.update(keys, values, layer)
    logits = model(torch.tensor([tokens]), past_key_values=past).logits
    return logits[0, -1].float().log_softmax(-1)
