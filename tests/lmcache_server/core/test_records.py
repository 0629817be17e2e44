"""The records join nothing; what their defaults say is relied on."""

import dataclasses

from lmcache_server.core.records import Counters, Reservation, View
from lmcache_server.protocol.keys import Namespace
from lmcache_server.protocol.layout import Kind


def test_every_counter_starts_at_zero() -> None:
    assert set(dataclasses.asdict(Counters()).values()) == {0}


def test_a_reservation_is_not_framed_until_a_frame_comes() -> None:
    view = View(1, Namespace("m", "", Kind.KV, "l", 1), (64,), range(1))
    assert not Reservation(view, []).framed
