"""RESULTS.md and its pictures: what was run replaces what was there, and a budget is never told by halves."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks._budgets import BUDGETS
from benchmarks._peer import peer_version
from benchmarks._plots import PICTURES

bench = importlib.import_module("benchmarks.__main__")

ALL = {name: {"ours": [1.0], "peer": [2.0]} for name in BUDGETS.keys() - {"gpu_copies"}}


def run(name: str, budgets: object, code: int = 0) -> object:
    document = json.dumps({"benchmark": name, "budgets": budgets})
    return bench.Run(f"python -m benchmarks.{name}", code, f"{name} table\n{document}", 2.0)


def test_a_whole_run_has_every_budget_and_what_each_part_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "RESULTS.md"
    runs = {"server_sdk": run("server_sdk", ALL), "wire": run("wire", {})}
    bench.write(results, "python -m benchmarks --peer", runs, gpu=False)
    text, said = results.read_text(), capsys.readouterr().out
    for part in (text, said):
        assert all(budget.text in part for budget in BUDGETS.values())
        assert "no GPU here" in part or torch.cuda.is_available()
    assert "Written by `python -m benchmarks --peer`" in text and "cores of" in text and "torch" in text
    assert peer_version() is None or f"LMCache (the peer) {peer_version()}" in text
    assert "`python -m benchmarks.wire`, commit " in text and "wire table\n```" in text and ", 2 s" in text
    assert re.search(r"^all +4$", text, re.M), "seconds of all together"
    assert '{"benchmark"' not in text
    assert (tmp_path / "budgets.png").exists() and "![budgets](budgets.png)" in text


def test_a_part_that_ran_again_replaces_its_own_section_and_no_other(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    bench.write(results, "all", {"server_sdk": run("server_sdk", ALL), "wire": run("wire", {})}, gpu=False)
    before = bench.sections_of(results.read_text())
    again = bench.Run("python -m benchmarks.wire", 0, "another table", 3.0)
    bench.write(results, "some", {"wire": again}, gpu=False)
    after = bench.sections_of(results.read_text())
    assert list(after) == list(before) == ["budgets", "server_sdk", "wire"]
    assert {name for name in after if after[name].strip() != before[name].strip()} == {"wire"}
    assert "another table" in after["wire"] and "wire table" not in after["wire"]


def test_a_part_that_fails_is_told_and_makes_the_run_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", {"no_such_benchmark": ()})
    with pytest.raises(SystemExit) as end:
        bench.main(["--results", str(tmp_path / "RESULTS.md")])
    assert end.value.code == 1
    assert "FAILED with 1" in capsys.readouterr().out
    assert "FAILED with 1" in (tmp_path / "RESULTS.md").read_text()


def test_every_benchmark_is_a_module_and_there_is_no_other() -> None:
    folder = Path(bench.__file__).parent
    names = {path.stem for path in folder.glob("[a-z]*.py") if not path.stem.startswith("side_")}
    assert names == set(bench.BENCHMARKS)


@pytest.mark.parametrize("option", ["--peer", "--gpu"])
def test_options_are_those_that_the_benchmarks_know(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in bench.BENCHMARKS.items():
        with pytest.raises(SystemExit):
            importlib.import_module(f"benchmarks.{name}").main(["--help"])
        assert (option in options) == (option in capsys.readouterr().out), name


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    documents = [
        {"benchmark": "wire round trips", "echo, tcp, 1": {"per_second": 1.0}, "echo, tcp, 4": {"per_second": 2.0}},
        {"benchmark": "sharing", "rag, with the server": {"ttft_ms": [1.0, 2.0]}},
        {"benchmark": "token dropping, 4 streams", "1": {"tokens_per_second": 1.0}, "0.5": {"tokens_per_second": 2.0}},
        {"benchmark": "lookups, p50"},
    ]
    names = bench.drawn(documents, tmp_path)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3 < len(PICTURES)
