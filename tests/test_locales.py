"""Names are bytes on the disk and UTF-8 in datasets, whatever the locale of a process is."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from datasets import decrypted, encrypt, make_kms
from programs import jobs, storage
from support import program, run_python

from ags_fast import Dataset
from ags_fast.fs import Store

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [
    b"plain",
    "größe.csv".encode(),
    b"latin-\xe9",
    "日本/語 €".encode(),
    "ÿ/".encode() + b"\xff\x80\xfe",
    b"new\nline",
]
TEXTS = sorted(name.decode("utf-8", "surrogateescape") for name in NAMES)


@pytest.fixture(params=["ascii", "latin-1", "utf-8"])
def locale(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """What makes a process have another locale."""
    if request.param == "utf-8":
        return {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"}
    if request.param == "ascii":
        return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if shutil.which("localedef") is None:
        pytest.skip("no program makes locales")
    (tmp_path / "locales").mkdir()
    made = tmp_path / "locales" / "en_US.ISO-8859-1"
    if subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", made], capture_output=True).returncode > 1:
        pytest.skip("the locale's source is not installed")
    return {"LC_ALL": made.name, "LOCPATH": str(made.parent), "PYTHONUTF8": "0"}


def write(folder: Path) -> Path:
    for name in NAMES:
        path = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"x")
    return folder


def test_a_store(locale: Any, tmp_path: Path) -> None:
    """A store is pickled in a process of UTF-8, and used in one with the locale: so do the executors of Spark."""
    folder = write(tmp_path / "größe")
    (folder / "é").symlink_to("nowhere")
    (folder / "ö").mkdir()
    temporary = f".ü..{'0' * 16}.agstmp"
    (folder / temporary).touch()
    printed = run_python(program(storage.names_of_store, Store(folder)), **locale)
    first, *rest = printed.splitlines()
    found = ast.literal_eval(f"[{first.replace('] [', '], [').replace(')] ', ')], ')}]")
    assert found[0] == TEXTS
    assert [one[:2] for one in found[1]] == [(temporary, "TemporaryFile"), ("é", "DanglingLink"), ("ö/", "EmptyFolder")]
    assert found[2] == f"{folder}/ü"
    assert ast.literal_eval(rest[0]) == [temporary]
    there = {entry.path for entry in Store(folder).list()}
    assert there == {f"{above}/{text}" for text in TEXTS for above in ("new", "begun", "only")}


def test_datasets(locale: Any, tmp_path: Path) -> None:
    """What one locale has written, all others read; and no file seems to be missing or new."""
    kms = make_kms(tmp_path)
    src = write(tmp_path / "src")
    encrypt(src, tmp_path / "other", kms, fsync=False).raise_for_failures()
    a, b, c, d = (str(tmp_path / name) for name in ("src", "ds", "other", "out"))
    rows, counts = ast.literal_eval(run_python(program(jobs.round_trip, a, b, c, d, kms), **locale))
    assert rows == sorted(("ok", f"{src}/{text}") for text in TEXTS)
    assert counts == {"ok": len(NAMES), "skipped": 0, "failed": 0}
    for name in NAMES:
        with open(os.path.join(os.fsencode(tmp_path / "out"), name), "rb") as file:
            assert file.read() == b"x"
    assert decrypted(tmp_path / "ds", kms) == dict.fromkeys(TEXTS, b"x")


def test_commands(locale: Any, tmp_path: Path) -> None:
    """The arguments are bytes, too, and a name that cannot be shown is escaped."""
    kms = make_kms(tmp_path)
    write(tmp_path / "größe")
    options = ["--keystore", kms["kms.local.path"], "--key-file", kms["kms.local.key-file"]]

    def run(*words: str) -> bytes:
        command: list[Any] = [sys.executable, "-P", "-m", "ags_fast", *map(os.fsencode, [*words, *options])]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **locale}, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("encrypt", "größe", "dätaset", "--wrapping-key-id", "master")
    assert [file.path for file in Dataset.open(tmp_path / "dätaset", kms=kms).files()] == TEXTS
    for text in TEXTS:
        assert run("cat", "dätaset", text) == b"x"
    listed = run("ls", "dätaset")
    assert "größe.csv".encode() in listed
    assert b"latin-\\xe9" in listed
    run("cp", "dätaset:größe.csv", "cöpy")
    run("decrypt", "dätaset", "öut", "--include", "größe.csv", "--include", TEXTS[-1])
    assert sorted(entry.path for entry in Store(tmp_path / "öut").list()) == ["größe.csv", TEXTS[-1]]
    assert (tmp_path / "cöpy").read_bytes() == b"x"
