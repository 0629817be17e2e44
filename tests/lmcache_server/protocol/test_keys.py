"""Tokens to chained hashes to keys: the same in every process, a prefix's hashes are those of the whole, and no two
different identities have one key.
"""

import hashlib
import json
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmcache_server.protocol.keys import HASH_ALGORITHMS, CacheEngineKey, ChunkHasher, Namespace
from lmcache_server.protocol.layout import Kind
from tests.lmcache_server.protocol import vectors

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=24)
EXTRAS = st.dictionaries(st.integers(0, 7), st.binary(min_size=1, max_size=4), max_size=3)
KEYS = st.builds(
    CacheEngineKey,
    st.builds(
        Namespace,
        st.text(max_size=4),
        st.text(max_size=4),
        st.sampled_from(Kind),
        st.text(max_size=4),
        st.integers(1, 3),
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.text(max_size=4),
    st.binary(max_size=4),
)


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_the_frozen_vectors_still_hold() -> None:
    file = json.loads(vectors.FILE.read_text(encoding="utf-8"))
    assert vectors.computed(file["inputs"]) == file["values"]
    assert {case["algorithm"] for case in file["inputs"]["hashes"]} == set(HASH_ALGORITHMS)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_with_another_hash_seed_computes_the_same_vectors(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    child = subprocess.run([sys.executable, vectors.__file__], env=environment, capture_output=True, check=True)
    assert json.loads(child.stdout) == json.loads(vectors.FILE.read_text(encoding="utf-8"))["values"]


def test_the_chain_is_the_digest_of_parent_tokens_and_extras() -> None:
    hasher = ChunkHasher(2, "sha256")
    root = hashlib.sha256(b"lmcache chunk chain 1").digest()
    first = hashlib.sha256(root + packed([1, 2]) + b"lora").digest()
    second = hashlib.sha256(first + packed([3, 4])).digest()
    assert hasher.hashes(packed([1, 2, 3, 4, 5]), {0: b"lora"}) == [first, second]


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_every_digest_has_at_least_128_bits(algorithm: str) -> None:
    assert len(ChunkHasher(2, algorithm).root) >= 16


@given(TOKENS, st.integers(1, 5), st.integers(0, 24), EXTRAS)
def test_a_prefix_has_the_first_hashes_of_the_whole(
    tokens: list[int], size: int, cut: int, extras: dict[int, bytes]
) -> None:
    hasher = ChunkHasher(size)
    whole, prefix = hasher.hashes(packed(tokens), extras), hasher.hashes(packed(tokens[:cut]), extras)
    assert len(whole) == len(tokens) // size == hasher.count(packed(tokens))
    assert prefix == whole[: len(tokens[:cut]) // size]


@given(TOKENS, st.integers(1, 5), st.integers(0, 23), EXTRAS)
def test_one_other_token_changes_its_chunk_and_every_later_one(
    tokens: list[int], size: int, at: int, extras: dict[int, bytes]
) -> None:
    assume(at < len(tokens) // size * size)
    hasher = ChunkHasher(size)
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = hasher.hashes(packed(tokens), extras), hasher.hashes(packed(other), extras)
    assert before[: at // size] == after[: at // size]
    assert not set(before[at // size :]) & set(after[at // size :])


@given(TOKENS, st.integers(1, 5), EXTRAS, st.integers(0, 7), st.binary(min_size=1, max_size=4))
def test_an_extra_changes_its_chunk_and_every_later_one(
    tokens: list[int], size: int, extras: dict[int, bytes], at: int, extra: bytes
) -> None:
    assume(at < len(tokens) // size and extras.get(at, b"") != extra)
    hasher = ChunkHasher(size)
    before, after = hasher.hashes(packed(tokens), extras), hasher.hashes(packed(tokens), extras | {at: extra})
    assert before[:at] == after[:at]
    assert not set(before[at:]) & set(after[at:])


def test_media_that_share_their_last_bits_have_different_keys_from_the_first_chunk_they_touch() -> None:
    hasher = ChunkHasher(2)
    one, other = b"img:" + bytes(28) + b"\xff" * 4, b"img:" + bytes(27) + b"\x01" + b"\xff" * 4
    before, after = hasher.hashes(packed([9] * 8), {2: one}), hasher.hashes(packed([9] * 8), {2: other})
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False]


@given(KEYS, KEYS)
def test_two_keys_encode_alike_only_if_they_are_equal(one: CacheEngineKey, other: CacheEngineKey) -> None:
    assert (one.encode() == other.encode()) == (one == other)


@given(KEYS)
def test_no_field_of_a_key_can_be_moved_into_its_neighbour(key: CacheEngineKey) -> None:
    n = key.namespace
    assume(n.model_name or n.revision)
    moved = Namespace(n.model_name + n.revision, "", n.kind, n.layout, n.world_size)
    swapped = Namespace(n.revision, n.model_name, n.kind, n.layout, n.world_size)
    for namespace in (moved, swapped):
        other = CacheEngineKey(namespace, key.worker_id, key.group, key.cache_salt, key.chunk_hash)
        assert (other.encode() == key.encode()) == (other == key)
