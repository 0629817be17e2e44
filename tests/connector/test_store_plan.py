"""What a step stores: whole chunks, all of whose blocks are still there, in the tables of every group."""

import pytest

from lmcache_connector.metadata import NULL_BLOCK
from lmcache_connector.store_plan import block_tables, first_whole_chunk
from tests.connector.rig import rig_config


@pytest.mark.parametrize(("tokens", "blocks"), [(0, (0, 0)), (1, (1, 1)), (16, (1, 2)), (17, (2, 3)), (64, (4, 8))])
def test_a_table_ends_with_the_block_of_the_last_token(tokens: int, blocks: tuple[int, int]) -> None:
    shape = rig_config("tcp://localhost:1", windows=(0, 40), block_size=(16, 8)).shape
    tables = block_tables(shape, (range(10, 20), range(20, 40)), tokens)
    assert tables == (tuple(range(10, 10 + blocks[0])), tuple(range(20, 20 + blocks[1])))


@pytest.mark.parametrize(("gone", "first"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_chunk_of_which_a_part_has_left_its_window_is_not_whole(gone: int, first: int) -> None:
    shape = rig_config("tcp://localhost:1", windows=(0, 40), block_size=8).shape
    tables = (tuple(range(1, 9)), (NULL_BLOCK,) * gone + tuple(range(11, 19 - gone)))
    assert first_whole_chunk(shape, tables, 16) == first


def test_where_no_block_leaves_every_chunk_is_whole() -> None:
    shape = rig_config("tcp://localhost:1").shape
    assert first_whole_chunk(shape, ((1, 2, 3, 4),), 16) == 0
