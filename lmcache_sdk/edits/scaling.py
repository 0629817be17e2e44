"""The frequencies of a rotary embedding: radians per position for each pair of a head's elements, as float32.

`inverse_frequencies` takes the rope parameters as a model's configuration names them and follows what the engine (vLLM)
computes its keys with, operation by operation, since the keys that are moved are the engine's. A scheme that also
multiplies cosine and sine by a constant (YaRN, LongRoPE) needs no mention of it: the constant is in the key already,
and turning a key does not change its length.

    default    Su et al., RoFormer, arXiv 2104.09864
    linear     position interpolation: Chen et al., arXiv 2306.15595
    dynamic    NTK-aware base: Peng et al., YaRN, arXiv 2309.00071, section 3.1; vLLM uses one length for all prompts
    yarn       arXiv 2309.00071, section 3.2 ("NTK-by-parts")
    llama3     the rope_scaling of Llama 3.1 (frequency bands), as in the model's published code
    longrope   Ding et al., arXiv 2402.13753: one factor per pair
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["inverse_frequencies"]


def inverse_frequencies(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    """float32 `[rotary_dim // 2]` for the parameters `rope` (`rope_theta`, `rope_type` and what the type needs).

    `max_positions` is the configuration's `max_position_embeddings`. Raises LMCacheSDKError for an unknown type, and
    for a type whose parameters are missing.
    """
    kind = str(rope.get("rope_type", "default"))
    if kind not in _SCHEMES:
        raise LMCacheSDKError(
            f"rope_type: expected one of {', '.join(_SCHEMES)}, got {kind!r}: its keys cannot be moved"
        )
    if "mrope_section" in rope:
        raise LMCacheSDKError(
            "mrope_section: this model turns keys by three positions per token (time, height, width), "
            "which a cache does not keep; its keys cannot be moved"
        )
    try:
        return _SCHEMES[kind](rope, rotary_dim, max_positions)
    except KeyError as missing:
        raise LMCacheSDKError(f"rope parameters: type {kind!r} needs {missing}, got {sorted(rope)}") from missing


def _wavelengths(base: float, rotary_dim: int) -> torch.Tensor:
    """Positions per radian of each pair, unscaled."""
    return torch.pow(base, torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _unscaled(base: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / _wavelengths(base, rotary_dim)


def _default(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    return _unscaled(rope["rope_theta"], rotary_dim)


def _linear(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    return _unscaled(rope["rope_theta"], rotary_dim) / float(rope["factor"])


def _dynamic(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    if "alpha" in rope:
        stretch = rope["alpha"]
    else:
        trained = rope.get("max_trained_positions", max_positions)
        stretch = rope["factor"] * max_positions / trained - (rope["factor"] - 1)
    return _unscaled(rope["rope_theta"] * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


def _yarn(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    base, trained, factor = float(rope["rope_theta"]), rope["original_max_position_embeddings"], float(rope["factor"])

    def pair_that_turns(rotations: float) -> float:
        """The pair, as a fraction of an index, that turns so many times over the trained length."""
        return rotary_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    wavelengths = _wavelengths(base, rotary_dim)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    frequencies = _unscaled(rope["rope_theta"], rotary_dim)
    wavelengths = 2 * math.pi / frequencies
    share = (trained / wavelengths - low) / (high - low) if low != high else torch.zeros_like(frequencies)
    between = (1 - share) * frequencies / factor + share * frequencies
    slow = torch.where(wavelengths > trained / low, frequencies / factor, between)
    return torch.where(wavelengths < trained / high, frequencies, slow)


def _longrope(rope: Mapping[str, Any], rotary_dim: int, max_positions: int) -> torch.Tensor:
    # vLLM takes the long factors for the whole life of an engine if its max_model_len exceeds the trained length; that
    # length is the engine's option, the configuration's own is its default.
    factors = rope["long_factor" if max_positions > rope["original_max_position_embeddings"] else "short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(rope["rope_theta"], rotary_dim))


_SCHEMES: dict[str, Callable[[Mapping[str, Any], int, int], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
