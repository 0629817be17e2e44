"""The bytes of chunks as raw frames of messages, where client and server share no memory.

Frame i of a message is the bytes of its piece i. What was written so is published by the same commit, and only if all
of it arrived.
"""

from dataclasses import dataclass

__all__ = ["Piece", "Read", "ReadReply", "Write", "WriteReply"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one object: `part` of chunk `chunk`, from `offset` in the object, `length` bytes."""

    chunk: int
    part: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Write:
    """Fill reserved objects; raw frame i holds piece i. The pieces of an object arrive in order, without holes."""

    instance: int
    reservation: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class WriteReply:
    """Bytes taken."""

    written: int


@dataclass(frozen=True, slots=True)
class Read:
    """Fetch pieces of leased objects (`chunk` counts from the first chunk of the lease); raw frame i of the reply
    holds piece i.
    """

    instance: int
    lease: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ReadReply:
    """Bytes that follow as raw frames."""

    length: int
