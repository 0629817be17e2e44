"""What holds for every test of the connector: its threads end with it, so none logs into the test that comes next."""

import threading
from collections.abc import Iterator

import pytest


def _heartbeats() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lmcache-heartbeat"}


@pytest.fixture(autouse=True, scope="module")
def no_link_outlives_its_module() -> Iterator[None]:
    """Module fixtures hold engines and rigs, so it is the module whose end counts."""
    before = _heartbeats()
    yield
    assert not _heartbeats() - before, "a connector or rig of this module was never closed"
