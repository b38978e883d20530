"""Encryption that mirrors a tree, that finds the format of each file, and the sizes that are shown of files."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, QUIET, read_tree, rows_of, version_of, write_tree
from kms_clients import keystore

from ags_fast import Dataset, cli
from ags_fast.jobs import decrypt_files, encrypt_files, rekey_files, remove_files, restore_version

if TYPE_CHECKING:
    from pathlib import Path

    from ags_fast.jobs import JobResult

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TREE = {"a/one": b"1", "a/two": b"22", "b": b"", "c/d/e": b"333", "c/f": b"4"}


class Mirror:
    """A source, and a dataset that mirrors it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.src, self.url = folder, folder / "src", folder / "ds"
        self.kms = keystore(folder, MASTER)

    def encrypt(self, **options: Any) -> JobResult:
        options = {"wrapping_key_id": MASTER, "fsync": False} | QUIET | options
        return encrypt_files(self.src, self.url, kms=self.kms, **options)

    def mirror(self, **options: Any) -> set[str]:
        """Mirror, and return the paths that were removed."""
        done = self.encrypt(delete=True, overwrite=True, **options)
        done.raise_for_failures()
        return self.removed(done)

    @staticmethod
    def removed(done: JobResult) -> set[str]:
        return {row.src for row in done.rows if row.error_class == "Removed"}

    def paths(self) -> set[str]:
        return set(rows_of(self.url, self.kms))

    def version(self) -> int:
        return version_of(self.url, self.kms).entry.number


@pytest.fixture
def made(tmp_path: Path) -> Mirror:
    mirror = Mirror(tmp_path)
    write_tree(mirror.src, TREE)
    mirror.encrypt().raise_for_failures()
    return mirror


def test_a_mirror_is_one_version(made: Mirror) -> None:
    (made.src / "a/one").unlink()
    shutil.rmtree(made.src / "c")
    write_tree(made.src, {"new": b"5", "a/two": b"changed"})
    assert made.removed(made.encrypt(overwrite=True, dry_run=True)) == set()
    planned = made.encrypt(overwrite=True, delete=True, dry_run=True)
    assert made.removed(planned) == {"a/one", "c/d/e", "c/f"}
    assert planned.counts["planned"] == 5
    assert made.version() == 2
    assert made.mirror() == {"a/one", "c/d/e", "c/f"}
    assert made.version() == 3
    decrypt_files(made.url, made.folder / "out", kms=made.kms, engine=HERE).raise_for_failures()
    assert read_tree(made.folder / "out") == read_tree(made.src)
    decrypt_files(made.url, made.folder / "old", kms=made.kms, engine=HERE, version=2).raise_for_failures()
    assert read_tree(made.folder / "old") == TREE
    assert made.mirror() == set()
    assert made.version() == 3
    (made.src / "new").unlink()
    assert made.mirror() == {"new"}  # nothing else is to do
    assert made.paths() == {"a/two", "b"}


def test_without_it_files_stay(made: Mirror) -> None:
    shutil.rmtree(made.src / "a")
    write_tree(made.src, {"new": b"5"})
    made.encrypt().raise_for_failures()
    assert made.paths() == {*TREE, "new"}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"include": "a*"}, {"a/one"}),
        ({"include": ["b", "a/*"]}, {"a/one"}),
        ({"exclude": "a"}, {"c/d/e"}),
        ({"exclude": ["a/one", "c/d/e"]}, set()),
        ({}, {"a/one", "c/d/e"}),
    ],
)
def test_what_is_outside_of_the_choice_is_not_gone(made: Mirror, options: dict[str, Any], gone: set[str]) -> None:
    (made.src / "a/one").unlink()
    (made.src / "c/d/e").unlink()
    assert made.mirror(**options) == gone
    assert made.paths() == TREE.keys() - gone


def test_what_is_left_out_is_not_gone(made: Mirror) -> None:
    write_tree(made.src, {".h/x": b"hidden", "link/y": b"6"})
    made.encrypt(hidden=True).raise_for_failures()
    shutil.rmtree(made.src / "link")
    (made.src / "link").symlink_to(made.folder)  # out of the tree
    (made.src / "b").unlink()
    (made.src / "b").symlink_to("nowhere")
    assert made.mirror() == set()
    shutil.rmtree(made.src / ".h")
    assert made.mirror() == set()  # hidden files are not chosen
    assert made.mirror(hidden=True) == {".h/x"}
    (made.src / "link").unlink()
    (made.src / "link").mkdir()
    assert made.mirror() == {"link/y"}


def test_files_and_folders_change_places(made: Mirror) -> None:
    shutil.rmtree(made.src / "c")
    (made.src / "b").unlink()
    write_tree(made.src, {"c": b"was a folder", "b/x": b"was a file"})
    assert made.mirror() == {"b", "c/d/e", "c/f"}
    assert made.paths() == {"a/one", "a/two", "b/x", "c"}
    (made.src / "c").unlink()
    write_tree(made.src, {"c/g": b"7", "c/h": b"8"})
    assert made.mirror() == {"c"}
    shutil.rmtree(made.src / "c")
    write_tree(made.src, {"c": b"a file again"})
    done = made.encrypt(delete=True, exclude="c/h")  # which stays, so "c" is a folder
    assert [(row.src, row.error_class) for row in done.failed] == [(str(made.src / "c"), "ConcurrentChangeError")]
    assert {"c/g", "c/h"} < made.paths()


def test_a_failure_removes_nothing(made: Mirror) -> None:
    (made.src / "a/one").rename(made.src / "renamed")
    (made.src / "renamed").unlink()
    (made.src / "renamed").symlink_to("/proc/self/mem")
    done = made.encrypt(delete=True, links="follow")
    assert [row.src for row in done.failed] == [str(made.src / "renamed")]
    assert [row.src for row in done.rows if row.error_class == "NotRemoved"] == ["a/one"]
    assert made.paths() == TREE.keys()
    assert not done.no_sources


def test_an_empty_source_is_refused(made: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(made.src)
    made.src.mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no file to encrypt.*allow_empty=True"):
        made.encrypt(delete=True)
    with pytest.raises(ValueError, match="delete_sources"):
        made.encrypt(delete=True, delete_sources=True)
    options = [text for name, value in made.kms.items() for text in ("--kms", f"{name}={value}")]
    command = ["encrypt", str(made.src), str(made.url), *options, "--delete"]
    assert cli.main(command) == 5
    assert "pass --allow-empty" in capsys.readouterr().err
    assert made.paths() == TREE.keys()
    assert cli.main([*command, "--allow-empty"]) == 0
    assert re.search("ok +a/one +Removed: its source is gone", capsys.readouterr().out)
    assert made.paths() == set()


@pytest.fixture
def mixed(tmp_path: Path) -> Mirror:
    mirror = Mirror(tmp_path)
    write_tree(
        mirror.src, {"text": b"PAR1 and more", "x.parquet": b"no Parquet", "PAR1": b"PAR1", "ends": b"12345678PAR1"}
    )
    pq.write_table(pa.table({"x": [1, 2, 3]}), mirror.src / "table")
    return mirror


@pytest.mark.parametrize("template", [None, "t.{n}"])
def test_each_file_gets_its_format(mixed: Mirror, template: str | None) -> None:
    mixed.encrypt(format="auto", aad_prefix=template, column_keys={"x": MASTER}).raise_for_failures()
    rows = rows_of(mixed.url, mixed.kms)
    assert {path: row.format for path, row in rows.items()} == {
        **dict.fromkeys(("text", "x.parquet", "PAR1", "ends"), "ags1"),
        "table": "parquet",
    }
    assert {path for path, row in rows.items() if row.column_keys} == {"table"}
    assert mixed.encrypt(format="auto").counts == {"ok": 0, "skipped": 5, "failed": 0}
    shutil.copy(mixed.src / "table", mixed.src / "text")
    assert mixed.encrypt(format="auto", overwrite=True).counts["ok"] == 1
    assert rows_of(mixed.url, mixed.kms)["text"].format == "parquet"
    decrypt_files(mixed.url, mixed.folder / "out", kms=mixed.kms, engine=HERE).raise_for_failures()
    assert pq.read_table(mixed.folder / "out" / "text").to_pydict() == {"x": [1, 2, 3]}
    with pytest.raises(ValueError, match="column_keys is for format='parquet' and format='auto'"):
        mixed.encrypt(format="ags1", column_keys={"x": MASTER})


def test_sizes_are_those_of_the_sources(mixed: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {path: len(data) for path, data in read_tree(mixed.src).items()}
    done = mixed.encrypt(format="auto")
    assert {row.dst: row.source_length for row in done.rows} == sizes
    assert sum(row.nbytes for row in done.rows) == sum(sizes.values())
    rekey_files(mixed.url, kms=mixed.kms, engine=HERE).raise_for_failures()
    dataset = Dataset.open(mixed.url, kms=mixed.kms)
    with dataset.transaction() as changes, changes.create("written", "parquet") as file:
        file.write((mixed.src / "table").read_bytes())
    with dataset.transaction() as changes:
        changes.rename({"table": "renamed"})
        changes.copy("written", "copied")
    dataset.refresh()
    sizes |= {"renamed": sizes.pop("table"), "written": (mixed.src / "table").stat().st_size}
    files = {file.path: file for file in dataset.files()}
    copied = files.pop("copied")
    assert {path: file.source_length for path, file in files.items()} == sizes
    assert sizes["written"] <= copied.source_length < 1000
    assert files["renamed"].plain_length == len(dataset.open_file("renamed").read()) > 60_000
    total = sum(sizes.values()) + copied.source_length
    assert next(dataset.versions()).source_length == total
    options = [text for name, value in mixed.kms.items() for text in ("--kms", f"{name}={value}")]

    def shown(*words: str) -> str:
        assert cli.main([words[0], str(mixed.url), *words[1:], *options]) == 0
        return capsys.readouterr().out

    assert f"{sizes['renamed']:>15,}  renamed" in shown("ls").splitlines()
    assert f"{total:,}" in shown("du").splitlines()[1]
    assert re.search(rf" 7 +{total:,} ", shown("log", "-n", "1"))
    assert f"moved     table -> renamed  ({sizes['renamed']:,} bytes)" in shown("diff", "4")
    (found,) = json.loads(shown("ls", "renamed", "--json"))["files"]
    assert (found["source_length"], found["plain_length"]) == (sizes["renamed"], files["renamed"].plain_length)
    text = " ".join(shown("stat", "renamed").split())
    assert f"source length {sizes['renamed']:,} bytes" in text
    assert f"plain length {files['renamed'].plain_length:,} bytes" in text


def test_rows_name_paths(made: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(TREE)
    options = [text for name, value in made.kms.items() for text in ("--kms", f"{name}={value}")]
    again = made.encrypt()
    assert [row.dst for row in sorted(again.rows)] == paths
    turned = rekey_files(made.url, kms=made.kms, engine=HERE)
    assert sorted((row.src, row.dst) for row in turned.rows) == [(path, path) for path in paths]
    gone = remove_files(made.url, "a/*", kms=made.kms)
    assert [(row.src, row.dst) for row in gone.rows] == [("a/one", None), ("a/two", None)]
    back = restore_version(made.url, 2, kms=made.kms)
    assert {(row.src, row.dst) for row in back.rows} == {(p, d) for p in paths for d in (p, None)} - {
        ("a/one", None),
        ("a/two", None),
    }
    assert cli.main(["encrypt", str(made.src), str(made.url), *options]) == 0
    assert "Unchanged" in (out := capsys.readouterr().out)
    assert str(made.src / "b") not in out  # one line for all of them
