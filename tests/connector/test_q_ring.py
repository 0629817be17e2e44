"""The ring: blocks are handed out once, all come back, and what is written is what is read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.q_ring import QRingBuffer, places


def ring_of(blocks: int, block_size: int = 4) -> QRingBuffer:
    return QRingBuffer(2, blocks, block_size, 3, torch.float32, torch.device("cpu"))


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 14)), max_size=40))
def test_a_block_is_never_handed_out_twice_and_all_come_back(blocks: int, steps: list[tuple[bool, int]]) -> None:
    ring = ring_of(blocks)
    taken: list[list[int]] = []
    for take, number in steps:
        if take:
            held = sum(map(len, taken))
            got = ring.take(number)
            assert (got is None) == (held + number > blocks)
            taken += [] if got is None else [got]
        elif taken:
            ring.give_back(taken.pop(number % len(taken)))
        held_blocks = [block for one in taken for block in one]
        assert len(set(held_blocks)) == len(held_blocks)
        assert set(held_blocks) <= set(range(blocks))
        assert ring.free == blocks - len(held_blocks)
    for one in taken:
        ring.give_back(one)
    assert sorted(ring.take(blocks) or []) == list(range(blocks))


@pytest.mark.parametrize("wrong", [[0, 0], [7], [-1], [0, 3]])
def test_what_was_not_taken_cannot_be_given_back(wrong: list[int]) -> None:
    ring = ring_of(4)
    assert ring.take(3) == [3, 2, 1]
    ring.give_back([3])
    ring.take(0)
    with pytest.raises(ValueError, match="that were taken, each once"):
        ring.give_back(wrong)
    assert ring.free == 2


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 40), st.integers(0, 20), st.randoms())
def test_places_follow_the_block_table(size: int, base: int, skip: int, count: int, random: object) -> None:
    start, end = base + skip, base + skip + count
    blocks = list(range(base // size, -(-end // size) + 1))
    random.shuffle(blocks)  # type: ignore[attr-defined]
    expected = [blocks[t // size - base // size] * size + t % size for t in range(start, end)]
    assert places(blocks, base, start, end, size).tolist() == expected


def test_each_layer_is_read_back_where_it_was_written() -> None:
    ring = ring_of(4)
    first, second = torch.rand(5, 3), torch.rand(5, 3)
    where = torch.tensor([9, 2, 15, 3, 0])
    ring.write(0, first, where)
    ring.write(1, second, where)
    out = torch.empty(2, 3, 3)
    ring.read(out, where[[4, 0, 2]])
    assert torch.equal(out[0], first[[4, 0, 2]])
    assert torch.equal(out[1], second[[4, 0, 2]])
    assert ring.nbytes == 2 * 16 * 3 * 4
