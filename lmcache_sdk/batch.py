"""Many request streams together: prefill all, edit all, decode all, and one report for each.

Streams run on a bounded number of threads. A stream that fails does not stop the others: what went wrong is in
`failures` by its id and in the report, and the stream is as its own failure left it.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Protocol

from lmcache_sdk.errors import LMCacheSDKError
from lmcache_sdk.perf import StreamPerfMetrics
from lmcache_server.report import Metrics, StreamHandler, get_formatter

__all__ = ["LMCacheBatchedStream", "LMCacheBatchedStreamError", "RequestStream"]

logger = logging.getLogger(__name__)

WORKERS = 64
"""Streams under way at once: more than an engine on one device keeps busy with, few enough for any machine."""


class LMCacheBatchedStreamError(LMCacheSDKError):
    """The batch was asked for something that it cannot do: an unknown id, an unknown mode, a stream added twice."""


class RequestStream(Protocol):
    """What a batch needs of a stream; LMCacheRequestStream and the older LMCacheStream have it."""

    @property
    def request_stream_id(self) -> str:
        """Unique id."""

    def generate(self, sampling_params: Mapping[str, Any]) -> StreamPerfMetrics:
        """Run one pass."""

    def modify_kv(self, fn: Any, timeout: float, poll_interval: float) -> None:
        """Edit the cached KV."""


class LMCacheBatchedStream:
    """A set of request streams that go through their passes together.

    `request_streams` and `perf_metrics` (of the latest pass) and `failures` (of the latest call) are by stream id.
    `progress`: a bar on stderr; by default only if that is a terminal.
    """

    def __init__(self, *, max_workers: int = WORKERS, progress: bool | None = None) -> None:
        if max_workers < 1:
            raise LMCacheBatchedStreamError(f"max_workers: expected at least 1, got {max_workers}")
        self.request_streams: dict[str, Any] = {}
        self.perf_metrics: dict[str, StreamPerfMetrics] = {}
        self.failures: dict[str, Exception] = {}
        self._max_workers = max_workers
        self._progress = progress

    def __len__(self) -> int:
        return len(self.request_streams)

    def add(self, request: RequestStream) -> None:
        """Take a stream into the batch."""
        if not hasattr(request, "request_stream_id"):
            raise LMCacheBatchedStreamError(f"request: expected a request stream, got {type(request).__name__}")
        if request.request_stream_id in self.request_streams:
            raise LMCacheBatchedStreamError(f"request stream {request.request_stream_id} is in this batch already")
        self.request_streams[request.request_stream_id] = request

    def get_request_stream(self, stream_id: str) -> Any:
        """The stream of that id; LMCacheBatchedStreamError if there is none."""
        try:
            return self.request_streams[stream_id]
        except KeyError:
            raise LMCacheBatchedStreamError(f"no request stream {stream_id} in this batch") from None

    def prefill(self, sampling_params: Mapping[str, Any], *, fmt: str = "terminal", width: int = 80) -> Metrics:
        """Run every prompt once, for one token, so that its KV is cached."""
        duration = self.run_request_streams({**sampling_params, "max_tokens": 1}, "prefill")
        return self.get_perf_metrics(duration, fmt, width, "prefill")

    def modify(
        self,
        fn: Any,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        fmt: str = "terminal",
        width: int = 80,
    ) -> Metrics:
        """Apply the edit function to every stream's cached KV."""
        duration = self.modify_request_streams(fn, timeout, poll_interval)
        metrics = _report("Batched Stream Modify Metrics", fmt, width)
        metrics.add_section("results", "Results").add("duration", "Total Duration (s)", duration)
        return self._with_failures(metrics)

    def decode(self, sampling_params: Mapping[str, Any], *, fmt: str = "terminal", width: int = 80) -> Metrics:
        """Let every stream generate."""
        return self.get_perf_metrics(self.run_request_streams(sampling_params, "decode"), fmt, width, "decode")

    def run_request_streams(self, sampling_params: Mapping[str, Any], label: str = "generate") -> float:
        """One pass of every stream; the seconds it took. `perf_metrics` holds what each that succeeded cost."""
        self.perf_metrics = {}

        def run(stream_id: str) -> None:
            self.perf_metrics[stream_id] = self.request_streams[stream_id].generate(sampling_params)

        return self._each(run, label)

    def modify_request_streams(self, fn: Any, timeout: float = 30.0, poll_interval: float = 0.2) -> float:
        """Edit every stream; the seconds it took."""
        return self._each(
            lambda stream_id: self.request_streams[stream_id].modify_kv(fn, timeout, poll_interval), "modify"
        )

    def get_perf_metrics(
        self, duration: float, fmt: str = "terminal", width: int = 80, mode: str = "decode"
    ) -> Metrics:
        """The report on the latest pass, which took `duration` seconds; `mode` is prefill or decode."""
        if mode not in ("prefill", "decode"):
            raise LMCacheBatchedStreamError(f"mode: expected prefill or decode, got {mode!r}")
        metrics = _report(f"Batched Stream Metrics ({mode})", fmt, width)
        config = metrics.add_section("config", "Configuration")
        config.add("num_request_streams", "Number of Request Streams", len(self.request_streams))
        results = metrics.add_section("results", "Results")
        results.add("duration", "Total Duration (s)", duration)
        if mode == "prefill":
            tokens = sum(perf.input_tokens for perf in self.perf_metrics.values())
            results.add("input_tokens", "Total Input Tokens", tokens)
            results.add("input_tput", "Input Throughput (tokens/s)", tokens / duration if duration else 0.0)
        else:
            tokens = sum(perf.output_tokens for perf in self.perf_metrics.values())
            results.add("output_tokens", "Total Output Tokens", tokens)
            results.add("output_tput", "Decode Throughput (tokens/s)", tokens / duration if duration else 0.0)
        return self._with_failures(metrics)

    def _each(self, work: Callable[[str], None], label: str) -> float:
        self.failures = {}
        begin = time.perf_counter()
        bar = _Bar(label, len(self.request_streams), sys.stderr.isatty() if self._progress is None else self._progress)
        workers = min(self._max_workers, max(1, len(self.request_streams)))
        pool = ThreadPoolExecutor(workers, thread_name_prefix=f"lmcache-{label}")
        try:
            running = {pool.submit(work, stream_id): stream_id for stream_id in self.request_streams}
            for future in as_completed(running):
                error = future.exception()
                if isinstance(error, Exception):
                    self.failures[running[future]] = error
                elif error is not None:  # somebody wants the whole program to end
                    raise error
                bar.step()
        finally:
            pool.shutdown(cancel_futures=True)
        # In the order of the streams, not in that in which they happened to fail.
        self.failures = {name: self.failures[name] for name in self.request_streams if name in self.failures}
        if self.failures:
            first, reason = next(iter(self.failures.items()))
            logger.warning("%s: %d of %d streams failed; %s: %s", label, len(self.failures), len(self), first, reason)
        return time.perf_counter() - begin

    def _with_failures(self, metrics: Metrics) -> Metrics:
        if self.failures:
            table = metrics.add_table("failures", "Failures", ("stream", "Failed Stream"), ("reason", "Reason"))
            for stream_id, error in self.failures.items():
                table.add_row(stream=stream_id, reason=str(error))
        return metrics


class _Bar:
    """How many of the streams are done, on the terminal's last line."""

    def __init__(self, label: str, total: int, shown: bool) -> None:
        self._label = label
        self._total = total
        self._shown = shown and total > 0
        self._done = 0
        self._lock = threading.Lock()

    def step(self) -> None:
        if not self._shown:
            return
        with self._lock:
            self._done += 1
            filled = 30 * self._done // self._total
            end = "\n" if self._done == self._total else ""
            bar = f"\r{self._label} [{'#' * filled}{'.' * (30 - filled)}] {self._done}/{self._total}"
            print(bar, end=end, file=sys.stderr, flush=True)


def _report(title: str, fmt: str, width: int) -> Metrics:
    metrics = Metrics(title)
    metrics.add_handler(StreamHandler(get_formatter(fmt, width=width)))
    return metrics
