"""What every example needs: `lmcache server`, a vLLM with the connector beside it, and where to find them.

    setup = start("my_example")
    cache = kvcache.connect(setup.url, setup.http_url, setup.model_name)
    ...
    setup.stop()

An example that ends early, by an error or by Ctrl-C, stops what it started all the same.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from _demo_engine import Engine
from _demo_process import ChildProcess, free_port
from tiny_model import build_tiny_model

from lmcache_sdk import LMCacheSDKContext
from lmcache_sdk.edits import Rotary

CACHE = Path(__file__).resolve().parent.parent / ".cache"
CHUNK_SIZE = 256
ENGINE_ARGUMENTS = ("--max-model-len", "8192")
COMMIT_SECONDS = 30.0


@dataclass
class Setup:
    """A server and an engine that use each other."""

    model: Path
    engine: Engine
    url: str
    http_url: str
    running: ExitStack = field(default_factory=ExitStack)

    @property
    def model_name(self) -> str:
        """What engine and server call the model."""
        return str(self.model)

    @property
    def rotary(self) -> Rotary:
        """How the model's keys are turned."""
        return Rotary.from_config(json.loads((self.model / "config.json").read_text()))

    def clear(self) -> None:
        """Make the server and the engine forget all KV."""
        httpx.post(f"{self.http_url}/cache/clear", timeout=10.0).raise_for_status()
        self.engine.reset_prefix_cache()

    def stop(self) -> None:
        """End the engine and the server."""
        self.running.close()


def start(name: str, *, queries: bool = False) -> Setup:
    """Start a server and an engine for a tiny model of random weights; their logs are in .cache/`name`.

    With `queries` the engine stores the queries of prompts too. Takes about half a minute. Raises ProcessFailed with a
    log's end if one of them does not start.
    """
    if threading.current_thread() is threading.main_thread():
        # As Ctrl-C does: unwind, so that what was started is stopped.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as running:
        model = demo_model()
        port, http_port = free_port(), free_port()
        print(f"starting lmcache server on port {port} and vLLM; it takes about half a minute", flush=True)
        server = running.enter_context(start_server(name, port, http_port))
        log = CACHE / name / "vllm.log"
        config = connector(port, queries=queries)
        engine = running.enter_context(Engine(model, log, connector=config, arguments=ENGINE_ARGUMENTS))
        server.wait_until_answers(f"http://127.0.0.1:{http_port}/healthcheck", 20.0)
        engine.wait_until_ready()
        setup = Setup(model, engine, f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", running.pop_all())
    atexit.register(setup.stop)
    return setup


def demo_model() -> Path:
    """A Qwen3 with 8 layers, 8 query heads and 4 key heads of random weights in bfloat16; built on first use."""
    return build_tiny_model(CACHE / "models" / "demo", layers=8, hidden=512)


def start_server(name: str, port: int, http_port: int) -> ChildProcess:
    """`lmcache server` with a pool of its own."""
    command = [str(Path(sys.executable).parent / "lmcache"), "server", "--l1-size-gb", "1"]
    command += ["--chunk-size", str(CHUNK_SIZE), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-port", str(http_port), "--shm-name", f"{name}_{os.getpid()}"]
    return ChildProcess("lmcache server", command, CACHE / name / "server.log")


def connector(port: int, *, queries: bool = False) -> dict[str, object]:
    """vLLM's --kv-transfer-config."""
    extra: dict[str, object] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    if queries:
        extra["lmcache.mp.transfer_intermediate_tensors"] = True
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        # vLLM's own default fails a request whose KV is lost while it loads, as when the server is killed.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def wait_until_cached(cache: LMCacheSDKContext, prompt: list[int]) -> int:
    """Wait for the prompt's whole chunks; returns how many tokens these are.

    An engine answers before its KV is committed; the commit follows within moments. Raises TimeoutError without it.
    """
    whole = len(prompt) // cache.chunk_size * cache.chunk_size
    deadline = time.monotonic() + COMMIT_SECONDS
    while (found := cache.lookup(prompt)) < whole:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} of {whole} tokens are cached {COMMIT_SECONDS:.0f} s after the prompt")
        time.sleep(0.01)
    return whole
