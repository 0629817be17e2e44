"""The rig with attention modules: its forward pass hands out queries too, in a batch of any order."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.outputs import KVConnectorOutput

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.q_capture import cached_layers
from lmcache_connector.q_store import QueryStore
from lmcache_server.protocol.layout import CacheLayout, KernelGroup
from tests.connector.rig import Rig, Served

HEADS, HEAD_SIZE = 4, 8
"""Two query heads for each key head of the rig's model."""
WIDTH = HEADS * HEAD_SIZE


class Attention(torch.nn.Module):
    """Something that receives queries, keys and values, and remembers whose hooks it has."""

    def forward(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor:
        return query


class Metadata:
    """The part of a step's attention metadata that says where each row belongs."""

    def __init__(self, slot_mapping: torch.Tensor) -> None:
        self.slot_mapping = slot_mapping


@contextmanager
def forward_context(metadata: Any) -> Iterator[None]:
    """vLLM's own context of a forward pass, with this attention metadata."""
    context = ForwardContext(
        no_compile_layers={}, attn_metadata=metadata, slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode.NONE
    )
    with override_forward_context(context):
        yield


class QueryRig(Rig):
    """A rig that captures queries; `queries` is its store."""

    def __init__(self, config: ConnectorConfig, *, heads: int = HEADS) -> None:
        super().__init__(config)
        self.width = heads * HEAD_SIZE
        layout = CacheLayout((KernelGroup((0, 1), planes=1, heads=heads, head_size=HEAD_SIZE, dtype="float32"),))
        self.modules: dict[str, torch.nn.Module] = {layer: Attention() for layer in cached_layers(config.shape)}
        self.queries = QueryStore(config, 0, layout, self.modules, torch.device("cpu"))
        self.random = random.Random(0)

    def close(self) -> None:
        super().close()
        self.queries.close()

    def step(self, scheduled: dict[Served, int]) -> KVConnectorOutput:
        plan = self.plan(scheduled)
        self.queries.begin(plan)
        self.forward(scheduled)
        for served, count in scheduled.items():
            start = served.request.num_computed_tokens
            self.compute(served, start, start + count)
            served.request.num_computed_tokens += count
        output = self.report(plan)
        self.queries.store()
        return output

    def preempt(self, served: Served) -> None:
        """The engine takes the request's blocks; it is to be computed anew."""
        self.ended.add(served.request.request_id)  # vLLM lists it elsewhere; to the worker it is the same
        self.free += served.blocks
        served.request.num_computed_tokens = 0

    def forward(self, scheduled: dict[Served, int]) -> None:
        """Every scheduled token is a row, in any order, with padding behind them."""
        size = self.sizes[0]
        batch = [
            (served, token)
            for served, count in scheduled.items()
            for token in range(served.request.num_computed_tokens, served.request.num_computed_tokens + count)
        ]
        self.random.shuffle(batch)
        slots = [served.blocks[token // size] * size + token % size for served, token in batch] + [-1] * 3
        rows = [query_of(s.request.all_token_ids, token, s.request.cache_salt, self.width) for s, token in batch]
        if not rows:
            return
        queries = torch.stack([*rows, *torch.full((3, 2, self.width), torch.nan)], dim=1)
        with forward_context(dict.fromkeys(self.modules, Metadata(torch.tensor(slots)))):
            for module, layer in zip(self.modules.values(), queries, strict=True):
                module(layer, None, None)


def query_of(tokens: Sequence[int], token: int, salt: str | None = None, width: int = WIDTH) -> torch.Tensor:
    """`[layers, width]`: what the model asks at one token after those before it."""
    seed = hashlib.blake2b(repr((salt or "", tuple(tokens[: token + 1]))).encode(), digest_size=8).digest()
    return torch.randn(2, width, generator=torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1))


def queries_of(tokens: Sequence[int], count: int, salt: str | None = None) -> torch.Tensor:
    """`[1, layers, count, WIDTH]`: those of the first `count` tokens."""
    return torch.stack([query_of(tokens, token, salt) for token in range(count)], dim=1)[None]
