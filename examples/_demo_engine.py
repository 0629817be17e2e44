"""A vLLM engine on the CPU behind its OpenAI endpoint, as its own process, and a client that asks it for completions.

Prompts are token ids, and token ids come back: nothing here depends on a tokenizer.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from _demo_process import ChildProcess, free_port

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_COLOR": "0",
    # Adds POST /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
    # The first request with logprobs would otherwise compile a C++ helper, for up to 20 s.
    "TORCHDYNAMO_DISABLE": "1",
}
"""What vLLM needs on a machine without an accelerator and without a network."""

START_SECONDS = 180.0

WARM_UP = (1, 2, 3, 4, 5, 6, 7, 8)
"""The first prompt of an engine. On a CPU with AMX, vLLM 0.32 dies of an illegal instruction if its first prompt has
fewer than five tokens; a longer one makes a library ask for the right to use AMX, for the life of the process."""


@dataclass(frozen=True)
class Completion:
    """The engine's answer: the sampled tokens, for each the logprobs of the likeliest tokens, and how it came about."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached_tokens: int
    """Prompt tokens whose KV the engine did not compute: its own cache's and the connector's."""
    ttft_ms: float


class EngineFailed(RuntimeError):
    """The engine refused a request, or failed at it."""


class Engine:
    """`python -m vllm.entrypoints.openai.api_server`, running until `stop` or the end of the `with` block."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self.model = str(model)
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", weights_dtype(model)]
        command += ["--enforce-eager", "--return-tokens-as-token-ids", "--enable-prompt-tokens-details", *arguments]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        self.process = ChildProcess("vLLM", command, log, {**ENVIRONMENT, **(environment or {})})
        self._http = httpx.Client(base_url=self.url, timeout=120.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Return when the engine has served a first prompt; raise ProcessFailed with its log otherwise."""
        self.process.wait_until_answers(f"{self.url}/health", seconds)
        self.complete(WARM_UP)

    def stop(self) -> None:
        """End the engine and its workers."""
        self._http.close()
        self.process.stop()

    def reset_prefix_cache(self) -> None:
        """Make the engine forget its own cached KV, not the connector's; waits while blocks are still held."""
        deadline = time.monotonic() + 10.0
        while not self._http.post("/reset_prefix_cache").raise_for_status().json()["success"]:
            if time.monotonic() > deadline:
                raise TimeoutError("the engine still holds blocks 10 s after its last request")
            time.sleep(0.02)

    def counter(self, name: str) -> int:
        """A counter of the engine's own (`prompt_tokens`, `external_prefix_cache_hits`, ...) since it started."""
        return int(self.metric(f"{name}_total"))

    def metric(self, name: str) -> float:
        """One of the engine's metrics by its name without `vllm:`, over all labels. LookupError if it has none."""
        text = self._http.get("/metrics").raise_for_status().text
        values = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        if not values:
            raise LookupError(f"{self.url}/metrics has no vllm:{name}")
        return sum(map(float, values))

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int = 1, cache_salt: str = "", top: int = 5, **sampling: Any
    ) -> Completion:
        """Greedy completion of a prompt of token ids, streamed, with the `top` likeliest tokens' logprobs for each."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": top,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": cache_salt} if cache_salt else {}),
            **sampling,
        }
        tokens: list[int] = []
        logprobs: list[dict[int, float]] = []
        usage: dict[str, Any] = {}
        first = 0.0
        start = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise EngineFailed(f"vLLM answered {response.status_code}: {response.read().decode(errors='replace')}")
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    first = first or time.perf_counter()
                    tokens += [_token(name) for name in choice["logprobs"]["tokens"]]
                    logprobs += [
                        {_token(n): p for n, p in likeliest.items()} for likeliest in choice["logprobs"]["top_logprobs"]
                    ]
        details = usage.get("prompt_tokens_details") or {}
        return Completion(tuple(tokens), tuple(logprobs), int(details.get("cached_tokens") or 0), (first - start) * 1e3)


def weights_dtype(model: Path) -> str:
    """The dtype that `model` was saved in. vLLM's own choice would run a float32 model in bfloat16."""
    return str(json.loads((model / "config.json").read_text())["dtype"])


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream; raises EngineFailed for one that reports an error."""
    for line in _lines(response):
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise EngineFailed(f"vLLM failed while streaming: {event['error']}")
        yield event


def _lines(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream; httpx's own are cut at every character that Unicode calls a line's end, also in a text."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in lines)


def _token(name: str) -> int:
    """The id in "token_id:17", which is how vLLM names tokens with --return-tokens-as-token-ids."""
    return int(name.removeprefix("token_id:"))
