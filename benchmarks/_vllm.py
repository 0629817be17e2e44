"""vLLM engines for benchmarks, as processes: all run the same 12-layer model of random weights, on the CPU or on CUDA.

An engine has the connector to our server, or LMCache 0.5.6's own adapter to LMCache's own server, or none.
ON CUDA THIS HAS NOT RUN YET.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._peer import ENVIRONMENT, PYTHON

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

from _demo_engine import Engine  # noqa: E402
from tiny_model import build_tiny_model  # noqa: E402

__all__ = ["Engine", "build_model", "engine", "prompt", "ready"]

BLOCK = 128
"""Tokens per block: vLLM's own choice on a CPU, so that the engines of all devices do the same."""
GPU_OPTIONS = ("--gpu-memory-utilization", "0.25")
"""Three engines share one device."""


def build_model() -> Path:
    """The model of every benchmark: 12 KB of KV per token."""
    return build_tiny_model(ROOT / ".cache" / "models" / "benchmark", layers=12, hidden=512)


def engine(
    model: Path, name: str, port: int | None, longest: int, *arguments: str, peer: bool = False, gpu: bool = False
) -> Engine:
    """An engine for prompts of at most `longest` tokens, with the connector to the server at `port` if there is one;
    with `peer` it is LMCache's adapter, in LMCache's environment.
    """
    log = ROOT / ".cache" / "benchmarks" / f"{name}-{os.getpid()}.log"
    options = [*options_of(longest, gpu), *arguments]
    settings: dict[str, Any] = {"connector": connector_to(port) if port else None, "arguments": options}
    return Engine(model, log, **settings, **({"python": PYTHON, "environment": ENVIRONMENT} if peer else {}))


def options_of(longest: int, gpu: bool) -> list[str]:
    """vLLM's options."""
    limits = ["--max-model-len", str(longest + 64), "--max-num-batched-tokens", "2048", "--block-size", str(BLOCK)]
    return [*limits, *(GPU_OPTIONS if gpu else ())]


def connector_to(port: int) -> dict[str, Any]:
    """The `--kv-transfer-config`, the same for both sides."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def ready(engines: Iterable[Engine]) -> None:
    """Return when all of them, which were started at once, have served a prompt."""
    for one in engines:
        one.wait_until_ready(400.0)


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no chunk with those of other seeds."""
    return [seed % 400 + 50, seed // 400 + 50, *((seed * 7 + i * i) % 500 for i in range(tokens - 2))]
