"""What transformers computes for a prompt, in float32 and the canonical layout: an oracle without any code of vLLM."""

from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def _network(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.no_grad()
def reference_kv(model: Path, tokens: list[int]) -> torch.Tensor:
    """K and V of every layer, `[2, L, T, D]`."""
    from transformers import DynamicCache

    network = _network(model)
    past = DynamicCache()  # without a configuration it keeps every token, of sliding windows too
    network(torch.tensor([tokens]), past_key_values=past, use_cache=True)
    planes = [[layer.keys for layer in past.layers], [layer.values for layer in past.layers]]
    return torch.stack([torch.cat(layers).transpose(1, 2).flatten(2) for layers in planes])
