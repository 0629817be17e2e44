import struct
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.tokens import LARGEST, token_bytes

token_lists = st.lists(st.integers(0, LARGEST), max_size=40)


@given(token_lists)
def test_ids_become_uint32_little_endian(tokens: list[int]) -> None:
    expected = struct.pack(f"<{len(tokens)}I", *tokens)
    assert token_bytes(tokens) == expected
    assert token_bytes(tuple(tokens)) == expected
    assert token_bytes(deque(tokens)) == expected
    assert token_bytes([np.int64(token) for token in tokens]) == expected
    for dtype in (np.int64, np.uint64, np.uint32, ">u4"):
        assert token_bytes(np.array(tokens, dtype=dtype)) == expected
    assert token_bytes(torch.tensor(tokens, dtype=torch.int64)) == expected
    assert token_bytes(torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)[::2]) == expected


@given(st.integers(0, LARGEST), st.integers(1, 200))
def test_a_range_is_a_sequence_of_tokens(start: int, length: int) -> None:
    tokens = range(start, min(start + length, LARGEST + 1))
    assert token_bytes(tokens) == struct.pack(f"<{len(tokens)}I", *tokens)


@given(token_lists, st.sampled_from([-1, LARGEST + 1, -(2**40), 2**63 - 1]), token_lists)
def test_an_id_out_of_range_is_named_with_its_place(before: list[int], wrong: int, after: list[int]) -> None:
    tokens = [*before, wrong, *after]
    for given_as in (tokens, tuple(tokens), np.array(tokens, dtype=np.int64), torch.tensor(tokens)):
        with pytest.raises(LMCacheSDKError, match=rf"tokens\[{len(before)}\]: expected a token id .*, got {wrong}$"):
            token_bytes(given_as)


@pytest.mark.parametrize("wrong", ["7", 1.0, None, [1]])
def test_what_is_no_integer_is_named_with_its_place(wrong: object) -> None:
    with pytest.raises(LMCacheSDKError, match=r"tokens\[2\]: expected an integer, got "):
        token_bytes([1, 2, wrong, 3])  # type: ignore[list-item]


def test_a_list_of_prompts_is_named_in_short() -> None:
    with pytest.raises(LMCacheSDKError, match=r"^tokens\[0\]: expected an integer, got \[0, 1, 2, 3, 4, 5, \.\.\.\]$"):
        token_bytes([list(range(9000))])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "tokens",
    ["123", b"123", 5, None, {1, 2}, iter([1]), np.array([[1, 2]]), np.array([1.0]), torch.tensor([True]),
     torch.tensor(3), torch.tensor([1.5])],
)  # fmt: skip
def test_what_is_no_list_of_integers_is_refused(tokens: Sequence[int]) -> None:
    with pytest.raises(LMCacheSDKError, match="tokens: expected"):
        token_bytes(tokens)
