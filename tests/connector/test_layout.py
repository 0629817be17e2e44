"""Shape arithmetic, against references that are written out index by index."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.layout import (
    Piece,
    Plane,
    chunk_pieces,
    common_stride,
    declared_planes,
    digits,
    packed_plane,
)


def test_pieces_of_chunks_larger_than_blocks() -> None:
    assert chunk_pieces(1, 0, 200, chunk_size=64, block_size=32, block_ids=[9, 8, 7, 6, 5, 4]) == [
        Piece(0, 7, 0, 32),
        Piece(32, 6, 0, 32),
    ]


def test_pieces_of_chunks_smaller_than_blocks() -> None:
    assert chunk_pieces(5, 0, 200, chunk_size=16, block_size=64, block_ids=[9, 8, 7]) == [Piece(0, 8, 16, 16)]


def test_pieces_begin_where_the_local_hit_ends_and_end_before_the_last_token() -> None:
    ids = [9, 8, 7, 6]
    assert chunk_pieces(0, 32, 63, chunk_size=64, block_size=16, block_ids=ids) == [
        Piece(32, 7, 0, 16),
        Piece(48, 6, 0, 15),
    ]
    assert chunk_pieces(0, 64, 128, chunk_size=64, block_size=16, block_ids=ids) == []


@given(
    small=st.integers(1, 24),
    factor=st.integers(1, 6),
    below=st.booleans(),
    first=st.integers(0, 300),
    length=st.integers(0, 300),
)
def test_pieces_cover_each_token_once_in_order_in_its_own_block(
    small: int, factor: int, below: bool, first: int, length: int
) -> None:
    chunk_size, block_size = (small, small * factor) if below else (small * factor, small)
    end = first + length
    block_ids = [1000 + i for i in range(-(-end // block_size))]
    covered = []
    for chunk in range(-(-end // chunk_size)):
        for in_chunk, block, in_block, tokens in chunk_pieces(chunk, first, end, chunk_size, block_size, block_ids):
            assert tokens > 0
            assert in_chunk + tokens <= chunk_size
            assert in_block + tokens <= block_size
            covered += [chunk * chunk_size + in_chunk + i for i in range(tokens)]
            assert [(block - 1000) * block_size + in_block + i for i in range(tokens)] == covered[-tokens:]
    assert covered == list(range(first, end))


def test_digits_of_a_plain_stride_are_one_digit() -> None:
    assert digits(3 * torch.arange(10)) == ((10, 3),)
    assert digits(torch.zeros(1, dtype=torch.int64)) == ((1, 1),)


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 50)), min_size=1, max_size=4))
def test_digits_say_where_each_index_is(wanted: list[tuple[int, int]]) -> None:
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in wanted:
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    found = digits(places)
    assert found is not None
    again = torch.zeros(1, dtype=torch.int64)
    for size, stride in found:
        again = (again[:, None] + stride * torch.arange(size)).flatten()
    assert torch.equal(again, places)


def test_places_without_a_rule_have_no_digits() -> None:
    assert digits(torch.tensor([0, 1, 3, 4, 5, 7])) is None
    assert digits(torch.tensor([0, 2, 1, 3, 5, 4])) is None


def test_positions_that_are_no_sum_of_rows_and_columns_make_no_plane() -> None:
    pages = torch.zeros(2, 1, 2, 4)
    crossed = torch.tensor([[0, 1], [3, 2]])
    assert packed_plane(pages, torch.tensor([[0, 1], [2, 3]])) is not None
    assert packed_plane(pages, crossed) is None


@given(
    blocks=st.integers(1, 4), heads=st.integers(1, 4), tokens=st.integers(1, 5), size=st.integers(1, 6),
    tokens_first=st.booleans(), padding=st.integers(0, 7), layers=st.integers(1, 3),
)  # fmt: skip
def test_declared_planes_are_where_the_strides_say(
    blocks: int, heads: int, tokens: int, size: int, tokens_first: bool, padding: int, layers: int
) -> None:
    pages = padded_pages(layers, blocks, heads, tokens, size, tokens_first, padding)
    stride = common_stride(pages)
    assert stride is not None
    for half, plane in enumerate(declared_planes(pages[0], size)):
        view = plane.of_pages(pages[0], layers, stride)
        assert view.shape == (layers, blocks, tokens, heads, size)
        for layer in range(layers):
            expected = pages[layer][..., half * size : (half + 1) * size].transpose(1, 2)
            assert torch.equal(view[layer], expected)
            assert view[layer].data_ptr() == expected.data_ptr(), "a view, not a copy"


def padded_pages(
    layers: int, blocks: int, heads: int, tokens: int, size: int, tokens_first: bool, padding: int
) -> list[torch.Tensor]:
    """Pages `[blocks, heads, tokens, 2 * size]`, all elements different, `padding` elements after each block."""
    block = heads * tokens * 2 * size
    memory = torch.arange(layers * blocks * (block + padding), dtype=torch.float32)
    head, token = (2 * size, heads * 2 * size) if tokens_first else (tokens * 2 * size, 2 * size)
    strides = (block + padding, head, token, 1)
    return [
        memory.as_strided((blocks, heads, tokens, 2 * size), strides, layer * blocks * (block + padding))
        for layer in range(layers)
    ]


def test_layers_in_different_allocations_or_at_unequal_distances_have_no_common_stride() -> None:
    memory = torch.zeros(100)
    assert common_stride([memory[0:10], memory[20:30], memory[40:50]]) == 20
    assert common_stride([memory[0:10], memory[20:30], memory[50:60]]) is None
    assert common_stride([memory[0:10], torch.zeros(10)]) is None
    assert common_stride([memory[20:30], memory[0:10]]) is None
    assert common_stride([memory]) == 0


def test_slots_are_cut_into_the_same_digits_as_pages() -> None:
    plane = Plane(0, 64, 32, ((2, 16), (4, 1)), ((2, 8), (2, 4)))
    slot = torch.arange(3 * 16 * 2 * 4).view(3, 16, 2, 4)
    cut = plane.of_slot(slot)
    assert cut.shape == (3, 2, 2, 4, 2, 2, 2)
    assert cut[1, 1, 0, 3, 1, 0, 1] == slot[1, 8 + 0 * 4 + 3, 1, 0 * 2 + 1]
