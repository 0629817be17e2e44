"""Token ids, as people hold them, to the bytes that the server hashes: uint32, little-endian."""

import reprlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lmcache_sdk.errors import LMCacheSDKError

__all__ = ["TokenIds", "token_bytes"]

TokenIds = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
"""Any sequence of integers, or a one-dimensional integer array of NumPy or torch."""

LARGEST = 2**32 - 1


def token_bytes(tokens: TokenIds) -> bytes:
    """The ids as uint32 little-endian; raises LMCacheSDKError naming the first one that is not from 0 to 2**32 - 1."""
    if isinstance(tokens, torch.Tensor):
        ids = _checked(tokens.detach().cpu().numpy())
    elif isinstance(tokens, np.ndarray):
        ids = _checked(tokens)
    elif isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray, memoryview)):
        ids = _packed(tokens)
    else:
        kind = type(tokens).__name__
        raise LMCacheSDKError(f"tokens: expected a sequence of integers or an integer array, got {kind}")
    return ids.astype("<u4", copy=False).tobytes()


def _checked(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise LMCacheSDKError(f"tokens: expected one dimension of integers, got {ids.dtype} of shape {list(ids.shape)}")
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST):
        index = int(((ids < 0) | (ids > LARGEST)).argmax())
        raise _out_of_range(index, ids[index])
    return ids


def _packed(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(array("I", tokens))  # three times as quick as through a list of int64
    except (TypeError, OverflowError):
        pass
    for index, token in enumerate(tokens):
        if not isinstance(token, (int, np.integer)):
            raise LMCacheSDKError(f"tokens[{index}]: expected an integer, got {reprlib.repr(token)}")
        if not 0 <= token <= LARGEST:
            raise _out_of_range(index, token)
    return np.array([int(token) for token in tokens], dtype=np.uint32)


def _out_of_range(index: int, token: object) -> LMCacheSDKError:
    return LMCacheSDKError(f"tokens[{index}]: expected a token id from 0 to {LARGEST}, got {token}")
