import pickle

import pytest

from lmcache_sdk.errors import (
    ConnectionLost,
    LMCacheRequestStreamError,
    LMCacheSDKError,
    ServerRefused,
    ServerUnavailable,
    StaleEdit,
)
from lmcache_server.protocol.errors import ErrorCode

ERRORS = [
    (LMCacheSDKError("kv: wrong"), "kv: wrong"),
    (ServerUnavailable("v1/hello", "tcp://h:1", 2.5), "no answer to v1/hello from tcp://h:1 within 2.5 s"),
    (
        ServerUnavailable("v1/hello", "tcp://h:1", 60.0, "away"),
        "no answer to v1/hello from tcp://h:1 within 60 s: away",
    ),
    (ServerUnavailable("v1/hello", "tcp://h:1", 4.99999), "no answer to v1/hello from tcp://h:1 within 5 s"),
    (ServerUnavailable("GET /config", "http://h:1", 0.0, "away"), "no answer to GET /config from http://h:1: away"),
    (ConnectionLost("v1/end", "tcp://h:1", 1.0), "the connection to tcp://h:1 was lost while waiting for v1/end"),
    (ServerRefused(ErrorCode.INVALID, "too long", "tokens"), "the server refused (invalid): tokens: too long"),
    (ServerRefused(ErrorCode.INTERNAL, "a fault"), "the server refused (internal): a fault"),
    (LMCacheRequestStreamError("no engine", "id 1"), "request stream id 1: no engine"),
    (StaleEdit("too late", "id 1"), "request stream id 1: too late"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_errors_say_what_happened(error: LMCacheSDKError, text: str) -> None:
    assert str(error) == text
    assert isinstance(error, LMCacheSDKError)


@pytest.mark.parametrize("error", [error for error, _ in ERRORS])
def test_errors_can_cross_to_another_process(error: LMCacheSDKError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
