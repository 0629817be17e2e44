"""Commands that ask a running server: what they print, write and return."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_server.cli.main import main
from tests.fake_engine import FakeEngine
from tests.servers import CacheServer, free_ports, running_server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def nowhere() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def strange() -> Iterator[str]:
    """A web server that answers everything with a JSON list."""

    class Strange(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[1]")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Strange) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


def test_a_ping_says_ok_and_how_long_it_took(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "kvcache", "--url", server.http_url + "/", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["title"] == "Ping KV Cache"
    assert report["metrics"]["status"] == "OK" and report["metrics"]["round_trip_time_ms"] > 0


def test_an_address_needs_no_scheme_and_no_other_one_is_taken(
    server: CacheServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ping", "kvcache"], ["describe", "kvcache"], ["kvcache", "clear"]):
        assert main([*command, "--url", f"localhost:{server.http_port}"]) == 0
        assert main([*command, "--url", server.url]) == 1
        assert f"{server.url}/" in (error := capsys.readouterr().err) and "expected http://host:port" in error


def test_a_port_that_takes_a_connection_and_says_nothing_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lmcache_server.cli.client._TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["ping", "kvcache", "--url", f"127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert "did not answer within 0.2 s; is that the --http-port?" in capsys.readouterr().err


def test_a_ping_of_nobody_fails_and_says_why(nowhere: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "kvcache", "--url", nowhere]) == 1
    output = capsys.readouterr()
    assert "FAIL" in output.out
    assert output.err.startswith(f"lmcache ping: error: {nowhere}/healthcheck cannot be reached")


@pytest.mark.parametrize("url", ["localhost", "http://", "ftp://x", "http://a b"])
def test_an_address_that_is_none_fails_in_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "kvcache", "--url", url]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_wrong_port_fails_in_one_sentence(
    server: CacheServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_server.cli.client._TIMEOUT", 0.5)
    for command in (["ping", "kvcache"], ["describe", "kvcache"], ["kvcache", "clear"]):
        assert main([*command, "--url", f"http://127.0.0.1:{server.port}"]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_another_kind_of_server_fails_in_one_sentence(strange: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["describe", "kvcache"], ["kvcache", "clear"]):
        assert main([*command, "--url", strange]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "is not" in line


def test_describe_shows_what_is_cached_and_for_which_models(
    server: CacheServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEngine(server.url, model="a/model") as engine:
        engine.store(engine.tokens(3))
        assert main(["describe", "kvcache", "--url", server.http_url, "--format", "json"]) == 0
        metrics = json.loads(capsys.readouterr().out)["metrics"]
        assert (metrics["health"], metrics["transport"], metrics["chunk_size"]) == ("OK", "shm", 16)
        assert (metrics["cached_objects"], metrics["eviction_policy"]) == (3, "LRU")
        assert [model["model"] for model in metrics["models"]] == ["a/model"]
        assert main(["describe", "kvcache", "--url", server.http_url]) == 0
        assert "Model: a/model" in capsys.readouterr().out


def test_clear_says_what_it_freed(server: CacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kvcache", "clear", "--url", server.http_url, "-q"]) == 0
    with FakeEngine(server.url) as engine:
        tokens = engine.tokens(4)
        engine.store(tokens)
        held = engine.acquire(tokens[: 2 * engine.chunk_bytes])
        assert main(["kvcache", "clear", "--url", server.http_url, "--format", "json"]) == 0
        output = capsys.readouterr().out
        assert json.loads(output)["metrics"] == {"status": "OK", "freed": 2, "held": 2}
        engine.release(held)


def test_quiet_prints_nothing_and_only_returns(
    server: CacheServer, nowhere: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["ping", "kvcache", "--url", server.http_url, "-q"]) == 0
    assert main(["ping", "kvcache", "--url", nowhere, "-q"]) == 1
    assert capfd.readouterr() == ("", "")


def test_a_report_may_go_to_a_file_too(server: CacheServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ping", "kvcache", "--url", server.http_url]
    assert main([*command, "--format", "json", "--output", str(tmp_path / "report")]) == 0
    assert json.loads((tmp_path / "report").read_text()) == json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--output", str(tmp_path / "no" / "report")])
    assert ended.value.code == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
