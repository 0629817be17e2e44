"""Every benchmark without an engine runs to its end with little work, and says as its last line what it measured."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks import core_decisions, dropping, gather_scatter, lookups, prefill, sdk_copies, server_sdk, sharing, wire
from tests.interop.peer import require_lmcache

Main = Callable[[Sequence[str]], None]
SMALL = ["--rounds=1", "--layers=2", "--tokens=256", "--repeats=1", "--seconds=0.2"]


def last_document(main: Main, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(arguments)
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


@pytest.mark.parametrize(
    "main",
    [core_decisions.main, gather_scatter.main, lookups.main, sdk_copies.main, server_sdk.main, wire.main],
    ids=lambda main: main.__module__,
)
def test_an_unknown_option_is_refused(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--rouns=3"])
    assert end.value.code == 2 and "unrecognized arguments: --rouns=3" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "main", [gather_scatter.main, prefill.main, sharing.main, dropping.main], ids=lambda main: main.__module__
)
def test_without_cuda_gpu_is_refused_before_anything_starts(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--gpu"])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "") and said.err.startswith("--gpu needs a CUDA device")


def test_core_decisions(capsys: pytest.CaptureFixture[str]) -> None:
    document = last_document(core_decisions.main, capsys, "--sizes", "64", "128")
    assert document["lookups_per_second"] > 0
    assert "budgets" not in document, "the budget is that of 1,000,000 chunks over 1,000"


def test_the_growth_of_lookups_is_a_budget_of_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core_decisions, "SIZES", (64, 128))
    document = last_document(core_decisions.main, capsys)
    assert len(document["budgets"]["lookup_growth"]["ours"]) == core_decisions.REPEATS


@pytest.mark.process
def test_wire(capsys: pytest.CaptureFixture[str]) -> None:
    document = last_document(wire.main, capsys, "--seconds=0.05", "--rounds=1", "--clients", "1", "2")
    assert [name for name in document if name.endswith(", 2")] == ["echo, tcp, 2", "echo, ipc, 2", "ping, tcp, 2"]


@pytest.mark.process
def test_lookups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lookups, "LENGTHS", (4096,))
    assert last_document(lookups.main, capsys, "--seconds=0.2", "--clients", "2")["per_second_2"] > 0


@pytest.mark.process
@pytest.mark.parametrize("transport", ["shm", "frames"])
def test_sdk_copies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], transport: str) -> None:
    monkeypatch.setattr(sdk_copies, "SHAPES", {"tiny": (4, 4, 64)})
    arguments = ["--tokens=512", "--repeats=1", f"--transport={transport}"]
    assert last_document(sdk_copies.main, capsys, *arguments).keys() > {"tiny_store", "tiny_retrieve", "tiny_view"}


@pytest.mark.process
def test_the_server_and_the_sdk(capsys: pytest.CaptureFixture[str]) -> None:
    found = last_document(server_sdk.main, capsys, *SMALL)["budgets"]
    assert {"store", "retrieve", "view_ms", "lookup_ms_131072", "lookups_per_second_4", "resident_mb"} < found.keys()
    assert {tuple(rounds) for rounds in found.values()} == {("ours",)}


@pytest.mark.process
def test_the_peer_does_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    require_lmcache()
    found = last_document(server_sdk.main, capsys, *SMALL, "--peer")["budgets"]
    alone = [name for name, rounds in found.items() if "peer" not in rounds]
    assert alone == ["view_ms"], "it has no view without a copy"


def test_a_peer_that_is_not_installed_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr("benchmarks._peer.VENV", tmp_path)
    with pytest.raises(SystemExit) as end:
        server_sdk.main(["--peer"])
    assert end.value.code == 2 and "make interop" in capsys.readouterr().err
