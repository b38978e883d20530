"""What a process imports: a command or a job waits for each module, and pandas takes longer than a small job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from datasets import MASTER, make_kms, write_tree
from support import run_python

from ags_fast.engines.local import LocalEngine
from ags_fast.jobs import encrypt_files

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")  # else nothing could import it
pytest.importorskip("pandas")

LAZY = (
    *("pandas", "tqdm", "pyarrow", "fsspec", "urllib.request", "asyncio"),
    *("multiprocessing.connection", "multiprocessing.spawn", "multiprocessing.synchronize", "socket"),
)

RUN = """
import sys
from ags_fast import Dataset, jobs
from ags_fast.cli import main

call, kms, wrapping_key_id, folder = eval(sys.argv[1]), eval(sys.argv[2]), sys.argv[3], sys.argv[4]
engine = jobs.LocalEngine(0)
exec(call)
print()
print(*(name for name in sys.argv[5].split() if name in sys.modules))
"""
CALLS = {
    "encrypt": 'jobs.encrypt_files(folder + "/src", folder + "/new", kms=kms, wrapping_key_id=wrapping_key_id, '
    "engine=engine).raise_for_failures()",
    "verify": 'jobs.verify_files(folder + "/dataset", kms=kms, engine=engine).raise_for_failures()',
    "decrypt": 'jobs.decrypt_files(folder + "/dataset", folder + "/out", kms=kms, engine=engine).raise_for_failures()',
    "rekey": 'jobs.rekey_files(folder + "/dataset", kms=kms, engine=engine).raise_for_failures()',
    "open": 'assert Dataset.open(folder + "/dataset", kms=kms).open_file("a/1").read() == b"one"',
    "write": 'with Dataset.open(folder + "/dataset", kms=kms).transaction() as t:\n'
    '    with t.create("new") as f: f.write(b"x")',
    "ls": 'main(["ls", folder + "/dataset", *(f"--kms={name}={value}" for name, value in kms.items())])',
    "cat": 'main(["cat", folder + "/dataset", "a/1", *(f"--kms={name}={value}" for name, value in kms.items())])',
}


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    kms = make_kms(tmp_path)
    write_tree(tmp_path / "src", {"a/1": b"one", "a/2": bytes(200_000), "b": b""})
    encrypt_files(tmp_path / "src", tmp_path / "dataset", kms=kms, wrapping_key_id=MASTER, engine=LocalEngine(0))
    return tmp_path, kms


@pytest.mark.parametrize("call", CALLS)
def test_jobs_and_commands_import_what_they_need(call: str, folder: tuple[Path, dict[str, str]]) -> None:
    path, kms = folder
    shown = run_python(RUN, repr(CALLS[call]), repr(kms), MASTER, path, " ".join(LAZY))
    assert shown.splitlines()[-1] == ""


def test_rotation_imports_no_arrow(folder: tuple[Path, dict[str, str]]) -> None:
    path, kms = folder
    rotate = 'jobs.rotate(folder + "/dataset", kms=kms, engine=engine)'
    assert run_python(RUN, repr(rotate), repr(kms), MASTER, path, "pandas pyarrow").splitlines()[-1] == ""


def test_an_sql_catalog_imports_no_rest_client() -> None:
    pytest.importorskip("pyiceberg")
    code = "import sys; from ags_fast.iceberg import SqlCatalog; print('pyiceberg.catalog.rest' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["ls", "--help"], ["nosuch"]])
def test_help_imports_no_arrow(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom ags_fast.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(*(name for name in ('pyarrow', 'numpy', 'tqdm', 'ags_fast.jobs.encryption') if name in sys.modules))"
    )
    assert run_python(program, *arguments).splitlines()[-1] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_commands_have_no_threads_for_linear_algebra() -> None:
    """pyarrow imports numpy, whose OpenBLAS has threads that spin until they sleep, unless a variable says not to."""
    program = (
        "import os, sys\nfrom ags_fast.__main__ import main\n"
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "try: main()\nexcept SystemExit: pass\n"
        "before = threads()\nimport numpy\nprint(threads() - before)"
    )
    assert run_python(program, "--version").splitlines()[-1] == "0"
