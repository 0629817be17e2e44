"""The budgets' table: every row that was asked for, which way is good, and ratios within a round."""

from pathlib import Path

from benchmarks._budgets import BUDGETS, measured, summary, table

ROOT = Path(__file__).parents[2] / "benchmarks"


def test_rounds_are_collected_from_all_documents() -> None:
    documents = [{"benchmark": "a", "budgets": {"store": {"ours": [1.0]}}}, {"benchmark": "b"}]
    assert measured(documents) == {"store": {"ours": [1.0]}}


def test_more_is_better_where_the_limit_is_a_least() -> None:
    (row,) = table({"store": {"ours": [0.8, 0.9, 0.7], "peer": [0.4, 0.3, 0.7]}})
    assert row == [BUDGETS["store"].text, ">= 0.8", "0.8 (0.7-0.9)", "yes", "0.4 (0.3-0.7)", "2 (1-3)"]


def test_less_is_better_where_the_limit_is_a_most() -> None:
    (row,) = table({"start_seconds": {"ours": [1.1, 1.1, 1.1], "peer": [2.2, 4.4, 3.3]}})
    assert row[2:] == ["1.1 (1.1-1.1)", "NO", "3.3 (2.2-4.4)", "3 (2-4)"]


def test_what_was_not_measured_says_why_in_its_place() -> None:
    rows = table({"store": {"ours": [1.0]}}, dict.fromkeys(BUDGETS.keys() - {"store"}, "no GPU here"))
    assert [row[0] for row in rows] == [budget.text for budget in BUDGETS.values()]
    assert rows[0][2:] == ["1 (1-1)", "yes", "-", "-"]
    assert {tuple(row[2:]) for row in rows[1:]} == {("no GPU here", "-", "-", "-")}


def test_the_summary_has_numbers_for_the_picture() -> None:
    facts = summary({"view_ms": {"ours": [0.5]}, "store": {"ours": [0.9], "peer": [0.3]}})
    assert facts["view_ms"] == {"ours": 0.5, "budget": 1.0, "met": True}
    assert facts["store"] == {"ours": 0.9, "budget": 0.8, "met": True, "peer": 0.3, "times_better": 3.0}


def test_every_benchmark_says_what_and_why() -> None:
    files = [path for path in ROOT.glob("*.py") if path.name[0] != "_" and "side_" not in path.name]
    assert [path.name for path in files if "\nWhy: " not in path.read_text()] == []
