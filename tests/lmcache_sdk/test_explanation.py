"""Why a retrieve found nothing, or less than expected, in words; against a real server."""

import itertools
from typing import Any

import pytest

import lmcache_sdk
from lmcache_sdk import LMCacheSDKContext, LMCacheSDKError, writing
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.views import ChunkGeometry
from lmcache_server.protocol.layout import KernelGroup, Kind
from lmcache_server.protocol.messages import End, Reserve, Stop
from tests.lmcache_sdk.fake_engine import TINY, random_kv, registered_engine
from tests.lmcache_sdk.story_engine import StoryEngine
from tests.servers import CacheServer

_starts = itertools.count(100_000, 1000)


@pytest.fixture
def tokens() -> list[int]:
    """Three chunks and two tokens that no other test has cached under any model."""
    return list(range(start := next(_starts), start + 50))


def test_an_explanation_says_how_far_and_what_stops_it(context: LMCacheSDKContext, tokens: list[int]) -> None:
    nothing = context.explain(tokens)
    assert (nothing.tokens, nothing.cached, nothing.chunk, nothing.stop) == (50, 0, 0, Stop.END)
    assert str(nothing) == (
        "0 of 50 tokens are cached. Chunk 0 (tokens 0 to 15) is not: nothing is stored behind the beginning (not yet, "
        "or not any more). No other namespace has more of it under this salt; other salts are not looked at."
    )
    context.store(random_kv(32), tokens[:32])
    some = context.explain(tokens)
    assert (some.cached, some.chunk) == (32, 2)
    assert str(some) == (
        "32 of 50 tokens are cached. Chunk 2 (tokens 32 to 47) is not: nothing is stored behind chunk 1 (not yet, or "
        "not any more)."
    )
    other = context.explain([*tokens[:20], 1, *tokens[21:]])
    assert str(other) == (
        "16 of 50 tokens are cached. Chunk 1 (tokens 16 to 31) is not: only other tokens (or other extras) follow "
        "chunk 0."
    )
    context.store(random_kv(48), tokens[:48])
    everything = context.explain(tokens)
    assert (everything.cached, everything.chunk, everything.stop) == (48, None, Stop.NOTHING)
    assert str(everything) == "48 of 50 tokens are cached. The last 2 are less than a chunk of 16."
    assert str(context.explain(tokens[:48])) == "48 of 48 tokens are cached."
    assert str(context.explain([])) == "0 of 0 tokens are cached."
    assert context.explain(tokens, "salt").cached == 0


def test_a_chunk_that_is_being_written_is_said_to_be(
    context: LMCacheSDKContext, engine: Attachment, tokens: list[int]
) -> None:
    prompt = StoryEngine(engine).prompt(tokens, "")
    engine.connection.request(Reserve(engine.instance, (prompt,)))
    assert str(context.explain(tokens)).startswith(
        "0 of 50 tokens are cached. Chunk 0 (tokens 0 to 15) is being written"
    )
    engine.connection.request(End(engine.instance, (prompt.session,)))


def test_a_shard_that_nobody_stored_is_named(server: CacheServer, model: str, tokens: list[int]) -> None:
    with (
        registered_engine(server, model, world_size=2, worker_id=0) as first,
        registered_engine(server, model, world_size=2, worker_id=1),
        lmcache_sdk.kvcache.connect(server.url, server.http_url, model, timeout=10) as context,
    ):
        StoryEngine(first).store(tokens)
        found = context.explain(tokens)
        assert (found.stop, found.missing_shards) == (Stop.PART_MISSING, (1,))
        assert "Chunk 0 (tokens 0 to 15) is there in part: nobody stored shard 1." in str(found)


@pytest.mark.parametrize(
    ("changes", "field", "asked", "found"),
    [
        ({"revision": "r2"}, "revision", "r1", "r2"),
        ({"groups": (KernelGroup((0, 1, 2), 2, 2, 8, "bfloat16"),)}, "layout", None, None),
        ({"world_size": 2, "worker_id": None}, "number of shards", 1, 2),
    ],
)
def test_the_field_that_differs_is_named(
    context: LMCacheSDKContext, server: CacheServer, model: str, changes: dict[str, Any], field: str, asked: object,
    found: object, tokens: list[int],
) -> None:  # fmt: skip
    groups, others = changes.get("groups", ()), {k: v for k, v in changes.items() if k != "groups"}
    with registered_engine(server, model, *groups, **others) as other:
        shards = other.world_size
        story = StoryEngine(other)
        geometry = ChunkGeometry.of(other.layout, 16, shards)
        kv = random_kv(48, other.layout.groups[0], shards=shards)
        writing.store(other, geometry, kv, story.prompt(tokens, ""), 10.0)
        context.store(random_kv(16), tokens[:16])
        explanation = context.explain(tokens)
        ((cached, fields),) = explanation.elsewhere
        assert (explanation.cached, cached, len(fields)) == (16, 48, 1)
        assert f"48 tokens are cached under {field}" in str(explanation)
        if asked is not None:
            assert list(fields.values()) == [(asked, found)]
            assert f"{found!r} instead of {asked!r}." in str(explanation)


def test_the_namespace_with_the_fewest_differences_comes_first(
    context: LMCacheSDKContext, server: CacheServer, model: str, tokens: list[int]
) -> None:
    queries = KernelGroup((0, 1, 2), 1, 2, 8, "float32")
    with (
        registered_engine(server, model + "##query", queries, kind=Kind.QUERY) as capturing,
        registered_engine(server, model, TINY, revision="r2") as other,
    ):
        StoryEngine(capturing).store(tokens)
        StoryEngine(other).store(tokens[:32])
        first, second = context.explain(tokens).elsewhere
        assert (first[0], list(first[1])) == (32, ["revision"])
        assert (second[0], second[1]["kind"]) == (48, ("kv", "query"))


def test_questions_that_cannot_be_asked_are_refused_by_name(context: LMCacheSDKContext, tokens: list[int]) -> None:
    with pytest.raises(LMCacheSDKError, match="tokens: expected a sequence"):
        context.explain(5)  # type: ignore[arg-type]
    with pytest.raises(LMCacheSDKError, match="cache_salt: expected"):
        context.explain(tokens, "a/b")
