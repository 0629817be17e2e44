"""Why a prompt is cached as far as it is."""

import dataclasses
from itertools import count
from typing import Any

import pytest

from lmcache_server.core import explain as explain_module
from lmcache_server.core.explain import MOST_OTHERS, MOST_TOLD, explain
from lmcache_server.protocol.keys import Namespace
from lmcache_server.protocol.layout import Kind
from lmcache_server.protocol.messages import Elsewhere, ExplainReply, Stop
from tests.lmcache_server.core.small_cache import SmallCache

_names = count()


def ask(cache: SmallCache, text: str, owner: int = 0, salt: str = "") -> ExplainReply:
    before = dataclasses.asdict(cache.l1.counters), cache.l1.index.size
    reply = explain(cache.l1, cache.view(owner), cache.prompt(text, "question", salt))
    assert (dataclasses.asdict(cache.l1.counters), cache.l1.index.size) == before
    assert len(cache.l1.reads) == 0
    return reply


def store_under(cache: SmallCache, text: str, salt: str = "", **changes: Any) -> Namespace:
    """Store `text` in a namespace that differs in `changes`."""
    namespace = cache.namespace
    cache.namespace = dataclasses.replace(namespace, **changes)
    cache.store(0, text, f"other {next(_names)}", salt)
    other, cache.namespace = cache.namespace, namespace
    return other


def test_what_stops_a_prompt_is_told_chunk_by_chunk() -> None:
    cache = SmallCache(pool=16)
    assert ask(cache, "abc") == ExplainReply(0, Stop.END, (), ())
    cache.store(1, "abc")
    assert ask(cache, "abc") == ExplainReply(3, Stop.NOTHING, (), ())
    assert ask(cache, "ab") == ExplainReply(2, Stop.NOTHING, (), ())
    assert ask(cache, "") == ExplainReply(0, Stop.NOTHING, (), ())
    assert ask(cache, "abcd") == ExplainReply(3, Stop.END, (), ())
    assert ask(cache, "abx") == ExplainReply(2, Stop.OTHER_TOKENS, (), ())
    assert ask(cache, "xbc") == ExplainReply(0, Stop.OTHER_TOKENS, (), ())
    writing = cache.reserve(1, "abcd")
    assert ask(cache, "abcde") == ExplainReply(3, Stop.BEING_WRITTEN, (), ())
    cache.commit(1, writing.reservation)
    assert ask(cache, "abcd") == ExplainReply(4, Stop.NOTHING, (), ())


def test_a_shard_that_is_missing_is_named() -> None:
    cache = SmallCache(pool=16, ranks=2)
    cache.store(1, "ab")
    assert ask(cache, "ab") == ExplainReply(0, Stop.PART_MISSING, (1,), ())
    cache.store(2, "a")
    assert ask(cache, "ab") == ExplainReply(1, Stop.PART_MISSING, (1,), ())
    writing = cache.reserve(2, "ab")
    assert ask(cache, "ab", owner=1) == ExplainReply(1, Stop.BEING_WRITTEN, (), ())
    cache.abort(2, writing.reservation)
    assert ask(cache, "ab").stop is Stop.PART_MISSING


@pytest.mark.parametrize(
    "changes", [{"model_name": "n"}, {"revision": "2"}, {"kind": Kind.QUERY}, {"layout": "other"}, {"world_size": 9}]
)
def test_namespaces_that_have_more_are_named(changes: dict[str, Any]) -> None:
    cache = SmallCache(pool=16)
    cache.store(1, "a")
    other = store_under(cache, "abc", **changes)
    expected = Elsewhere(3, other.model_name, other.revision, other.kind, other.layout, other.world_size)
    assert ask(cache, "abcd") == ExplainReply(1, Stop.END, (), (expected,))
    assert ask(cache, "a").elsewhere == ask(cache, "x").elsewhere == ()


def test_the_longest_come_first_and_nobody_is_named_who_has_no_more() -> None:
    cache = SmallCache(pool=64)
    cache.store(1, "ab")
    for length in (1, 2, 3, 5, 4):
        store_under(cache, "abcde"[:length], revision=str(length))
    assert [(each.chunks, each.revision) for each in ask(cache, "abcde").elsewhere] == [(5, "5"), (4, "4"), (3, "3")]


def test_what_is_cached_under_another_salt_stays_unknown() -> None:
    cache = SmallCache(pool=32)
    store_under(cache, "abc", "theirs", revision="2")
    store_under(cache, "abc", "", revision="3")
    cache.store(1, "abx", salt="theirs")
    assert ask(cache, "abc", salt="mine") == ExplainReply(0, Stop.END, (), ())
    assert [each.revision for each in ask(cache, "abc", salt="theirs").elsewhere] == ["2"]
    assert [each.revision for each in ask(cache, "abc").elsewhere] == ["3"]


def test_the_work_and_the_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SmallCache(pool=128)
    for i in range(MOST_OTHERS + 10):
        store_under(cache, "a", revision=str(i))
    walked = 0

    def counted(*arguments: Any) -> Any:
        nonlocal walked
        walked += 1
        return hit(*arguments)

    hit = explain_module._hit
    monkeypatch.setattr(explain_module, "_hit", counted)
    assert len(ask(cache, "a").elsewhere) == MOST_TOLD
    assert walked == MOST_OTHERS


def test_a_hash_that_is_equal_by_accident_counts_as_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SmallCache(pool=8)
    cache.store(1, "ab")
    stored = next(node for _, node in cache.l1.index.nodes() if cache.text(node) == "ab")
    monkeypatch.setattr(cache.l1.hasher, "chain", lambda *_: stored.hash)
    assert ask(cache, "ax").stop is Stop.OTHER_TOKENS
