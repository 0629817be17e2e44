"""Qwen3 in plain torch, for one prompt at a time: an oracle that shares no code with vLLM, transformers or the SDK.

It gives what they hide: keys before they are turned for a position. From them a test computes what an edited cache must
hold, and continues from any past.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


@dataclass
class Past:
    """What attention sees of earlier tokens: turned keys and values, each `[L, T, kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Forward:
    """One pass: `logits` `[T, vocabulary]`; `raw_keys` (not turned) and `values` `[L, T, kv_heads, head_dim]`, and
    `raw_queries` `[L, T, heads, head_dim]`."""

    logits: torch.Tensor
    raw_keys: torch.Tensor
    values: torch.Tensor
    raw_queries: torch.Tensor


class PlainQwen3:
    """The weights of a saved Qwen3 with tied embeddings, computed with in `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.weights = {name: w.to(dtype) for name, w in load_file(path / "model.safetensors").items()}
        self.dtype = dtype
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config["head_dim"]
        self.layers = self.config["num_hidden_layers"]

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of `x` `[..., T, heads, head_dim]` for `positions` `[T]`."""
        theta = self.config["rope_parameters"]["rope_theta"]
        frequencies = theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = positions.to(torch.float64)[:, None, None] * frequencies
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    @torch.no_grad()
    def forward(self, tokens: list[int], past: Past | None = None) -> Forward:
        """Compute `tokens`, which stand after the tokens of `past`."""
        before = past.keys.shape[1] if past is not None else 0
        positions = torch.arange(before, before + len(tokens))
        x = self.weights["model.embed_tokens.weight"][tokens]
        raw_keys, values, raw_queries = [], [], []
        for layer in range(self.layers):
            h = self._normed(x, layer, "input_layernorm")
            q, k, v = (
                self._linear(h, layer, f"self_attn.{name}_proj").unflatten(1, (-1, self.head_dim)) for name in "qkv"
            )
            q, k = self._normed(q, layer, "self_attn.q_norm"), self._normed(k, layer, "self_attn.k_norm")
            raw_keys.append(k)
            values.append(v)
            raw_queries.append(q)
            keys = self.turn(k, positions)
            if past is not None:
                keys, v = torch.cat((past.keys[layer], keys)), torch.cat((past.values[layer], v))
            x = x + self._linear(self._attention(self.turn(q, positions), keys, v), layer, "self_attn.o_proj")
            h = self._normed(x, layer, "post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(h, layer, "mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(h, layer, "mlp.up_proj"), layer, "mlp.down_proj")
        logits = self._rms(x, self.weights["model.norm.weight"]) @ self.weights["model.embed_tokens.weight"].T
        return Forward(logits, torch.stack(raw_keys), torch.stack(values), torch.stack(raw_queries))

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal, with the queries at the end: `[T, heads * head_dim]`."""
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1)

    def _linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

    def _normed(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return self._rms(x, self.weights[f"model.layers.{layer}.{name}.weight"])

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight
