import json

import pytest
from notebooks import EXAMPLES, NAMES, cells, notebook


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_example_makes(name: str) -> None:
    made = notebook((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    kept = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
    assert kept == made, "run `python examples/notebooks.py`"


def test_every_example_with_cells_is_a_notebook_too() -> None:
    with_cells = {path.stem for path in EXAMPLES.glob("*.py") if path.read_text(encoding="utf-8").startswith("# %%")}
    assert with_cells == set(NAMES) == {path.stem for path in EXAMPLES.glob("*.ipynb")}


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_notebook_is_the_code_of_its_example(name: str) -> None:
    document = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    compile("\n".join(code), f"{name}.ipynb", "exec")
    source = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in "\n".join(code).splitlines() if line and not line.startswith("#")] == source


def test_cells_begin_at_their_marks_and_text_loses_its_hashes() -> None:
    title = "# %% [markdown]\n# # Title\n#\n#     code in text\n\n"
    code = "# %%\na = 1  # %% no mark\n\n\ndef f(): ...\n\n\n# %%\nb = 2\n"
    text, first, second = cells(title + code)
    assert (text["cell_type"], text["source"]) == ("markdown", ["# Title\n", "\n", "    code in text"])
    assert (first["cell_type"], "".join(first["source"])) == ("code", "a = 1  # %% no mark\n\n\ndef f(): ...")
    assert second["source"] == ["b = 2"]
    assert len({cell["id"] for cell in (text, first, second)}) == 3


def test_something_before_the_first_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a cell mark before 'import json'"):
        cells("import json\n# %%\n")
