"""A real vLLM on the CPU for tests: behind its OpenAI endpoint as a process, or inside this one.

Both take the connector's configuration, or None for the oracle without a connector. Use the process to see what a user
sees and to survive kills; use the in-process engine to look at the connector and at the paged KV.

    with engine_process(model, tmp_path / "vllm.log", connector=CONFIG) as engine:
        answer = engine.complete(tokens, max_tokens=4)        # .tokens .logprobs .cached_tokens

    with in_process_engine(model, connector=CONFIG) as engine:
        answer = engine.complete(tokens, max_tokens=4)
        engine.worker_connector, engine.scheduler_connector, engine.kv_caches
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _demo_engine import ENVIRONMENT, WARM_UP, Completion, Engine, weights_dtype

import lmcache_connector.cpu_tiles  # noqa: F401 - lets a process that has llvmlite start another engine
from tests.models import tiny_model

_set_num_threads = torch.set_num_threads
"""torch's own, which vLLM replaces. An engine that drafts takes all cores, for this process and for good; its threads
spin, so that whatever else runs beside them takes ten times as long.
"""

__all__ = [
    "Completion",
    "Engine",
    "InProcessEngine",
    "completion_of",
    "connector_config",
    "engine_process",
    "in_process_engine",
    "tiny_model",
]


def connector_config(port: int, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` for a server on the loopback; `extra` are further `lmcache.mp.` settings."""
    settings = {f"lmcache.mp.{key}": value for key, value in extra.items()}
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, **settings},
    }


@contextmanager
def engine_process(
    model: Path,
    log: Path,
    *,
    connector: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """A ready engine behind its OpenAI endpoint; ends with the block. Raises ProcessFailed with the log's end."""
    with Engine(model, log, connector=connector, arguments=arguments, environment=environment) as engine:
        engine.wait_until_ready()
        yield engine


class InProcessEngine:
    """A vLLM engine whose scheduler, worker and connector halves live in this process."""

    def __init__(self, model: Path, connector: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.llm = LLM(
            model=str(model),
            dtype=weights_dtype(model),
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(**connector) if connector is not None else None,
            **{"max_model_len": 4096, "max_num_seqs": 16, "disable_log_stats": True, **options},
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.complete(WARM_UP)

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int = 1, cache_salt: str = "", top: int = 5, **sampling: Any
    ) -> Completion:
        """Greedy completion of one prompt of token ids."""
        return self.complete_all([prompt], max_tokens=max_tokens, cache_salt=cache_salt, top=top, **sampling)[0]

    def complete_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 1,
        cache_salt: str = "",
        top: int = 5,
        **sampling: Any,
    ) -> list[Completion]:
        """Greedy completions of several prompts, submitted at once."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            **{"temperature": 0.0, "ignore_eos": True, **sampling}, max_tokens=max_tokens, logprobs=top
        )
        salt = {"cache_salt": cache_salt} if cache_salt else {}
        inputs: Any = [{"prompt_token_ids": list(prompt), **salt} for prompt in prompts]
        return [completion_of(output) for output in self.llm.generate(inputs, parameters, use_tqdm=False)]

    def reset_prefix_cache(self) -> None:
        """Make the engine forget its own cached KV, not the connector's."""
        assert self.llm.reset_prefix_cache(), "blocks are still held"

    @property
    def scheduler(self) -> Any:
        """vLLM's Scheduler."""
        return self.core.scheduler

    @property
    def scheduler_connector(self) -> Any:
        """The connector's scheduler half, None without a connector."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The connector's worker half; AssertionError without a connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def model_runner(self) -> Any:
        """vLLM's CPUModelRunner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """The paged KV of each layer, `[blocks, heads, block_size, 2 * head_size]`."""
        caches: list[torch.Tensor] = self.model_runner.kv_caches
        return caches

    def close(self) -> None:
        """End the engine and undo what vLLM keeps per process, so that another may be built."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm, self.core
        cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def in_process_engine(
    model: Path, *, connector: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[InProcessEngine]:
    """An engine in this process; `options` go to `vllm.LLM`. One at a time."""
    threads = torch.get_num_threads()
    with _environment({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        engine = InProcessEngine(model, connector, options)
        _set_num_threads(threads)
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    earlier = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def completion_of(output: Any) -> Completion:
    """What the OpenAI endpoint would have said; there is no time to first token in process."""
    answer = output.outputs[0]
    logprobs = tuple({token: entry.logprob for token, entry in likeliest.items()} for likeliest in answer.logprobs)
    return Completion(tuple(answer.token_ids), logprobs, output.num_cached_tokens or 0, ttft_ms=0.0)
