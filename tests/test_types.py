"""What an editor sees: names of packages, types of arguments, and what Python and checkers say of mistakes."""

from __future__ import annotations

import importlib
import json
import os
import pydoc
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from support import start_python

import ags_fast

words: typing.Any = importlib.import_module("ags_fast._types")
PROGRAM = Path(__file__).parent / "programs" / "typed_user.py"
PACKAGES = {  # with what each needs
    "ags_fast": [],
    "ags_fast.avro": ["pyarrow", "fastavro"],
    "ags_fast.iceberg": ["pyiceberg"],
    "ags_fast.jobs": [],
    "ags_fast.keys": [],
    "ags_fast.parquet": ["pyarrow", "fsspec", "polars"],
    "ags_fast.spark": ["pyspark"],
    "ags_fast.spark.datasource": ["pyspark", "pyarrow"],
}


@pytest.mark.parametrize("name", PACKAGES)
def test_names_of_packages(name: str) -> None:
    for needed in PACKAGES[name]:
        pytest.importorskip(needed)
    package = importlib.import_module(name)
    shown = dir(package)
    assert set(package.__all__) <= set(shown)
    assert {one for one in shown if not one.startswith("_")} <= {*package.__all__, *submodules(package)}
    for one in package.__all__:
        assert getattr(package, one) is not None
    mistaken = package.__all__[0] + "z"
    done = start_python(["-c", f"import {name}; {name}.{mistaken}"]).communicate(timeout=60)[1]
    last = done.strip().splitlines()[-1]
    assert last == (
        f"AttributeError: module {name!r} has no attribute {mistaken!r}. Did you mean: {package.__all__[0]!r}?"
    )


def submodules(package: typing.Any) -> set[str]:
    (folder,) = package.__path__
    return {path.name.partition(".")[0] for path in Path(folder).iterdir()}


def test_help_shows_functions() -> None:
    pytest.importorskip("pyarrow")
    text = pydoc.plain(pydoc.render_doc("ags_fast.jobs"))
    for name in ("encrypt_files", "verify_files", "class JobResult"):
        assert re.search(rf"^    {name}\(", text, re.MULTILINE), name
    assert "dataset: 'Folder'" in text


def test_words_are_those_that_are_checked() -> None:
    from ags_fast.audit.runbook import EVENTS
    from ags_fast.dataset.files.contents import MODULES
    from ags_fast.jobs.rotation import WHATS
    from ags_fast.parquet.reading import V2_LAYOUTS

    assert typing.get_args(words.Event) == EVENTS
    assert typing.get_args(words.FileFormat) == (*MODULES, "auto")
    assert typing.get_args(words.Rotated) == WHATS
    assert (None, *typing.get_args(words.Layout)) == tuple(V2_LAYOUTS)
    with pytest.raises(ValueError, match=r"^links must be 'skip', 'follow' or 'error', not 'folow'$"):
        words.check_choice("links", "folow", words.Links)
    with pytest.raises(ValueError, match=r"^resume must be 'length', 'verify' or None, not True$"):
        words.check_choice("resume", True, words.Resume, None)
    words.check_choice("resume", None, words.Resume, None)


def test_errors_are_at_the_top() -> None:
    from ags_fast import errors

    for name in errors.__all__:
        assert getattr(ags_fast, name) is getattr(errors, name)
        assert name in ags_fast.__all__


# ------------------------------------------------------------------------------------------------ a user's program


def wrong_lines() -> set[int]:
    return {number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if "# type: ignore" in line}


def environment() -> dict[str, str]:
    """Of a checker: it finds the ags_fast that is tested."""
    where = Path(ags_fast.__file__).parents[1]
    return {**os.environ, "MYPYPATH": "" if where.name == "site-packages" else str(where)}


def mypy(program: Path, folder: Path) -> set[int]:
    """The lines of which mypy says something. Not what it says of ags_fast, which `make lint` asks for."""
    pytest.importorskip("mypy")
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={folder}", "--no-pretty"]
    command = [sys.executable, "-P", "-m", "mypy", *options, str(program)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {int(found[1]) for found in re.finditer(rf"^\S*{program.name}:(\d+): error", done.stdout, re.MULTILINE)}


def pyright(program: Path, folder: Path) -> set[int]:
    """The same of pyright. basedpyright is pyright with all that it needs; its own rules are off."""
    pytest.importorskip("basedpyright")
    project = {
        "include": [str(program)],
        "extraPaths": [str(Path(ags_fast.__file__).parents[1])],
        "typeCheckingMode": "strict",
        "reportMissingTypeStubs": False,
        "reportUnnecessaryTypeIgnoreComment": True,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(project))
    command = [
        sys.executable,
        "-P",
        "-m",
        "basedpyright",
        "--outputjson",
        "-p",
        str(folder),
        "--pythonpath",
        sys.executable,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in said}


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_user_s_program(checker: typing.Callable[[Path, Path], set[int]], tmp_path: Path) -> None:
    """Its right lines are right, and of each wrong one the checker says that it is wrong."""
    if not PROGRAM.is_file():
        pytest.skip("the tests run without the source tree")
    assert checker(PROGRAM, tmp_path) == set()
    bare = tmp_path / "bare.py"
    bare.write_text(re.sub(r"  # type: ignore\[.*", "", PROGRAM.read_text()))
    assert checker(bare, tmp_path) == wrong_lines()
    assert len(wrong_lines()) > 15
