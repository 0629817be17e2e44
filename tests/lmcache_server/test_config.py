"""Settings from flags, environment and file: who wins, what is refused, and that each is documented."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_server.config import SHM_PREFIX, Settings, SettingsError, add_flags, load

DEFAULTS = {
    "l1_size_gb": 4.0,
    "eviction_policy": "LRU",
    "chunk_size": 256,
    "host": "localhost",
    "port": 5555,
    "http_host": "127.0.0.1",
    "http_port": 8080,
    "shm_name": "auto",
    "shm_mode": "0600",
    "l1_use_lazy": True,
    "supported_transfer_mode": "auto",
    "eviction_trigger_watermark": 0.8,
    "eviction_ratio": 0.2,
    "l1_write_ttl_seconds": 600.0,
    "l1_read_ttl_seconds": 300.0,
    "session_ttl_seconds": 600.0,
    "worker_reap_timeout_seconds": 120.0,
    "worker_registration_grace_seconds": 3600.0,
    "hash_algorithm": "xxh3_128",
    "instance_id": "",
    "enable": "transfer_query",
    "log_level": "info",
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(result)
    return result


def loaded(*flags: str, environment: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    arguments = [*flags, "--config", str(file)] if file else list(flags)
    return load(parser().parse_args(arguments), environment or {})


def refused(*flags: str, environment: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(SettingsError) as raised:
        loaded(*flags, environment=environment, file=file)
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_the_defaults_are_these() -> None:
    assert {field.name: field.default for field in dataclasses.fields(Settings)} == DEFAULTS
    settings = loaded()
    assert dataclasses.replace(settings, instance_id="") == Settings()
    assert (settings.pool_bytes, settings.segment_name, settings.segment_mode) == (
        4 * 2**30, "lmcache_l1_pool_5555", 0o600,
    )  # fmt: skip


def test_every_setting_has_a_flag_with_its_text_and_its_default() -> None:
    text = " ".join(parser().format_help().split())
    for field in dataclasses.fields(Settings):
        assert "--" + field.name.replace("_", "-") in text
        assert " ".join(field.metadata["text"].split()) in text
        shown = {True: "on", "": "empty"}.get(field.default, str(field.default))  # type: ignore[arg-type]
        assert f"(default: {shown})" in text
        for choice in field.metadata["choices"]:
            assert choice in text


def test_a_flag_wins_over_the_environment_and_that_over_the_file(file: Path) -> None:
    file.write_text("chunk-size: 1\nport: 2\nhttp_port: 3\n")
    settings = loaded(
        "--chunk-size", "10", environment={"LMCACHE_CHUNK_SIZE": "20", "LMCACHE_PORT": "21"}, file=file
    )  # fmt: skip
    assert (settings.chunk_size, settings.port, settings.http_port) == (10, 21, 3)


def test_every_setting_can_be_given_in_each_of_the_three_ways(file: Path) -> None:
    wanted: dict[str, Any] = {
        "l1_size_gb": 2.5, "eviction_policy": "LRU", "chunk_size": 16, "host": "127.0.0.1", "port": 6000,
        "http_host": "::1", "http_port": 6001, "shm_name": "x", "shm_mode": "0660", "l1_use_lazy": False,
        "supported_transfer_mode": "engine_driven", "eviction_trigger_watermark": 0.5, "eviction_ratio": 0.25,
        "l1_write_ttl_seconds": 1.5, "l1_read_ttl_seconds": 2.5, "session_ttl_seconds": 3.5,
        "worker_reap_timeout_seconds": 4.5, "worker_registration_grace_seconds": 5.5, "hash_algorithm": "blake3",
        "instance_id": "me", "enable": "transfer_query", "log_level": "silent",
    }  # fmt: skip
    assert wanted.keys() == DEFAULTS.keys()
    flags, lines = [], []
    for name, value in wanted.items():
        flag = name.replace("_", "-")
        flags += ["--no-l1-use-lazy"] if name == "l1_use_lazy" else [f"--{flag}", str(value)]
        lines.append(f"{flag}: {value!r}" if isinstance(value, str) else f"{flag}: {str(value).lower()}")
    file.write_text("\n".join(lines))
    by_environment = {"LMCACHE_" + name.upper(): str(value) for name, value in wanted.items()}
    for settings in (loaded(*flags), loaded(environment=by_environment), loaded(file=file)):
        assert dataclasses.asdict(settings) == wanted


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--chunk-size", "0", "chunk-size: expected 1 to 65536 tokens, got 0"),
        ("--chunk-size", "-1", "expected 1 to 65536 tokens"),
        ("--chunk-size", "1e9", "--chunk-size: expected int, got '1e9'"),
        ("--chunk-size", "99999999", "expected 1 to 65536 tokens"),
        ("--l1-size-gb", "0", "at least 1 MiB (0.001)"),
        ("--l1-size-gb", "nan", "at least 1 MiB"),
        ("--l1-size-gb", "inf", "at least 1 MiB"),
        ("--l1-size-gb", "-4", "at least 1 MiB"),
        ("--l1-size-gb", "1e300", "at most 65536 GiB"),
        ("--l1-size-gb", "four", "--l1-size-gb: expected float, got 'four'"),
        ("--port", "0", "port: expected a port from 1 to 65535, got 0"),
        ("--port", "65536", "expected a port"),
        ("--port", "8080", "http-port: expected another port than --port (8080)"),
        ("--http-port", "http", "--http-port: expected int"),
        ("--eviction-policy", "LFU", "--eviction-policy: expected one of LRU, got 'LFU'"),
        ("--supported-transfer-mode", "lmcache_driven", "expected one of auto, engine_driven"),
        ("--hash-algorithm", "md5", "expected one of xxh3_128, blake3, sha256"),
        ("--shm-mode", "0777", "expected one of 0600, 0660, 0666"),
        ("--eviction-trigger-watermark", "1.5", "a share above 0 and at most 1"),
        ("--eviction-trigger-watermark", "nan", "a share above 0 and at most 1"),
        ("--eviction-ratio", "0", "a share above 0 and at most 1"),
        ("--l1-write-ttl-seconds", "0", "a number of seconds above 0"),
        ("--l1-read-ttl-seconds", "-1", "a number of seconds above 0"),
        ("--session-ttl-seconds", "inf", "a number of seconds above 0"),
        ("--worker-reap-timeout-seconds", "nan", "a number of seconds above 0"),
        ("--worker-registration-grace-seconds", "0", "a number of seconds above 0"),
        ("--shm-name", "a/b", "shm-name: expected at most 184 bytes without /"),
        ("--shm-name", "x" * 185, "expected at most 184 bytes"),
        ("--shm-name", "ü" * 100, "expected at most 184 bytes"),
        ("--log-level", "loud", "expected one of debug, info"),
    ],
)
def test_an_impossible_value_is_one_sentence_that_names_it(flag: str, value: str, words: str) -> None:
    assert words in refused(flag, value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("chunk-sice: 16", "unknown setting 'chunk-sice'; `lmcache server --help` lists"),
        ("7: 16", "unknown setting 7"),
        ("- chunk-size", "expected lines of `name: value`, got a list"),
        ("chunk-size", "got a str"),
        ("chunk-size: [16]", "chunk-size: expected int, got [16]"),
        ("chunk-size:", "chunk-size: expected int, got None"),
        ("chunk-size: true", "expected int, got True"),
        ("chunk-size: 16.0", "expected a whole number, got 16.0"),
        ("chunk-size: .inf", "expected int, got inf"),
        ("chunk-size: .nan", "expected int, got nan"),
        ("l1-size-gb: 1" + "0" * 400, "l1-size-gb: expected float"),
        ("l1-use-lazy: maybe", "expected true or false, got 'maybe'"),
        ("shm-name: \"a\\0b\"", "without /"),
        ("shm-mode: 0660", "expected one of 0600, 0660, 0666, got 432; put it in quotes"),
        ("a: b: c", "not YAML"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
        ("\x00", "not YAML"),
    ],
)  # fmt: skip
def test_an_impossible_file_is_one_sentence_that_names_it(file: Path, content: str, words: str) -> None:
    file.write_text(content)
    text = refused(file=file)
    assert words in text and (str(file) in text or "shm-name" in text)


def test_a_file_that_cannot_be_read_is_one_sentence(file: Path) -> None:
    assert "cannot be read (No such file or directory)" in refused(file=file)
    assert "cannot be read (Is a directory)" in refused(file=file.parent)
    file.write_bytes(b"chunk-size: \xff\xfe")
    assert "not YAML" in refused(file=file)
    file.write_text("[" * 3000)
    assert "not YAML" in refused(file=file)


def test_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert loaded(file=file).chunk_size == 256


def test_a_bad_variable_is_named() -> None:
    assert "LMCACHE_PORT: expected int, got 'x'" in refused(environment={"LMCACHE_PORT": "x"})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_a_switch_may_be_said_in_several_words(text: str, value: bool) -> None:
    assert loaded(environment={"LMCACHE_L1_USE_LAZY": text}).l1_use_lazy is value


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("auto", SHM_PREFIX + "5555"), ("", ""), ("mine", SHM_PREFIX + "mine"), ("/mine", SHM_PREFIX + "mine"),
        (SHM_PREFIX + "mine", SHM_PREFIX + "mine"), ("..", SHM_PREFIX + ".."),
    ],
)  # fmt: skip
def test_a_segment_always_has_the_prefix_of_the_project(name: str, segment: str) -> None:
    assert loaded("--shm-name", name).segment_name == segment


@given(st.floats(0.001, 65536))
def test_a_pool_is_whole_pages(size: float) -> None:
    settings = Settings(l1_size_gb=size)
    assert settings.pool_bytes % 4096 == 0
    assert 0 <= size * 2**30 - settings.pool_bytes < 4096


def test_two_servers_are_told_apart_unless_they_are_named() -> None:
    assert loaded().instance_id != loaded().instance_id
    assert loaded("--instance-id", "me").instance_id == "me"


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--chunk", "16"])
    assert "unrecognized arguments" in capsys.readouterr().err
