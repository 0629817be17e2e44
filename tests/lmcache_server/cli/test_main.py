"""The parser: commands, versions, and mistakes in one sentence."""

import subprocess
import sys

import pytest

from lmcache_server import __version__
from lmcache_server.cli.main import main


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for command in ("server", "ping", "describe", "kvcache"):
        assert command in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"lmcache-server {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["server", "--chunk", "1"], ["server", "--no-such-flag"], ["ping"], ["kvcache", "clear"]],
)
def test_a_mistake_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_flag_is_refused_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["describe", "kvcache", "--bogus", "3"])
    usage, *_, last = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: lmcache describe ")
    assert last == "lmcache describe: error: unrecognized arguments: --bogus 3"


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_server.cli.client._request", interrupted)
    assert main(["ping", "kvcache"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_server.cli.main", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"lmcache-server {__version__}\n"
