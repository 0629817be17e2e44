"""The workloads are what their table says, and every request leaves a record; the engines compute nothing."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharing
from tests.benchmarks.doubles import StandIn


def test_users_share_system_prompts_and_their_own_histories_grow() -> None:
    requests = sharing.chat(random.Random(1))
    assert len(requests) == 36
    assert len({tuple(one[:1024]) for one in requests}) == 2
    assert sorted(map(len, requests)) == [1792] * 12 + [2048] * 12 + [2304] * 12


def test_documents_are_asked_again_and_none_of_them_soon() -> None:
    requests = sharing.rag(random.Random(1))
    documents = [tuple(one[:2048]) for one in requests]
    assert (len(requests), len(set(documents)), len({tuple(one) for one in requests})) == (30, 6, 30)


@pytest.mark.process
def test_every_request_of_every_engine_is_a_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engines: dict[str, StandIn] = {}

    def engine(model: Any, name: str, port: int | None, *_: Any, peer: bool, gpu: bool) -> StandIn:
        engines[name] = StandIn(port)
        return engines[name]

    monkeypatch.setattr(sharing, "engine", engine)
    monkeypatch.setattr(sharing, "build_model", lambda: Path("model"))
    sharing.main(["--records", str(tmp_path / "records.jsonl")])
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(records) == 2 * (36 + 30)
    assert {(one["workload"], one["side"]) for one in records} == {
        ("chat", "none"), ("chat", "ours"), ("rag", "none"), ("rag", "ours"),
    }  # fmt: skip
    assert all(one["ttft_ms"] > 0 and one["seconds"] > 0 for one in records)
    alone, beside = engines.values()
    assert alone.asked == beside.asked, "the same requests in the same order"
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(document["rag, with the server"]["ttft_ms"]) == 30


def test_servers_are_compared_with_none_and_with_each_other() -> None:
    medians = {"none": {"ms": 4.0, "cached": 0.0}, "ours": {"ms": 1.0, "cached": 0.5}, "peer": {"ms": 2.0, "cached": 1}}
    assert [ratios for _, ratios in sharing.beside(medians)] == [[0.25, "-"], [0.5, "-"], [0.5, 0.5]]
    assert len(sharing.beside({"none": medians["none"], "ours": medians["ours"]})) == 1
