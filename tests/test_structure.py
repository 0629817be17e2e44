"""The arrows, the sizes and the habits of the source, as tests."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "lmcache_server": ROOT / "lmcache_server",
    "lmcache_sdk": ROOT / "lmcache_sdk",
    "lmcache_connector": ROOT / "connector" / "lmcache_connector",
    "lmcache": ROOT / "lmcache",
}
MAX_LINES = 450


def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules of the project that a module imports, in-function imports and package `__init__`s included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(path)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            # `from package import module` is about the module.
            named = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name if name in MODULES else base for name in named]
        yield from (target for target in targets if target in MODULES and target != name)


def test_there_is_no_import_cycle() -> None:
    graph = {name: sorted(set(imported(name, path))) for name, path in MODULES.items()}
    done: set[str] = set()
    way: list[str] = []

    def visit(name: str) -> None:
        if name in way:
            raise AssertionError(" -> ".join([*way[way.index(name) :], name]))
        if name not in done:
            way.append(name)
            for target in graph[name]:
                visit(target)
            way.pop()
            done.add(name)

    for name in graph:
        visit(name)


def test_the_arrows_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that are loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_client_loads_no_web_framework_and_no_engine() -> None:
    assert not loaded_by("import lmcache_sdk") & {"fastapi", "uvicorn", "starlette", "vllm"}


def test_the_server_loads_no_tensors() -> None:
    statement = "import lmcache_server.app, lmcache_server.cli.main, lmcache_server.cli.server"
    assert not loaded_by(statement) & {"torch", "numpy", "vllm", "transformers"}


def test_the_command_line_is_quick_to_load() -> None:
    loaded = loaded_by("import lmcache_server.cli.main")
    assert not loaded & {"fastapi", "uvicorn", "zmq", "torch"}


def test_every_module_opens_with_its_law_and_stays_short() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert [name for name, path in MODULES.items() if not ast.get_docstring(tree(path))] == []
    assert {name: len(text.splitlines()) for name, text in texts.items() if text.count("\n") > MAX_LINES} == {}


def test_nothing_is_pickled_and_no_text_is_run() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    found = []
    for name, path in MODULES.items():
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{name}: import {used}" for used in names if used.partition(".")[0] in forbidden]
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("eval", "exec", "yaml.load", "torch.load") or called.endswith(("send_pyobj", "recv_pyobj")):
                found.append(f"{name}: {called}")
    assert found == []


def test_the_server_reads_its_environment_in_one_place() -> None:
    readers = set()
    for name, path in MODULES.items():
        if name.partition(".")[0] == "lmcache_server":
            text = ast.unparse(tree(path))
            if "os.environ" in text or "getenv" in text:
                readers.add(name)
    assert readers <= {"lmcache_server.config", "lmcache_server.cli.server"}, readers


def test_every_module_of_the_server_has_tests_of_its_own() -> None:
    missing = []
    for name, path in MODULES.items():
        if name.partition(".")[0] != "lmcache_server":
            continue
        if path.name == "__init__.py":
            assert len(tree(path).body) <= 2, f"{name}: a package's own file holds its law and nothing to be tested"
            continue
        if not (ROOT / "tests" / path.relative_to(ROOT).parent / f"test_{path.name}").exists():
            missing.append(name)
    assert missing == []


def test_what_a_module_offers_is_there_and_is_sorted_into_its_list() -> None:
    for name, path in MODULES.items():
        body = tree(path).body
        lists = [n for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        if not lists:
            continue
        offered = ast.literal_eval(lists[0].value)
        assert len(set(offered)) == len(offered), name
        defined = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
        defined |= {
            target.id for n in body if isinstance(n, ast.Assign | ast.AnnAssign)
            for target in (n.targets if isinstance(n, ast.Assign) else [n.target]) if isinstance(target, ast.Name)
        }  # fmt: skip
        defined |= {
            (alias.asname or alias.name).partition(".")[0] for n in body if isinstance(n, ast.Import | ast.ImportFrom)
            for alias in n.names
        }  # fmt: skip
        lazy = "__getattr__" in defined
        assert lazy or set(offered) <= defined, f"{name}: {set(offered) - defined}"


def test_broad_excepts_are_few_and_each_says_why() -> None:
    found = []
    for path in MODULES.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                if caught in ("", "Exception", "BaseException") and ast.unparse(node.body[-1]) != "raise":
                    assert "#" in lines[node.lineno - 1], (
                        f"{path}:{node.lineno} catches everything and does not say why"
                    )
                    found.append(f"{path.name}:{node.lineno}")
    assert len(found) <= 12, found
