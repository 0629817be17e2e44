"""Pieces, places and rows, against references that are written out token by token."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.layout import Piece, chunk_pieces, cut_at, row_tables, token_places
from lmcache_server.protocol.layout import KernelGroup


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


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5)), first=st.integers(0, 60), length=st.integers(0, 60),
    chunk=st.integers(1, 20),
)  # fmt: skip
def test_kernel_blocks_hold_the_same_tokens_at_the_same_places(
    sizes: tuple[int, int], first: int, length: int, chunk: int
) -> None:
    kernel, block = sizes[0], sizes[0] * sizes[1]
    ids = [100 - i for i in range(-(-(first + length) // block))]
    for index in range(-(-(first + length) // chunk)):
        pieces = chunk_pieces(index, first, first + length, chunk, block, ids)
        cut = cut_at(kernel, pieces, block)
        assert all(0 <= piece.in_block < piece.in_block + piece.tokens <= kernel for piece in cut)
        places = [ids[t // block] * block + t % block for t in range(first, first + length) if t // chunk == index]
        assert token_places(pieces, block).tolist() == token_places(cut, kernel).tolist() == places
        assert [p.in_chunk + i for p in cut for i in range(p.tokens)] == [
            t - index * chunk for t in range(first, first + length) if t // chunk == index
        ]


def test_rows_are_numbered_in_the_largest_unit_that_all_of_them_begin_at() -> None:
    group = KernelGroup((0, 1), planes=2, heads=2, head_size=64, dtype="bfloat16")
    dense = torch.zeros(2, 3, 16, 2, 128, dtype=torch.bfloat16).transpose(2, 3)
    (table,) = row_tables(list(dense.unbind(0)), group)
    assert table.units.shape == (2 * 3 * 16 * 2 * 2, 128 // 8), "a unit is a row of 128 bytes"
    assert (table.block, table.token, table.plane) == (64, 4, 1)
    padded = torch.zeros(2 * 3 * 4104, dtype=torch.bfloat16).as_strided(dense.shape, (12312, 4104, 128, 256, 1))
    (table,) = row_tables(list(padded.unbind(0)), group)
    assert table.units.shape[1] * 8 == 16, "pages of 8208 bytes are multiples of 16 bytes, not of 128"
    assert table.plane == 8


def test_a_stride_that_nothing_is_reached_with_does_not_cut_the_rows() -> None:
    group = KernelGroup((0,), planes=2, heads=1, head_size=64, dtype="bfloat16")
    page = torch.zeros(3 * 16 * 128, dtype=torch.bfloat16).as_strided((3, 1, 16, 128), (16 * 128, 7, 128, 1))
    (table,) = row_tables([page], group)
    assert table.units.shape == (3 * 16 * 2, 16)


def test_layers_share_a_table_as_far_as_they_share_an_allocation() -> None:
    group = KernelGroup(tuple(range(5)), planes=2, heads=1, head_size=4, dtype="float32")
    one, other = (torch.zeros(9, 2, 1, 4, 8) for _ in range(2))
    pages = [one[0], one[7], one[2], other[0], one[1]]
    assert [table.layers for table in row_tables(pages, group)] == [slice(0, 3), slice(3, 4), slice(4, 5)]
