"""Batches over a real server: everything that succeeds counts, everything that fails is named."""

import io
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from lmcache_sdk import LMCacheSDKCacheKind, LMCacheSDKContext
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.batch import LMCacheBatchedStream, LMCacheBatchedStreamError
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.perf import StreamPerfMetrics, measured
from lmcache_sdk.request import LMCacheRequestStream, LMCacheRequestStreamError, TokenEvent, create_request
from tests.lmcache_sdk.story_engine import StoryEngine, kv_of

KV = LMCacheSDKCacheKind.KV
LABELS = {
    "num_request_streams": "Number of Request Streams:",
    "duration": "Total Duration (s):",
    "input_tokens": "Total Input Tokens:",
    "input_tput": "Input Throughput (tokens/s):",
    "output_tokens": "Total Output Tokens:",
    "output_tput": "Decode Throughput (tokens/s):",
}


class PlainStream:
    """A stream without an engine, for what a batch does by itself."""

    def __init__(self, stream_id: str, fails: BaseException | None = None, seconds: float = 0.0) -> None:
        self.request_stream_id = stream_id
        self.asked: list[Mapping[str, Any]] = []
        self._fails = fails
        self._seconds = seconds

    def generate(self, sampling_params: Mapping[str, Any]) -> StreamPerfMetrics:
        self.asked.append(sampling_params)
        time.sleep(self._seconds)
        if self._fails:
            raise self._fails
        return measured(10, 0.5, [0.1] * sampling_params.get("max_tokens", 1))

    def modify_kv(self, fn: Any, timeout: float, poll_interval: float) -> None:
        fn(self.request_stream_id, (timeout, poll_interval))


def plain_batch(*streams: PlainStream, **options: Any) -> LMCacheBatchedStream:
    batch = LMCacheBatchedStream(**options)
    for stream in streams:
        batch.add(stream)
    return batch


@pytest.fixture
def story(engine: Attachment) -> StoryEngine:
    return StoryEngine(engine)


def test_a_thousand_streams_of_which_some_fail_end_with_the_others_right(
    context: LMCacheSDKContext, story: StoryEngine
) -> None:
    batch = LMCacheBatchedStream(max_workers=8)
    prompts: dict[str, list[int]] = {}
    for i in range(1000):
        prompt = [5000 + i, *range(39)]
        stream = create_request([context], lambda *_: [TokenEvent(1, "a")], prompt)
        prompts[stream.request_stream_id] = prompt
        batch.add(stream)
    failing = {prompt[0] for prompt in list(prompts.values())[::20]}
    for prompt in prompts.values():
        context.store(kv_of(prompt[:32], story.geometry), prompt[:32])
    threads: set[str] = set()

    def halve(tensors: Mapping[LMCacheSDKCacheKind, torch.Tensor], tokens: Sequence[int]) -> Any:
        threads.add(threading.current_thread().name)
        if tokens[0] in failing:
            raise ValueError(f"not {tokens[0]}")
        return tensors[KV][:, :, 16:] + 1, tokens[16:]

    report = batch.modify(halve).to_dict()["metrics"]
    assert len(threads) <= 8
    assert len(batch.failures) == len(report["failures"]) == 50
    assert {row["stream"] for row in report["failures"]} == set(batch.failures)
    assert {prompts[stream_id][0] for stream_id in batch.failures} == failing
    right: Counter[str] = Counter()
    for stream_id, stream in batch.request_streams.items():
        prompt = prompts[stream_id]
        if stream_id in batch.failures:
            assert isinstance(batch.failures[stream_id], LMCacheRequestStreamError)
            assert f"not {prompt[0]}" in str(batch.failures[stream_id])
            assert (stream.tokens, stream.suffix_tokens, stream.cache_salt) == (prompt, [], "")
            right["untouched"] += 1
            continue
        assert (stream.tokens, stream.suffix_tokens) == (prompt[16:32], prompt[32:])
        kv = context.retrieve(stream.tokens, stream.cache_salt)
        assert kv is not None
        right["edited"] += torch.equal(kv, kv_of(prompt[:32], story.geometry)[:, :, 16:] + 1)
    assert right == {"edited": 950, "untouched": 50}
    report = batch.decode({"max_tokens": 1}).to_dict()["metrics"]
    assert (report["results"]["output_tokens"], len(batch.perf_metrics)) == (1000, 1000)
    assert "failures" not in report


def test_prefill_modify_and_decode_go_through_every_stream(context: LMCacheSDKContext, engine: Attachment) -> None:
    engines = [StoryEngine(engine) for _ in range(4)]
    batch = LMCacheBatchedStream()
    for i, story in enumerate(engines):
        batch.add(create_request([context], story, range(1000 * i, 1000 * i + 40)))
    sampling = {"max_tokens": 5, "temperature": 1.0}
    assert batch.prefill(sampling).to_dict()["metrics"]["results"]["input_tokens"] == 4 * 40
    assert sampling["max_tokens"] == 5
    assert all(story.calls[0].sampling_params == {"max_tokens": 1, "temperature": 1.0} for story in engines)
    assert not any(stream.is_done for stream in batch.request_streams.values())
    batch.modify(lambda tensors, tokens: (tensors[KV][:, :, 16:], tokens[16:]))
    assert batch.failures == {}
    batch.decode(sampling)
    assert all((story.calls[1].cached, len(story.calls[1].prompt)) == (16, 25) for story in engines)
    for stream_id, stream in batch.request_streams.items():
        assert (stream.decoded_tokens, batch.perf_metrics[stream_id].output_tokens) == (6, 5)
        assert batch.get_request_stream(stream_id) is stream


# Reports.


def test_the_report_of_a_prefill_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = plain_batch(PlainStream("a"), PlainStream("b")).prefill({"max_tokens": 7}, width=60)
    document = metrics.to_dict()
    assert document["title"] == "Batched Stream Metrics (prefill)"
    assert list(document["metrics"]) == ["config", "results"]
    assert document["metrics"]["config"] == {"num_request_streams": 2}
    results = document["metrics"]["results"]
    assert list(results) == ["duration", "input_tokens", "input_tput"]
    assert results["input_tokens"] == 20
    assert results["input_tput"] == pytest.approx(20 / results["duration"])
    metrics.emit()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " Batched Stream Metrics (prefill) ".center(60, "=")
    assert lines[1] == " Configuration ".center(60, "-")
    assert lines[3] == " Results ".center(60, "-")
    for line, key in zip((lines[2], *lines[4:7]), ("num_request_streams", *results), strict=True):
        assert line.startswith(LABELS[key])
    assert lines[7] == "=" * 60
    assert all(len(line) == 60 for line in lines)


def test_the_report_of_a_decode_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = plain_batch(PlainStream("a"), PlainStream("b")).decode({"max_tokens": 7}, fmt="json")
    document = metrics.to_dict()
    assert document["title"] == "Batched Stream Metrics (decode)"
    results = document["metrics"]["results"]
    assert list(results) == ["duration", "output_tokens", "output_tput"]
    assert (document["metrics"]["config"], results["output_tokens"]) == ({"num_request_streams": 2}, 14)
    metrics.emit()
    assert '"output_tokens": 14' in capsys.readouterr().out


def test_the_report_of_a_modify_has_a_duration(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    batch = plain_batch(PlainStream("a"))
    metrics = batch.modify(lambda *arguments: seen.append(arguments), timeout=3.0, poll_interval=0.1)
    assert seen == [("a", (3.0, 0.1))]
    document = metrics.to_dict()
    assert document["title"] == "Batched Stream Modify Metrics"
    assert [list(section) for section in document["metrics"].values()] == [["duration"]]
    metrics.emit()
    assert capsys.readouterr().out.splitlines()[0] == " Batched Stream Modify Metrics ".center(80, "=")


def test_failures_are_reported_by_id_and_the_others_count(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    batch = plain_batch(PlainStream("good"), PlainStream("bad", LMCacheSDKError("no luck")))
    with caplog.at_level(logging.WARNING, "lmcache_sdk.batch"):
        metrics = batch.decode({"max_tokens": 3})
    assert "decode: 1 of 2 streams failed; bad: no luck" in caplog.text
    assert set(batch.perf_metrics) == {"good"}
    assert list(batch.failures) == ["bad"]
    document = metrics.to_dict()["metrics"]
    assert document["failures"] == [{"stream": "bad", "reason": "no luck"}]
    assert document["results"]["output_tokens"] == 3
    metrics.emit()
    assert "bad            no luck" in capsys.readouterr().out


def test_reasons_of_failures_are_wrapped_to_the_width(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the pool has no room for 3 of 4 chunks; the first 1 are cached. Enlarge it or store fewer tokens"
    batch = plain_batch(PlainStream("bad", LMCacheSDKError(reason)), PlainStream("worse", LMCacheSDKError("gone")))
    batch.decode({"max_tokens": 3}, width=60).emit()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 60
    table = lines[lines.index("Failed Stream  Reason") :]
    assert table[2].startswith("bad            the pool")
    assert " ".join(line[15:] for line in table[2:-2]) == reason
    assert table[-2] == "worse          gone"


def test_an_empty_batch_has_reports_too() -> None:
    batch = LMCacheBatchedStream()
    assert len(batch) == 0
    assert batch.prefill({}).to_dict()["metrics"]["results"]["input_tokens"] == 0
    assert batch.get_perf_metrics(0.0).to_dict()["metrics"]["results"]["output_tput"] == 0.0


def test_each_pass_replaces_the_metrics_of_the_last(context: LMCacheSDKContext) -> None:
    bad = PlainStream("bad")
    batch = plain_batch(bad)
    batch.prefill({})
    assert set(batch.perf_metrics) == {"bad"}
    bad._fails = LMCacheSDKError("now")
    batch.decode({})
    assert batch.perf_metrics == {}
    bad._fails = None
    batch.decode({})
    assert batch.failures == {}


# Members.


def test_a_stream_is_added_once_and_found_by_its_id() -> None:
    stream = PlainStream("a")
    batch = plain_batch(stream)
    assert batch.request_streams == {"a": stream}
    assert batch.get_request_stream("a") is stream
    with pytest.raises(LMCacheBatchedStreamError, match="request stream a is in this batch already"):
        batch.add(stream)
    with pytest.raises(LMCacheBatchedStreamError, match="expected a request stream, got int"):
        batch.add(7)  # type: ignore[arg-type]
    with pytest.raises(LMCacheBatchedStreamError, match="no request stream b in this batch"):
        batch.get_request_stream("b")
    assert issubclass(LMCacheBatchedStreamError, LMCacheSDKError)


def test_arguments_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(LMCacheBatchedStreamError, match="max_workers: expected at least 1, got 0"):
        LMCacheBatchedStream(max_workers=0)
    with pytest.raises(LMCacheBatchedStreamError, match="mode: expected prefill or decode, got 'modify'"):
        LMCacheBatchedStream().get_perf_metrics(1.0, mode="modify")
    with pytest.raises(ValueError, match="expected terminal or json"):
        plain_batch(PlainStream("a")).decode({}, fmt="xml")


# Threads.


def test_a_batch_runs_a_bounded_number_of_streams_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    class Counting(PlainStream):
        def generate(self, sampling_params: Mapping[str, Any]) -> StreamPerfMetrics:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.002)
            with lock:
                running -= 1
            return super().generate(sampling_params)

    before = threading.active_count()
    batch = plain_batch(*(Counting(str(i)) for i in range(300)))
    batch.decode({})
    assert 8 <= most <= 64
    assert len(batch.perf_metrics) == 300
    assert threading.active_count() == before


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_wants_the_program_to_end_ends_the_batch_soon(end: type[BaseException]) -> None:
    streams = [PlainStream("first", end()), *(PlainStream(str(i), seconds=0.05) for i in range(200))]
    start = time.monotonic()
    with pytest.raises(end):
        plain_batch(*streams, max_workers=1).decode({})
    assert time.monotonic() - start < 5
    assert sum(bool(stream.asked) for stream in streams) < 100


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"),
    [
        (Terminal, None, True),
        (Terminal, False, False),
        (io.StringIO, None, False),
        (io.StringIO, True, True),
    ],
)
def test_progress_is_shown_on_a_terminal_unless_it_is_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], progress: bool | None, shown: bool
) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    plain_batch(PlainStream("a"), PlainStream("b", LMCacheSDKError("x")), progress=progress).prefill({})
    if not shown:
        assert stderr.getvalue() == ""
        return
    lines = stderr.getvalue().split("\r")
    assert lines[1:] == [
        f"prefill [{'#' * 15}{'.' * 15}] 1/2",
        f"prefill [{'#' * 30}] 2/2\n",
    ]


def test_the_newer_stream_is_what_a_batch_needs() -> None:
    from lmcache_sdk.batch import RequestStream

    wanted = {name for name in vars(RequestStream) if not name.startswith("_")}
    assert wanted <= set(dir(LMCacheRequestStream)) | {"request_stream_id"}
