"""A request's own wish to keep out of the cache: `"kv_transfer_params": {"no_store": true, "no_load": true}`.

Both are JSON booleans. A request cannot be refused where the connector sees it, so a value of another type is warned of
and taken as the wish: nothing is cached that somebody may have meant to keep private. Other keys are other connectors'.
"""

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["OptOut", "read_opt_out"]

logger = logging.getLogger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class OptOut:
    """What must not be done for a request."""

    no_store: bool = False
    no_load: bool = False


def read_opt_out(request: "Request") -> OptOut:
    """The request's wish."""
    parameters = request.kv_transfer_params
    if parameters is None:
        return OptOut()
    if not isinstance(parameters, Mapping):
        _complain(request, "kv_transfer_params", parameters, "an object")
        return OptOut(True, True)
    return OptOut(_flag(request, parameters, "no_store"), _flag(request, parameters, "no_load"))


def _flag(request: "Request", parameters: Mapping[str, Any], key: str) -> bool:
    value = parameters.get(key, False)
    if isinstance(value, bool):
        return value
    _complain(request, f"kv_transfer_params.{key}", value, "true or false (a JSON boolean)")
    return True


def _complain(request: "Request", field: str, value: object, expected: str) -> None:
    logger.warning(
        "request %s: %s: expected %s, got %s; the request is kept out of the cache as if it had said true",
        reprlib.repr(request.request_id),
        field,
        expected,
        reprlib.repr(value),
    )
