"""The `lmcache.*` keys: honoured, harmless, or refused with a sentence."""

import re
from typing import Any

import pytest

from lmcache_connector.settings import KEYS, MAX_TIMEOUT, Settings, read_settings


def test_without_any_key_the_defaults_hold() -> None:
    assert read_settings({}) == Settings(
        url="tcp://localhost:5555", timeout=2.0, heartbeat_interval=2.0, save_decode_cache=False
    )


def test_keys_of_other_connectors_are_not_ours_to_judge() -> None:
    assert read_settings({"discard_partial_chunks": True, "lmcachelike": 1}) == Settings()


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ({"lmcache.mp.port": 6555}, "tcp://localhost:6555"),
        ({"lmcache.mp.port": "6555", "lmcache.mp.host": "10.0.0.1"}, "tcp://10.0.0.1:6555"),
        ({"lmcache.mp.host": "tcp://cache.internal/"}, "tcp://cache.internal:5555"),
        ({"lmcache.mp.server_urls": ["tcp://cache:7000"]}, "tcp://cache:7000"),
        ({"lmcache.mp.server_urls": "cache:7000"}, "tcp://cache:7000"),
    ],
)
def test_the_server_is_found_by_host_and_port_or_by_one_address(config: dict[str, Any], url: str) -> None:
    assert read_settings(config).url == url


def test_a_generous_timeout_never_lets_a_hook_of_the_engine_wait_long() -> None:
    assert read_settings({"lmcache.mp.mq_timeout": 300.0}).timeout == MAX_TIMEOUT
    assert read_settings({"lmcache.mp.mq_timeout": 0.5}).timeout == 0.5


def test_keys_that_ask_for_what_happens_anyway_are_accepted() -> None:
    harmless = {
        "lmcache.mp.nonblocking_lookup_status": "yes",
        "lmcache.mp.mp_transfer_mode": "engine_driven",
        "lmcache.mp.isolated_ipc": False,
        "lmcache.mp.eager_prefetch": "false",
        "lmcache.mp.lazy_offload": "off",
        "lmcache.mp.lazy_offload_threshold": "100",
        "lmcache.mp.transfer_intermediate_tensors": 0,
        "lmcache.mp.q.ring_depth": 2,
        "lmcache.q.ring_depth": "2",
        "lmcache.q.ring_blocks": None,
        "lmcache.mp.autostart.server_args": "",
    }
    assert read_settings(harmless) == Settings()


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("lmcache.mp.prot", 6555, "did you mean lmcache.mp.port?"),
        ("lmcache.nothing.like.it.at.all", 1, "known are lmcache.mp.host"),
        ("lmcache.mp.port", 0, "from 1 to 65535"),
        ("lmcache.mp.port", 65536, "from 1 to 65535"),
        ("lmcache.mp.port", 1.5, "from 1 to 65535"),
        ("lmcache.mp.port", "http", "expected a number"),
        ("lmcache.mp.port", True, "expected a number"),
        ("lmcache.mp.host", "", "expected a host name"),
        ("lmcache.mp.host", "udp://here", "no address"),
        ("lmcache.mp.mq_timeout", 0, "above 0"),
        ("lmcache.mp.mq_timeout", float("nan"), "above 0"),
        ("lmcache.mp.heartbeat_interval", -1, "above 0"),
        ("lmcache.mp.heartbeat_interval", float("inf"), "above 0"),
        ("lmcache.mp.save_decode_cache", "true", "a JSON boolean"),
        ("lmcache.mp.server_urls", ["a:1", "b:2"], "2 servers are not supported yet"),
        ("lmcache.mp.server_urls", 7, "the address of one server"),
        ("lmcache.mp.lazy_offload", True, "remove the key or set it to False"),
        ("lmcache.mp.mp_transfer_mode", "lmcache_driven", "remove the key or set it to 'auto'"),
        ("lmcache.mp.transfer_intermediate_tensors", "both", "expected true or false"),
        ("lmcache.mp.transfer_intermediate_tensors", 2, "expected true or false"),
        ("lmcache.mp.q.ring_depth", 0, "a whole number from 1"),
        ("lmcache.q.ring_depth", 1.5, "a whole number from 1"),
        ("lmcache.mp.q.ring_depth", None, "expected a number"),
        ("lmcache.q.ring_blocks", -1, "a whole number from 1"),
        ("lmcache.mp.q.ring_blocks", True, "expected a number"),
        ("lmcache.mp.autostart", "on", "start the server yourself"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_key_value_and_remedy(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)) as refusal:
        read_settings({key: value})
    assert key in str(refusal.value)


@pytest.mark.parametrize("on", [True, "true", 1, "on"])
def test_queries_are_captured_if_asked_for(on: Any) -> None:
    assert read_settings({"lmcache.mp.transfer_intermediate_tensors": on}) == Settings(transfer_queries=True)


@pytest.mark.parametrize(("name", "field"), [("ring_depth", "ring_depth"), ("ring_blocks", "ring_blocks")])
def test_both_spellings_of_the_ring_are_one_setting(name: str, field: str) -> None:
    long, short = f"lmcache.mp.q.{name}", f"lmcache.q.{name}"
    for keys in ([long], [short], [long, short]):
        assert getattr(read_settings(dict.fromkeys(keys, 3)), field) == 3
    with pytest.raises(ValueError, match=re.escape(f"{short}: 4, but {long}: 3; they are the same, remove one")):
        read_settings({long: 3, short: 4})


def test_every_key_of_the_documents_is_known() -> None:
    documented = """
        server_urls host port mq_timeout heartbeat_interval nonblocking_lookup_status mp_transfer_mode isolated_ipc
        use_vmm_api hash_algorithm save_decode_cache eager_prefetch lazy_offload lazy_offload_policy
        lazy_offload_horizon_steps lazy_offload_max_drain_per_step lazy_offload_max_deferral_seconds
        lazy_offload_threshold lazy_offload_select_count transfer_intermediate_tensors autostart autostart.server_args
        autostart.wait_timeout
    """
    ring = {"lmcache.q.ring_depth", "lmcache.q.ring_blocks", "lmcache.mp.q.ring_depth"}
    assert {f"lmcache.mp.{name}" for name in documented.split()} | ring <= KEYS.keys()
