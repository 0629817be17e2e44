"""The messages of the events: they survive the wire, and a limit that is none is refused."""

import pytest

from lmcache_server.protocol.codec import decode, encode
from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.events import MAX_EVENTS, ChunkEvent, ChunkEventKind, Events, EventsReply


@pytest.mark.parametrize("after", [None, -3, 0, 2**62])
def test_a_question_survives_the_wire(after: int | None) -> None:
    assert decode(Events, encode(Events(7, after, 5))) == Events(7, after, 5)


def test_a_reply_survives_the_wire() -> None:
    events = (
        ChunkEvent(ChunkEventKind.STORED, b"\x01" * 16, "salt", b"\x02" * 16, b"\0" * 64, b"extra"),
        ChunkEvent(ChunkEventKind.REMOVED, b"\x01" * 16),
        ChunkEvent(ChunkEventKind.CLEARED),
    )
    reply = EventsReply(events, 3, lost=False, more=True)
    assert decode(EventsReply, encode(reply)) == reply


@pytest.mark.parametrize("limit", [0, -1, MAX_EVENTS + 1])
def test_a_limit_that_is_none_is_refused_with_what_is_expected(limit: int) -> None:
    with pytest.raises(ProtocolError, match=f"expected 1 to {MAX_EVENTS} events, got {limit}") as raised:
        Events(7, None, limit)
    assert raised.value.field == "limit"
