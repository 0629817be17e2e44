"""What transformers computes for a prompt, in float32 and the canonical layout: an oracle without any code of vLLM."""

from pathlib import Path

import torch


@torch.no_grad()
def reference_kv(model: Path, tokens: list[int]) -> torch.Tensor:
    """K and V of every layer, `[2, L, T, D]`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cache = DynamicCache()  # without a configuration it keeps every token, of sliding windows too
    network(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    planes = [[layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]]
    return torch.stack([torch.cat(layers).transpose(1, 2).flatten(2) for layers in planes])
