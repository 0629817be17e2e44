"""A registration that could not work is refused by its field."""

from typing import Any

import msgspec
import pytest

from lmcache_server.protocol.errors import ProtocolError
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from lmcache_server.protocol.messages import PROTOCOL_VERSION, Hello, Register, Transport

KV = CacheLayout((KernelGroup((0,), 2, 1, 8, "float32"),))
ONE_PLANE = CacheLayout((KernelGroup((0,), 1, 1, 8, "float32"),))
REGISTER = Register("worker", "a/model", "", Kind.KV, 2, 1, KV, 16)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"role": ""}, "role"),
        ({"role": "r" * 65}, "role"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": "m" * 1025}, "model_name"),
        ({"revision": "r" * 1025}, "revision"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 1025}, "world_size"),
        ({"worker_id": 2}, "worker_id"),
        ({"worker_id": -1}, "worker_id"),
        ({"block_size": 0}, "block_size"),
        ({"world_size": 1024, "layout": CacheLayout(KV.groups * 5)}, "world_size"),
        ({"kind": Kind.QUERY}, "layout.groups"),
    ],
)
def test_an_impossible_registration_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        msgspec.structs.replace(REGISTER, **change)
    assert raised.value.field == field


def test_a_client_of_all_shards_and_a_query_cache_may_register() -> None:
    assert msgspec.structs.replace(REGISTER, worker_id=None).worker_id is None
    assert msgspec.structs.replace(REGISTER, kind=Kind.QUERY, layout=ONE_PLANE).kind is Kind.QUERY


def test_the_words_on_the_wire_are_these() -> None:
    assert (Hello().protocol, PROTOCOL_VERSION) == (1, 1)
    assert [transport.value for transport in Transport] == ["shm", "frames"]
