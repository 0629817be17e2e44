"""Models whose layers an engine keeps in several kernel groups (full attention, sliding windows), on both transports.

The other side of the wire is a client that knows nothing of the SDK (tests.fake_engine), and whose bytes come from the
reference in tests.lmcache_sdk.layouts.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lmcache_sdk
from lmcache_sdk import LMCacheSDKCacheKind, LMCacheSDKContext, LMCacheSDKError, TensorShape
from lmcache_sdk.edits import CachedLayer, HighestScores, Rotary, SinksAndRecent, keep_tokens, keydiff, token_dropping
from lmcache_sdk.request import LMCacheRequestStreamError, create_request
from lmcache_sdk.shapes import listed
from lmcache_sdk.transfer import SharedMemoryTransfer
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.fake_engine import FakeEngine
from tests.lmcache_sdk.fake_engine import registered_engine
from tests.lmcache_sdk.layouts import equal_bits, layouts, part_of, random_tensors
from tests.lmcache_sdk.story_engine import StoryEngine, kv_of
from tests.servers import CacheServer

KV, QUERY = LMCacheSDKCacheKind.KV, LMCacheSDKCacheKind.QUERY
CHUNK = 16
TOKENS = list(range(500, 548))
"""Three chunks."""

FULL = KernelGroup((2, 5), planes=2, heads=2, head_size=8, dtype="float32")
SLIDING = KernelGroup((0, 1, 3, 4), planes=2, heads=2, head_size=8, dtype="float32", window=64)
WIDE = KernelGroup((6,), planes=2, heads=2, head_size=16, dtype="bfloat16")
LATENT = KernelGroup((7, 8), planes=1, heads=1, head_size=24, dtype="uint8")
ALIKE, UNLIKE = CacheLayout((FULL, SLIDING)), CacheLayout((FULL, WIDE, SLIDING, LATENT))
_models = itertools.count()


@dataclass
class ReferenceEngine(FakeEngine):
    """A client whose parts are those of `tensors` by the reference: it stores them, and reads nothing else."""

    tensors: Sequence[torch.Tensor] = field(default_factory=list)

    def body(self, chunk: int, part: int, tokens: bytes, salt: str, extras: Mapping[int, bytes]) -> bytes:
        first = 0 if self.worker_id is None else self.worker_id * len(self.layout.groups)
        return part_of(self.layout, self.tensors, CHUNK, chunk, first + part)


@contextlib.contextmanager
def engine_of(
    server: CacheServer, layout: CacheLayout, tensors: Sequence[torch.Tensor], shards: int = 1
) -> Iterator[tuple[list[ReferenceEngine], LMCacheSDKContext]]:
    """The workers of an engine of `layout`, one per shard, and a context for their cache."""
    model = f"groups {next(_models)}"
    with contextlib.ExitStack() as stack:
        workers = [
            ReferenceEngine(server.url, model, world_size=shards, worker_id=rank, layout=layout, tensors=tensors)
            for rank in range(shards)
        ]
        for worker in workers:
            stack.enter_context(worker)
        connect = lmcache_sdk.kvcache.connect
        yield workers, stack.enter_context(connect(server.url, server.http_url, model, timeout=10))


def as_cached(tensors: Sequence[torch.Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def long_keys(layer: CachedLayer) -> torch.Tensor:
    return layer.keys.norm(dim=-1)


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(listed(one), listed(other), strict=True))
    return isinstance(one, torch.Tensor) is isinstance(other, torch.Tensor) and all(equal_bits(a, b) for a, b in pairs)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(3), shards=st.integers(1, 2), tail=st.integers(0, 3))
def test_what_crosses_the_wire_is_what_the_layout_says_both_ways(
    server: CacheServer, layout: CacheLayout, shards: int, tail: int
) -> None:
    tensors = random_tensors(layout, 48 + tail, shards)
    tokens = range(48 + tail)
    whole = [tensor[:, :, :48] for tensor in tensors]
    with engine_of(server, layout, tensors, shards) as (workers, context):
        assert context.store(as_cached(tensors), tokens, "ours") is True
        for worker in workers:
            assert worker.load(packed(range(48)), "ours") == 3  # asserts every byte
            assert worker.store(packed(range(48)), "theirs") == 3
        for salt in ("ours", "theirs"):
            assert same(context.retrieve(tokens, salt), as_cached(whole))
            with context.view(tokens, salt) as view:
                assert view.tokens == 48
                for i, chunk in enumerate(view):
                    assert same(chunk, as_cached([t[:, :, CHUNK * i : CHUNK * (i + 1)] for t in whole]))
        assert context.retrieve(tokens) is None
        assert context.store(as_cached(tensors), tokens, "theirs") is False
    server.quiet()


def test_groups_of_one_shape_are_one_tensor_in_the_order_of_the_model(server: CacheServer) -> None:
    tensors = random_tensors(ALIKE, 48, 2)
    with engine_of(server, ALIKE, tensors, shards=2) as (workers, context):
        assert context.shapes == (TensorShape(torch.float32, 2, (0, 1, 2, 3, 4, 5), (64, 64, 0, 64, 64, 0), 4, 8),)
        workers[0].store(packed(TOKENS))
        assert context.retrieve(TOKENS) is None
        workers[1].store(packed(TOKENS[:32]))
        back = context.retrieve(TOKENS)
        assert back is not None
        assert back.shape == (2, 6, 32, 32)
        assert equal_bits(back, tensors[0][:, :, :32])
        out = torch.zeros(2, 6, 40, 32)
        context.retrieve(TOKENS, out=out)
        assert equal_bits(out[:, :, :32], back)
        assert not out[:, :, 32:].any()
        assert context.explain(TOKENS).missing_shards == (1,)
        with context.view(TOKENS) as view:
            assert repr(view) == "<CacheView: 32 tokens, 2 chunks of [2, 6, 16, 32]>"


def test_groups_that_differ_in_shape_are_a_tuple_everywhere(server: CacheServer) -> None:
    tensors = random_tensors(UNLIKE, 48, 1)
    with engine_of(server, UNLIKE, tensors) as (workers, context):
        assert [(str(shape), shape.layers) for shape in context.shapes] == [
            ("[2, 6, T, 16] torch.float32", (0, 1, 2, 3, 4, 5)),
            ("[2, 1, T, 32] torch.bfloat16", (6,)),
            ("[1, 2, T, 24] torch.uint8", (7, 8)),
        ]
        workers[0].store(packed(TOKENS))
        back = context.retrieve(TOKENS)
        assert isinstance(back, tuple)
        assert same(back, tuple(tensors))
        out = tuple(torch.zeros_like(tensor) for tensor in tensors)
        filled = context.retrieve(TOKENS[:40], out=out)
        assert [tensor.data_ptr() for tensor in filled] == [tensor.data_ptr() for tensor in out]
        assert same(filled, tuple(tensor[:, :, :32] for tensor in tensors))
        assert context.store(list(tensors), TOKENS, "a list") is True
        with context.view(TOKENS) as view:
            assert (
                repr(view) == "<CacheView: 48 tokens, 3 chunks of [2, 6, 16, 16] and [2, 1, 16, 32] and [1, 2, 16, 24]>"
            )
            if server.segment:  # what lies in one slot is shown there
                assert isinstance(context.transfer_ctx, SharedMemoryTransfer)
                pool = context.transfer_ctx._open().shown
                inside = [pool.data_ptr() <= tensor.data_ptr() < pool.data_ptr() + len(pool) for tensor in view[0]]
                assert inside == [False, True, True]


def test_tensors_that_do_not_fit_a_tuple_are_refused_by_name(server: CacheServer) -> None:
    tensors = random_tensors(UNLIKE, 48, 1)
    with engine_of(server, UNLIKE, tensors) as (workers, context):
        workers[0].store(packed(TOKENS))
        for bad, message in [
            (tensors[0], r"kv: expected a tuple of 3 tensors, \[2, 6, T, 16\] torch.float32 and .*, got Tensor"),
            (tuple(tensors[:2]), "kv: expected a tuple of 3 tensors, .* got 2 of them"),
            ((tensors[1], *tensors[1:]), r"kv\[0\]: expected dtype torch.float32, got torch.bfloat16"),
            ((tensors[0][:, :5], *tensors[1:]), r"kv\[0\]: expected shape \[2, 6, T, 16\], got \[2, 5, 48, 16\]"),
            ((tensors[0][:, :, :32], *tensors[1:]), r"kv: expected tensors of equally many tokens, got \[32, 48, 48\]"),
        ]:
            with pytest.raises(LMCacheSDKError, match=message):
                context.store(bad, TOKENS, "bad")
        with pytest.raises(LMCacheSDKError, match=r"tokens: expected one per kv.shape\[2\] \(48\), got 47"):
            context.store(tuple(tensors), TOKENS[:47], "bad")
        with pytest.raises(
            LMCacheSDKError, match=r"out: expected room for 48 cached tokens \[2, 6, 48, 16\] and .* got"
        ):
            context.retrieve(TOKENS, out=tuple(tensor[:, :, :32] for tensor in tensors))
        assert context.lookup(TOKENS, "bad") == 0


def test_an_edit_of_sliding_and_full_layers_is_the_edit_of_one_tensor(server: CacheServer, model: str) -> None:
    with (
        registered_engine(server, model, FULL, SLIDING) as worker,
        lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as context,
    ):
        engine, rotary = StoryEngine(worker), Rotary.default(theta=1e4, head_size=8)
        stream = create_request([context], engine, TOKENS)
        stream.generate({"max_tokens": 1})
        select = HighestScores(long_keys, rotary.head_size, keep=0.3, chunk_size=CHUNK)
        stream.modify_kv(token_dropping(select, rotary))
        assert len(stream.tokens) == CHUNK
        stream.generate({"max_tokens": 1})
        kv = kv_of(TOKENS, engine.geometry)
        expected, kept = keep_tokens(kv, TOKENS, select({KV: kv}, TOKENS), rotary)
        assert stream.tokens[:CHUNK] == kept
        assert same(engine.calls[1].taken, expected)
        assert same(context.retrieve(TOKENS), kv)
        assert context.lookup(kept) == 0


def test_an_edit_of_layers_of_several_shapes_gets_and_returns_a_tuple(server: CacheServer, model: str) -> None:
    rotary, wide = Rotary.default(theta=1e4, head_size=8), Rotary.default(theta=1e6, head_size=16)
    selector = SinksAndRecent(recent=12)
    queries = KernelGroup((0, 1, 2, 3, 4, 5), 1, 4, 8, "float32"), KernelGroup((6,), 1, 4, 16, "float32")
    with (
        registered_engine(server, model, FULL, SLIDING, WIDE) as worker,
        registered_engine(server, model + "##query", *queries, kind=Kind.QUERY) as asking,
        lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as context,
        lmcache_sdk.qcache.connect(server.url, server.http_url, model, timeout=10) as q_context,
    ):
        engine, q_engine = StoryEngine(worker), StoryEngine(asking)
        q_engine.store(TOKENS[:32])
        stream = create_request([context, q_context], engine, TOKENS)
        stream.generate({"max_tokens": 1})

        def edit(tensors: Mapping[LMCacheSDKCacheKind, Any], tokens: Sequence[int]) -> tuple[Any, Sequence[int]]:
            assert same(tensors[QUERY], kv_of(tokens, q_engine.geometry))
            kept = selector(tensors, tokens)
            narrow, left = keep_tokens(tensors[KV][0], tokens, kept, rotary)
            return (narrow, keep_tokens(tensors[KV][1], tokens, kept, wide)[0]), left

        for fn in (token_dropping(selector, rotary), token_dropping(HighestScores(keydiff, 8), rotary)):
            with pytest.raises(
                LMCacheRequestStreamError, match=r"kv: expected one tensor, got 2 .*edit the tensors one"
            ):
                stream.modify_kv(fn)
        with pytest.raises(LMCacheRequestStreamError, match=r"not stored: kv: expected a tuple of 2 tensors"):
            stream.modify_kv(lambda tensors, tokens: (tensors[KV][0], tokens))
        stream.modify_kv(edit)
        stream.generate({"max_tokens": 1})
        kept = [*TOKENS[:4], *TOKENS[20:32]]
        assert stream.tokens[:16] == kept
        taken, whole = engine.calls[1].taken, kv_of(TOKENS[:32], engine.geometry)
        assert taken is not None
        for before, after, turning in zip(whole, taken, (rotary, wide), strict=True):
            expected, _ = keep_tokens(before, TOKENS[:32], [*range(4), *range(20, 32)], turning)
            assert equal_bits(after, expected)
        assert context.lookup(kept) == 0
