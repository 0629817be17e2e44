"""The images and the compose file, read as Docker reads them: no daemon is needed to see that they fit the project."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_server.cli.main import main

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages by name, each a list of (instruction, rest); what is before the first is under ""."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    result: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            name = rest.rpartition(" AS ")[2]
            result[name] = []
        result[name].append((instruction, rest))
    return result


def last(stage: str, instruction: str) -> str:
    return [rest for name, rest in stages()[stage] if name == instruction][-1]


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return document


def test_every_file_that_is_copied_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {source for name, rest in stages()["build"] if name == "COPY" for source in rest.split()[:-1]}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_everything_that_the_wheel_is_built_from_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {source for name, rest in stages()["build"] if name == "COPY" for source in rest.split()[:-1]}
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert Path(package).parts[0] in copied
    assert {"pyproject.toml", "README.md", "LICENSE"} <= copied


def test_the_server_is_the_default_image_without_torch_and_without_root() -> None:
    assert list(stages())[-1] == "server"
    assert last("server", "FROM").startswith("python:3.11-slim")
    user, group = last("server", "USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert re.search(r"/opt/lmcache/bin/pip install --no-cache-dir \. ", last("build", "RUN")), "no extra is installed"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [name for name in needed if re.match(r"torch|vllm|numpy", name)]


def test_signals_reach_the_server_and_it_is_asked_whether_it_is_alive(capsys: pytest.CaptureFixture[str]) -> None:
    assert last("server", "STOPSIGNAL") == "SIGTERM"
    assert json.loads(last("server", "ENTRYPOINT")) == ["lmcache", "server"]
    options, _, command = last("server", "HEALTHCHECK").partition(" CMD ")
    assert "--interval=" in options
    program, *arguments = json.loads(command)
    assert program == "lmcache"
    # Nobody listens at this address: 1 is "not alive", 2 would be a mistake in the arguments.
    assert main([*arguments, "--url", "http://127.0.0.1:9"]) == 1
    capsys.readouterr()


def test_the_flags_and_variables_that_the_image_and_compose_give_are_the_servers() -> None:
    from argparse import ArgumentParser

    from lmcache_server.config import add_flags, load

    variables = dict(pair.split("=", 1) for pair in shlex.split(last("server", "ENV")) if pair.startswith("LMCACHE_"))
    parser = ArgumentParser()
    add_flags(parser)
    settings = load(parser.parse_args(compose()["services"]["server"]["command"]), variables)
    assert (settings.host, settings.http_host) == ("0.0.0.0", "0.0.0.0")
    exposed = {int(port) for port in last("server", "EXPOSE").split()}
    assert exposed == {settings.port, settings.http_port}


def test_the_pool_fits_into_the_shared_memory_of_its_container() -> None:
    server = compose()["services"]["server"]
    size = re.fullmatch(r"(\d+)gb", server["shm_size"])
    pool = int(server["command"][server["command"].index("--l1-size-gb") + 1])
    assert size
    # The table of generations takes 8 bytes per 4096 of the pool.
    assert int(size[1]) * GIB >= pool * GIB * (1 + 8 / 4096)


def test_the_engine_shares_the_servers_memory_and_starts_after_it() -> None:
    services = compose()["services"]
    server, engine = services["server"], services["vllm"]
    assert server["ipc"] == "shareable"
    assert engine["ipc"] == "service:server"
    assert engine["profiles"] == ["vllm"]
    assert "profiles" not in server
    assert engine["depends_on"]["server"]["condition"] == "service_healthy"
    assert {service["build"]["target"] for service in services.values()} <= set(stages())


def test_the_engine_is_pointed_at_the_server() -> None:
    command = compose()["services"]["vllm"]["command"]
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "LMCacheMPConnector"
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"lmcache.mp.host": "tcp://server", "lmcache.mp.port": 5555}


def test_ports_are_published_on_this_machine_only_and_the_server_has_no_privileges() -> None:
    services = compose()["services"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    server = services["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
