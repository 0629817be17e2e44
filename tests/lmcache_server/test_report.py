"""Reports for people and for programs."""

import io
import json
from pathlib import Path

import pytest

from lmcache_server.report import FileHandler, Metrics, StreamHandler, get_formatter


def filled() -> Metrics:
    metrics = Metrics("Report")
    second = metrics.add_list_section("models", "one", "Model: one")
    second.add("model", "Model", "one")
    section = metrics.add_section("results", "Results")
    section.add("duration", "Duration (s)", 1.5)
    section.add("absent", "Absent", None)
    table = metrics.add_table("rows", "Rows", ("name", "Name"), ("count", "Count"))
    table.add_row(name="a", count=10)
    table.add_row(name="long name")
    metrics.add_list_section("models", "two", "Model: two").add("model", "Model", "two")
    metrics.add("status", "Status", "OK")
    return metrics


def test_programs_get_raw_values_flat_ones_first_and_lists_last() -> None:
    wanted = {
        "title": "Report",
        "metrics": {
            "status": "OK",
            "results": {"duration": 1.5, "absent": None},
            "rows": [{"name": "a", "count": 10}, {"name": "long name", "count": None}],
            "models": [{"model": "one"}, {"model": "two"}],
        },
    }
    assert filled().to_dict() == wanted
    assert list(filled().to_dict()["metrics"]) == ["status", "results", "rows", "models"]


def test_people_get_labels_on_the_left_and_values_on_the_right() -> None:
    stream = io.StringIO()
    metrics = filled()
    metrics.title("Renamed")
    metrics.add_handler(StreamHandler(get_formatter("terminal", width=30), stream))
    metrics.emit()
    assert (
        stream.getvalue()
        == """\
========== Renamed ===========
Status:                     OK
-------- Model: one ----------
Model:                     one
---------- Results -----------
Duration (s):             1.50
Absent:                    N/A
Name       Count
----------------
a          10
long name  N/A
-------- Model: two ----------
Model:                     two
==============================
""".replace("-------- Model: one ----------", " Model: one ".center(30, "-")).replace(
            "-------- Model: two ----------", " Model: two ".center(30, "-")
        )
    )


def test_a_report_of_everything_looks_as_it_always_did() -> None:
    metrics, stream = Metrics("Batched Stream Metrics (prefill)"), io.StringIO()
    metrics.add_section("config", "Configuration").add("num_request_streams", "Number of request streams", 2)
    results = metrics.add_section("results", "Results")
    for key, label, value in (("duration", "Duration (s)", 1.23456), ("flag", "Flag", True), ("none", "Nothing", None)):
        results.add(key, label, value)
    metrics.add_table("usage", "Usage", ("instance", "Instance"), ("ratio", "Ratio")).add_row(instance="i1", ratio=0.5)
    metrics.add_list_section("models", "a", "Model: a").add("model", "Model", "a")
    metrics.add("status", "Status", "OK")
    metrics.add_handler(StreamHandler(get_formatter("terminal", width=60, indent=4), stream))
    metrics.emit()
    assert stream.getvalue() == EVERYTHING
    assert json.dumps(metrics.to_dict()) == (
        '{"title": "Batched Stream Metrics (prefill)", "metrics": '
        '{"status": "OK", "config": {"num_request_streams": 2}, '
        '"results": {"duration": 1.23456, "flag": true, "none": null}, "usage": [{"instance": "i1", "ratio": 0.5}], '
        '"models": [{"model": "a"}]}}'
    )


EVERYTHING = """\
============= Batched Stream Metrics (prefill) =============
Status:                                                   OK
---------------------- Configuration -----------------------
Number of request streams:                                 2
------------------------- Results --------------------------
Duration (s):                                           1.23
Flag:                                                   True
Nothing:                                                 N/A
Instance  Ratio
---------------
i1         0.50
------------------------- Model: a -------------------------
Model:                                                     a
============================================================
"""


def test_a_value_that_is_too_long_stays_apart_from_its_label() -> None:
    metrics, stream = Metrics("T"), io.StringIO()
    metrics.add("url", "URL", "http://a.long.address:8080")
    metrics.add_handler(StreamHandler(get_formatter("terminal", width=10), stream))
    metrics.emit()
    assert "URL: http://a.long.address:8080\n" in stream.getvalue()


def test_numbers_of_a_table_stand_to_the_right() -> None:
    metrics, stream = Metrics("T"), io.StringIO()
    table = metrics.add_table("t", "T", ("n", "Number"))
    for n in (1, 200):
        table.add_row(n=n)
    metrics.add_table("empty", "Empty", ("n", "Number"))
    metrics.add_handler(StreamHandler(get_formatter("terminal"), stream))
    metrics.emit()
    assert "Number\n------\n     1\n   200\n(none)\n" in stream.getvalue()


def test_a_text_in_the_last_column_is_wrapped_to_the_width_but_not_to_nothing() -> None:
    for width, lines in (
        (30, ["alpha     some words that do", "          not fit", "b"]),
        (5, ["alpha     some words that"]),
    ):
        metrics, stream = Metrics("T"), io.StringIO()
        table = metrics.add_table("t", "T", ("name", "Name"), ("why", "Why"))
        table.add_row(name="alpha   ", why="some words that do not fit")
        table.add_row(name="b", why="")
        metrics.add_handler(StreamHandler(get_formatter("terminal", width=width), stream))
        metrics.emit()
        assert stream.getvalue().splitlines()[3 : 3 + len(lines)] == lines


def test_a_file_is_json_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    metrics = filled()
    metrics.add_handler(FileHandler(tmp_path / "report.json"))
    metrics.add_handler(FileHandler(tmp_path / "report.txt", get_formatter("terminal")))
    metrics.emit()
    assert json.loads((tmp_path / "report.json").read_text()) == metrics.to_dict()
    assert (tmp_path / "report.txt").read_text().startswith("===")


def test_stdout_is_the_one_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics("T")
    metrics.add_handler(StreamHandler(get_formatter("json", indent=0)))
    metrics.emit()
    assert json.loads(capsys.readouterr().out) == {"title": "T", "metrics": {}}


def test_a_key_names_one_section() -> None:
    metrics = filled()
    assert metrics["results"].label == "Results"
    with pytest.raises(KeyError):
        metrics["nothing"]
    for add in (metrics.add_section, metrics.add_table):
        with pytest.raises(ValueError, match="is there already"):
            add("results", "Again")
    with pytest.raises(ValueError, match="is there already"):
        metrics.add_list_section("models", "one", "Again")


def test_a_row_has_known_columns_and_a_table_to_be_in() -> None:
    metrics = filled()
    with pytest.raises(ValueError, match="no column 'size'"):
        metrics["rows"].add_row(size=1)
    with pytest.raises(ValueError, match="is no table"):
        metrics["results"].add_row(size=1)


def test_there_are_two_formatters() -> None:
    with pytest.raises(ValueError, match="expected terminal or json, got 'xml'"):
        get_formatter("xml")
