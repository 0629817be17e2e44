import importlib
import subprocess
import sys

import pytest

import lmcache_sdk

PROGRAM = """
import time, torch
start = time.perf_counter()
import sys, lmcache_sdk
print(time.perf_counter() - start)
print(sorted(name for name in sys.modules if name.split('.')[0] in {'fastapi', 'uvicorn', 'starlette', 'vllm', 'yaml'}))
print(sorted(name for name in sys.modules if name.startswith('lmcache_server.')))
"""


def test_importing_the_client_is_quick_and_loads_no_server_and_no_engine() -> None:
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    seconds, foreign, ours = child.stdout.splitlines()
    assert float(seconds) < 2.0
    assert foreign == "[]"
    assert all(name.startswith("lmcache_server.protocol") for name in eval(ours))


def test_the_root_is_made_of_what_the_modules_export() -> None:
    modules = [
        importlib.import_module(f"lmcache_sdk.{name}") for name in ("cache_kind", "context", "errors", "reading")
    ]
    exported = {name: getattr(module, name) for module in modules for name in module.__all__}
    for name in ("CacheView", "LMCacheSDKCacheKind", "LMCacheSDKContext", "LMCacheSDKError", "ModifyFnType",
                 "ConnectionLost", "ServerRefused", "ServerUnavailable"):  # fmt: skip
        assert name in lmcache_sdk.__all__
        assert getattr(lmcache_sdk, name) is exported[name]
    assert all(hasattr(lmcache_sdk, name) for name in lmcache_sdk.__all__)


@pytest.mark.parametrize("name", ["kvcache", "qcache"])
def test_each_kind_has_a_module_that_connects(name: str) -> None:
    module = getattr(lmcache_sdk, name)
    assert "connect" in module.__all__
    assert name in lmcache_sdk.__all__
