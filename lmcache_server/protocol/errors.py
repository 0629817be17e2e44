"""What may go wrong, as a closed list that travels on the wire.

An expected outcome (a miss, a lost reservation, fewer slots than asked for) is part of a reply and never an error.
An error says which field was wrong and what would be right; the sender can always read it from the reply.
"""

from enum import StrEnum

__all__ = ["ErrorCode", "ProtocolError"]


class ErrorCode(StrEnum):
    """Why a request was refused; each value names what its sender can do about it."""

    INVALID = "invalid"
    """A field has the wrong type or value: correct the request."""
    UNKNOWN_OPERATION = "unknown_operation"
    """No such operation in this dialect: check the protocol version."""
    UNKNOWN_INSTANCE = "unknown_instance"
    """The server does not know this instance (it restarted, or reaped it): register again."""
    UNKNOWN_LEASE = "unknown_lease"
    """The lease ended or was never this instance's: acquire or reserve again."""
    INCOMPATIBLE = "incompatible"
    """Well-formed, but cannot work with this server: change the configuration of one side."""
    UNSUPPORTED = "unsupported"
    """Known to the protocol, not offered by this server as it is configured."""
    INTERNAL = "internal"
    """A fault of the server, logged there with its trace: retry later or report it."""


class ProtocolError(ValueError):
    """A request that is refused: `code`, the `field` at fault (empty if none) and a sentence that names the remedy.

    As a ValueError it may be raised by what a message checks of itself: the codec adds where in a message that was.
    """

    def __init__(self, code: ErrorCode, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = code
        self.message = message
        self.field = field


def invalid(field: str, message: str) -> ProtocolError:
    """The error of a bad field."""
    return ProtocolError(ErrorCode.INVALID, message, field)
