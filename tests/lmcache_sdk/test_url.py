import pytest

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.url import server_url


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("localhost:5555", "tcp://localhost:5555"),
        ("10.0.0.7:1", "tcp://10.0.0.7:1"),
        ("tcp://cache.example:65535", "tcp://cache.example:65535"),
        ("ipc:///run/lmcache.sock", "ipc:///run/lmcache.sock"),
        ("[::1]:5555", "tcp://[::1]:5555"),
    ],
)
def test_an_address_is_completed(given: str, full: str) -> None:
    assert server_url(given) == full


@pytest.mark.parametrize(
    "given",
    ["", "localhost", "localhost:", ":5555", "localhost:0", "localhost:65536", "localhost:http", "http://localhost:8080",
     "inproc://x", "ipc://", "tcp://", "tcp://host:1/path", "user@host:5", "a b:5", 5555, None],
)  # fmt: skip
def test_what_cannot_be_an_address_is_refused_by_name(given: object) -> None:
    with pytest.raises(LMCacheSDKError, match="url: expected host:port") as caught:
        server_url(given)  # type: ignore[arg-type]
    assert repr(given) in str(caught.value)
