"""Moving keys: a key that was turned for one position is turned on to another, without knowing the raw key.

A rotary embedding turns each pair of a head's elements by an angle proportional to the position:

    key(p) = R(angle(p)) raw        so        key(new) = R(angle(new) - angle(old)) key(old)

    neox style      pair i = elements i and i + rotary_dim / 2
    interleaved     pair i = elements 2 i and 2 i + 1
    partial         elements from rotary_dim on are not turned
    latent          MLA models: one plane per token, and only its last head_size elements are a turned key

Engines round each angle to float32; the difference is taken between the rounded angles, so that a moved key agrees with
a key computed in place even at far positions. Keys whose position does not change keep their bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmcache_sdk.edits.scaling import inverse_frequencies
from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["Rotary"]

_INTERLEAVED = frozenset({"codegen", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm4", "gptj"})
"""Values of `model_type` whose pairs are neighbours; a configuration does not say it otherwise."""

_PARTLY_LATENT = frozenset({"minicpm3"})
"""Values of `model_type` that compute latents, but whose keys engines cache head by head."""

_OF_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_dim", "rotary_pct")
"""Fields of which a model with a rotary embedding has one."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """The rotary embedding of a model's keys: `frequencies` in radians per position, float32 `[rotary_dim / 2]`."""

    frequencies: torch.Tensor
    head_size: int
    interleaved: bool = False
    latent: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rotary_dim <= self.head_size:
            most, got = self.head_size // 2, len(self.frequencies)
            raise LMCacheSDKError(f"frequencies: expected 1 to {most} for a head of {self.head_size}, got {got}")

    @classmethod
    def default(
        cls, theta: float, head_size: int, *, rotary_dim: int | None = None, interleaved: bool = False
    ) -> "Rotary":
        """The unscaled embedding with base `theta` on the first `rotary_dim` elements of each head (None: on all)."""
        return cls(inverse_frequencies({"rope_theta": theta}, rotary_dim or head_size, 0), head_size, interleaved)

    @classmethod
    def from_config(cls, config: object, layer_type: str | None = None) -> "Rotary":
        """The embedding that `config` describes: a model's configuration as an object, or its config.json as a mapping.

        `layer_type` chooses where a model has several embeddings (full_attention, sliding_attention). Raises
        LMCacheSDKError for one whose keys cannot be moved.
        """
        config = _field(config, "text_config") or config
        _check_turned(config)
        rope = _rope_parameters(config, layer_type)
        if _is_latent(config):
            head_size = int(_field(config, "qk_rope_head_dim"))
            frequencies = inverse_frequencies(rope, head_size, int(_field(config, "max_position_embeddings") or 0))
            # Engines turn neighbours here, whatever the model's own code does with its weights' order.
            return cls(frequencies, head_size, interleaved=True, latent=True)
        heads, hidden = _field(config, "num_attention_heads"), _field(config, "hidden_size")
        if not (head_size := int(_field(config, "head_dim") or (hidden // heads if hidden and heads else 0))):
            raise LMCacheSDKError("config: expected head_dim, or hidden_size and num_attention_heads, got neither")
        share = (
            rope.get("partial_rotary_factor") or _field(config, "partial_rotary_factor") or _field(config, "rotary_pct")
        )
        rotary_dim = int(_field(config, "rotary_dim") or head_size * (share or 1.0))
        frequencies = inverse_frequencies(rope, rotary_dim, int(_field(config, "max_position_embeddings") or 0))
        return cls(frequencies, head_size, _field(config, "model_type") in _INTERLEAVED)

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are turned, from the first on."""
        return 2 * len(self.frequencies)

    def move(
        self, keys: torch.Tensor, old: Sequence[int] | torch.Tensor, new: Sequence[int] | torch.Tensor
    ) -> torch.Tensor:
        """A copy of `keys` `[..., T, heads * head_size]`, turned from positions `old` `[T]` to positions `new` `[T]`.

        For a latent cache `keys` are whole latents `[..., T, rank + head_size]`.
        Computed in float32 (float64 for float64 keys) and rounded once to the keys' dtype.
        """
        before, after = self._positions("old", old, keys), self._positions("new", new, keys)
        if keys.dtype not in _FLOATS:
            raise LMCacheSDKError(f"keys: expected a floating dtype, got {keys.dtype}; dequantise them first")
        if self.latent and keys.shape[-1] <= self.head_size:
            raise LMCacheSDKError(f"keys: expected latents of more than {self.head_size}, got {keys.shape[-1]}")
        if not self.latent and keys.shape[-1] % self.head_size:
            raise LMCacheSDKError(f"keys: expected a multiple of {self.head_size} per token, got {keys.shape[-1]}")
        result = keys.clone(memory_format=torch.contiguous_format)
        moved = (before != after).nonzero().flatten()
        if not len(moved):
            return result
        turn = self._angles(after[moved]) - self._angles(before[moved])
        exact = torch.float64 if keys.dtype == torch.float64 else torch.float32
        cos, sin = turn.cos().to(exact)[:, None, :], turn.sin().to(exact)[:, None, :]
        # One layer at a time: the wider copies stay small.
        first = keys.shape[-1] - self.head_size if self.latent else 0
        for layer in result.view(-1, *keys.shape[-2:])[..., first:]:
            heads = layer[moved].to(exact).view(len(moved), -1, self.head_size)
            self._turn(heads, cos, sin)
            layer[moved] = heads.flatten(1).to(keys.dtype)
        return result

    def turn_on_average(self, raw: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`raw` `[..., head_size]`, at position 0, turned by the mean of the rotations for all of `positions`.

        That mean is linear but no rotation: it shortens, most where the positions' angles differ most.
        """
        angles = self._angles(positions)
        result = raw.clone(memory_format=torch.contiguous_format)
        self._turn(result, angles.cos().mean(dim=0).to(raw.dtype), angles.sin().mean(dim=0).to(raw.dtype))
        return result

    def _positions(self, name: str, positions: Sequence[int] | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        result = torch.as_tensor(positions, dtype=torch.int64)
        if keys.ndim < 2 or result.shape != keys.shape[-2:-1]:
            raise LMCacheSDKError(
                f"{name}: expected one position per token of keys {list(keys.shape)}, got {list(result.shape)}"
            )
        return result

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions.to(torch.float32)[:, None] * self.frequencies).to(torch.float64)

    def _turn(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turn `heads` `[..., head_size]` in place."""
        half = self.rotary_dim // 2
        if self.interleaved:
            x, y = heads[..., 0 : self.rotary_dim : 2], heads[..., 1 : self.rotary_dim : 2]
        else:
            x, y = heads[..., :half], heads[..., half : self.rotary_dim]
        turned = x * cos - y * sin, y * cos + x * sin
        x.copy_(turned[0])
        y.copy_(turned[1])


def _is_latent(config: object) -> bool:
    """Whether engines cache one latent per token for this model, instead of keys and values."""
    kind = _field(config, "model_type")
    if kind in _PARTLY_LATENT:
        raise LMCacheSDKError(
            f"model_type: {kind!r} turns the last part of each head, which is not supported; its keys cannot be moved"
        )
    return bool(_field(config, "kv_lora_rank"))


def _field(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _rope_parameters(config: object, layer_type: str | None) -> dict[str, Any]:
    """One flat mapping from `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (transformers 4)."""
    found = dict(_field(config, "rope_parameters") or _field(config, "rope_scaling") or {})
    per_layer = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    if per_layer:
        if layer_type not in per_layer:
            raise LMCacheSDKError(f"layer_type: expected one of {', '.join(per_layer)}, got {layer_type!r}")
        found = dict(per_layer[layer_type])
    if "rope_type" not in found and "type" in found:
        found["rope_type"] = found.pop("type")
    theta = _field(config, "rope_theta") or _field(config, "rotary_emb_base")
    found.setdefault("rope_theta", 10000.0 if theta is None else theta)
    trained = _field(config, "original_max_position_embeddings")
    if trained is not None:
        found.setdefault("original_max_position_embeddings", trained)
    return found


def _check_turned(config: object) -> None:
    """Raise LMCacheSDKError for a model without a rotary embedding. An old config.json may say nothing of the one that
    its model has; a configuration object has its defaults.
    """
    if isinstance(config, Mapping) or any(_field(config, name) is not None for name in _OF_ROTARY):
        return
    raise LMCacheSDKError(
        f"model_type: {_field(config, 'model_type')!r} has no rotary embedding that its configuration tells of; "
        "its keys cannot be moved"
    )
