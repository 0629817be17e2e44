"""The main job, end to end, on any machine: a real vLLM puts its prompt KV into the server, takes it back after it
forgot its own, and decodes on a KV cache that the SDK edited.

    python examples/demo.py         progress on stderr; a table and, as the last line, one JSON object on stdout

Exits with 1 and the reason if a step does not show what it should. Whatever was started is stopped, on Ctrl-C too.
"""

import json
import signal
import statistics
import sys
import time
from contextlib import ExitStack

import httpx
from _demo_engine import Engine, EngineFailed
from _demo_process import ProcessFailed, free_port
from _demo_setup import CACHE, ENGINE_ARGUMENTS, connector, demo_model, start_server
from _demo_steps import DemoFailed, Measured, Say, edit, hits

from lmcache_sdk import LMCacheSDKError, kvcache
from lmcache_sdk.edits import Rotary


def run(say: Say) -> Measured:
    """All steps, with a server and an engine of their own."""
    measured = Measured()
    with ExitStack() as running:
        say("building the model: a Qwen3 with random weights")
        model = demo_model()
        port, http_port = free_port(), free_port()
        say(f"starting lmcache server on port {port}, HTTP on {http_port}")
        server = running.enter_context(start_server("demo", port, http_port))
        server.wait_until_answers(f"http://127.0.0.1:{http_port}/healthcheck", 20.0)
        say("starting vLLM with the connector; it takes about half a minute")
        log = CACHE / "demo" / "vllm.log"
        engine = running.enter_context(Engine(model, log, connector=connector(port), arguments=ENGINE_ARGUMENTS))
        engine.wait_until_ready()
        say(f"vLLM is ready at {engine.url}")
        url, http_url = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}"
        cache = running.enter_context(kvcache.connect(url, http_url, str(model)))
        hits(engine, cache, measured, say)
        edit(engine, cache, Rotary.from_config(json.loads((model / "config.json").read_text())), measured, say)
        say("stopping vLLM and the server")
    return measured


def report(measured: Measured, seconds: float) -> str:
    """The table, and the JSON object on the last line."""
    times = (measured.cold, measured.local, measured.external, measured.edited)
    cold, local, external, edited = map(statistics.median, times)
    rows = [
        ("cold prompt", cold, "computed"),
        ("local hit", local, f"{measured.cached_tokens} tokens from the engine's own cache"),
        ("external hit", external, f"{measured.cached_tokens} tokens from the server; logprobs equal the local hit's"),
        ("edited cache", edited, f"{measured.kept_tokens} tokens kept, {measured.dropped_tokens} dropped"),
    ]
    table = [f"{'':14}{'first token':>12}", *(f"{name:14}{ms:9.1f} ms   {note}" for name, ms, note in rows)]
    facts = {
        "cold_ttft_ms": round(cold, 2),
        "local_hit_ttft_ms": round(local, 2),
        "external_hit_ttft_ms": round(external, 2),
        "external_equals_local": measured.external_equals_local,
        "cached_tokens": measured.cached_tokens,
        "kept_tokens": measured.kept_tokens,
        "dropped_tokens": measured.dropped_tokens,
        "edited_ttft_ms": round(edited, 2),
        "edit_served": measured.edit_served,
        "plain_client_unaffected": measured.plain_client_unaffected,
        "seconds": round(seconds, 1),
    }
    return "\n".join([*table, "", json.dumps(facts)])


def main() -> int:
    """Run the demo; 0 if every step showed what it should."""
    start = time.monotonic()
    # As Ctrl-C does: unwind, so that what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        measured = run(say)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return 128 + signal.SIGINT
    except (DemoFailed, EngineFailed, ProcessFailed, LMCacheSDKError, httpx.HTTPError, OSError) as error:
        say(f"failed: {error}")
        return 1
    print(report(measured, time.monotonic() - start), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
