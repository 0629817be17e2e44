"""A real vLLM in float32 that captures queries: what `qcache` gives is what transformers computes with the weights.

Several prompts at once, each computed in several steps, so that every batch is a mixture; and a hybrid model, so that
most layers have block tables of their own. (A plain one is compared in tests/lmcache_sdk/edits/test_with_engine.py.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_connector.q_ring import QRingBuffer
from lmcache_connector.q_store import QueryStore
from lmcache_sdk import LMCacheSDKContext, qcache
from tests.connector.watched import prompt_of
from tests.engine import InProcessEngine, connector_config, in_process_engine
from tests.models import hybrid_model
from tests.servers import CacheServer, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(240)]

CHUNK, BLOCK = 64, 32
BUDGET = 80
"""Tokens per step: neither chunks nor blocks."""
TOLERANCE = 5e-5
"""Absolute, and relative besides, between float32 computations that order their sums differently (they differ by 1e-5).
Queries are of size 1; those of a neighbouring token differ by 1."""


class Oracle:
    """The same weights in transformers, which turns a layer's queries as the last thing before attention."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def queries(self, tokens: list[int]) -> torch.Tensor:
        """`[1, layers, tokens, heads * head_size]`, after the rotary embedding."""
        from transformers.models.gemma3 import modeling_gemma3

        turned: list[torch.Tensor] = []
        turn = modeling_gemma3.apply_rotary_pos_emb

        def remember(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            queries, keys = turn(*arguments, **options)
            turned.append(queries[0].transpose(0, 1).flatten(1))
            return queries, keys

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_gemma3, "apply_rotary_pos_emb", remember)
            self.model(torch.tensor([tokens]))
        return torch.stack(turned)[None]


@dataclass
class Setup:
    server: CacheServer
    engine: InProcessEngine
    context: LMCacheSDKContext
    oracle: Oracle

    @property
    def store(self) -> QueryStore:
        store = self.engine.worker_connector.query_store
        assert isinstance(store, QueryStore)
        return store

    def assert_cached(self, prompt: list[int], tokens: int, salt: str = "") -> None:
        """The first `tokens` tokens of the prompt have their queries cached, and these are the model's."""
        found = self.context.retrieve(prompt, salt)
        assert (found is None) == (tokens == 0)
        if found is not None:
            assert found.shape == (1, 6, tokens, 4 * 64)
            expected = self.oracle.queries(prompt)[:, :, :tokens]
            torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    model = hybrid_model()
    options = {"max_model_len": 512, "max_num_batched_tokens": BUDGET, "max_num_seqs": 4, "block_size": BLOCK}
    with running_server("--chunk-size", str(CHUNK), "--enable", "transfer_query") as server:
        connector = connector_config(server.port, transfer_intermediate_tensors=True, **{"q.ring_depth": 3})
        with (
            in_process_engine(model, connector=connector, **options) as engine,
            qcache.connect(server.url, server.http_url, str(model)) as context,
        ):
            yield Setup(server, engine, context, Oracle(model))
        server.quiet()


def test_queries_of_a_mixed_batch_are_those_of_the_model(setup: Setup) -> None:
    assert setup.store.ring.blocks == 3 * 3
    prompts = [prompt_of(length, length) for length in (150, 33, 97, 63, 300, 64, 193)]
    setup.engine.complete_all(prompts, max_tokens=3)
    for prompt in prompts:
        setup.assert_cached(prompt, len(prompt) // CHUNK * CHUNK)
    assert not setup.store._told, "the ring had room for all of them"


def test_a_prompt_that_goes_on_adds_its_queries_behind_cached_ones(setup: Setup) -> None:
    prompt = prompt_of(200, 1)
    setup.engine.complete(prompt[:100])
    setup.engine.reset_prefix_cache()
    answer = setup.engine.complete(prompt)
    assert answer.cached_tokens == 64
    setup.assert_cached(prompt, 192)


def test_keys_that_were_cached_without_queries_get_them_under_a_salt(setup: Setup) -> None:
    prompt = prompt_of(100, 2)
    ring, setup.store.ring = setup.store.ring, QRingBuffer(6, 0, BLOCK, 256, torch.float32, torch.device("cpu"))
    setup.engine.complete(prompt)
    setup.store.ring = ring
    assert setup.store._told, "one was passed over"
    assert setup.engine.complete(prompt).cached_tokens == 96  # its own blocks
    setup.assert_cached(prompt, 0)
    setup.engine.complete(prompt, cache_salt="fresh")
    setup.assert_cached(prompt, 64, "fresh")


def test_requests_aborted_at_any_point_leave_no_block_taken(setup: Setup) -> None:
    from vllm import SamplingParams

    llm = setup.engine.llm.llm_engine
    parameters = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [prompt_of(170, 300 + i) for i in range(12)]
    for round in range(4):
        names = [f"{round}-{i}" for i in range(3)]
        for i, name in enumerate(names):
            llm.add_request(name, {"prompt_token_ids": prompts[3 * round + i]}, parameters)
        for _ in range(1 + round):
            llm.step()
        llm.abort_request(names)
    while llm.has_unfinished_requests() or setup.engine.scheduler.has_requests():
        llm.step()
    for prompt in prompts:
        found = setup.context.retrieve(prompt)
        setup.assert_cached(prompt, 0 if found is None else found.shape[2])
    setup.engine.complete(prompt_of(40, 400))
    assert setup.store.ring.free == setup.store.ring.blocks
