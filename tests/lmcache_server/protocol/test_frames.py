"""The messages that carry bytes as frames name every byte by its object and place."""

import pytest

from lmcache_server.protocol.codec import decode, encode
from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.frames import Piece, Read, Write


@pytest.mark.parametrize("message", [Write(1, 2, (Piece(0, 1, 64, 4096),)), Read(1, 2, (Piece(3, 0, 0, 0),))])
def test_pieces_travel_as_they_are(message: Write | Read) -> None:
    assert decode(type(message), encode(message)) == message


def test_a_piece_without_a_place_is_refused_by_its_field() -> None:
    with pytest.raises(ProtocolError, match="offset"):
        decode(Piece, encode(Piece(0, 1, 64, 4096)).replace(b"offset", b"0ffset"))
