"""vLLM engines on the CPU for benchmarks: all run the same 12-layer model of random weights, as processes."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

from _demo_engine import Engine  # noqa: E402
from tiny_model import build_tiny_model  # noqa: E402

__all__ = ["Engine", "build_model", "engine", "prompt"]


def build_model() -> Path:
    """The model of every benchmark: 12 KB of KV per token."""
    return build_tiny_model(ROOT / ".cache" / "models" / "benchmark", layers=12, hidden=512)


def engine(model: Path, name: str, port: int | None, longest: int, *arguments: str) -> Engine:
    """An engine for prompts of at most `longest` tokens, with the connector to the server at `port` if there is one."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    log = ROOT / ".cache" / "benchmarks" / f"{name}.log"
    limits = ["--max-model-len", str(longest + 64), "--max-num-batched-tokens", "2048"]
    return Engine(model, log, connector=connector if port else None, arguments=[*limits, *arguments])


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no chunk with those of other seeds."""
    return [seed % 400 + 50, seed // 400 + 50, *((seed * 7 + i * i) % 500 for i in range(tokens - 2))]
