"""What is kept is frozen from time to time; garbage is not, and what is let go of goes."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lmcache_server.io.freezer import EVERY, Freezer


class Thing:
    """Something that can be part of a cycle."""

    other: "Thing | None" = None


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_it_freezes_each_time_enough_was_made() -> None:
    made = 100
    freezer = Freezer(lambda: made)
    freezer.tick()
    made += EVERY - 1
    freezer.tick()
    assert gc.get_freeze_count() == 0
    made += 1
    freezer.tick()
    frozen = gc.get_freeze_count()
    assert frozen > 0
    kept = [Thing() for _ in range(1000)]
    freezer.tick()
    assert gc.get_freeze_count() <= frozen, "frozen things may go, none may come"
    made += EVERY
    freezer.tick()
    tracked = {id(thing) for thing in gc.get_objects()}
    assert not any(id(thing) in tracked for thing in kept)


def test_what_is_frozen_is_not_looked_at_again() -> None:
    kept = [Thing() for _ in range(1000)]
    Freezer(lambda: 0).freeze()
    tracked = {id(thing) for thing in gc.get_objects()}
    assert not any(id(thing) in tracked for thing in kept)


def test_garbage_is_collected_first_and_not_kept() -> None:
    thing = Thing()
    thing.other = thing
    gone = weakref.ref(thing)
    del thing
    assert gone() is not None
    Freezer(lambda: 0).freeze()
    assert gone() is None


def test_what_was_frozen_goes_with_its_last_reference() -> None:
    thing = Thing()
    gone = weakref.ref(thing)
    Freezer(lambda: 0).freeze()
    assert gone() is thing
    del thing
    assert gone() is None


def test_thawing_leaves_all_to_the_collector_again() -> None:
    Freezer(lambda: 0).freeze()
    Freezer.thaw()
    assert gc.get_freeze_count() == 0
