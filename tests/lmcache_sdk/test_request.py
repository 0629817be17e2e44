"""Request streams over a real server and an engine that stores and takes KV as a connector does."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import lmcache_sdk
from lmcache_sdk import LMCacheSDKCacheKind, LMCacheSDKContext, LMCacheSDKError
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.request import (
    EditAlreadyApplied,
    LMCacheRequestStream,
    LMCacheRequestStreamError,
    StaleEdit,
    StreamAborted,
    TokenEvent,
    create_request,
)
from lmcache_server.protocol.layout import KernelGroup, Kind
from tests.lmcache_sdk.fake_engine import random_kv, registered_engine
from tests.lmcache_sdk.story_engine import StoryEngine, kv_of
from tests.servers import CacheServer, running_server

KV, QUERY = LMCacheSDKCacheKind.KV, LMCacheSDKCacheKind.QUERY
PROMPT = list(range(100, 140))
"""Two chunks and half of one."""

Tensors = Mapping[LMCacheSDKCacheKind, torch.Tensor]
Edited = tuple[torch.Tensor, Sequence[int]]


@pytest.fixture
def story(engine: Attachment) -> StoryEngine:
    return StoryEngine(engine)


@pytest.fixture
def stream(context: LMCacheSDKContext, story: StoryEngine) -> LMCacheRequestStream:
    """A stream whose prompt was prefilled."""
    stream = create_request([context], story, PROMPT)
    stream.generate({"max_tokens": 1})
    return stream


def state(stream: LMCacheRequestStream) -> tuple[Any, ...]:
    """All that an edit may change."""
    return (list(stream.tokens), list(stream._suffix_tokens), stream.done, stream.cache_salt, stream.decoded_tokens)


def drop_first_chunk(tensors: Tensors, tokens: Sequence[int]) -> Edited:
    return tensors[KV][:, :, 16:] + 0.5, tokens[16:]


# Passes.


def test_a_pass_appends_what_it_generates_and_its_prompt_is_all_tokens(
    context: LMCacheSDKContext, story: StoryEngine
) -> None:
    stream = create_request(contexts=[context], post_completion=story, prompt_token_ids=PROMPT, cache_salt="mine")
    perf = stream.generate({"max_tokens": 3, "temperature": 0.0})
    generated = stream.tokens[40:]
    assert stream.tokens[:40] == PROMPT
    assert (len(generated), stream.decoded_tokens, stream.done, stream.suffix_tokens) == (3, 3, False, [])
    assert stream.output_text == "".join(f"<{token}>" for token in generated)
    assert stream.output_tokens is stream.tokens
    assert (perf.input_tokens, perf.output_tokens) == (40, 3)
    call = story.calls[0]
    assert (call.prompt, call.cache_salt) == (PROMPT, "mine")
    assert call.sampling_params == {"max_tokens": 3, "temperature": 0.0}
    stream.generate({"max_tokens": 2}, suffix_tokens=[7, 8])
    assert story.calls[1].prompt == [*PROMPT, *generated, 7, 8]
    assert (stream.decoded_tokens, len(stream.tokens)) == (5, 47)
    assert story.calls[1].cached == 32


def test_a_stream_is_done_when_a_pass_yields_less_than_it_might(context: LMCacheSDKContext, story: StoryEngine) -> None:
    stream = create_request([context], story, PROMPT)
    story.stop_after = 0
    stream.generate({})  # one token, if it is not said how many
    assert stream.is_done
    story.stop_after = 2
    stream.generate({"max_tokens": 2})
    assert not stream.is_done
    stream.generate({"max_tokens": 3})
    assert stream.is_done
    stream.modify_kv(drop_first_chunk)
    assert not stream.is_done


def test_each_stream_has_an_id_of_its_own(context: LMCacheSDKContext, story: StoryEngine) -> None:
    one, other = (create_request([context], story, PROMPT) for _ in range(2))
    assert one.request_stream_id != other.request_stream_id
    assert str(uuid.UUID(one.request_stream_id, version=4)) == one.request_stream_id
    assert repr(one) == (f"<LMCacheRequestStream {one.request_stream_id}: 40 tokens, 0 suffix, 0 decoded, open>")


def test_what_an_engine_generated_before_it_failed_counts(context: LMCacheSDKContext, story: StoryEngine) -> None:
    stream = create_request([context], story, PROMPT)
    story.fail_after = 2
    with pytest.raises(LMCacheRequestStreamError, match="failed after 2 tokens: the device is gone") as caught:
        stream.generate({"max_tokens": 5})
    assert caught.value.request_stream_id == stream.request_stream_id
    assert stream.request_stream_id in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (stream.decoded_tokens, len(stream.tokens), stream.done) == (2, 42, False)
    story.fail_after = None
    stream.generate({"max_tokens": 1})
    assert story.calls[1].prompt[:40] == PROMPT
    assert stream.decoded_tokens == 3


def test_an_engine_that_fails_before_it_iterates_is_the_same_error(context: LMCacheSDKContext) -> None:
    def broken(*_: Any) -> list[TokenEvent]:
        raise OSError("no route")

    with pytest.raises(LMCacheRequestStreamError, match="after 0 tokens: no route"):
        create_request([context], broken, PROMPT).generate({"max_tokens": 1})


def test_an_interrupted_pass_keeps_what_came(context: LMCacheSDKContext) -> None:
    def interrupted(*_: Any) -> Any:
        yield TokenEvent(1, "a")
        raise KeyboardInterrupt

    stream = create_request([context], interrupted, PROMPT)
    with pytest.raises(KeyboardInterrupt):
        stream.generate({"max_tokens": 4})
    assert stream.tokens == [*PROMPT, 1]
    assert (stream.decoded_tokens, stream.output_text) == (1, "a")


def test_sampling_parameters_are_a_mapping(stream: LMCacheRequestStream) -> None:
    with pytest.raises(LMCacheRequestStreamError, match="sampling_params: expected a mapping, got NoneType"):
        stream.generate(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, -1, None, "3"])
def test_a_pass_is_asked_for_at_least_one_token(stream: LMCacheRequestStream, most: Any) -> None:
    before = state(stream)
    with pytest.raises(LMCacheRequestStreamError, match="max_tokens: expected at least 1"):
        stream.generate({"max_tokens": most})
    assert state(stream) == before


def test_tokens_may_be_any_sequence_of_ids_and_nothing_else(context: LMCacheSDKContext, story: StoryEngine) -> None:
    stream = create_request([context], story, torch.tensor(PROMPT))
    assert stream.tokens == PROMPT
    with pytest.raises(LMCacheRequestStreamError, match=r"prompt_token_ids\[1\]: expected a token id"):
        create_request([context], story, [1, -1])
    with pytest.raises(LMCacheRequestStreamError, match=r"suffix_tokens\[0\]: expected an integer"):
        stream.generate({}, ["a"])  # type: ignore[list-item]
    assert stream.tokens == PROMPT
    assert story.calls == []


# Taking KV out.


def test_retrieve_gives_the_whole_chunks_of_a_stream(stream: LMCacheRequestStream, story: StoryEngine) -> None:
    kv = stream.retrieve(KV)
    assert kv.shape == (2, 3, 32, 16)
    assert torch.equal(kv, kv_of(PROMPT[:32], story.geometry))


def test_retrieve_waits_while_an_engine_still_stores(context: LMCacheSDKContext, story: StoryEngine) -> None:
    story.store_after = 0.15
    stream = create_request([context], lambda *_: [TokenEvent(1, "")], PROMPT)
    stream.generate({"max_tokens": 1})
    storing = threading.Thread(target=story.store, args=(PROMPT,))
    storing.start()
    assert stream.retrieve(KV, timeout=5, poll_interval=0.2).shape[2] == 32
    storing.join()


def test_retrieve_of_what_nobody_stores_is_an_error_at_its_deadline(context: LMCacheSDKContext) -> None:
    stream = create_request([context], lambda *_: [], PROMPT)
    start = time.monotonic()
    with pytest.raises(LMCacheRequestStreamError, match=r"no KV of its 40 tokens was cached within 0\.3 s"):
        stream.retrieve(KV, timeout=0.3, poll_interval=0.05)
    assert 0.3 <= time.monotonic() - start < 2
    with pytest.raises(LMCacheRequestStreamError, match="no KV"):
        stream.modify_kv(drop_first_chunk, timeout=0.0)


def test_less_than_a_chunk_is_never_waited_for(context: LMCacheSDKContext) -> None:
    stream = create_request([context], lambda *_: [], PROMPT[:15])
    start = time.monotonic()
    with pytest.raises(LMCacheRequestStreamError, match="its 15 tokens are less than a chunk of 16"):
        stream.modify_kv(drop_first_chunk)
    assert time.monotonic() - start < 5


def test_retrieve_takes_what_there_is_when_the_engine_stores_no_more(
    context: LMCacheSDKContext, story: StoryEngine
) -> None:
    story.store(PROMPT[:16])
    stream = create_request([context], lambda *_: [], PROMPT)
    assert stream.retrieve(KV, timeout=5, poll_interval=0.02).shape[2] == 16
    stream.modify_kv(lambda tensors, tokens: (tensors[KV], tokens))
    assert (stream.tokens, stream.suffix_tokens) == (PROMPT[:16], PROMPT[16:])


def test_a_kind_without_a_context_is_refused_by_name(stream: LMCacheRequestStream) -> None:
    with pytest.raises(LMCacheRequestStreamError, match=r"no context for LMCacheSDKCacheKind.QUERY, only KV"):
        stream.retrieve(QUERY)
    with pytest.raises(LMCacheRequestStreamError, match="no context"):
        stream.update(QUERY, random_kv(16), range(16))


def test_a_stream_has_one_context_per_kind(context: LMCacheSDKContext, story: StoryEngine) -> None:
    with pytest.raises(LMCacheRequestStreamError, match="contexts: two for KV, expected one per kind"):
        create_request([context, context], story, PROMPT)
    with pytest.raises(LMCacheRequestStreamError, match="contexts: expected at least one"):
        create_request(iter([]), story, PROMPT)
    with pytest.raises(LMCacheRequestStreamError, match="contexts: expected a list of them, got LMCacheSDKContext"):
        create_request(context, story, PROMPT)  # type: ignore[arg-type]
    with pytest.raises(LMCacheRequestStreamError, match=r"contexts: expected contexts, got 'x'"):
        create_request("x", story, PROMPT)  # type: ignore[arg-type]


# Edits.


def test_an_edit_sees_the_cached_prefix_and_leaves_the_rest_as_suffix(
    stream: LMCacheRequestStream, story: StoryEngine
) -> None:
    generated = stream.tokens[40:]
    seen: list[Any] = []

    def edit(tensors: Tensors, tokens: Sequence[int]) -> Edited:
        seen.append((dict(tensors), list(tokens)))
        return drop_first_chunk(tensors, tokens)

    stream.modify_kv(edit)
    ((tensors, tokens),) = seen
    assert list(tensors) == [KV]
    assert torch.equal(tensors[KV], kv_of(PROMPT[:32], story.geometry))
    assert tokens == PROMPT[:32]
    assert (stream.tokens, stream.suffix_tokens) == (PROMPT[16:32], [*PROMPT[32:], *generated])
    assert stream._suffix_tokens is stream.suffix_tokens
    assert stream.decoded_tokens == 1
    stream.generate({"max_tokens": 2}, suffix_tokens=[5])
    assert stream.suffix_tokens == []
    assert story.calls[1].prompt == [*PROMPT[16:], *generated, 5]
    assert story.calls[1].taken is not None
    assert torch.equal(story.calls[1].taken, kv_of(PROMPT[:32], story.geometry)[:, :, 16:] + 0.5)
    assert stream.decoded_tokens == 3


def test_edits_follow_each_other_and_suffixes_add_up(stream: LMCacheRequestStream, story: StoryEngine) -> None:
    tail = stream.tokens[32:]
    stream.modify_kv(lambda tensors, tokens: (tensors[KV] * 2, tokens))
    stream.modify_kv(lambda tensors, tokens: (tensors[KV][:, :, :16] + 1, tokens[:16]))
    assert (stream.tokens, stream.suffix_tokens) == (PROMPT[:16], tail)
    stream.generate({"max_tokens": 1})
    taken = story.calls[-1].taken
    assert taken is not None
    assert torch.equal(taken, kv_of(PROMPT[:16], story.geometry) * 2 + 1)


def test_an_edit_of_the_same_tokens_is_never_cached_already(stream: LMCacheRequestStream, story: StoryEngine) -> None:
    for factor in (2.0, 3.0, 5.0):
        stream.modify_kv(lambda tensors, tokens, factor=factor: (tensors[KV] * factor, tokens))
        assert torch.equal(stream.retrieve(KV), kv_of(PROMPT[:32], story.geometry) * factor)
        stream.update(KV, kv_of(PROMPT[:32], story.geometry), PROMPT[:32])


def test_nobody_else_meets_an_edit(
    context: LMCacheSDKContext, stream: LMCacheRequestStream, story: StoryEngine
) -> None:
    stream.modify_kv(drop_first_chunk)
    edited = PROMPT[16:32]
    assert stream.cache_salt.startswith("edit-")
    assert context.lookup(edited) == 0
    plain = create_request([context], story, edited)
    plain.generate({"max_tokens": 1})
    assert story.calls[-1].cached == 0
    assert torch.equal(plain.retrieve(KV), kv_of(edited, story.geometry))
    other = create_request([context], story, PROMPT)
    other.modify_kv(drop_first_chunk)
    assert other.cache_salt != stream.cache_salt
    assert torch.equal(stream.retrieve(KV), kv_of(PROMPT[:32], story.geometry)[:, :, 16:] + 0.5)
    assert torch.equal(create_request([context], story, PROMPT).retrieve(KV), kv_of(PROMPT[:32], story.geometry))


def test_tenants_with_salts_edit_apart_from_each_other(context: LMCacheSDKContext, story: StoryEngine) -> None:
    streams = [create_request([context], story, PROMPT, salt) for salt in ("one", "two")]
    for factor, stream in enumerate(streams, 2):
        stream.generate({"max_tokens": 1})
        stream.modify_kv(lambda tensors, tokens, factor=factor: (tensors[KV] * factor, tokens))
    assert [call.cached for call in story.calls] == [0, 0]
    for factor, stream in enumerate(streams, 2):
        assert torch.equal(stream.retrieve(KV), kv_of(PROMPT[:32], story.geometry) * factor)


def test_without_isolation_an_edit_is_everybodys_and_what_is_cached_stays(
    context: LMCacheSDKContext, story: StoryEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stream = create_request([context], story, PROMPT, "salt", isolate_edits=False)
    stream.generate({"max_tokens": 1})
    stream.modify_kv(drop_first_chunk)
    assert stream.cache_salt == "salt"
    edited = kv_of(PROMPT[:32], story.geometry)[:, :, 16:] + 0.5
    back = context.retrieve(PROMPT[16:32], "salt")
    assert back is not None
    assert torch.equal(back, edited)
    with caplog.at_level(logging.WARNING, "lmcache_sdk.request"):
        stream.modify_kv(lambda tensors, tokens: (tensors[KV] + 1, tokens))
    assert "its 16 tokens were cached already and stay as they are" in caplog.text
    assert torch.equal(stream.retrieve(KV), edited)


def test_an_edit_that_keeps_less_than_a_chunk_says_that_nothing_is_stored(
    stream: LMCacheRequestStream, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lmcache_sdk.request"):
        stream.modify_kv(lambda tensors, tokens: (tensors[KV][:, :, :5], tokens[:5]))
    assert "nothing was stored, its 5 tokens are less than a chunk" in caplog.text
    assert (stream.tokens, stream.suffix_tokens[:8]) == (PROMPT[:5], PROMPT[32:])


def fails(*_: Any) -> Edited:
    raise ValueError("no such layer")


def test_a_failing_function_leaves_the_stream_as_it_was(stream: LMCacheRequestStream, story: StoryEngine) -> None:
    story.stop_after = 0
    stream.generate({"max_tokens": 1})
    before = state(stream)
    assert stream.done
    with pytest.raises(LMCacheRequestStreamError, match="edit function failed: ValueError: no such layer") as caught:
        stream.modify_kv(fails)
    assert isinstance(caught.value.__cause__, ValueError)
    assert state(stream) == before
    stream.modify_kv(drop_first_chunk)
    assert not stream.done


def test_a_function_may_spoil_what_it_was_given_before_it_fails(
    stream: LMCacheRequestStream, story: StoryEngine
) -> None:
    def spoil(tensors: Tensors, tokens: Sequence[int]) -> Edited:
        tensors[KV].zero_()
        tokens.clear()  # type: ignore[attr-defined]
        raise ValueError("after all")

    before = state(stream)
    with pytest.raises(LMCacheRequestStreamError, match="after all"):
        stream.modify_kv(spoil)
    assert state(stream) == before
    assert torch.equal(stream.retrieve(KV), kv_of(PROMPT[:32], story.geometry))


def test_a_function_may_edit_its_list_of_tokens_in_place(stream: LMCacheRequestStream) -> None:
    tail = stream.tokens[32:]

    def edit(tensors: Tensors, tokens: Sequence[int]) -> Edited:
        del tokens[16:]  # type: ignore[attr-defined]
        return tensors[KV][:, :, :16], tokens

    stream.modify_kv(edit)
    assert (stream.tokens, stream.suffix_tokens) == (PROMPT[:16], tail)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, tokens: (t[KV], tokens[1:]), r"tokens: expected one per kv.shape\[2\] \(32\), got 31"),
        (lambda t, tokens: (t[KV][:, 1:], tokens), r"kv: expected shape \[2, 3, T, 16\], got \[2, 2, 32, 16\]"),
        (lambda t, tokens: (t[KV][0], tokens), r"kv: expected shape \[2, 3, T, 16\], got \[3, 32, 16\]"),
        (lambda t, tokens: (t[KV].half(), tokens), "kv: expected dtype torch.float32, got torch.float16"),
        (lambda t, tokens: (t[KV].to("meta"), tokens), "kv: expected a tensor on the CPU, got one on meta"),
        (lambda t, tokens: (None, tokens), "kv: expected a torch.Tensor, got NoneType"),
        (lambda t, tokens: (t[KV], [-1] * 32), r"tokens\[0\]: expected a token id"),
        (lambda t, tokens: t[KV], r"edit function: expected \(new KV, its tokens\), got Tensor"),
        (lambda t, tokens: (t[KV],), r"edit function: expected \(new KV, its tokens\), got tuple"),
        (lambda t, tokens: None, r"edit function: expected \(new KV, its tokens\), got NoneType"),
    ],
)
def test_an_edit_that_does_not_fit_names_expected_and_given_and_changes_nothing(
    stream: LMCacheRequestStream, edit: Callable[..., Any], message: str
) -> None:
    before = state(stream)
    with pytest.raises(LMCacheRequestStreamError, match=message):
        stream.modify_kv(edit)
    assert state(stream) == before


BIG = KernelGroup((0, 1), planes=2, heads=1, head_size=16384, dtype="float32")
"""4 MiB per chunk of 16 tokens: sixteen fill the pool, with its room for alignment."""


def test_a_store_without_room_leaves_the_stream_as_it_was_and_nothing_for_the_next_edit() -> None:
    with (
        running_server() as server,
        registered_engine(server, "m", BIG) as engine,
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=10) as context,
    ):
        stream = create_request([context], StoryEngine(engine), range(4 * 16))
        stream.generate({"max_tokens": 1})
        before = state(stream)
        too_much = 20 * 16

        def grow(tensors: Tensors, tokens: Sequence[int]) -> Edited:
            return torch.zeros(2, 2, too_much, BIG.hidden), range(too_much)

        with pytest.raises(LMCacheRequestStreamError, match=r"the edit was not stored: the pool has no room"):
            stream.modify_kv(grow)
        assert state(stream) == before
        # The failed store left chunks of zeros behind; an edit of the same tokens must not meet them.
        stream.update(KV, torch.ones(2, 2, 64, BIG.hidden), range(64))
        assert bool((stream.retrieve(KV) == 1).all())
        server.quiet()


def test_a_server_that_is_gone_leaves_the_stream_as_it_was() -> None:
    with (
        running_server() as server,
        registered_engine(server, "m") as engine,
        lmcache_sdk.kvcache.connect(server.url, server.http_url, "m", timeout=0.5) as context,
    ):
        stream = create_request([context], StoryEngine(engine), PROMPT)
        stream.generate({"max_tokens": 1})
        edit, before = stream.begin_edit(), state(stream)
        server.kill()
        with pytest.raises(LMCacheRequestStreamError, match="the edit was not stored: no answer"):
            edit.apply(edit.tensors[KV], edit.tokens)
        assert state(stream) == before
        server.start()
        edit.apply(edit.tensors[KV], edit.tokens)
        assert torch.equal(stream.retrieve(KV), edit.tensors[KV])


# Exactly once, or refused.


def test_an_edit_is_applied_once(stream: LMCacheRequestStream) -> None:
    edit = stream.begin_edit()
    edit.apply(edit.tensors[KV] + 1, edit.tokens)
    after = state(stream)
    with pytest.raises(EditAlreadyApplied, match="applied already"):
        edit.apply(edit.tensors[KV] + 2, edit.tokens)
    assert state(stream) == after
    assert torch.equal(stream.retrieve(KV), edit.tensors[KV] + 1)


def test_an_edit_whose_source_changed_is_stale(stream: LMCacheRequestStream) -> None:
    for change in (
        lambda: stream.generate({"max_tokens": 1}),
        lambda: stream.modify_kv(lambda tensors, tokens: (tensors[KV], tokens)),
        lambda: stream.update(KV, random_kv(16), range(16)),
    ):
        edit = stream.begin_edit(poll_interval=0.01)
        change()
        after = state(stream)
        with pytest.raises(StaleEdit, match="changed after the edit's source"):
            edit.apply(edit.tensors[KV], edit.tokens)
        assert state(stream) == after


def test_an_edit_that_failed_to_be_stored_may_be_applied_again(stream: LMCacheRequestStream) -> None:
    edit = stream.begin_edit()
    with pytest.raises(LMCacheRequestStreamError, match="tokens: expected one per"):
        edit.apply(edit.tensors[KV], edit.tokens[1:])
    edit.apply(edit.tensors[KV], edit.tokens)


def test_nothing_happens_to_a_stream_after_it_was_aborted(stream: LMCacheRequestStream) -> None:
    edit, before = stream.begin_edit(), state(stream)
    stream.abort()
    calls: list[Callable[[], Any]] = [
        lambda: edit.apply(edit.tensors[KV], edit.tokens),
        lambda: stream.generate({"max_tokens": 1}),
        lambda: stream.begin_edit(),
        lambda: stream.modify_kv(drop_first_chunk),
        lambda: stream.update(KV, random_kv(16), range(16)),
    ]
    for call in calls:
        with pytest.raises(StreamAborted):
            call()
    assert state(stream) == before
    assert "aborted" in repr(stream)


def test_an_abort_ends_a_pass_that_is_under_way(context: LMCacheSDKContext) -> None:
    ended: list[str] = []

    def endless(*_: Any) -> Any:
        try:
            for token in range(1000):
                yield TokenEvent(token, "")
                stream.abort()
        finally:
            ended.append("engine")

    stream = create_request([context], endless, PROMPT)
    with pytest.raises(StreamAborted, match="aborted after 2 tokens"):
        stream.generate({"max_tokens": 1000})
    assert (stream.decoded_tokens, ended) == (2, ["engine"])


def test_an_edit_under_way_when_its_stream_is_aborted_is_refused(stream: LMCacheRequestStream) -> None:
    before = state(stream)

    def edit(tensors: Tensors, tokens: Sequence[int]) -> Edited:
        stream.abort()
        return tensors[KV], tokens

    with pytest.raises(StreamAborted):
        stream.modify_kv(edit)
    assert state(stream) == before


def test_an_abort_while_an_edit_is_stored_refuses_the_edit(
    stream: LMCacheRequestStream, context: LMCacheSDKContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, before, store = stream.begin_edit(), state(stream), context.store

    def aborted_meanwhile(*arguments: Any) -> bool:
        stored = store(*arguments)
        stream.abort()
        return stored

    monkeypatch.setattr(context, "store", aborted_meanwhile)
    with pytest.raises(StreamAborted, match="while an edit was stored"):
        edit.apply(edit.tensors[KV], edit.tokens)
    assert state(stream) == before


def test_a_stream_does_one_thing_at_a_time(context: LMCacheSDKContext) -> None:
    refused: list[str] = []

    def nested(*_: Any) -> list[TokenEvent]:
        for call in (lambda: stream.generate({}), lambda: stream.modify_kv(fails)):
            with pytest.raises(LMCacheRequestStreamError) as caught:
                call()
            refused.append(caught.value.message)
        return [TokenEvent(1, "")]

    stream = create_request([context], nested, PROMPT)
    stream.generate({})
    assert refused == [
        f"{what} while it is busy; a stream does one thing at a time" for what in ("generate", "begin_edit")
    ]


# Queries.


def test_an_edit_sees_queries_beside_the_kv_cut_to_the_same_tokens(
    server: CacheServer, context: LMCacheSDKContext, story: StoryEngine, model: str
) -> None:
    group = KernelGroup((0, 1), planes=1, heads=4, head_size=8, dtype="float32")
    with (
        registered_engine(server, model + "##query", group, kind=Kind.QUERY),
        lmcache_sdk.qcache.connect(server.url, server.http_url, model, timeout=10) as queries,
    ):
        stream = create_request((c for c in (context, queries)), story, PROMPT)
        stream.generate({"max_tokens": 1})
        q = random_kv(16, group)
        queries.store(q, PROMPT[:16])
        assert torch.equal(stream.retrieve(QUERY, timeout=0.1), q)

        def edit(tensors: Tensors, tokens: Sequence[int]) -> Edited:
            assert set(tensors) == {KV, QUERY}
            assert torch.equal(tensors[QUERY], q)
            assert torch.equal(tensors[KV], kv_of(PROMPT[:16], story.geometry))
            assert tokens == PROMPT[:16]
            return tensors[KV] + 1, tokens

        tail = stream.tokens[16:]
        stream.modify_kv(edit)
        assert (stream.tokens, stream.suffix_tokens) == (PROMPT[:16], tail)
        with pytest.raises(LMCacheRequestStreamError, match="no QUERY of its 16 tokens"):
            stream.modify_kv(edit, timeout=0.1)


def test_every_error_of_a_stream_is_one_of_the_sdk(stream: LMCacheRequestStream) -> None:
    for kind in (StaleEdit, EditAlreadyApplied, StreamAborted):
        error = kind("why", stream.request_stream_id)
        assert isinstance(error, LMCacheRequestStreamError)
        assert isinstance(error, LMCacheSDKError)
        assert str(error) == f"request stream {stream.request_stream_id}: why"
