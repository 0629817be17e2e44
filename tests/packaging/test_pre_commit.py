import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_hooks_check_what_make_lint_checks() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [shlex.split(hook["entry"]) for hook in hooks]
    tools = [Path(program).name for program, *_ in entries]
    lint = (ROOT / "Makefile").read_text().partition("lint: install")[2].partition("\n\n")[0]
    assert tools == [line.split("$(BIN)/")[1].split()[0] for line in lint.splitlines() if "$(BIN)/" in line]
    assert [rest[0] for program, *rest in entries if Path(program).name == "ruff"] == ["check", "format"]


def test_hooks_need_nothing_from_the_network() -> None:
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]:
        assert repository["repo"] == "local"
        assert {hook["language"] for hook in repository["hooks"]} == {"system"}
