"""Mutants of `ags_fast.dataset`: the code without one of the rules of the log. The simulator must find each.

``mutants.txt`` has them: a line ``== name == rule``, a line ``$ schedule`` that finds it, and for each change
``@@ module``, the lines that are taken out of the module, which stand there once, and the lines that take their place.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

FLOOR = Path(__file__).parents[2] / "ags_fast" / "dataset"


class Edit(NamedTuple):
    """Lines of a module, and the lines that take their place."""

    module: str
    old: str
    new: str


class Mutant(NamedTuple):
    """The code without one rule.

    Attributes:
        rule: The number of the rule, and what it says.
        schedule: What finds it: arguments of ``python -m simulation replay``.
        edits: How the source changes.
    """

    rule: str
    schedule: tuple[str, ...]
    edits: tuple[Edit, ...]


def parsed(text: str) -> dict[str, Mutant]:
    """Return the mutants in a text, by name."""
    found = {}
    for block in text.split("\n== ")[1:]:
        (title, _, body) = block.partition("\n")
        name, _, rule = title.partition(" == ")
        schedule, edits = body.partition("\n")[0].removeprefix("$ ").split(), []
        for part in body.split("@@ ")[1:]:
            module, *lines = part.splitlines()
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] == sign) for sign in "-+")
            edits.append(Edit(module.removesuffix(".py"), old, new))
        found[name] = Mutant(rule, tuple(schedule), tuple(edits))
    return found


MUTANTS = parsed(Path(__file__).with_name("mutants.txt").read_text())


def source_of(module: str, edits: Sequence[Edit]) -> str:
    """Return the source of a module with some edits. ValueError: a text to replace does not stand there once."""
    text = (FLOOR / f"{module}.py").read_text()
    for edit in edits:
        if edit.module == module:
            if text.count(edit.old) != 1:
                raise ValueError(f"{edit.old!r} stands {text.count(edit.old)} times in {module}.py")
            text = text.replace(edit.old, edit.new)
    return text


def install(names: Sequence[str]) -> None:
    """Import the floor without some rules from now on. It must not have been imported before."""
    edits = [edit for name in names for edit in MUTANTS[name].edits]
    changed = {f"ags_fast.dataset.{edit.module}": edit.module for edit in edits}
    if already := changed.keys() & sys.modules.keys():
        raise RuntimeError(f"imported already: {sorted(already)}")

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> object:  # type: ignore[override]
            return compile(source_of(changed[fullname], edits), self.path, "exec", dont_inherit=True)

    class Finder:
        @staticmethod
        def find_spec(
            name: str, path: object, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if name not in changed:
                return None
            file = str(FLOOR / f"{changed[name]}.py")
            return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))

    sys.meta_path.insert(0, Finder)
