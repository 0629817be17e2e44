"""A refusal says which field and what would be right, in words and in parts."""

from lmcache_server.protocol.errors import ErrorCode, ProtocolError, invalid


def test_an_error_reads_as_field_and_remedy_and_keeps_both_apart() -> None:
    error = invalid("port", "expected a number")
    assert str(error) == "port: expected a number"
    assert (error.code, error.field, error.message) == (ErrorCode.INVALID, "port", "expected a number")


def test_an_error_without_a_field_is_its_sentence_alone() -> None:
    assert str(ProtocolError(ErrorCode.INTERNAL, "a fault of the server")) == "a fault of the server"


def test_the_codes_on_the_wire_are_these() -> None:
    assert [code.value for code in ErrorCode] == [
        "invalid", "unknown_operation", "unknown_instance", "unknown_lease", "incompatible", "unsupported", "internal",
    ]  # fmt: skip
