"""The drop-in holds names only, and its names and signatures are the recorded ones.

`python -m tests.lmcache.test_names` records them anew: a change of `public_names.json` is a change of what people's
code relies on.
"""

import ast
import importlib
import inspect
import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("public_names.json")
FILES = sorted((ROOT / "lmcache").rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def called_with(value: Any) -> str:
    """The parameters and their defaults; how annotations are written differs from one Python to the next."""
    signature = inspect.signature(value)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def signature_of(value: Any) -> Any:
    """What callers rely on: parameters and their defaults; of a class, also those of its public members."""
    if inspect.ismodule(value):
        return "module"
    if not inspect.isclass(value):
        return called_with(value) if inspect.isfunction(inspect.unwrap(value)) else "type alias"
    if issubclass(value, Enum):
        return [member.name for member in value]
    members = {
        name: "property" if isinstance(member, property) else called_with(member)
        for name, member in inspect.getmembers_static(value)
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
    }
    bases = [base.__name__ for base in value.__mro__[1:-1] if issubclass(base, Exception)]
    made = {"()": called_with(value.__init__)} if inspect.isfunction(value.__init__) else {}
    return {**made, **members, **({"is a": bases} if bases else {})}


def public_names() -> dict[str, dict[str, Any]]:
    """Module -> name -> signature."""
    modules = {module_name(file): importlib.import_module(module_name(file)) for file in FILES}
    return {
        name: {public: signature_of(getattr(module, public)) for public in sorted(getattr(module, "__all__", ()))}
        for name, module in modules.items()
    }


def test_names_and_signatures_are_the_recorded_ones() -> None:
    assert public_names() == json.loads(RECORD.read_text()), "run `python -m tests.lmcache.test_names` if this is meant"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_module_of_the_drop_in_holds_nothing_but_names(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree)
    imported: set[str] = set()
    listed: list[str] = []
    for statement in tree.body[1:]:
        if isinstance(statement, ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in statement.names}
        else:
            assert isinstance(statement, ast.Assign), f"{file}:{statement.lineno} is no import and no __all__"
            assert [target.id for target in statement.targets if isinstance(target, ast.Name)] == ["__all__"]
            listed = ast.literal_eval(statement.value)
    assert set(listed) == imported
    assert len(set(listed)) == len(listed)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(public_names(), indent=2) + "\n")
