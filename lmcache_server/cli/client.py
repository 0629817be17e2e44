"""Commands that ask a running server or engine over HTTP: `ping`, `describe`, `kvcache clear`."""

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from lmcache_server.report import FileHandler, Metrics, StreamHandler, get_formatter

__all__ = ["add_parsers"]

KVCACHE_URL = "http://localhost:8080"
ENGINE_URL = "http://localhost:8000"
_TIMEOUT = 10.0


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--format", choices=["terminal", "json"], default="terminal", help="how to print (default: terminal)"
    )
    common.add_argument("--output", metavar="FILE", help="write the report to a file as well")
    common.add_argument("-q", "--quiet", action="store_true", help="print nothing, only set the exit code")

    ping = commands.add_parser("ping", parents=[common], help="is a server or an engine alive?", allow_abbrev=False)
    ping.add_argument("target", choices=["kvcache", "engine"])
    ping.add_argument("--url", help=f"HTTP address (default: {KVCACHE_URL} or {ENGINE_URL})")
    ping.set_defaults(run=_ping)

    describe = commands.add_parser("describe", parents=[common], help="what does a server hold?", allow_abbrev=False)
    describe.add_argument("target", choices=["kvcache"])
    describe.add_argument("--url", default=KVCACHE_URL, help="HTTP address (default: %(default)s)")
    describe.set_defaults(run=_describe)

    kvcache = commands.add_parser("kvcache", parents=[common], help="change what a server holds", allow_abbrev=False)
    kvcache.add_argument("action", choices=["clear"])
    kvcache.add_argument("--url", required=True, help="HTTP address of the server")
    kvcache.set_defaults(run=_clear)


class _Unreachable(Exception):
    """No usable answer: one sentence."""


def _address(url: str) -> str:
    """`url` with its scheme and without the last slash."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _request(url: str, method: str = "GET") -> bytes:
    if not url.startswith(("http://", "https://")):
        raise _Unreachable(f"{url} is no HTTP address; expected http://host:port, with the server's --http-port")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=_TIMEOUT) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise _Unreachable(f"{url} answered {error.code} {error.reason}") from error
    except http.client.HTTPException as error:
        raise _Unreachable(f"{url} does not speak HTTP; is that the --http-port?") from error
    except TimeoutError as error:
        raise _Unreachable(f"{url} did not answer within {_TIMEOUT:g} s; is that the --http-port?") from error
    except (OSError, ValueError) as error:
        raise _Unreachable(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error


def _ping(options: argparse.Namespace) -> int:
    kvcache = options.target == "kvcache"
    url = _address(options.url or (KVCACHE_URL if kvcache else ENGINE_URL))
    report = Metrics("Ping KV Cache" if kvcache else "Ping Engine")
    begin = time.perf_counter()
    try:
        _request(url + ("/healthcheck" if kvcache else "/health"))
    except _Unreachable as error:
        report.add("status", "Status", "FAIL")
        _show(report, options, 30)
        return _fail(options, str(error), 1)
    report.add("status", "Status", "OK")
    report.add("round_trip_time_ms", "Round trip time (ms)", round((time.perf_counter() - begin) * 1000, 2))
    _show(report, options, 30)
    return 0


def _describe(options: argparse.Namespace) -> int:
    url = _address(options.url)
    try:
        status = json.loads(_request(url + "/status"))
        l1 = status["storage_manager"]["l1_manager"]
        report = Metrics("Describe KV Cache")
        report.add("health", "Health", "OK" if status["is_healthy"] else "FAIL")
        report.add("url", "URL", url)
        report.add("engine_type", "Engine type", status["engine_type"])
        report.add("transport", "Transport", status.get("transport"))
        report.add("chunk_size", "Chunk size", status["chunk_size"])
        report.add("l1_capacity_gb", "L1 capacity (GB)", l1["memory_total_bytes"] / 2**30)
        used = f"{l1['memory_used_bytes'] / 2**30:.2f} ({l1['memory_usage_ratio']:.1%})"
        report.add("l1_used_gb", "L1 used (GB)", used)
        report.add(
            "eviction_policy", "Eviction policy", status["storage_manager"]["l1_eviction_controller"]["eviction_policy"]
        )
        report.add("cached_objects", "Cached objects", l1["total_object_count"])
        report.add("active_sessions", "Active sessions", status["active_sessions"])
        for number, engine in enumerate(status["cache_context_meta"].values()):
            section = report.add_list_section("models", f"model-{number}", f"Model: {engine['model_name']}")
            section.add("model", "Model", engine["model_name"])
            section.add("world_size", "World size", engine["world_size"])
            section.add("num_layers", "Layers", engine["kv_cache_layout"]["num_layers"])
            section.add("bytes_per_token", "Bytes per token", engine["kv_cache_layout"]["cache_size_per_token"])
    except (ValueError, KeyError, TypeError) as error:
        return _fail(options, f"{url}/status is not the status of a cache server: {type(error).__name__} {error}", 1)
    except _Unreachable as error:
        return _fail(options, str(error), 1)
    _show(report, options, 50)
    return 0


def _clear(options: argparse.Namespace) -> int:
    url = _address(options.url)
    try:
        cleared = json.loads(_request(url + "/cache/clear", "POST"))
        report = Metrics("Clear KV Cache")
        report.add("status", "Status", "OK")
        for key, label in (("freed", "Objects freed"), ("held", "Objects still in use")):
            report.add(key, label, cleared[key])
    except (ValueError, KeyError, TypeError) as error:
        return _fail(options, f"{url} is not a cache server: {type(error).__name__} {error}", 1)
    except _Unreachable as error:
        return _fail(options, str(error), 1)
    _show(report, options, 40)
    return 0


def _show(report: Metrics, options: argparse.Namespace, width: int) -> None:
    formatter = get_formatter(options.format, width=width)
    if not options.quiet:
        report.add_handler(StreamHandler(formatter))
    if options.output:
        report.add_handler(FileHandler(options.output, formatter))
    try:
        report.emit()
    except OSError as error:
        raise SystemExit(_fail(options, f"--output {options.output} cannot be written: {error.strerror}", 2)) from error


def _fail(options: argparse.Namespace, reason: str, code: int) -> int:
    if not options.quiet:
        print(f"lmcache {options.command}: error: {reason}", file=sys.stderr)
    return code
