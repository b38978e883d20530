"""ags-fast cp: files into a dataset and out of it, as a shell runs it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

import pytest
from datasets import encrypt, make_kms, object_of, read_tree, write_tree
from support import flip

from ags_fast import cli
from ags_fast.cli import taking

if TYPE_CHECKING:
    from pathlib import Path


class Shell:
    """The command in a folder with the dataset `ds`, of the files a and b/c, and local files."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.kms = make_kms(folder)
        self.options = [f"--kms={name}={value}" for name, value in self.kms.items()]
        write_tree(folder / "src", {"a": b"one", "b/c": b"two"})
        os.chmod(folder / "src" / "a", 0o640)
        os.utime(folder / "src" / "a", ns=(10**18, 10**18))
        encrypt(folder / "src", folder / "ds", self.kms)
        write_tree(folder / "local", {"x": b"local x", "y": bytes(3_000_000)})

    def __call__(self, *words: str, code: int = 0) -> dict[str, Any]:
        self._capsys.readouterr()
        assert cli.main([*words, "--json", *self.options]) == code
        return dict(json.loads(self._capsys.readouterr().out))

    def usage(self, *words: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main([*words, *self.options])
        assert end.value.code == 2
        return self._capsys.readouterr().err

    def listed(self, version: int | None = None) -> dict[str, int]:
        more = () if version is None else ("--version", str(version))
        return {file["path"]: file["plain_length"] for file in self("ls", "ds", *more)["files"]}


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def test_out(shell: Shell, tmp_path: Path) -> None:
    told = shell("cp", "ds:a", "copy")
    assert told["files"] == [{"src": "a", "dst": "copy", "plain_bytes": 3}]
    assert (tmp_path / "copy").read_bytes() == b"one"
    info = os.stat("copy")
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o640, 10**18)
    (tmp_path / "folder").mkdir()
    shell("cp", "ds:a", "ds:b/c", "folder")
    assert read_tree(tmp_path / "folder") == {"a": b"one", "c": b"two"}
    assert "--overwrite replaces" in shell("cp", "ds:b/c", "copy", code=2)["error"]
    shell("cp", "ds:b/c", "copy", "--overwrite")
    assert (tmp_path / "copy").read_bytes() == b"two"


def test_in(shell: Shell, tmp_path: Path) -> None:
    """All files of a command are one version."""
    assert shell("cp", "local/x", "local/y", "ds:2026/")["version"] == 3
    assert shell.listed() == {"a": 3, "b/c": 3, "2026/x": 7, "2026/y": 3_000_000}
    assert shell("cp", "local/x", "ds:")["files"][0]["dst"] == "x"
    assert "ds has 'a': --overwrite replaces" in shell("cp", "local/x", "ds:a", code=2)["error"]
    assert shell("cp", "local/x", "ds:a", "--overwrite")["version"] == 5
    shell("cp", "ds:a", "new")
    shell("cp", "ds:a", "old", "--version", "2")
    assert (tmp_path / "new").read_bytes() == b"local x"
    assert (tmp_path / "old").read_bytes() == b"one"
    assert shell("verify", "ds", "--quiet")["ok"] == 5


def test_patterns(shell: Shell, tmp_path: Path) -> None:
    """They match as in a shell: * is no slash, and a file of that very name comes first."""
    for path in ("2026/01.csv", "2026/02.csv", "2026/old/03.csv", "2026/x.txt", "2025/01.csv", "2026/[ab].csv"):
        shell("cp", "local/x", f"ds:{path}")

    def taken(*patterns: str, options: tuple[str, ...] = ()) -> set[str]:
        (out := tmp_path / "out").mkdir()
        shell("cp", *options, *(f"ds:{pattern}" for pattern in patterns), "out")
        found = set(read_tree(out))
        shutil.rmtree(out)
        return found

    assert taken("2026/*.csv") == {"01.csv", "02.csv", "[ab].csv"}
    assert taken("2026/0[2-9].csv", "2026/?.txt", "a") == {"02.csv", "x.txt", "a"}
    assert taken("202?/old/*") == {"03.csv"}
    assert taken("2026/[ab].csv") == {"[ab].csv"}
    assert taken("202[56]", options=("-r",)) >= {"2025/01.csv", "2026/old/03.csv"}
    assert "with -r" in shell("cp", "ds:2026/*", ".", code=2)["error"]  # one of them is a folder
    assert "two of the sources" in shell("cp", "ds:*/01.csv", ".", code=2)["error"]
    shell("cp", "ds:2026/x*", "one")
    assert (tmp_path / "one").read_bytes() == b"local x"


def test_folders(shell: Shell, tmp_path: Path) -> None:
    """A folder that is there gets the source by its name; else the target is the copy."""
    tree = read_tree(tmp_path / "local")
    assert shell("cp", "-r", "local", "ds:new")["version"] == 3
    shell("cp", "-r", "local", "ds:new")  # is there now
    shell("cp", "-r", "local/", "src/a", "ds:two")
    shell("cp", "-r", "local/.", "ds:dot/")
    expected = {f"{folder}/{name}" for folder in ("new", "new/local", "two/local", "dot") for name in tree}
    assert set(shell.listed()) == {"a", "b/c", "two/a"} | expected
    shell("cp", "local/x", "ds:new/local", "--overwrite")
    assert "new/local/x" in shell.listed()

    shell("cp", "-r", "ds:two", "out/made")
    assert set(read_tree(tmp_path / "out" / "made")) == {"a", "local/x", "local/y"}
    shell("cp", "-r", "ds:two/", "ds:b/c", "out/made")
    assert set(read_tree(tmp_path / "out" / "made" / "two")) == {"a", "local/x", "local/y"}
    assert (tmp_path / "out" / "made" / "c").read_bytes() == b"two"
    shell("cp", "-r", "ds:", "whole")
    assert set(read_tree(tmp_path / "whole")) == set(shell.listed())
    assert "with -r" in shell("cp", "ds:", "again", code=2)["error"]


def test_what_a_folder_has_beside_files(shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "local" / "pipe")
    (tmp_path / "local" / "out").symlink_to("../src")
    (tmp_path / "local" / ".hidden").write_bytes(b"hidden")
    capsys.readouterr()
    assert cli.main(["cp", "-r", "local", "ds:new", "--quiet", *shell.options]) == 0
    said = capsys.readouterr().err
    assert "local/pipe is left out: a pipe" in said
    assert "local/out is left out: a link that leads out" in said
    assert {path for path in shell.listed() if path.startswith("new/")} == {"new/x", "new/y", "new/.hidden"}


def test_more_files_than_are_open_at_once(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "AT_ONCE", 3)
    write_tree(tmp_path / "many", {f"{n}": b"%d" % n for n in range(8)})
    shell("cp", "-r", "many", "ds:many")
    sealed = object_of(tmp_path / "ds", shell.kms, "many/7")
    sealed.write_bytes(flip(sealed.read_bytes(), 200))
    shell("cp", "-r", "ds:many", "back", code=3)
    assert read_tree(tmp_path / "back") == {f"{n}": b"%d" % n for n in range(6)}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("local/x", "local/none", "ds:new/"), 5, "local/none"),
        (("local/x", "local", "ds:new/"), 2, "with -r"),
        (("ds:a", "ds:b", "."), 2, "with -r"),
        (("ds:*.no", "."), 5, "*.no"),
        (("ds:a", "ds:none", "."), 5, "none"),
        (("ds:a", "ds:b/c", "nowhere"), 5, "several files need a folder"),
        (("ds:a", "nowhere/x"), 5, "nowhere"),
        (("nods:a", "x"), 5, "no dataset at"),
        (("local/x", "nods:a"), 5, "no dataset at"),
    ],
)
def test_nothing_or_all(shell: Shell, tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    def files() -> set[str]:
        """But for entries that say that a job was given up."""
        return {path for path in read_tree(tmp_path) if not path.startswith("ds/_ags/log/")}

    before, listed = files(), shell.listed()
    assert said in shell("cp", *words, code=code)["error"]
    assert shell.listed() == listed
    assert files() == before


def test_a_changed_file(shell: Shell, tmp_path: Path) -> None:
    sealed = object_of(tmp_path / "ds", shell.kms, "b/c")
    sealed.write_bytes(flip(sealed.read_bytes(), 200))
    before = read_tree(tmp_path)
    (tmp_path / "folder").mkdir()
    assert shell("cp", "ds:a", "ds:b/c", "folder", code=3)["error_class"] == "IntegrityError"
    assert read_tree(tmp_path) == before


def test_wrong_usage(shell: Shell) -> None:
    for words in (
        ("local/x", "y"),
        ("ds:a", "ds:b"),
        ("ds:a", "local/x", "."),
        ("ds:a", "other:b", "."),
    ):
        assert "DATASET:PATH" in shell.usage("cp", *words)
    assert "--version is for files that are copied out" in shell.usage("cp", "local/x", "ds:z", "--version", "1")
    shell("cp", "local/x", "ds:x/a")
    assert "two of the sources" in shell("cp", "ds:a", "ds:x/a", ".", code=2)["error"]
    assert "no name" in shell.usage("cp", "-", "ds:b/")


def test_urls(shell: Shell, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/ds"
    shell("cp", f"{url}:b/c", "copy")
    assert (tmp_path / "copy").read_bytes() == b"two"
    shell("cp", "copy", f"{url}:at:noon")
    shell("cp", "ds:at:noon", "again")
    assert (tmp_path / "again").read_bytes() == b"two"
