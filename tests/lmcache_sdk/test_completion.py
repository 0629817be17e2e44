"""The ready PostCompletion and its async twin, over real HTTP. No test may leave a socket behind."""

import asyncio
import gc
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_sdk.completion import (
    AsyncEngineCompletion,
    CompletionBroken,
    CompletionError,
    CompletionRefused,
    CompletionTimeout,
    EngineCompletion,
    async_post_completion,
    post_completion,
)
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.request import TokenEvent
from tests.lmcache_sdk.sse_engine import DONE, SseEngine, token
from tests.servers import free_ports

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")

Ask = Callable[..., list[TokenEvent]]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A socket that nobody closed is an error in the test that made it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        gc.collect()


def ask_at_once(url: str, params: dict[str, Any], salt: str, got: list[TokenEvent], **options: Any) -> None:
    with post_completion(url, "a/model", **options) as complete:
        for event in complete([1, 2, 3], params, salt):
            got.append(event)


def ask_with_asyncio(url: str, params: dict[str, Any], salt: str, got: list[TokenEvent], **options: Any) -> None:
    async def collect() -> None:
        async with async_post_completion(url, "a/model", **options) as complete:
            async for event in complete([1, 2, 3], params, salt):
                got.append(event)

    asyncio.run(collect())


@pytest.fixture(params=[ask_at_once, ask_with_asyncio], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Complete one prompt; what came, also before an error, is in `got`."""

    def call(
        url: str,
        params: dict[str, Any] | None = None,
        salt: str = "",
        got: list[TokenEvent] | None = None,
        **options: Any,
    ) -> list[TokenEvent]:
        events: list[TokenEvent] = [] if got is None else got
        request.param(url, params or {}, salt, events, **{"timeout": 5.0, **options})
        return events

    return call


def says(*pieces: bytes) -> Any:
    return lambda engine, sent: iter(pieces)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def choice(text: str, logprobs: Any = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "logprobs": logprobs, **more}]})


def test_a_prompt_goes_as_ids_and_tokens_come_back_as_events(ask: Ask) -> None:
    with SseEngine(says(token(7, "a"), token(8, "b"), DONE)) as engine:
        assert ask(engine.url, {"max_tokens": 2, "temperature": 0.0}, api_key="key") == [
            TokenEvent(7, "a"), TokenEvent(8, "b"),
        ]  # fmt: skip
        ((path, headers, sent),) = engine.requests
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer key"
    assert sent == {
        "model": "a/model", "prompt": [1, 2, 3], "logprobs": 0, "return_tokens_as_token_ids": True, "stream": True,
        "max_tokens": 2, "temperature": 0.0,
    }  # fmt: skip


def test_a_salt_is_sent_if_there_is_one_and_sampling_parameters_win_but_for_streaming(ask: Ask) -> None:
    with SseEngine(says(DONE)) as engine:
        assert ask(engine.url, {"logprobs": 5, "stream": False}, "edit-1") == []
        ((_, headers, sent),) = engine.requests
    assert (sent["cache_salt"], sent["logprobs"], sent["stream"]) == ("edit-1", 5, True)
    assert "Authorization" not in headers


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_as_openai_clients_know_it(ask: Ask, suffix: str) -> None:
    with SseEngine(says(DONE)) as engine:
        ask(engine.url + suffix)
        assert engine.requests[0][0] == "/v1/completions"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "", "http://h:port"])
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    for make in (post_completion, async_post_completion):
        with pytest.raises(CompletionError, match=r"base_url: expected http://host:port"):
            make(url, "m")


def test_other_lines_of_an_event_stream_are_no_tokens(ask: Ask) -> None:
    noise = [b": a comment\n\n", b"event: x\n", b"\n", choice("", None, finish_reason="stop"), event({"choices": []})]
    with SseEngine(says(*noise, token(1), DONE)) as engine:
        assert ask(engine.url) == [TokenEvent(1, "<1>")]


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_token_may_be_what_unicode_calls_the_end_of_a_line(ask: Ask, size: int) -> None:
    texts = ["\x85", "\u2028", "\u2029\x0b\x0c", "e\u0301"]
    answer = b"".join(token(i, text).replace(json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode())
                      for i, text in enumerate(texts)) + DONE.replace(b"\n", b"\r\n")  # fmt: skip
    with SseEngine(says(*(answer[i : i + size] for i in range(0, len(answer), size)))) as engine:
        assert [event.text for event in ask(engine.url)] == texts


def test_several_tokens_of_one_event_share_its_text(ask: Ask) -> None:
    several = choice("ab", {"tokens": ["token_id:1", "token_id:2"]})
    with SseEngine(says(several, choice("", {"tokens": ["token_id:3"]}), DONE)) as engine:
        assert ask(engine.url) == [TokenEvent(1, ""), TokenEvent(2, "ab"), TokenEvent(3, "")]


@pytest.mark.parametrize("logprobs", [None, {}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": ["token_id:x"]}])
def test_missing_ids_are_made_from_the_text_or_are_an_error(ask: Ask, logprobs: Any) -> None:
    with SseEngine(says(choice("ab", logprobs), DONE)) as engine:
        assert ask(engine.url, tokenize=lambda text: [ord(c) for c in text]) == [
            TokenEvent(97, ""), TokenEvent(98, "ab"),
        ]  # fmt: skip
        with pytest.raises(
            CompletionBroken, match=r"does not tell token ids; .*--return-tokens-as-token-ids.*tokenize"
        ):
            ask(engine.url)


# What may go wrong.


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (400, json.dumps({"error": {"message": "max_tokens is too large"}}).encode(), "max_tokens is too large"),
        (404, b"no such model", "no such model"),
        (503, b"", ""),
        (500, b"\xff" * 5000, "�"),
    ],
)
def test_an_http_error_is_a_refusal_with_its_status(ask: Ask, status: int, body: bytes, text: str) -> None:
    with SseEngine(status=status, body=body) as engine, pytest.raises(CompletionRefused) as caught:
        ask(engine.url)
    assert caught.value.status == status
    assert str(caught.value).startswith(f"the engine answered {status}: {text}")
    assert len(str(caught.value)) < 2100


def test_an_engine_that_is_not_there_is_said_to_be_unreachable(ask: Ask) -> None:
    (port,) = free_ports(1)
    with pytest.raises(CompletionError, match=rf"http://127.0.0.1:{port} cannot be reached") as caught:
        ask(f"http://127.0.0.1:{port}")
    assert type(caught.value) is CompletionError


def test_an_engine_that_does_not_answer_is_a_time_out(ask: Ask) -> None:
    def silent(engine: SseEngine, sent: Any) -> Iterator[bytes]:
        engine.stopping.wait(10)
        yield DONE

    start = time.monotonic()
    with SseEngine(silent) as engine, pytest.raises(CompletionTimeout, match=r"no first token .* within 0\.3 s"):
        ask(engine.url, timeout=0.1, first_token_timeout=0.3)
    assert time.monotonic() - start < 3


def test_an_engine_that_stops_in_the_middle_is_a_time_out_after_its_tokens(ask: Ask) -> None:
    def stops(engine: SseEngine, sent: Any) -> Iterator[bytes]:
        yield token(1)
        engine.stopping.wait(10)

    got: list[TokenEvent] = []
    with SseEngine(stops) as engine:
        with pytest.raises(CompletionTimeout, match=r"no next token .* within 0\.3 s"):
            ask(engine.url, got=got, timeout=0.3)
        assert got == [TokenEvent(1, "<1>")]
        assert not [thread for thread in threading.enumerate() if thread.name == "lmcache-sdk-silence"]


def test_an_error_that_is_kept_keeps_no_thread(ask: Ask) -> None:
    with SseEngine(says(token(1), b"data: nonsense\n\n")) as engine, pytest.raises(CompletionBroken) as kept:
        ask(engine.url)
    assert kept.value.__traceback__ is not None
    assert not [thread for thread in threading.enumerate() if thread.name == "lmcache-sdk-silence"]


def test_the_first_token_may_take_longer_than_the_next(ask: Ask) -> None:
    def queued(engine: SseEngine, sent: Any) -> Iterator[bytes]:
        yield b": a comment is no token\n\n"
        time.sleep(0.6)
        yield token(1)
        yield token(2) + DONE

    with SseEngine(queued) as engine:
        assert [event.token_id for event in ask(engine.url, timeout=0.3)] == [1, 2]


def test_who_takes_their_time_between_tokens_is_not_timed_out() -> None:
    with (
        SseEngine(says(token(1), token(2), token(3) + DONE)) as engine,
        post_completion(engine.url, "a/model", timeout=0.2) as complete,
    ):
        got = []
        for event in complete([1], {}, ""):
            time.sleep(0.4)
            got.append(event.token_id)
    assert got == [1, 2, 3]


def test_slow_tokens_are_no_time_out(ask: Ask) -> None:
    def slow(engine: SseEngine, sent: Any) -> Iterator[bytes]:
        for i in range(5):
            time.sleep(0.15)
            yield token(i)
        yield DONE

    with SseEngine(slow) as engine:
        assert len(ask(engine.url, timeout=0.6)) == 5


def test_a_stream_that_breaks_in_the_middle_is_told_after_its_tokens(ask: Ask) -> None:
    def breaks(engine: SseEngine, sent: Any) -> Iterator[bytes]:
        yield token(1)
        yield token(2)
        raise BrokenPipeError

    got: list[TokenEvent] = []
    with SseEngine(breaks) as engine, pytest.raises(CompletionBroken, match=r"the stream from .* broke"):
        ask(engine.url, got=got)
    assert [e.token_id for e in got] == [1, 2]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([token(1)], r"ended without \[DONE\]"),
        ([event({"error": {"message": "out of memory"}})], "failed while streaming: .*out of memory"),
        ([b"data: {not json\n\n"], "something else than a completion: {not json"),
        ([event([1, 2])], "something else than a completion"),
        ([event(5)], "something else than a completion"),
        ([event({"choices": [5]})], "something else than a completion"),
        ([event({"object": "chat"})], "something else than a completion"),
        ([event({"choices": [{"index": 1, "text": "x"}]})], "needs n = 1"),
    ],
)
def test_an_answer_that_is_no_complete_completion_is_broken(ask: Ask, pieces: list[bytes], message: str) -> None:
    with SseEngine(says(*pieces)) as engine, pytest.raises(CompletionBroken, match=message):
        ask(engine.url)


def test_what_went_wrong_is_told_apart() -> None:
    kinds = (CompletionTimeout, CompletionRefused, CompletionBroken)
    assert all(issubclass(kind, CompletionError) for kind in kinds)
    assert issubclass(CompletionError, LMCacheSDKError)
    assert not any(issubclass(one, other) for one in kinds for other in kinds if one is not other)


# Connections.


def test_threads_share_one_client_and_its_connections_are_used_again() -> None:
    def echo(engine: SseEngine, sent: dict[str, Any]) -> Iterator[bytes]:
        yield from (token(t) for t in sent["prompt"])
        yield DONE

    wrong: list[Any] = []
    with SseEngine(echo) as engine, post_completion(engine.url, "m") as complete:

        def work(number: int) -> None:
            for i in range(10):
                prompt = [number, i]
                if [e.token_id for e in complete(prompt, {}, "")] != prompt:
                    wrong.append(prompt)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert len(engine.requests) == 80
        assert engine.connections <= 8


def test_a_pass_that_is_given_up_lets_its_connection_go() -> None:
    ended = threading.Event()

    def endless(engine: SseEngine, sent: Any) -> Iterator[bytes]:
        try:
            while not engine.stopping.is_set():
                yield token(1)
                time.sleep(0.001)
        finally:
            ended.set()

    with SseEngine(endless) as engine, post_completion(engine.url, "m") as complete:
        events = complete([1], {}, "")
        assert next(events) == TokenEvent(1, "<1>")
        events.close()  # type: ignore[attr-defined]
        assert ended.wait(5), "the engine did not notice"


def test_a_closed_client_says_so() -> None:
    complete = post_completion("http://127.0.0.1:1", "m")
    complete.close()
    complete.close()
    with pytest.raises(CompletionError, match=r"client of http://127.0.0.1:1 is closed; make a new one"):
        list(complete([1], {}, ""))

    async def go() -> None:
        late = async_post_completion("http://127.0.0.1:1", "m")
        await late.close()
        await late.close()
        with pytest.raises(CompletionError, match="is closed"):
            await anext(late([1], {}, ""))

    asyncio.run(go())


def test_a_client_that_nobody_closed_leaves_no_socket() -> None:
    with SseEngine(says(DONE)) as engine:
        complete = post_completion(engine.url, "m")
        assert list(complete([1], {}, "")) == []
        client = complete._client
        del complete
        gc.collect()
        assert client.is_closed


def test_both_twins_are_what_their_functions_make() -> None:
    with post_completion("http://h:1", "m") as complete:
        assert isinstance(complete, EngineCompletion)
    assert isinstance(async_post_completion("http://h:1", "m"), AsyncEngineCompletion)
