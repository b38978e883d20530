"""``ags-fast ls|log|diff|stat|du``, and what is below them: `Dataset.versions` and `Dataset.changes`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from datasets import HERE, MASTER, add_tree, read_tree, rows_of
from support import flip, pattern

from ags_fast import Dataset, cli
from ags_fast.jobs import expire, rekey_files, remove_files, rotate

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")

ODD = "odd \n\x1b[31m.csv"
FIRST = {"2025/a.csv": pattern(1_000), "2025/x/b.csv": pattern(2_000), "2026/c.csv": pattern(10), ODD: b"odd"}


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Path:
    """Version 2: the first files. 3: one more. 4: one file less. 5: one rekeyed. 6: one moved, one written again."""
    dataset = tmp_path / "dataset"
    add_tree(dataset, kms, FIRST)
    add_tree(dataset, kms, {"2026/d.csv": pattern(20)})
    remove_files(dataset, "2025/a.csv", kms=kms)
    rekey_files(dataset, paths="2026/c.csv", kms=kms, engine=HERE, progress=False)
    with Dataset.open(dataset, kms=kms).transaction() as changes:
        changes.rename({"2025/x/b.csv": "2025/y.csv"})
        changes.remove("2026/d.csv")
        with changes.create("2026/d.csv") as file:
            file.write(pattern(30))
    return dataset


def run(dataset: Path, kms: dict[str, str], command: str, *arguments: str) -> int:
    return cli.main([command, str(dataset), *arguments, *(f"--kms={name}={value}" for name, value in kms.items())])


def as_json(
    capsys: pytest.CaptureFixture[str], dataset: Path, kms: dict[str, str], command: str, *more: str
) -> dict[str, Any]:
    assert run(dataset, kms, command, *more, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_versions(dataset: Path, kms: dict[str, str]) -> None:
    handle = Dataset.open(dataset, kms=kms)
    versions = list(handle.versions())
    assert [(version.number, version.operation, version.files) for version in versions] == [
        (6, "write", 4),
        (5, "rekey", 4),
        (4, "remove", 4),
        (3, "encrypt", 5),
        (2, "encrypt", 4),
        (1, "create", 0),
    ]
    assert versions[0].pin == handle.pin
    assert [version.parent for version in versions] == [5, 4, 3, 2, 1, None]
    Dataset.open(dataset, kms=kms, pin=versions[-1].pin)


@pytest.mark.parametrize(
    ("since", "version", "expected"),
    [
        (2, 3, {("added", "2026/d.csv")}),
        (3, 4, {("removed", "2025/a.csv")}),
        (4, 5, {("rekeyed", "2026/c.csv")}),
        (5, 6, {("moved", "2025/y.csv"), ("changed", "2026/d.csv")}),
        (6, 5, {("moved", "2025/x/b.csv"), ("changed", "2026/d.csv")}),
        (6, 6, set()),
        (
            2,
            6,
            {
                ("added", "2026/d.csv"),
                ("moved", "2025/y.csv"),
                ("rekeyed", "2026/c.csv"),
                ("removed", "2025/a.csv"),
            },
        ),
    ],
)
def test_changes(dataset: Path, kms: dict[str, str], since: int, version: int, expected: set[tuple[str, str]]) -> None:
    changes = Dataset.open(dataset, kms=kms, version=version).changes(since)
    assert {(change.kind, change.path) for change in changes} == expected
    assert [change.path for change in changes] == sorted(path for _, path in expected)
    for change in changes:
        assert (change.old is None, change.new is None) == (change.kind == "added", change.kind == "removed")


def test_a_rotation_changes_no_file(dataset: Path, kms: dict[str, str]) -> None:
    rotate(dataset, kms=kms, what="kek")
    handle = Dataset.open(dataset, kms=kms)
    assert handle.changes(6) == []
    with pytest.raises(FileNotFoundError, match="no version 9: the newest one is 7"):
        handle.changes(9)


def test_log(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, dataset, kms, "log")
    assert [version["number"] for version in found["versions"]] == [6, 5, 4, 3, 2, 1]
    assert found["versions"][0]["pin"] == found["pin"]
    assert run(dataset, kms, "log", "--last", "2") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [["version", "by"], ["6", "write"], ["5", "rekey"]]
    assert found["pin"] in shown[1]
    expire(dataset, kms=kms, keep=2, force=True).raise_for_failures()
    assert [one["number"] for one in as_json(capsys, dataset, kms, "log")["versions"]] == [7, 6, 5]


def test_diff(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dataset, kms, "diff", "2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "removed   2025/a.csv  (1,000 bytes)",
        "moved     2025/x/b.csv -> 2025/y.csv  (2,000 bytes)",
        "rekeyed   2026/c.csv  (10 bytes)",
        "added     2026/d.csv  (30 bytes)",
        "version 2 to 6: 1 added, 1 moved, 1 rekeyed, 1 removed",
    ]
    assert run(dataset, kms, "diff", "5", "6") == 0
    assert "changed   2026/d.csv  (20 -> 30 bytes)" in capsys.readouterr().out
    found = as_json(capsys, dataset, kms, "diff", "2", "3")
    assert [(change["kind"], change["new"]["plain_length"]) for change in found["changes"]] == [("added", 20)]
    assert run(dataset, kms, "diff", "3", "3") == 0
    assert capsys.readouterr().out == "version 3 to 3: the same files\n"
    assert run(dataset, kms, "diff", "1", "9") == 5


def test_ls(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, dataset, kms, "ls", "2026/*", "--version", "3")
    assert [(file["path"], file["plain_length"]) for file in found["files"]] == [("2026/c.csv", 10), ("2026/d.csv", 20)]
    assert found["version"] == 3
    assert run(dataset, kms, "ls", "-l") == 0
    heads, *lines = capsys.readouterr().out.splitlines()
    assert heads.split() == ["mode", "bytes", "encrypted", "changed", "(UTC)", "key", "path"]
    assert [line.split()[0] for line in lines] == ["-rw-r--r--", "-rw-r--r--", "-", "-rw-r--r--"]  # one was written
    assert lines[-1].endswith(r"odd \n\x1b[31m.csv")
    assert run(dataset, kms, "ls", "2026") == 5
    assert "did you mean '2026/*'?" in capsys.readouterr().err


def test_stat(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, dataset, kms, "stat", "2026/c.csv")
    assert (found["added_in"], found["plain_length"], found["file_length"]) == (5, 10, 46)
    assert (found["wrapping_key_id"], found["master_version"]) == (MASTER, "1")
    assert run(dataset, kms, "stat", ODD) == 0
    assert r"path             odd \n\x1b[31m.csv" in capsys.readouterr().out.splitlines()
    assert run(dataset, kms, "stat", "2025/a.csv") == 5
    assert run(dataset, kms, "stat", "2025/a.csv", "--version", "2") == 0
    expire(dataset, kms=kms, keep=1, force=True).raise_for_failures()
    capsys.readouterr()
    assert run(dataset, kms, "stat", "2026/c.csv") == 0
    assert "added in         an expired version, by job " in capsys.readouterr().out


def test_du(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, dataset, kms, "du", "--depth", "2", "--version", "2")
    assert [(one["path"], one["files"], one["source_length"]) for one in found["folders"]] == [
        ("", 4, 3_013),
        ("2025", 2, 3_000),
        ("2025/x", 1, 2_000),
        ("2026", 1, 10),
    ]
    objects = {row.file for row in rows_of(dataset, kms, 2).values()}
    on_disk = sum(len(data) for path, data in read_tree(dataset).items() if path in objects)
    assert found["folders"][0]["file_length"] == on_disk
    assert run(dataset, kms, "du") == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["folder", ".", "2025/", "2026/"]


@pytest.mark.parametrize("command", [["ls"], ["log"], ["diff", "2"], ["stat", ODD], ["du"]])
def test_what_was_changed_is_refused(dataset: Path, kms: dict[str, str], command: list[str]) -> None:
    entries = sorted((dataset / "_ags" / "log" / "0000000").iterdir())
    data = entries[-1].read_bytes()
    entries[-1].write_bytes(flip(data, 8 * (len(data) - 30)))
    assert run(dataset, kms, *command) == 3
    for entry in entries:
        entry.unlink()
    assert run(dataset, kms, *command) == 3
