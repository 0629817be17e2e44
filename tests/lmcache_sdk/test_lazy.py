"""A sequence like any other, made item by item."""

import pytest

from lmcache_sdk.lazy import Lazy


def test_it_behaves_as_the_list_of_its_items() -> None:
    lazy, items = Lazy(4, lambda i: i * i), [0, 1, 4, 9]
    assert list(lazy) == items and len(lazy) == 4 and bool(lazy)
    assert (lazy[0], lazy[-1], lazy[1:3], lazy[::-1]) == (0, 9, [1, 4], items[::-1])
    assert not Lazy(0, str)
    for outside in (4, -5):
        with pytest.raises(IndexError):
            lazy[outside]


def test_an_item_is_made_when_it_is_asked_for_and_no_other() -> None:
    made: list[int] = []
    lazy = Lazy(1_000_000, made.append)
    assert made == []
    lazy[-2]
    assert made == [999_998]
