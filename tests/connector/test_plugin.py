"""The plain name `LMCacheMPConnector` means ours, in every process of vLLM."""

from importlib.metadata import entry_points

import pytest

factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory


def test_the_entry_point_puts_ours_into_vllms_registry_however_often_it_runs() -> None:
    (entry,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "lmcache")
    register = entry.load()
    register()
    register()
    assert factory.get_connector_class_by_name("LMCacheMPConnector").__module__ == "lmcache_connector.mp_connector"


def test_the_class_is_found_by_module_path_too() -> None:
    from vllm.config import KVTransferConfig

    by_path = KVTransferConfig(
        kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_module_path="lmcache_connector.mp_connector"
    )
    assert factory.get_connector_class(by_path).__module__ == "lmcache_connector.mp_connector"
