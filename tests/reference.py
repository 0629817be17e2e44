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


@torch.no_grad()
def reference_latents(model: Path, tokens: list[int]) -> torch.Tensor:
    """For MLA, `[L, T, C]`: the normed latent of each token, then the key part that is turned, before it is turned."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for layer in network.model.layers:
        attention = layer.self_attn

        def keep(_: object, __: object, output: torch.Tensor, attention: torch.nn.Module = attention) -> None:
            latent, turned = output.split([network.config.kv_lora_rank, network.config.qk_rope_head_dim], dim=-1)
            found.append(torch.cat([attention.kv_a_layernorm(latent), turned], dim=-1)[0])

        attention.kv_a_proj_with_mqa.register_forward_hook(keep)
    network(torch.tensor([tokens]), use_cache=False)
    return torch.stack(found)
