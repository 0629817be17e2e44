"""What is paired with what, on engines that compute nothing; and one run with real ones."""

import json

import pytest

from benchmarks import prefill
from benchmarks._measure import Sample
from benchmarks._vllm import GPU_OPTIONS, options_of
from tests.benchmarks.doubles import StandIn


def test_a_local_and_an_external_hit_of_each_prompt_are_a_pair() -> None:
    engines = {"ours": StandIn(1, external=0.004), "peer": StandIn(2, external=0.008)}
    prompts = [[1, 2, 3], [4, 5, 6]]
    for one in prompts:
        for engine in engines.values():
            engine.complete(one)
    hit = prefill.hits(engines, prompts, rounds=3)
    ratios = prefill.budgets(hit, {side: Sample((1.0,)) for side in ("none", *engines)})["external_over_local"]
    assert {side: {round(ratio) for ratio in found} for side, found in ratios.items()} == {"ours": {4}, "peer": {8}}
    assert len(ratios["ours"]) == 6


def test_a_hit_that_was_none_ends_the_run() -> None:
    with pytest.raises(AssertionError, match="ours: 0 tokens hit"):
        prefill.hits({"ours": StandIn(None)}, [list(range(300))], rounds=1)


def test_every_engine_gets_every_new_prompt_once_and_comes_first_in_turn() -> None:
    order: list[str] = []
    engines = {side: StandIn(None) for side in ("none", "ours", "peer")}
    for side, engine in engines.items():
        engine.complete = lambda prompt, side=side: order.append(side)  # type: ignore[method-assign, assignment]
    new = prefill.throughput(engines, tokens=8, pairs=3, before={"peer": lambda: order.append("clear")})
    assert order[:4] == ["clear", "peer", "none", "ours"], "the first pair, which is not counted"
    assert order[4:] == [
        *("none", "ours", "clear", "peer"), *("ours", "clear", "peer", "none"), *("clear", "peer", "none", "ours"),
    ]  # fmt: skip
    assert {side: len(sample.seconds) for side, sample in new.items()} == {"none": 3, "ours": 3, "peer": 3}


def test_storing_is_compared_with_no_connector_pair_by_pair() -> None:
    new = {"none": Sample((1.0, 2.0)), "ours": Sample((1.25, 2.0)), "peer": Sample((2.0, 4.0))}
    hit = {side: (Sample((1.0,)), Sample((1.5,))) for side in ("ours", "peer")}
    assert prefill.budgets(hit, new)["storing_over_none"] == {"ours": [0.8, 1.0], "peer": [0.5, 0.5]}


def test_engines_on_a_gpu_share_it() -> None:
    assert options_of(8192, gpu=True) == [*options_of(8192, gpu=False), *GPU_OPTIONS]


@pytest.mark.vllm
@pytest.mark.process
@pytest.mark.timeout(400)
def test_real_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """LMCache's own adapter, which --peer adds, is in front of an engine in tests/interop."""
    prefill.main(["--tokens=512", "--rounds=1", "--pairs=1"])
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert 0 < documents[1]["store_share"] < 0.5
    found = documents[-1]["budgets"]
    assert {name: set(rounds) for name, rounds in found.items()} == {
        "external_over_local": {"ours"},
        "storing_over_none": {"ours"},
    }
