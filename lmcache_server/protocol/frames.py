"""The bytes of chunks as raw frames of messages, where client and server share no memory.

Frame i of a message is the bytes of its piece i. What was written so is published by the same commit, and only if all
of it arrived.
"""

from lmcache_server.protocol.codec import Many, Message

__all__ = ["Piece", "Read", "ReadReply", "Write", "WriteReply"]


class Piece(Message, frozen=True):
    """A run of bytes of one object: `part` of chunk `chunk`, from `offset` in the object, `length` bytes."""

    chunk: int
    part: int
    offset: int
    length: int


class Write(Message, frozen=True):
    """Fill reserved objects; raw frame i holds piece i. The pieces of an object arrive in order, without holes."""

    instance: int
    reservation: int
    pieces: Many[Piece]


class WriteReply(Message, frozen=True):
    """Bytes taken."""

    written: int


class Read(Message, frozen=True):
    """Fetch pieces of leased objects (`chunk` counts from the first chunk of the lease); raw frame i of the reply
    holds piece i.
    """

    instance: int
    lease: int
    pieces: Many[Piece]


class ReadReply(Message, frozen=True):
    """Bytes that follow as raw frames."""

    length: int
