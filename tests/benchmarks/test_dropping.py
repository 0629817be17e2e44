"""Token dropping runs to its end on an engine that computes KV by a formula."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import dropping
from lmcache_sdk.attachment import attach
from lmcache_sdk.transport import ServerConnection
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from tests.lmcache_sdk.story_engine import StoryEngine

LAYOUT = CacheLayout((KernelGroup((0, 1), 2, 4, 64, "bfloat16"),))


@pytest.mark.process
def test_each_share_is_decoded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    story: list[StoryEngine] = []

    @contextmanager
    def engine(model: Any, name: str, port: int, *_: Any, gpu: bool) -> Iterator[SimpleNamespace]:
        with ServerConnection(f"tcp://127.0.0.1:{port}") as connection:
            worker = attach(
                connection, role="worker", model_name="model", revision="", kind=Kind.KV, world_size=1, worker_id=0,
                layout=LAYOUT, block_size=16,
            )  # fmt: skip
            story.append(StoryEngine(worker))
            yield SimpleNamespace(model="model", url="", wait_until_ready=lambda _: None, reset_prefix_cache=int)
            worker.detach()

    monkeypatch.setattr(dropping, "engine", engine)
    monkeypatch.setattr(dropping, "post_completion", lambda *_, **__: story[0])
    monkeypatch.setattr(dropping, "TOKENS", 1024)
    dropping.main(["--decode=4", "--rounds=2"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [name for name in document if name != "benchmark"] == ["1", "0.5", "0.25", "0.125"]
    kept = [call.cached for call in story[0].calls[-2 * 4 * dropping.STREAMS :]]
    assert max(kept[: dropping.STREAMS]) >= 1024 and 0 < min(kept) < 512, "what was decoded ran on what was kept"
