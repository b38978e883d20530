"""The house rules that no linter knows: sizes, budgets of lines, faces of packages, circles of files.

EXCEPTIONS is what the rules found when they were written. Take an entry out when its file obeys; add none.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ["ags_fast", "benchmarks"]
BUDGETS = ROOT / "tests" / "budgets.toml"
MAX_LINES = {"module": 600, "function": 60}  # of a function without its arguments and docstring

EXCEPTIONS: set[str] = set()
CIRCLES: set[tuple[str, str]] = set()
FACES: set[str] = set()

if not (ROOT / "ags_fast" / "cli").is_dir():
    pytest.skip("the tests run without the source tree", allow_module_level=True)


def modules() -> dict[str, Path]:
    """The Python files by the names of their modules."""
    found = {}
    for program in PROGRAMS:
        for path in sorted((ROOT / program).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert len(found) > 50
    return found


def too_long(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """What is longer in a module than the rules allow, with its number of lines."""
    text = path.read_text()
    if (lines := text.count("\n")) > MAX_LINES["module"]:
        yield name, lines

    def visit(node: ast.AST, place: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{place}.{child.name}"
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = child.body[0 if ast.get_docstring(child) is None else 1 :]
                lines = (child.body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                if lines > MAX_LINES["function"]:
                    yield inner, lines
            yield from visit(child, inner)

    yield from visit(ast.parse(text), name)


def test_nothing_is_too_long() -> None:
    long = dict(found for name, path in modules().items() for found in too_long(name, path))
    assert {name: lines for name, lines in long.items() if name not in EXCEPTIONS} == {}
    assert EXCEPTIONS - long.keys() == set(), "obeys now: take it out of EXCEPTIONS"


def test_faces_hold_names() -> None:
    """A package's ``__init__`` defines nothing."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    holding = {
        name
        for name, path in modules().items()
        if path.name == "__init__.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
    }
    assert holding - FACES == set()
    assert FACES - holding == set(), "obeys now: take it out of FACES"


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of `known` that a file imports, also for TYPE_CHECKING and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else module for name in names}
    return found & known.keys()


def test_no_circles_of_files() -> None:
    known = modules()
    lazy = {name for name, path in known.items() if "__getattr__, __dir__ =" in path.read_text()}
    graph = {
        # A lazy face imports a module of its own when somebody asks for the name.
        name: {other for other in imports_of(path, known) if not (name in lazy and other.startswith(f"{name}."))}
        - {name}
        for name, path in known.items()
    }
    assert {(name, other) for name, other in CIRCLES if other not in graph.get(name, ())} == set(), "obeys now"
    for name, other in CIRCLES:
        graph[name].discard(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


# ------------------------------------------------------------------------------------------------ budgets


def budgets(text: str) -> dict[str, int]:
    lines: dict[str, int] = tomllib.loads(text)["lines"]
    return lines


def lines_of_packages() -> Counter[str]:
    """Lines of Python of each package of ags_fast, and of the modules in no package: "rest"."""
    found = Counter[str]()
    for path in (ROOT / "ags_fast").rglob("*.py"):
        package, *inside = path.relative_to(ROOT / "ags_fast").parts
        found[package if inside else "rest"] += path.read_text().count("\n")
    return found


def test_no_package_is_over_its_budget() -> None:
    allowed, found = budgets(BUDGETS.read_text()), lines_of_packages()
    assert found.keys() == allowed.keys()
    over = {package: f"{lines - allowed[package]} lines over {BUDGETS.name}" for package, lines in found.items()}
    assert {package: over[package] for package in found if found[package] > allowed[package]} == {}


def test_no_budget_was_raised() -> None:
    """A budget only falls. What was once committed is the bound for all that follows."""
    name = BUDGETS.relative_to(ROOT).as_posix()
    log = subprocess.run(["git", "log", "--format=%H", "--", name], cwd=ROOT, capture_output=True, text=True)
    if log.returncode:
        pytest.skip("the tests run without the history")
    now = budgets(BUDGETS.read_text())
    for commit in log.stdout.split():
        shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True)
        before = budgets(shown.stdout) if shown.returncode == 0 else now  # a commit may have moved the file
        raised = {package: before[package] for package in now.keys() & before if now[package] > before[package]}
        assert not raised, f"{name} has raised budgets; at {commit} they were {raised}"


def test_the_tests_of_each_package_are_there() -> None:
    """The table that `make quick` reads names each package, and files that exist."""
    table = tomllib.loads(BUDGETS.read_text())
    assert table["tests"].keys() == table["lines"].keys()
    files = {file for some in table["tests"].values() for file in some}
    assert [file for file in sorted(files) if not (ROOT / "tests" / file).is_file()] == []


def test_times_name_tests() -> None:
    """Each pattern of times.toml begins with the name of a test that there is. Methods may be inherited."""
    lost = []
    for files in tomllib.loads((ROOT / "tests" / "times.toml").read_text()).values():
        for file, patterns in files.items():
            text = (ROOT / "tests" / f"{file}.py").read_text()
            names = [re.match(r"\w*(::)?", pattern) for pattern in patterns]
            words = [name[0][:-2] if name[1] else f"def {name[0]}" for name in names if name]
            lost += [f"{file}: {word}" for word in words if not re.search(rf"\b{word}", text)]
    assert not lost
