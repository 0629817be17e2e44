import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

import lmcache_sdk
from lmcache_sdk import LMCacheSDKCacheKind, LMCacheSDKContext, LMCacheSDKError
from lmcache_sdk.transfer import FrameTransfer, SharedMemoryTransfer
from lmcache_server.protocol.layout import ITEM_BYTES, KernelGroup, Kind
from tests.lmcache_sdk.fake_engine import TINY, random_kv, registered_engine
from tests.servers import CacheServer


def connect(server: CacheServer, model: str, **arguments: Any) -> LMCacheSDKContext:
    return lmcache_sdk.kvcache.connect(server.url, server.http_url, model, **{"timeout": 10.0, **arguments})


def test_what_is_stored_comes_back_bit_for_bit(context: LMCacheSDKContext) -> None:
    kv = random_kv(64)
    assert context.store(kv, range(64)) is True
    back = context.retrieve(range(64))
    assert back is not None
    assert torch.equal(back, kv)


def test_the_longest_cached_prefix_comes_back(context: LMCacheSDKContext) -> None:
    kv = random_kv(48)
    context.store(kv, range(48))
    for tokens, cached in [(16, 16), (31, 16), (32, 32), (47, 32), (48, 48), (100, 48)]:
        back = context.retrieve(range(tokens))
        assert back is not None
        assert torch.equal(back, kv[:, :, :cached])
        assert context.lookup(range(tokens)) == cached
    changed = [*range(20), 9999, *range(21, 48)]
    assert context.lookup(changed) == 16


def test_a_miss_and_less_than_a_chunk_are_none(context: LMCacheSDKContext) -> None:
    assert context.retrieve(range(64)) is None
    assert context.lookup(range(64)) == 0
    context.store(random_kv(16), range(16))
    assert context.retrieve(range(15)) is None
    assert context.retrieve([]) is None
    assert context.lookup(range(15)) == 0


def test_tokens_after_the_last_whole_chunk_are_not_stored(context: LMCacheSDKContext) -> None:
    kv = random_kv(40)
    assert context.store(kv, range(40)) is True
    back = context.retrieve(range(48))
    assert back is not None
    assert torch.equal(back, kv[:, :, :32])
    assert context.store(random_kv(15), range(1000, 1015)) is False


def test_storing_what_is_cached_already_writes_nothing_and_says_so(context: LMCacheSDKContext) -> None:
    kv, edited = random_kv(32), random_kv(32)
    assert context.store(kv, range(32)) is True
    assert context.store(edited, range(32)) is False
    back = context.retrieve(range(32))
    assert back is not None
    assert torch.equal(back, kv)


def test_storing_more_of_a_prompt_adds_the_rest(context: LMCacheSDKContext) -> None:
    kv = random_kv(64)
    assert context.store(kv[:, :, :32], range(32)) is True
    assert context.store(kv, range(64)) is True
    assert context.store(kv[:, :, :48], range(48)) is False
    back = context.retrieve(range(64))
    assert back is not None
    assert torch.equal(back, kv)


def test_salts_share_nothing(context: LMCacheSDKContext) -> None:
    ours, theirs = random_kv(16), random_kv(16)
    context.store(ours, range(16), cache_salt="ours")
    assert context.retrieve(range(16)) is None
    assert context.retrieve(range(16), "theirs") is None
    assert context.store(theirs, range(16), "theirs") is True
    for salt, kv in (("ours", ours), ("theirs", theirs)):
        back = context.retrieve(range(16), cache_salt=salt)
        assert back is not None
        assert torch.equal(back, kv)
        with context.view(range(16), salt) as view:
            assert torch.equal(view[0], kv)
        assert context.lookup(range(16), salt) == 16


def test_tokens_may_be_given_in_many_ways(context: LMCacheSDKContext) -> None:
    context.store(random_kv(32), torch.arange(32))
    for tokens in (list(range(32)), tuple(range(32)), np.arange(32, dtype=np.int32), torch.arange(32)):
        assert context.lookup(tokens) == 32


def test_a_given_tensor_is_filled_in_place(context: LMCacheSDKContext) -> None:
    kv = random_kv(32)
    context.store(kv, range(32))
    out = torch.full((2, 3, 50, 16), 7.0)
    back = context.retrieve(range(32), out=out)
    assert back is not None
    assert back.data_ptr() == out.data_ptr()
    assert back.shape == (2, 3, 32, 16)
    assert torch.equal(out[:, :, :32], kv)
    assert bool((out[:, :, 32:] == 7.0).all())
    strided = torch.zeros(2, 3, 64, 32)[:, :, ::2, ::2]
    back = context.retrieve(range(32), out=strided)
    assert back is not None
    assert torch.equal(strided, kv)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 3, 16, 16), r"out: expected room for 32 cached tokens \[2, 3, 32, 16\], got \[2, 3, 16, 16\]"),
        (torch.zeros(2, 3, 32, 8), r"out: expected shape \[2, 3, T, 16\], got \[2, 3, 32, 8\]"),
        (torch.zeros(1, 3, 32, 16), r"out: expected shape \[2, 3, T, 16\]"),
        (torch.zeros(2, 3, 32, 16, dtype=torch.bfloat16), r"out: expected dtype torch.float32, got torch.bfloat16"),
        ("out", "out: expected a torch.Tensor, got str"),
    ],
)
def test_a_given_tensor_that_does_not_fit_is_refused(context: LMCacheSDKContext, out: Any, message: str) -> None:
    context.store(random_kv(32), range(32))
    with pytest.raises(LMCacheSDKError, match=message):
        context.retrieve(range(32), out=out)


@pytest.mark.parametrize(
    ("kv", "tokens", "message"),
    [
        (random_kv(32), range(33), r"tokens: expected one per kv.shape\[2\] \(32\), got 33"),
        (random_kv(32).bfloat16(), range(32), "kv: expected dtype torch.float32, got torch.bfloat16"),
        (random_kv(32)[:, :2], range(32), r"kv: expected shape \[2, 3, T, 16\], got \[2, 2, 32, 16\]"),
        (random_kv(32)[0], range(32), r"kv: expected shape"),
        (random_kv(16), [*range(15), -1], r"tokens\[15\]: expected a token id"),
        (random_kv(16), ["a"] * 16, r"tokens\[0\]: expected an integer"),
        (random_kv(16), 16, "tokens: expected a sequence"),
    ],
)
def test_kv_and_tokens_that_do_not_fit_are_refused(
    context: LMCacheSDKContext, kv: torch.Tensor, tokens: Any, message: str
) -> None:
    with pytest.raises(LMCacheSDKError, match=message):
        context.store(kv, tokens)


@pytest.mark.parametrize("salt", ["a/b", "a@b", "a\\b", "\0", "x" * 129, 5, None])
def test_a_salt_that_cannot_be_one_is_refused_by_name(context: LMCacheSDKContext, salt: Any) -> None:
    for call in (context.lookup, context.retrieve):
        with pytest.raises(LMCacheSDKError, match="cache_salt: expected"):
            call(range(16), salt)


def test_request_configs_are_lmcache_entries_or_refused(context: LMCacheSDKContext) -> None:
    kv = random_kv(16)
    assert context.store(kv, range(16), request_configs={"lmcache.tag": "x"}) is True
    assert context.retrieve(range(16), request_configs={}) is not None
    with pytest.raises(LMCacheSDKError, match="request_configs: unknown key 'tag'"):
        context.retrieve(range(16), request_configs={"tag": 1})
    with pytest.raises(LMCacheSDKError, match="request_configs: expected a mapping or None, got list"):
        context.store(kv, range(16), request_configs=["lmcache.tag"])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype_comes_back_bit_for_bit(server: CacheServer, model: str, dtype: str) -> None:
    group = KernelGroup((0, 1), 2, 1, 8, dtype)
    raw = torch.randint(0, 256, (2, 2, 32, 8 * ITEM_BYTES[dtype]), dtype=torch.uint8)
    kv = raw.view(getattr(torch, dtype))
    with registered_engine(server, model, group), connect(server, model) as context:
        assert context.store(kv, range(32)) is True
        back = context.retrieve(range(32))
        assert back is not None
        assert back.dtype == kv.dtype
        assert torch.equal(back.view(torch.uint8), raw)


def test_one_latent_plane_comes_back_as_one(server: CacheServer, model: str) -> None:
    group = KernelGroup((0, 1, 2, 3), planes=1, heads=1, head_size=24, dtype="bfloat16")
    with registered_engine(server, model, group), connect(server, model) as context:
        kv = random_kv(32, group)
        assert kv.shape == (1, 4, 32, 24)
        context.store(kv, range(32))
        back = context.retrieve(range(32))
        assert back is not None
        assert torch.equal(back, kv)


def test_shards_are_joined_side_by_side_and_split_again(server: CacheServer, model: str) -> None:
    with (
        registered_engine(server, model, world_size=2, worker_id=0) as first,
        registered_engine(server, model, world_size=2, worker_id=1),
        connect(server, model) as context,
    ):
        kv = random_kv(32, shards=2)
        assert kv.shape == (2, 3, 32, 32)
        assert context.store(kv, range(32)) is True
        back = context.retrieve(range(32))
        assert back is not None
        assert torch.equal(back, kv)
        with context.view(range(32)) as view:
            assert torch.equal(torch.cat(list(view), dim=2), kv)
        half = KernelGroup(TINY.layers, 2, 1, 16, "float32")
        assert first.layout.groups[0].hidden == half.hidden


def test_queries_have_a_cache_of_their_own(server: CacheServer, model: str) -> None:
    group = KernelGroup((0, 1), planes=1, heads=4, head_size=8, dtype="float32")
    kind = LMCacheSDKCacheKind.QUERY
    with (
        registered_engine(server, model),
        registered_engine(server, model + "##query", group, kind=Kind.QUERY),
        connect(server, model) as keys_and_values,
        lmcache_sdk.qcache.connect(server.url, server.http_url, model, timeout=10) as queries,
        lmcache_sdk.connect(kind, server.url, server.http_url, model, timeout=10) as again,
    ):
        q = random_kv(16, group)
        assert queries.store(q, range(16)) is True
        assert keys_and_values.retrieve(range(16)) is None
        back = again.retrieve(range(16))
        assert back is not None
        assert torch.equal(back, q)
        assert (again.kind, again.model_name, keys_and_values.kind) == (kind, model, LMCacheSDKCacheKind.KV)


def test_a_context_says_what_it_is(server: CacheServer, engine: object, model: str) -> None:
    context = connect(server, model)
    assert context.chunk_size == 16
    assert context.kind is LMCacheSDKCacheKind.KV
    assert context.model_name == model
    assert type(context.transfer_ctx) is (SharedMemoryTransfer if server.segment else FrameTransfer)
    assert repr(context) == f"LMCacheSDKContext(KV, {model!r}, {server.url}, {context.transfer_ctx!r})"
    context.close()
    assert repr(context) == f"LMCacheSDKContext(KV, {model!r}, {server.url}, closed)"


def test_a_closed_context_is_an_error(server: CacheServer, engine: object, model: str) -> None:
    with connect(server, model) as context:
        context.store(random_kv(16), range(16))
        kept = context.retrieve(range(16))
    context.close()
    assert kept is not None
    assert kept.isfinite().all()
    for call in (
        lambda: context.retrieve(range(16)),
        lambda: context.lookup(range(16)),
        lambda: context.store(random_kv(16), range(16)),
        lambda: context.view(range(16)).__enter__(),
        lambda: context.chunk_size,
        lambda: context.transfer_ctx,
        lambda: context.register_caches(),
    ):
        with pytest.raises(LMCacheSDKError, match="closed"):
            call()


def test_caches_may_be_registered_again(context: LMCacheSDKContext) -> None:
    kv = random_kv(16)
    context.store(kv, range(16))
    context.register_caches()
    back = context.retrieve(range(16))
    assert back is not None
    assert torch.equal(back, kv)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "KV"}, "kind: expected a LMCacheSDKCacheKind, got 'KV'"),
        ({"timeout": 0}, "timeout: expected seconds above 0, got 0"),
        ({"timeout": float("nan")}, "timeout: expected seconds above 0, got nan"),
        ({"timeout": None}, "timeout: expected seconds above 0, got None"),
        ({"url": "nowhere"}, "url: expected host:port"),
        ({"http_url": "ftp://x"}, "http_url: expected http://host:port"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    usual = {"kind": LMCacheSDKCacheKind.KV, "url": "h:1", "http_url": "http://h:2", "model_name": "m", "timeout": 1.0}
    with pytest.raises(LMCacheSDKError, match=message):
        lmcache_sdk.connect(**(usual | arguments))


def test_both_calls_can_be_awaited_side_by_side(context: LMCacheSDKContext) -> None:
    async def one(number: int) -> bool:
        kv, tokens = random_kv(32), range(1000 * number, 1000 * number + 32)
        assert await context.aretrieve(tokens, "salt") is None
        assert await context.astore(kv, tokens, "salt") is True
        assert await context.astore(kv, tokens, "salt", {"lmcache.tag": "x"}) is False
        out = torch.empty(2, 3, 40, 16)
        back = await context.aretrieve(tokens, "salt", out=out)
        assert back is not None
        assert back.data_ptr() == out.data_ptr()
        return torch.equal(back, kv)

    async def all_of_them() -> list[bool]:
        with pytest.raises(LMCacheSDKError, match="tokens: expected one per"):
            await context.astore(random_kv(16), range(15))
        return await asyncio.gather(*(one(number) for number in range(1, 9)))

    assert asyncio.run(all_of_them()) == [True] * 8


def test_threads_may_share_a_context(context: LMCacheSDKContext) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        tokens = range(1000 * number, 1000 * number + 64)
        kv = random_kv(64)
        for length in (16, 48, 64):
            context.store(kv[:, :, :length], tokens[:length])
            back = context.retrieve(tokens)
            if back is None or not torch.equal(back, kv[:, :, :length]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
