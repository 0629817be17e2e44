"""Names that are unique and well formed, and their text."""

import re

from lmcache_server.metrics import METRICS, PREFIX, render


def test_every_name_is_unique_and_says_what_it_is() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert len({metric.number for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.kind in ("counter", "gauge")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.text and "\n" not in metric.text


def test_each_metric_is_help_type_and_one_number() -> None:
    lines = render({metric.number: i + 0.5 for i, metric in enumerate(METRICS)}).splitlines()
    assert len(lines) == 3 * len(METRICS)
    for i, metric in enumerate(METRICS):
        name = PREFIX + metric.name
        assert lines[3 * i : 3 * i + 3] == [
            f"# HELP {name} {metric.text}",
            f"# TYPE {name} {metric.kind}",
            f"{name} {i}.5",
        ]


def test_a_large_counter_is_exact() -> None:
    numbers = dict.fromkeys([metric.number for metric in METRICS], 0.0) | {"lookups": 2**53 - 1}
    assert f"{PREFIX}lookups_requests_total 9007199254740991\n" in render(numbers)
