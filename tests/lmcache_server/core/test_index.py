"""The prefix tree: the longest run of complete nodes is a hit, and never on the hash's word."""

import itertools
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.core.index import Node, PrefixIndex
from lmcache_server.protocol.keys import HASH_ALGORITHMS, ChunkHasher


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@pytest.fixture
def index() -> PrefixIndex[str]:
    """Chunks of one token."""
    return PrefixIndex(ChunkHasher(1))


def fill(index: PrefixIndex[str], key: str, chunks: bytes, extras: dict[int, bytes] | None = None) -> list[Node[str]]:
    nodes = [node for _, node in index.walk(key, 1, chunks, extras or {})]
    for node in nodes:
        node.parts[0], node.missing = "sealed", 0
    return nodes


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], bytes]:
    """A hash of one value: everything collides."""

    def digest(_: bytes) -> bytes:
        return b"same"

    monkeypatch.setitem(HASH_ALGORITHMS, "constant", digest)
    return digest


def test_a_hit_is_the_longest_complete_run_from_the_start(index: PrefixIndex[str]) -> None:
    nodes = fill(index, "k", tokens(1, 2, 3, 4))
    assert index.hit("k", tokens(1, 2, 3, 4, 5)) == nodes
    nodes[2].missing = 1
    assert index.hit("k", tokens(1, 2, 3, 4)) == nodes[:2]
    nodes[0].missing = 1
    assert index.hit("k", tokens(1, 2, 3, 4)) == []


def test_trees_of_different_keys_share_nothing(index: PrefixIndex[str]) -> None:
    fill(index, "a", tokens(1, 2))
    assert index.hit("b", tokens(1, 2)) == []
    assert index.hit("", tokens(1, 2)) == []


def test_prompts_with_a_common_start_share_its_nodes(index: PrefixIndex[str]) -> None:
    one, other = fill(index, "k", tokens(1, 2, 3)), fill(index, "k", tokens(1, 2, 4))
    assert one[:2] == other[:2] and one[2] is not other[2]
    assert index.size == 4


def test_extras_are_part_of_a_chunk(index: PrefixIndex[str]) -> None:
    with_image = fill(index, "k", tokens(1, 2, 3), {1: b"image"})
    assert index.hit("k", tokens(1, 2, 3)) == with_image[:1]
    assert index.hit("k", tokens(1, 2, 3), {1: b"other"}) == with_image[:1]
    assert index.hit("k", tokens(1, 2, 3), {1: b"image", 9: b"beyond"}) == with_image


def test_an_equal_hash_of_other_tokens_is_no_hit(colliding: Callable[[bytes], bytes]) -> None:
    index: PrefixIndex[str] = PrefixIndex(ChunkHasher(1, "constant"))
    nodes = fill(index, "k", tokens(1))
    assert index.hit("k", tokens(1)) == nodes
    assert index.hit("k", tokens(2)) == []


def test_an_equal_hash_of_other_extras_is_no_hit(colliding: Callable[[bytes], bytes]) -> None:
    index: PrefixIndex[str] = PrefixIndex(ChunkHasher(1, "constant"))
    nodes = fill(index, "k", tokens(1), {0: b"lora"})
    assert index.hit("k", tokens(1), {0: b"lora"}) == nodes
    assert index.hit("k", tokens(1), {0: b"other"}) == []
    assert index.hit("k", tokens(1)) == []


def test_nothing_is_stored_over_or_beyond_a_collision(colliding: Callable[[bytes], bytes]) -> None:
    index: PrefixIndex[str] = PrefixIndex(ChunkHasher(1, "constant"))
    (node,) = fill(index, "k", tokens(1))
    assert fill(index, "k", tokens(2, 1)) == []
    assert fill(index, "k", tokens(1), {0: b"lora"}) == []
    assert node.tokens == tokens(1) and index.size == 1


def test_a_walk_makes_a_node_only_when_it_reaches_it(index: PrefixIndex[str]) -> None:
    walk = index.walk("k", 2, tokens(1, 2, 3))
    assert next(walk)[0] == 0
    assert index.size == 1
    assert [i for i, _ in walk] == [1, 2]
    assert index.size == 3


def test_what_is_no_whole_chunk_is_left_out() -> None:
    index: PrefixIndex[str] = PrefixIndex(ChunkHasher(2))
    assert len(fill(index, "k", tokens(1, 2, 3))) == 1


def test_only_a_leaf_can_be_removed(index: PrefixIndex[str]) -> None:
    first, second = fill(index, "k", tokens(1, 2))
    with pytest.raises(AssertionError):
        index.remove(first)
    index.remove(second)
    assert (index.size, index.linked(second), index.linked(first)) == (1, False, True)
    assert index.hit("k", tokens(1, 2)) == [first]


def test_a_detached_tree_is_out_of_reach_but_whole(index: PrefixIndex[str]) -> None:
    nodes = fill(index, "k", tokens(1, 2))
    (root,) = index.detach_all()
    assert root.subtree() == [root, *nodes]
    assert index.hit("k", tokens(1, 2)) == [] and index.size == 0 and list(index.nodes()) == []
    assert [index.attached(node) for node in nodes] == [False, False]
    assert index.linked(nodes[1])
    again = fill(index, "k", tokens(1, 2))
    assert again[0] is not nodes[0] and index.attached(again[0])
    index.remove(nodes[1])
    assert index.size == 2


def test_trees_that_hold_nothing_are_forgotten(index: PrefixIndex[str]) -> None:
    for tenant in range(100):
        index.root(f"tenant {tenant}")
    fill(index, "kept", tokens(1))
    index.prune_roots()
    assert list(index._roots) == ["kept"]
    assert len(index.hit("kept", tokens(1))) == 1


def test_a_node_knows_its_path_and_whether_it_holds_anything(index: PrefixIndex[str]) -> None:
    nodes = fill(index, "k", tokens(1, 2, 3))
    assert nodes[2].path() == nodes
    assert nodes[0].root.path() == []
    assert not nodes[0].empty
    nodes[0].parts[0] = None
    assert nodes[0].empty


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12)


@given(PROMPTS, st.lists(st.integers(0, 2), max_size=6), st.sampled_from([1, 2]))
def test_a_hit_is_the_longest_prefix_of_anything_stored(
    stored: list[list[int]], asked: list[int], chunk_size: int
) -> None:
    index: PrefixIndex[str] = PrefixIndex(ChunkHasher(chunk_size))
    for prompt in stored:
        fill(index, "k", tokens(*prompt))

    def chunks(prompt: list[int]) -> list[tuple[int, ...]]:
        whole = range(0, len(prompt) // chunk_size * chunk_size, chunk_size)
        return [tuple(prompt[i : i + chunk_size]) for i in whole]

    def common(prompt: list[int]) -> int:
        pairs = zip(chunks(prompt), chunks(asked), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    hit = index.hit("k", tokens(*asked))
    assert len(hit) == max(map(common, stored), default=0)
    assert b"".join(node.tokens for node in hit) == tokens(*asked)[: len(hit) * chunk_size * 4]
    prefixes = {tuple(chunks(prompt)[:n]) for prompt in stored for n in range(1, len(chunks(prompt)) + 1)}
    assert index.size == len(prefixes) == len(list(index.nodes()))


def test_a_walk_over_a_changing_tree_meets_what_stays_once_and_nothing_that_is_gone(
    index: PrefixIndex[str],
) -> None:
    branches = [fill(index, "k", tokens(first, 7, 8)) for first in range(5)]
    walk = index.below("k")
    met = [next(walk)]
    gone = next(branch for branch in branches if branch[0] is not met[0])
    for node in reversed(gone):
        index.remove(node)
    for node in walk:
        met.append(node)
        fill(index, "k", tokens(100 + len(met) % 3, 9))
    assert len(set(met)) == len(met)
    stays = {node for branch in branches if branch is not gone for node in branch}
    assert stays <= set(met) and not set(gone) & set(met)
    assert [node for node in index.below("k") if index.key(node) != "k"] == list(index.below("nobody")) == []


def test_a_walk_ends_with_its_tree(index: PrefixIndex[str]) -> None:
    fill(index, "k", tokens(1, 2, 3))
    walk = index.below("k")
    next(walk)
    index.detach_all()
    assert list(walk) == []


def test_a_run_without_branches_is_walked_and_hit_without_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    index: PrefixIndex[str] = PrefixIndex(ChunkHasher(1))
    nodes = fill(index, "k", tokens(1, 2, 3), {1: b"x"})

    def chain(*_: bytes) -> bytes:
        raise AssertionError("hashed again")

    monkeypatch.setattr(index._hasher, "chain", chain)
    assert index.hit("k", tokens(1, 2, 3), {1: b"x"}) == nodes
    assert [node for _, node in index.walk("k", 1, tokens(1, 2, 3), {1: b"x"})] == nodes
    with pytest.raises(AssertionError, match="hashed again"):
        list(index.walk("k", 1, tokens(1, 2, 3), {1: b"y"}))
