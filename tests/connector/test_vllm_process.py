"""The engine as users run it: an OpenAI endpoint, engine core and worker in processes of their own, the plain name."""

import re
import time
from pathlib import Path

import pytest

from tests.connector.watched import prompt_of
from tests.engine import connector_config, engine_process, tiny_model
from tests.servers import running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(300)]


def test_an_engine_in_several_processes_offloads_its_prompts_and_takes_them_back(tmp_path: Path) -> None:
    prompt = prompt_of(600)
    arguments = ["--max-model-len", "2048"]
    with running_server("--chunk-size", "64") as server:
        settings = connector_config(server.port)
        with engine_process(tiny_model(), tmp_path / "vllm.log", connector=settings, arguments=arguments) as engine:
            cold = engine.complete(prompt, max_tokens=4)
            local = engine.complete(prompt, max_tokens=4)
            engine.reset_prefix_cache()
            external = engine.complete(prompt, max_tokens=4)
            assert (cold.cached_tokens, local.cached_tokens, external.cached_tokens) == (0, 576, 576)
            assert external.logprobs == local.logprobs
            assert external.tokens == cold.tokens
            assert engine.complete(prompt, cache_salt="another").cached_tokens == 0
            private = prompt_of(600, seed=1)
            for wish in (True, "yes"):
                engine.reset_prefix_cache()
                answer = engine.complete(private, kv_transfer_params={"no_store": wish, "no_load": wish})
                assert answer.cached_tokens == 0
            contexts = server.status()["cache_context_meta"].values()
            assert [(c["model_name"], c["world_size"], c["block_size"]) for c in contexts] == [
                (str(tiny_model()), 1, 128)
            ]
            server.quiet()
        deadline = time.monotonic() + 10
        while server.status()["cache_context_meta"]:  # it leaves, or the server notices that its process is gone
            assert time.monotonic() < deadline
            time.sleep(0.05)
    log = (tmp_path / "vllm.log").read_text()
    assert "kv_load_failure_policy is 'fail'" in log
    assert "using the cache server" in log
    assert "kv_transfer_params.no_store: expected true or false (a JSON boolean), got 'yes'" in log
    names = re.findall(r"(scheduler|worker) of model (.*)", log)
    assert sorted(half for half, _ in names) == ["scheduler", "worker"] and names[0][1] == names[1][1]
