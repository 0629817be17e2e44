"""The table of states, pair by pair."""

import itertools

import pytest

from lmcache_server.core.memory_obj import TRANSITIONS, Event, IllegalTransition, MemoryObj, State, put_in_order
from lmcache_server.protocol.messages import pack_slot

LEGAL = {
    (State.RESERVED, Event.COMMIT): State.SEALED,
    (State.RESERVED, Event.ABORT): State.FREED,
    (State.RESERVED, Event.LOSE): State.QUARANTINED,
    (State.QUARANTINED, Event.ANSWER): State.FREED,
    (State.SEALED, Event.DROP): State.FREED,
}


def in_state(state: State) -> MemoryObj:
    obj = MemoryObj(4096, 100, 7)
    obj.state = state
    return obj


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=lambda x: x.value)
def test_every_pair_of_state_and_event_is_in_the_table_or_raises(state: State, event: Event) -> None:
    obj = in_state(state)
    if (state, event) in LEGAL:
        obj.apply(event)
        assert obj.state is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            obj.apply(event)
        assert obj.state is state


def test_the_table_holds_nothing_else() -> None:
    assert TRANSITIONS == LEGAL


def test_a_held_object_cannot_be_dropped() -> None:
    obj = in_state(State.SEALED)
    obj.refs = 1
    with pytest.raises(IllegalTransition, match="refs=1"):
        obj.apply(Event.DROP)
    obj.refs = 0
    obj.apply(Event.DROP)
    assert obj.state is State.FREED


def test_a_new_object_is_reserved_and_says_where_it_is() -> None:
    assert repr(MemoryObj(4096, 100, 7)) == "<MemoryObj reserved @4096+100 gen=7 refs=0>"


def test_objects_trade_places_with_those_of_their_length_only() -> None:
    lengths, places = [2, 3, 2, 3, 2], [9, 7, 4, 0, 1]
    objects = [MemoryObj(place, length, place + 100) for length, place in zip(lengths, places, strict=True)]
    put_in_order(objects)
    assert [obj.offset for obj in objects] == [1, 0, 4, 7, 9]
    assert [obj.length for obj in objects] == lengths
    assert [obj.generation - obj.offset for obj in objects] == [100] * 5
    assert [obj.slot for obj in objects] == [pack_slot(obj.offset, obj.generation) for obj in objects]
    put_in_order([])
