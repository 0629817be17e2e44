import dataclasses

import pytest

from lmcache_sdk.perf import StreamPerfMetrics, measured


def test_the_gap_before_the_first_token_is_apart_from_those_between_tokens() -> None:
    perf = measured(100, 2.0, [0.5, 0.25, 0.125])
    assert perf == StreamPerfMetrics(
        duration=2.0, input_tokens=100, output_tokens=3, input_tput=200.0, output_tput=1.5, tpot=[0.25, 0.125], ttft=0.5
    )


def test_a_pass_without_tokens_has_no_throughput() -> None:
    assert measured(10, 1.0, []) == StreamPerfMetrics(1.0, 10, 0, 0.0, 0.0, [], 0.0)
    assert measured(10, 0.0, [0.0]).output_tput == 0.0


def test_metrics_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        measured(1, 1.0, [1.0]).duration = 2.0  # type: ignore[misc]


def test_the_fields_are_the_documented_ones() -> None:
    names = [field.name for field in dataclasses.fields(StreamPerfMetrics)]
    assert names == ["duration", "input_tokens", "output_tokens", "input_tput", "output_tput", "tpot", "ttft"]
