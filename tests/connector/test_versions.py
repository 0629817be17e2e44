"""A version that the tests have not seen costs one warning; one that lacks what we rely on ends the start."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_connector.mp_connector import LMCacheMPConnector
from lmcache_connector.versions import (
    HOOKS,
    TESTED,
    check_vllm,
    untested_version,
    warn_if_untested,
    warn_of_faults,
)


def test_this_version_is_in_the_table_of_those_that_the_tests_have_passed_with() -> None:
    assert untested_version() == "", f"if the whole suite passes with {vllm.__version__}, add it to TESTED"
    check_vllm()


def test_every_hook_that_we_implement_is_checked() -> None:
    ours = {name for name, value in vars(LMCacheMPConnector).items() if callable(getattr(value, "__func__", value))}
    assert {name for name in ours if hasattr(KVConnectorBase_V1, name)} <= set(HOOKS)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0.0rc1", "dev"])
def test_another_version_costs_one_warning_that_says_what_is_unknown(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level(logging.WARNING):
        warn_if_untested()
    (record,) = caplog.records
    for words in (version, TESTED[0], "layout of KV pages", "unknown"):
        assert words in record.getMessage()


@pytest.mark.parametrize("version", [TESTED[0], TESTED[0] + "+cpu"])
def test_a_tested_version_costs_none(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level(logging.WARNING):
        warn_if_untested()
    assert caplog.records == []


def other_parameters(self: Any, request: Any, num_computed_tokens: int, tier: str) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        (KVConnectorBase_V1, "take_events", None, "no hook take_events"),
        (KVConnectorBase_V1, "get_num_new_matched_tokens", other_parameters, r"takes \(request, .*, tier\), not \("),
        (base, "KVConnectorWorkerMetadata", None, "v1.base has no KVConnectorWorkerMetadata"),
        (metrics.KVConnectorStats, "aggregate", None, "KVConnectorStats has no aggregate"),
        (CacheHitSource, "HOST", None, "CacheHitSource has no HOST"),
    ],
)
def test_a_vllm_that_lacks_what_we_rely_on_is_refused_at_the_start_by_the_name_of_that(
    owner: Any, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setattr(owner, name, value)
    elif owner is CacheHitSource:
        monkeypatch.setattr("vllm.v1.metrics.cache_hit_source.CacheHitSource", type("CacheHitSource", (), {}))
    else:
        monkeypatch.delattr(owner, name)
    monkeypatch.delitem(sys.modules, "lmcache_connector.mp_connector")
    chosen = KVTransferConfig(
        kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_module_path="lmcache_connector.mp_connector"
    )
    with pytest.raises(ValueError, match=rf"does not work with vLLM {vllm.__version__}.*{words}.*{TESTED[0]}"):
        KVConnectorFactory.get_connector_class(chosen)


@pytest.mark.parametrize(("device", "adapters", "warned"), [("cpu", True, 1), ("cuda", True, 0), ("cpu", False, 0)])
def test_adapters_on_a_cpu_are_warned_of(
    caplog: pytest.LogCaptureFixture, device: str, adapters: bool, warned: int
) -> None:
    config = SimpleNamespace(
        lora_config=SimpleNamespace(max_loras=2) if adapters else None,
        device_config=SimpleNamespace(device_type=device),
    )
    with caplog.at_level("WARNING", logger="vllm"):
        warn_of_faults(config)
    assert caplog.text.count("raise --max-loras to one more") == warned
