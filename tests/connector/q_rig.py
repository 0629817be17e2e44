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
from lmcache_connector.stats import Recorder
from lmcache_server.protocol.layout import CacheLayout, KernelGroup
from tests.connector.rig import Rig, Served

HEADS, HEAD_SIZE = 4, 8
"""Two query heads for each key head of the rig's model."""


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
    """A rig whose ranks capture queries; `queries` is the first rank's store."""

    def __init__(self, config: ConnectorConfig, *, heads: int = HEADS) -> None:
        super().__init__(config)
        self.width = heads * HEAD_SIZE
        self.layers = cached_layers(config.shape)
        group = KernelGroup(tuple(self.layers.values()), planes=1, heads=heads, head_size=HEAD_SIZE, dtype="float32")
        self.modules: list[dict[str, torch.nn.Module]] = [
            {name: Attention() for name in self.layers} for _ in self.ranks
        ]
        self.stores: list[QueryStore] = []
        try:
            for rank, modules in enumerate(self.modules):
                stats = Recorder(first=rank == 0)
                self.stores.append(QueryStore(config, rank, CacheLayout((group,)), modules, torch.device("cpu"), stats))
        except ValueError:
            self.close()
            raise
        self.random = random.Random(0)

    @property
    def queries(self) -> QueryStore:
        """The first rank's store."""
        return self.stores[0]

    def close(self) -> None:
        super().close()
        for store in self.stores:
            store.close()

    def step(self, scheduled: dict[Served, int]) -> KVConnectorOutput:
        for served in scheduled:
            self.leave_windows(served, served.request.num_computed_tokens)
        plan = self.plan(scheduled)
        for store in self.stores:
            store.begin(plan)
        self.forward(scheduled)
        for served, count in scheduled.items():
            start = served.request.num_computed_tokens
            self.compute(served, start, start + count)
            served.request.num_computed_tokens += count
        output = self.report(plan)
        for store in self.stores:
            store.store()
        return output

    def preempt(self, served: Served) -> None:
        """The engine takes the request's blocks; it is to be computed anew."""
        self.ended.add(served.request.request_id)  # vLLM lists it elsewhere; to the worker it is the same
        self.free += served.blocks
        served.request.num_computed_tokens = 0

    def forward(self, scheduled: dict[Served, int]) -> None:
        """Every scheduled token is a row, in any order, with padding behind them."""
        batch = [
            (served, token)
            for served, count in scheduled.items()
            for token in range(served.request.num_computed_tokens, served.request.num_computed_tokens + count)
        ]
        if not batch:
            return
        self.random.shuffle(batch)
        metadata = {}
        for group, size in zip(self.config.shape.groups, self.sizes, strict=True):
            slots = [s.tables[group.table][token // size] * size + token % size for s, token in batch] + [-1] * 3
            metadata |= dict.fromkeys(group.layers, Metadata(torch.tensor(slots)))
        rows = [self.query_of(s.request.all_token_ids, token, s.request.cache_salt) for s, token in batch]
        queries = torch.stack([*rows, *torch.full((3, *rows[0].shape), torch.nan)], dim=1)
        with forward_context(metadata):
            for modules, part in zip(self.modules, queries.split(self.width, dim=2), strict=True):
                for module, layer in zip(modules.values(), part, strict=True):
                    module(layer, None, None)

    def query_of(self, tokens: Sequence[int], token: int, salt: str | None = None) -> torch.Tensor:
        """`[layers, ranks * width]`: what the model asks at one token after those before it."""
        seed = hashlib.blake2b(repr((salt or "", tuple(tokens[: token + 1]))).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        return torch.randn(len(self.layers), len(self.ranks) * self.width, generator=generator)

    def queries_of(self, tokens: Sequence[int], count: int, salt: str | None = None) -> torch.Tensor:
        """`[1, layers, count, ranks * width]`: those of the first `count` tokens."""
        return torch.stack([self.query_of(tokens, token, salt) for token in range(count)], dim=1)[None]
