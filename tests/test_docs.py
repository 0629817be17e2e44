"""Every snippet of README.md and docs/ is run.

The python blocks of a page run as one program, `lmcache server` lines go through the real parser. The pages name the
ports 6555 and 8080 and the model Qwen/Qwen3-8B; here the ports are those of a server that the test starts, and a worker
of that model is registered with it. Tables of settings and metrics are compared with the code; `python -m
tests.test_docs` writes them anew.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lmcache_connector import metrics, settings
from lmcache_connector.versions import TESTED
from lmcache_sdk.attachment import attach
from lmcache_sdk.transport import ServerConnection
from lmcache_server.cli.server import add_parser
from lmcache_server.config import Settings, load
from lmcache_server.core.memory_obj import TRANSITIONS
from lmcache_server.metrics import METRICS
from lmcache_server.protocol.layout import CacheLayout, KernelGroup, Kind
from lmcache_server.protocol.messages import OPERATIONS
from tests.servers import CacheServer, running_server

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVER_PAGE = ROOT / "docs" / "server.md"
VLLM_PAGE = ROOT / "docs" / "vllm.md"


def blocks(page: Path, language: str) -> list[str]:
    """The bodies of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def settings_table() -> str:
    """One row per setting."""
    rows = ["| flag | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        default = (
            {True: "on", False: "off", "": "empty"}.get(field.default, field.default)
            if field.type in (bool, str)
            else field.default
        )
        rows.append(f"| `{flag}` | {default} | {field.metadata['text']} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """One row per metric."""
    rows = ["| name | type | what it counts |", "|---|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {kind} | {text} |" for name, kind, text, _ in METRICS])


def connector_metrics_table() -> str:
    """One row per metric that vLLM shows of the connector."""
    rows = ["| metric | type | what it counts |", "|---|---|---|"]
    described = [f"| `{metrics.PREFIX}{name}` | {kind} | {text} |" for name, kind, text, _ in metrics.METRICS]
    return "\n".join(rows + described)


def options_table() -> str:
    """One row per option of the connector; what it is stands below it in the code."""
    body = ast.parse(inspect.getsource(settings)).body
    (record,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    texts = {
        field.target.id: ast.literal_eval(text.value)
        for field, text in pairwise(record.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    defaults = {field.name: field.default for field in dataclasses.fields(settings.Settings)}
    rows = [
        "| option | default | what it is |",
        "|---|---|---|",
        "| `lmcache.mp.host`, `lmcache.mp.port` | `tcp://localhost`, 5555 | Where the server is. |",
    ]
    keys: dict[str, list[str]] = {}
    for key, name in settings.FIELDS.items():
        keys.setdefault(name, []).append(f"`{key}`")
    return "\n".join(
        rows
        + [f"| {', '.join(spellings)} | {_json(defaults[name])} | {texts[name]} |" for name, spellings in keys.items()]
    )


def _json(value: object) -> str:
    return "none" if value is None else json.dumps(value)


def versions_table() -> str:
    """One row per tested version of vLLM."""
    return "\n".join(["| vLLM | tested |", "|---|---|", *(f"| {v} | the whole test suite |" for v in TESTED)])


def states_table() -> str:
    """One row per legal transition of a MemoryObj."""
    rows = ["| state | event | next state |", "|---|---|---|"]
    return "\n".join(rows + [f"| {a.value} | {event.value} | {b.value} |" for (a, event), b in TRANSITIONS.items()])


TABLES = {
    "| flag |": (SERVER_PAGE, settings_table),
    "| name |": (SERVER_PAGE, metrics_table),
    "| metric |": (VLLM_PAGE, connector_metrics_table),
    "| vLLM |": (VLLM_PAGE, versions_table),
    "| option |": (VLLM_PAGE, options_table),
    "| state |": (ROOT / "docs" / "architecture.md", states_table),
}
"""How a table begins -> its page, and what it should be."""


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server("--chunk-size", "256") as server:
        connection = ServerConnection(server.url)
        group = KernelGroup(layers=(0, 1), planes=2, heads=2, head_size=8, dtype="bfloat16")
        worker = attach(
            connection, role="worker", model_name="Qwen/Qwen3-8B", revision="", kind=Kind.KV, world_size=1, worker_id=0,
            layout=CacheLayout((group,)), block_size=16,
        )  # fmt: skip
        yield server
        worker.detach()
        connection.close()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
@pytest.mark.process
def test_the_python_of_a_page_runs(page: Path, server: CacheServer) -> None:
    program = "\n".join(blocks(page, "python")).replace("localhost:6555", f"localhost:{server.port}")
    program = program.replace("localhost:8080", f"localhost:{server.http_port}")
    exec(compile(program, str(page), "exec"), {"__name__": page.stem})


def lmcache_lines() -> list[list[str]]:
    """Every `lmcache server` command line of the pages, as arguments."""
    lines = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            commands = re.findall(r"^lmcache server.*$", block.replace("\\\n", " "), re.M)
            lines += [shlex.split(command, comments=True)[1:] for command in commands]
    return lines


@pytest.mark.parametrize("words", lmcache_lines(), ids=" ".join)
def test_every_server_command_line_of_the_pages_is_accepted(words: list[str], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    (yaml_block,) = blocks(SERVER_PAGE, "yaml")
    (tmp_path / "lmcache.yaml").write_text(yaml_block, encoding="utf-8")
    options = parser.parse_args([str(tmp_path / word) if word.endswith(".yaml") else word for word in words])
    assert load(options, {}).chunk_size in (128, 256)


def test_the_yaml_of_the_server_page_names_known_settings_only() -> None:
    (block,) = blocks(SERVER_PAGE, "yaml")
    known = {field.name for field in dataclasses.fields(Settings)}
    assert {name.replace("-", "_") for name in yaml.safe_load(block)} <= known


@pytest.mark.parametrize("beginning", TABLES)
def test_a_table_of_the_pages_is_that_of_the_code(beginning: str) -> None:
    page, table = TABLES[beginning]
    assert table() in page.read_text(encoding="utf-8"), "run `python -m tests.test_docs`"


def test_every_engine_of_the_pages_computes_what_it_cannot_load() -> None:
    """vLLM's own default would fail the request, and the README promises that a killed server costs none."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    configs = list(re.findall(r"\{\s*\"kv_connector\": .*?\}\s*\}", text, re.S))
    assert len(configs) == 3  # README, editing, compatibility
    for config in map(json.loads, configs):
        assert config["kv_load_failure_policy"] == "recompute"


def test_the_wire_page_lists_every_operation_and_no_other() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(v1/\w+)`", text)) == set(OPERATIONS)


def test_relative_links_of_the_pages_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def write_tables() -> None:
    """Replace the tables of the pages by those of the code."""
    for beginning, (page, table) in TABLES.items():
        text = page.read_text(encoding="utf-8")
        pattern = re.escape(beginning) + r".*?\n(?=\n)"
        _, found, _ = re.split(f"({pattern})", text, maxsplit=1, flags=re.S)
        page.write_text(text.replace(found, table() + "\n"), encoding="utf-8")


if __name__ == "__main__":
    write_tables()
