"""Keeping some tokens of a cached prompt: gather them on the token axis, and move their keys to where they stand now.

    tokens      a b c d e f g h          positions 0 1 2 3 4 5 6 7
    kept        0 1 4 5
    afterwards  a b e f                  positions 0 1 2 3: the keys of e and f are turned from 4, 5 to 2, 3

The values stay as they were computed, with the dropped tokens in view: that is the point of dropping tokens from a
cache instead of from the prompt. Token i of a cache always stands at position i, so edits can follow each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind
from lmcache_sdk.context import ModifyFnType
from lmcache_sdk.edits.rotary import Rotary
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.shapes import CachedTensors, one_tensor

__all__ = ["EveryOtherChunk", "TokenSelector", "check_share", "keep_tokens", "token_dropping"]


class TokenSelector(Protocol):
    """Decides which tokens of one request stay."""

    def __call__(self, tensors: Mapping[LMCacheSDKCacheKind, CachedTensors], tokens: Sequence[int]) -> Sequence[int]:
        """Indices into `tokens` that stay, ascending. `tensors` holds what is cached for them: KV is `[2, L, T, D]`."""


def check_share(keep: float, chunk_size: int) -> None:
    """Raise LMCacheSDKError unless a selector can keep the share `keep` of the tokens, in chunks of `chunk_size`."""
    if not 0 < keep <= 1:
        raise LMCacheSDKError(f"keep: expected a share above 0 and up to 1, got {keep}")
    if chunk_size < 1:
        raise LMCacheSDKError(f"chunk_size: expected at least 1, got {chunk_size}")


@dataclass(frozen=True, slots=True)
class EveryOtherChunk:
    """Keeps the first chunk, drops the second, and so on: half of the chunks, whatever is in them."""

    chunk_size: int

    def __call__(self, tensors: Mapping[LMCacheSDKCacheKind, CachedTensors], tokens: Sequence[int]) -> Sequence[int]:
        """Indices of the tokens in chunks 0, 2, 4, ..."""
        return [i for i in range(len(tokens)) if (i // self.chunk_size) % 2 == 0]


def token_dropping(select: TokenSelector, rotary: Rotary) -> ModifyFnType:
    """The edit function that keeps what `select` chooses, for a model whose keys are turned by `rotary`."""

    def edit(
        tensors: Mapping[LMCacheSDKCacheKind, CachedTensors], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        kv = one_tensor(tensors[LMCacheSDKCacheKind.KV], "kv")
        return keep_tokens(kv, tokens, select(tensors, tokens), rotary)

    return edit


def keep_tokens(
    kv: torch.Tensor, tokens: Sequence[int], kept: Sequence[int], rotary: Rotary
) -> tuple[torch.Tensor, list[int]]:
    """New KV `[2, L, len(kept), D]` and its tokens, from `kv` `[2, L, T, D]` of `tokens`; `kv` is left as it is.

    Latents of MLA models are `[1, L, T, D]`, and `rotary` knows it (`Rotary.latent`). Raises LMCacheSDKError unless
    `kept` is strictly ascending within the tokens and `kv` is a cache of them as `rotary` expects it.
    """
    kv = one_tensor(kv, "kv")
    planes = 1 if rotary.latent else 2
    if kv.ndim != 4 or kv.shape[0] != planes or kv.shape[2] != len(tokens):
        model = "of an MLA model's latents" if rotary.latent else "of keys and values"
        raise LMCacheSDKError(
            f"kv: expected [{planes}, layers, {len(tokens)}, D] {model} for {len(tokens)} tokens, got {list(kv.shape)}"
        )
    indices = torch.as_tensor(kept, dtype=torch.int64)
    if indices.ndim != 1 or bool((indices.diff() <= 0).any()):
        raise LMCacheSDKError("kept: expected indices in strictly ascending order")
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= len(tokens)):
        raise LMCacheSDKError(
            f"kept: expected indices from 0 to {len(tokens) - 1}, got {int(indices[0])} to {int(indices[-1])}"
        )
    remaining = kv.index_select(2, indices)
    remaining[0] = rotary.move(remaining[0], indices, torch.arange(len(indices)))
    return remaining, [tokens[i] for i in indices.tolist()]
