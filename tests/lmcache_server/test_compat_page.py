"""docs/compatibility.md says what the code says, and names for each claim a test that is there.

`python -m tests.lmcache_server.test_compat_page` writes the table of operations anew.
"""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache_server.protocol.numbered import FIXED, MISS, OPERATIONS, RAISED, Refusal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
HEADING = "| number | operation | answer | when it cannot be done |"


def operations_table() -> str:
    """One row per operation, those with a number first."""
    rows = [(entry.number, name, "spoken", words(entry.failure)) for name, entry in OPERATIONS.items()]
    for name, (number, answer) in FIXED.items():
        rows.append((number, name, words(answer) if isinstance(answer, Refusal) else f"always {words(answer)}", ""))
    rows.sort(key=lambda row: (row[0] is None, row[0] or 0, row[1]))
    lines = [f"| {number or ''} | `{name}` | {answer} | {failure} |" for number, name, answer, failure in rows]
    return "\n".join([HEADING, "|---|---|---|---|", *lines])


def words(answer: Any) -> str:
    """An answer, as the page says it."""
    if isinstance(answer, Refusal):
        return f"refused: {answer or 'the reason'}"
    if answer == MISS or answer == OPERATIONS["prepare_store"].failure:
        return "no hit" if answer == MISS else "nothing to store"
    return "an empty answer" if answer is None else f"`{answer}`"


def rows_of(section: str) -> list[str]:
    """The rows of the table of one section of the page."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return re.findall(r"^\|.*\|$", text, re.M)[2:]


def names_of_tests(folder: str) -> set[str]:
    """The names of all tests in the files of a folder."""
    return {
        node.name
        for file in (ROOT / "tests" / folder).glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_table_of_operations_is_that_of_the_code() -> None:
    assert RAISED in [entry.failure for entry in OPERATIONS.values()]
    assert operations_table() in PAGE.read_text(encoding="utf-8"), f"run `python -m {__name__}`"


@pytest.mark.parametrize("section", ["Clients", "What differs, on purpose"])
def test_every_claim_names_a_test_that_is_there(section: str) -> None:
    claimed = [row.split("|")[-2].strip(" `") for row in rows_of(section)]
    assert len(claimed) == len(set(claimed)) > 10
    assert set(claimed) <= names_of_tests("interop") | names_of_tests("lmcache_server")


def test_every_test_with_their_clients_is_in_the_matrix() -> None:
    assert names_of_tests("interop") == {row.split("|")[-2].strip(" `") for row in rows_of("Clients")}


def write_table() -> None:
    """Replace the table of operations by that of the code."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.escape(HEADING) + r".*?(?=\n\n)"
    PAGE.write_text(re.sub(pattern, lambda _: operations_table(), text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    write_table()
