"""How is measured: order, ratios, quartiles, and what a table looks like."""

import json

import pytest

from benchmarks._measure import Sample, Spread, interleaved, refuse, rendered, report


def test_calls_run_in_turn_and_the_warm_ones_are_not_counted() -> None:
    ran: list[str] = []
    samples = interleaved({name: lambda name=name: ran.append(name) for name in "ab"}, repeats=3, inner=2, warm=1)
    assert "".join(ran) == "ab" + 3 * "aabb"
    assert [len(samples[name].seconds) for name in "ab"] == [3, 3]


def test_a_ratio_is_taken_within_a_repeat() -> None:
    slow, quick = Sample((2.0, 40.0, 3.0)), Sample((1.0, 10.0, 1.0))
    assert slow.ratios(quick) == [2.0, 4.0, 3.0]
    assert slow.over(quick) == Spread(3.0, 2.0, 4.0)


def test_of_three_values_the_spread_is_the_lowest_and_the_highest_and_of_more_the_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of(list(map(float, range(8)))) == Spread(3.5, 2.0, 6.0)


def test_numbers_have_three_digits_and_no_powers_of_ten() -> None:
    assert str(Spread(2423.6, 0.98512, 12.0)) == "2,420 (0.985-12)"


def test_a_table_has_its_names_on_the_left_and_its_numbers_on_the_right() -> None:
    assert rendered("title", ["what", "ms"], [["short", 1.0], ["a longer one", 10.5]]).splitlines() == [
        "title",
        "what            ms",
        "------------  ----",
        "short            1",
        "a longer one  10.5",
    ]


def test_the_last_line_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    report("title", ["what"], [["row"]], {"fact": 1})
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"benchmark": "title", "fact": 1}


def test_a_refusal_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        refuse("there is no such thing here")
    assert (end.value.code, capsys.readouterr().err) == (2, "there is no such thing here\n")
