"""What PyIceberg reads of properties, found in its sources: the names, and where a value chooses what is called."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Found", "installed", "walk"]

# What holds properties: the last name of an expression has one of these words.
HOLDERS = ("properties", "config", "parameters")
METHODS = ("get", "pop", "setdefault")
READERS = ("property_as_bool", "property_as_int", "property_as_float", "get_first_property_value")
IMPORTS = ("import_module", "__import__")
EVALUATES = ("eval", "exec", "compile")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Found:
    """What a walk found.

    Attributes:
        read: The names of properties that are read; with a star at the end, all that begin so.
        calls: Those of them whose value reaches an import, or chooses what is called.
        importers: Functions that import or evaluate what is not written there, as ``file: name``.
        unknown: Reads of a name that the walk could not tell, as ``file: source``.
    """

    read: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    importers: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def installed() -> Path:
    """Return the folder of PyIceberg's sources."""
    spec = find_spec("pyiceberg")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def walk(folder: Path) -> Found:
    """Return what the sources below a folder read."""
    trees = {path.relative_to(folder): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    names = _constants(trees.values())
    functions = [(path, one) for path, tree in trees.items() for one in ast.walk(tree) if isinstance(one, Function)]
    found = Found(importers={f"{path}: {one.name}" for path, one in functions if _imports(one)})
    importers = {one.rpartition(": ")[2] for one in found.importers} | {*IMPORTS}
    for path, tree in trees.items():
        for one in ast.walk(tree):
            for name in _read(one, names):
                if name is None:
                    found.unknown.add(f"{path}: {ast.unparse(one)}")
                else:
                    found.read.add(name)
    for _, function in functions:
        found.calls |= _called(function, names, importers)
    return found


def _constants(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the text of constants, of modules and of classes, by name."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        scopes: list[ast.Module | ast.ClassDef] = [tree]
        scopes += [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
        for one in (statement for scope in scopes for statement in scope.body):
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
            value = getattr(one, "value", None)
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.setdefault(target.id, set()).add(value.value)
    return found


def _texts(node: ast.expr, names: dict[str, set[str]]) -> set[str | None]:
    """Return the texts that an expression may be. None stands for one that nobody can tell."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.JoinedStr):  # f"{PREFIX}.{column}"
        made: set[str | None] = {""}
        for part in node.values:
            texts = _texts(part.value if isinstance(part, ast.FormattedValue) else part, names)
            if None in texts:
                return {f"{one}*" if one else None for one in made}
            made = {f"{one}{text}" for one in made for text in texts}
        return made
    found = names.get(_last(node))
    return {None} if found is None else set(found)


def _last(node: ast.AST) -> str:
    """Return the last name of an expression: ``c`` of ``a.b.c``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _holds(node: ast.AST) -> bool:
    return _last(node).lower().endswith(HOLDERS)


def _read(node: ast.AST, names: dict[str, set[str]]) -> set[str | None]:
    """Return the names of the properties that an expression, without its parts, reads."""
    asked: list[ast.expr] = []
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and _holds(node.func.value):
            asked = node.args[:1]
        elif _last(node.func) == "get_first_property_value":
            asked = node.args[1:]
        elif _last(node.func) in READERS:
            asked = node.args[1:2] or [one.value for one in node.keywords if one.arg == "property_name"]
        elif (
            isinstance(node.func, ast.Attribute) and node.func.attr == "startswith" and _last(node.func.value) == "key"
        ):
            return {f"{one}*" if one else None for one in _texts(node.args[0], names)}
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _holds(node.value):
        asked = [node.slice]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and _holds(node.comparators[0]):
        asked = [node.left]
    return {text for one in asked for text in _texts(one, names)}


def _imports(function: Function) -> bool:
    """Tell whether a function imports, or evaluates, what is not written there."""
    return any(
        isinstance(one, ast.Call)
        and (_last(one.func) in IMPORTS or (isinstance(one.func, ast.Name) and one.func.id in EVALUATES))
        and not all(isinstance(argument, ast.Constant) for argument in one.args)
        for one in ast.walk(function)
    )


def _called(function: Function, names: dict[str, set[str]], importers: set[str]) -> set[str]:
    """Return which properties that a function reads reach an import, or choose what is called."""
    origins = _Origins(names)
    for _ in range(3):  # what is assigned from what is assigned
        for one in ast.walk(function):
            if isinstance(one, ast.Assign | ast.NamedExpr):
                origins.assign(one.targets if isinstance(one, ast.Assign) else [one.target], one.value)
    reached: set[str] = set()
    for one in ast.walk(function):
        if isinstance(one, ast.Call):
            if _last(one.func) in importers:
                for argument in (*one.args, *(named.value for named in one.keywords)):
                    reached |= origins.of(argument)
            if isinstance(one.func, ast.Name | ast.Subscript):  # x(...), REGISTRY[x](...); not x.method(...)
                reached |= origins.of(one.func)
    return reached


class _Origins:
    """From which properties the values of a function's names come."""

    def __init__(self, names: dict[str, set[str]]) -> None:
        self._names = names
        self._of: dict[str, set[str]] = {}

    def of(self, node: ast.AST) -> set[str]:
        """Return the properties from which the value of an expression comes."""
        found: set[str] = set()
        for one in ast.walk(node):
            found |= {text for text in _read(one, self._names) if text}
            if isinstance(one, ast.Name):
                found |= self._of.get(one.id, set())
        return found

    def assign(self, targets: Iterable[ast.expr], value: ast.expr) -> None:
        """Note that these targets have the value."""
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Name) and (found := self.of(value)):
                    self._of.setdefault(one.id, set()).update(found)
