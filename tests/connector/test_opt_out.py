"""A request's wish to keep out, as it arrives in vLLM's own requests."""

from typing import Any

import pytest

from lmcache_connector.opt_out import OptOut, read_opt_out

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.request import Request


def wish(parameters: Any) -> OptOut:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": parameters})
    return read_opt_out(Request("r", [1, 2], sampling, None))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, OptOut()), ({}, OptOut()), ({"no_store": True}, OptOut(no_store=True)),
        ({"no_load": True}, OptOut(no_load=True)), ({"no_load": True, "no_store": True}, OptOut(True, True)),
        ({"no_load": False, "no_store": False}, OptOut()), ({"do_remote_prefill": 1, "no_stores": "x"}, OptOut()),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_heard(parameters: Any, expected: OptOut, caplog: pytest.LogCaptureFixture) -> None:
    assert wish(parameters) == expected
    assert caplog.records == []


def test_a_request_without_extra_arguments_wishes_nothing() -> None:
    assert read_opt_out(Request("r", [1, 2], SamplingParams(max_tokens=1), None)) == OptOut()


@pytest.mark.parametrize("value", ["true", 1, 0, None, [True], {"a": 1}, "x" * 100_000])
@pytest.mark.parametrize("key", ["no_store", "no_load"])
def test_a_value_of_another_type_keeps_out_and_is_warned_of(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert wish({key: value}) == OptOut(**{key: True})
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == "WARNING" and f"kv_transfer_params.{key}: expected true or false" in message
    assert repr(value)[:8] in message and len(message) < 300


@pytest.mark.parametrize("parameters", ["no_store", ["no_store"], True, 7])
def test_parameters_that_are_no_object_keep_out_of_everything(
    parameters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert wish(parameters) == OptOut(True, True)
    assert "kv_transfer_params: expected an object" in caplog.text
