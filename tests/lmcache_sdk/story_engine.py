"""An engine in the test's own process: a registered worker that computes, stores and generates as a real one would.

    engine = StoryEngine(attachment)
    stream = create_request([context], engine, tokens)
    stream.generate({"max_tokens": 2})        # stores the KV of the prompt's whole chunks, then tells two tokens

The KV that it computes for a token is a function of the token and its place (`kv_of`), so that edited KV can be told
from it. What it finds cached it takes as it is, and remembers: `calls[i].taken` is the KV that a pass ran on.
"""

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmcache_sdk import reading, writing
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.heartbeat import Heartbeat
from lmcache_sdk.request import TokenEvent
from lmcache_sdk.shapes import CachedTensors, TensorShape, token_count
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.messages import Prompt, SessionId

__all__ = ["Call", "StoryEngine", "kv_of"]

_tokens = itertools.count(70_000)


@dataclass
class Call:
    """One pass: what was asked, and the cached KV that it ran on (None: it computed everything)."""

    prompt: list[int]
    sampling_params: dict[str, Any]
    cache_salt: str
    taken: CachedTensors | None

    @property
    def cached(self) -> int:
        """How many tokens were not computed."""
        return 0 if self.taken is None else token_count(self.taken)


@dataclass
class StoryEngine:
    """A PostCompletion over the worker `attachment`."""

    attachment: Attachment
    stop_after: int | None = None
    """How many tokens a pass yields at most, as if an end token came."""
    fail_after: int | None = None
    """After how many tokens a pass fails."""
    store_after: float = 0.0
    """Seconds between the answer and the store of each chunk, in a thread as a connector does."""
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.geometry = ChunkGeometry.of(self.attachment.layout, self.attachment.hello.chunk_size, 1)

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent]:
        self.calls.append(Call(prompt_token_ids, sampling_params, cache_salt, self.load(prompt_token_ids, cache_salt)))
        self.store(prompt_token_ids, cache_salt)
        for i in range(sampling_params.get("max_tokens", 1)):
            if i == self.fail_after:
                raise RuntimeError("the device is gone")
            if i == self.stop_after:
                return
            token = next(_tokens)
            yield TokenEvent(token, f"<{token}>")

    def load(self, tokens: Sequence[int], salt: str = "") -> CachedTensors | None:
        """The cached KV of the longest prefix, as this worker sees it."""
        heartbeat = Heartbeat("story", lambda _: None, 60.0)
        try:
            prompt = self.prompt(tokens, salt)
            return reading.retrieve(self.attachment, self.geometry, heartbeat, prompt, None, 10.0)[0]
        finally:
            heartbeat.stop()

    def store(self, tokens: Sequence[int], salt: str = "") -> None:
        """Compute and store the whole chunks of `tokens` that nobody has."""
        prompt = self.prompt(tokens, salt)
        whole = len(prompt.tokens) // 4
        for chunk_end in range(self.geometry.tokens, whole + 1, self.geometry.tokens) if self.store_after else [whole]:
            if self.store_after:
                time.sleep(self.store_after)
            if chunk_end:
                part = Prompt(prompt.session, prompt.tokens[: chunk_end * 4], salt)
                kv = self.computed(tokens[:chunk_end])
                writing.store(self.attachment, self.geometry, kv, part, 10.0)

    def computed(self, tokens: Sequence[int]) -> CachedTensors:
        """What this worker computes for `tokens`."""
        return kv_of(tokens, self.geometry)

    def prompt(self, tokens: Sequence[int], salt: str) -> Prompt:
        """The whole chunks of `tokens`."""
        whole = len(tokens) // self.geometry.tokens * self.geometry.tokens
        packed = np.array(tokens[:whole], dtype="<u4").tobytes()
        return Prompt(SessionId(f"story-{uuid.uuid4().hex}"), packed, salt)


def kv_of(tokens: Sequence[int], geometry: ChunkGeometry, shard: int = 0) -> CachedTensors:
    """[planes, L, T, D] that no other token, place, layer, plane or element shares (in float32); or several of them."""
    tensors = [_kv_of(tokens, shape, shard) for shape in geometry.shapes]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _kv_of(tokens: Sequence[int], shape: TensorShape, shard: int) -> torch.Tensor:
    planes, layers, _, hidden = shape.of(0)
    each = torch.arange(planes * layers * hidden).view(planes, layers, 1, hidden) / 1024
    places = torch.tensor(list(tokens)) % 4096 * 8 + torch.arange(len(tokens)) % 8
    return (each + places.view(1, 1, -1, 1) + shard / 2048).to(shape.dtype)
