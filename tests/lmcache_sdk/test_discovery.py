import copy
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_sdk.cache_kind import LMCacheSDKCacheKind as CacheKind
from lmcache_sdk.discovery import Discovery, Engine, discover
from lmcache_sdk.errors import LMCacheSDKError, ServerUnavailable
from lmcache_server.protocol.codec import to_map
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.lmcache_sdk.http_double import HttpDouble, ok

LAYOUT = CacheLayout((KernelGroup((0, 1), 2, 2, 8, "bfloat16"),))
ENGINE = {
    "model_name": "m",
    "revision": "r1",
    "kind": "kv",
    "world_size": 1,
    "worker_id": 0,
    "block_size": 16,
    "layout": to_map(LAYOUT),
    "fingerprint": "whatever",
    "kv_cache_layout": {"num_layers": 2},
}
CONFIG = {"mp": {"chunk_size": 16, "port": 1}}
STATUS = {"server_id": "s1", "incarnation": 5, "cache_context_meta": {"11": ENGINE}}


def changed(document: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    result = copy.deepcopy(document)
    change(result)
    return result


def found(config: Any = CONFIG, status: Any = STATUS, kind: CacheKind = CacheKind.KV, model: str = "m") -> Discovery:
    with HttpDouble({"/config": ok(config), "/status": ok(status)}) as double:
        return discover(double.url, model, kind, 5)


def test_the_engine_of_a_model_is_found() -> None:
    assert found() == Discovery("s1", 16, Engine("m", "r1", Kind.KV, 1, 16, LAYOUT))


def test_engines_of_other_models_and_kinds_are_left_alone() -> None:
    others = {
        "1": ENGINE | {"model_name": "other", "layout": "of no interest"},
        "2": ENGINE | {"model_name": "m##query", "kind": "query"},
        "3": ENGINE,
    }
    assert found(status=STATUS | {"cache_context_meta": others}).engine.kind is Kind.KV


def test_ranks_of_one_engine_and_equal_engines_count_as_one() -> None:
    ranks = {str(rank): ENGINE | {"worker_id": rank, "world_size": 2, "block_size": 16 << rank} for rank in range(2)}
    assert found(status=STATUS | {"cache_context_meta": ranks}).engine.world_size == 2


def test_queries_are_found_under_the_name_of_their_cache() -> None:
    entry = ENGINE | {"model_name": "m##query", "kind": "query"}
    engine = found(status=STATUS | {"cache_context_meta": {"1": ENGINE, "2": entry}}, kind=CacheKind.QUERY).engine
    assert (engine.model_name, engine.kind) == ("m##query", Kind.QUERY)


def test_an_engine_that_caches_no_queries_is_told_how_to() -> None:
    with pytest.raises(LMCacheSDKError, match=r"'m' caches no queries; start it with .*transfer_intermediate_tensors"):
        found(kind=CacheKind.QUERY)


def test_an_unknown_model_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(LMCacheSDKError, match=r"no engine has registered 'x'; registered models: m$"):
        found(model="x")
    with pytest.raises(LMCacheSDKError, match=r"no engine has registered 'm'; registered models: none$"):
        found(status=STATUS | {"cache_context_meta": {}})


def other_dtype(entry: dict[str, Any]) -> None:
    entry["layout"]["groups"][0]["dtype"] = "float16"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (other_dtype, r"layout\.groups\[0\]\.dtype \('bfloat16' and 'float16'\)"),
        (lambda entry: entry.update(revision="r2"), r"revision \('r1' and 'r2'\)"),
        (lambda entry: entry.update(world_size=4), r"world_size \(1 and 4\)"),
        (
            lambda entry: entry["layout"]["groups"][0].update(layers=[0]),
            r"layout\.groups\[0\]\.layers \(\[0, 1\] and \[0\]\)",
        ),
    ],
)
def test_engines_that_differ_are_not_chosen_between(change: Callable[[dict[str, Any]], None], difference: str) -> None:
    entries = {"11": ENGINE, "12": changed(ENGINE, change)}
    with pytest.raises(LMCacheSDKError, match=f"engines of 'm' differ in {difference}"):
        found(status=STATUS | {"cache_context_meta": entries})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"/config: mp\.chunk_size: expected int, got nothing"),
        ({"mp": []}, r"mp\.chunk_size: expected int, got nothing"),
        (changed(CONFIG, lambda c: c["mp"].update(chunk_size="16")), "expected int, got str"),
        (changed(CONFIG, lambda c: c["mp"].update(chunk_size=True)), "expected int, got bool"),
        (changed(CONFIG, lambda c: c["mp"].update(chunk_size=0)), "impossible chunk_size 0"),
        ([], "expected a JSON object, got list"),
    ],
)
def test_a_wrong_config_is_refused_with_the_field(config: Any, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        found(config=config)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({"cache_context_meta": {}}, "/status: server_id: expected str, got nothing"),
        ({"server_id": "s1"}, "cache_context_meta: expected dict, got nothing"),
        (STATUS | {"cache_context_meta": []}, "cache_context_meta: expected dict, got list"),
        (STATUS | {"cache_context_meta": {"11": 5}}, "registered models: None"),
        (
            changed(STATUS, lambda s: s["cache_context_meta"]["11"].pop("layout")),
            r"cache_context_meta\[11\]\.layout: missing",
        ),
        (
            changed(STATUS, lambda s: s["cache_context_meta"]["11"].update(layout=[])),
            r"\[11\]\.layout: expected object",
        ),
        (
            changed(STATUS, lambda s: s["cache_context_meta"]["11"]["layout"]["groups"][0].update(dtype="float64")),
            r"layout\.groups\[0\]\.dtype: expected one of .* got 'float64'",
        ),
        (changed(STATUS, lambda s: s["cache_context_meta"]["11"].update(world_size="1")), r"world_size: expected int"),
        (
            changed(STATUS, lambda s: s["cache_context_meta"]["11"].update(world_size=0)),
            r"world_size: .* got 0",
        ),
        (changed(STATUS, lambda s: s["cache_context_meta"]["11"].pop("revision")), r"\.revision: missing"),
    ],
)
def test_a_wrong_status_is_refused_with_the_field(status: Any, message: str) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        found(status=status)


def test_a_server_error_and_a_hang_are_errors_within_the_timeout() -> None:
    failing = b"HTTP/1.1 500 Internal Server Error\r\n\r\n"
    with (
        HttpDouble({"/config": failing, "/status": ok(STATUS)}) as double,
        pytest.raises(LMCacheSDKError, match=r"GET http://.*/config: expected 200, got 500"),
    ):
        discover(double.url, "m", CacheKind.KV, 5)
    with (
        HttpDouble({"/config": ok(CONFIG), "/status": None}) as double,
        pytest.raises(ServerUnavailable, match="GET /status"),
    ):
        discover(double.url, "m", CacheKind.KV, 0.3)
