"""Small random LoRA adapters in the format of `peft`, for the tiny models of the tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["save_adapter"]

RANK = 8


def save_adapter(path: Path, model: Path, seed: int, strength: float = 0.2) -> Path:
    """Write an adapter for the attention of `model` to the directory `path`; the seed decides its weights."""
    config = json.loads((model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = strength * torch.randn(RANK, hidden, generator=generator)
            weights[f"{key}.lora_B.weight"] = strength * torch.randn(size, RANK, generator=generator)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(outputs), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(described))
    return path
