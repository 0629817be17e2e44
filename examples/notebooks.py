"""The notebooks, made from the example files: cells begin at `# %%`, text cells at `# %% [markdown]`.

    python examples/notebooks.py        writes each example's .ipynb anew

The file is the source and the notebook holds nothing else (no outputs), so the two cannot differ: a test compares them.
"""

import json
import re
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
NAMES = ("basic_check", "follow_up", "snapkv", "token_dropping")
MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def notebook(source: str) -> str:
    """The notebook of an example file, as the text of an .ipynb file."""
    document = {
        "cells": cells(source),
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def cells(source: str) -> list[dict[str, Any]]:
    """The cells of an example file, in order. Raises ValueError if something stands before the first."""
    before, *parts = MARK.split(source)
    if before.strip():
        raise ValueError(f"expected a cell mark before {before.strip().splitlines()[0]!r}")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [_cell(f"cell-{number}", bool(mark), text.strip("\n")) for number, (mark, text) in enumerate(pairs)]


def _cell(name: str, markdown: bool, text: str) -> dict[str, Any]:
    if markdown:
        lines = [line.removeprefix("#").removeprefix(" ") for line in text.splitlines()]
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": _lines("\n".join(lines))}
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {},
        "outputs": [],
        "source": _lines(text),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    for name in NAMES:
        path = EXAMPLES / f"{name}.ipynb"
        path.write_text(notebook((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
