"""Erasure: a version without files, and what `expire` then removes with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import datasets
import pytest
from datasets import HERE, decrypted, leftovers, read_tree, row_of, rows_of, version_of, write_tree
from support import pattern

from ags_fast import IntegrityError
from ags_fast.cli import main
from ags_fast.dataset.change import Wish
from ags_fast.dataset.job import Job
from ags_fast.jobs import Policy, expire, rekey_files, remove_files, sweep, verify_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("pyarrow")

TREE = {f"year={y}/{n}.csv": pattern(500 + n, y + n) for y in (2025, 2026) for n in range(3)} | {"one": b"1"}
GONE = {path for path in TREE if path.startswith("year=2025/")}
KEPT = {path: data for path, data in TREE.items() if path not in GONE}


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Path:
    encrypt(tmp_path, kms, TREE, policy=Policy(kek_scope="partition"))
    return tmp_path / "dataset"


def encrypt(folder: Path, kms: dict[str, str], tree: dict[str, bytes], **options: Any) -> Any:
    result = datasets.encrypt(write_tree(folder / "src", tree), folder / "dataset", kms, **options)
    result.raise_for_failures()
    return result


def scopes(dataset: Path, kms: Any) -> set[str]:
    return {key.properties.get("scope", "") for key in version_of(dataset, kms).entry.keys.values()}


def data(dataset: Path) -> dict[str, bytes]:
    return {path: content for path, content in read_tree(dataset).items() if not path.startswith("_ags/")}


def test_what_is_removed_and_when(dataset: Path, kms: dict[str, str]) -> None:
    before = read_tree(dataset)
    kept = rows_of(dataset, kms)
    planned = remove_files(dataset, "year=2025/*", kms=kms, dry_run=True)
    assert planned.counts["planned"] == 3
    assert planned.still_in == [2]
    assert read_tree(dataset) == before
    result = remove_files(dataset, "year=2025/*", kms=kms)
    assert (result.op, result.version, result.still_in) == ("remove", 3, [2])
    assert result.counts == {"ok": 3, "skipped": 0, "failed": 0}
    assert row_of(result, "year=2025/1.csv").plain_length == 501
    assert "Still in version 2, until expire" in result.warnings[0]
    assert "Copies" in result.warnings[0]
    assert decrypted(dataset, kms) == KEPT
    assert decrypted(dataset, kms, version=2) == TREE
    assert data(dataset) == {path: content for path, content in before.items() if not path.startswith("_ags/")}
    # Then the objects, tables and keys that only version 2 needs go, and nothing else.
    old = {path for path in before if path.startswith("_ags/tables/")}
    assert {"partition:year=2025", "partition:year=2026"} <= scopes(dataset, kms)
    expire(dataset, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    assert "partition:year=2026" in scopes(dataset, kms)
    assert "partition:year=2025" not in scopes(dataset, kms)
    after = read_tree(dataset)
    assert old.isdisjoint(after)
    assert len([path for path in after if path.startswith("_ags/tables/")]) == 1
    assert data(dataset) == {kept[path].file: before[kept[path].file] for path in KEPT}
    assert decrypted(dataset, kms) == KEPT
    assert leftovers(dataset, kms) == []
    checked = verify_files(dataset, kms=kms, engine=HERE, pin=result.pin)
    assert checked.counts == {"ok": 4, "skipped": 0, "failed": 0}
    assert remove_files(dataset, "one", kms=kms, pin=result.pin).still_in == [3, 4, 5]


@pytest.mark.parametrize("expired", [False, True])
def test_removed_and_encrypted_again(dataset: Path, kms: dict[str, str], tmp_path: Path, expired: bool) -> None:
    remove_files(dataset, ["one", "year=2025/1.csv"], kms=kms).raise_for_failures()
    if expired:
        expire(dataset, kms=kms, keep=1, skip_grace=True)
    encrypt(tmp_path, kms, {"one": b"another"})
    assert decrypted(dataset, kms) == TREE | {"one": b"another"}
    assert remove_files(dataset, "one", kms=kms).still_in == ([2, 4] if not expired else [6])
    for job in (rekey_files, verify_files):
        job(dataset, kms=kms, engine=HERE).raise_for_failures()


def test_all_of_it(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    assert remove_files(dataset, "*", kms=kms).counts["ok"] == len(TREE)
    assert decrypted(dataset, kms) == {}
    expire(dataset, kms=kms, keep=1, skip_grace=True).raise_for_failures()
    assert data(dataset) == {}
    assert leftovers(dataset, kms) == []
    encrypt(tmp_path, kms, {})
    assert decrypted(dataset, kms) == TREE


def test_what_a_policy_keeps(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    encrypt(tmp_path, kms, {"two": b"2"}, policy=Policy(keep=1))
    result = remove_files(dataset, "one", kms=kms)
    assert result.still_in == []
    assert result.expired is not None
    assert not [path for path in data(dataset) if path.startswith("one.")]
    assert "Still in" not in result.warnings[0]


def test_members_of_numbered_sets(kms: dict[str, str], tmp_path: Path) -> None:
    """What is left is no set any more: it would lack a member for ever."""
    encrypt(tmp_path, kms, {f"{n}": b"%d" % n for n in range(4)}, aad_prefix="a.{n}")
    encrypt(tmp_path, kms, {f"b{n}": b"%d" % n for n in range(2)}, aad_prefix="b.{n}")
    dataset = tmp_path / "dataset"
    remove_files(dataset, "2", kms=kms).raise_for_failures()
    assert verify_files(dataset, kms=kms, engine=HERE).counts["failed"] == 0
    assert version_of(dataset, kms).entry.sets == {rows_of(dataset, kms)["b0"].job_id: 2}


@pytest.mark.parametrize("what", ["adds", "replaces", "removes"])
def test_another_job_meanwhile(
    dataset: Path, kms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    real = Job.commit
    others: dict[str, Callable[[], Any]] = {
        "adds": lambda: encrypt(tmp_path, kms, {"more": b"more"}),
        "replaces": lambda: encrypt(tmp_path, kms, {"one": b"replaced"}, overwrite=True),
        "removes": lambda: remove_files(dataset, ["one", "year=2026/0.csv"], kms=kms),
    }

    def late(job: Job, wish: Wish) -> Any:
        monkeypatch.undo()
        others[what]()
        return real(job, wish)

    monkeypatch.setattr(Job, "commit", late)
    result = remove_files(dataset, ["one", "year=2025/0.csv"], kms=kms)
    left = {path: content for path, content in TREE.items() if path not in ("one", "year=2025/0.csv")}
    if what == "adds":
        left |= {"more": b"more"}
    elif what == "replaces":
        left |= {"one": b"replaced"}
    else:
        del left["year=2026/0.csv"]
    assert decrypted(dataset, kms) == left
    assert result.version == 4
    assert leftovers(dataset, kms) == []
    assert [row.error_class for row in result.failed] == ["ConcurrentChangeError"] * (what == "replaces")


def test_a_removal_that_died(dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_tree(dataset)
    monkeypatch.setattr(Job, "commit", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        remove_files(dataset, "one", kms=kms)
    monkeypatch.undo()
    assert decrypted(dataset, kms) == TREE
    assert leftovers(dataset, kms) != []
    sweep(dataset, kms=kms)
    assert leftovers(dataset, kms) == []
    after = read_tree(dataset)
    assert before.items() <= after.items()


def test_what_is_refused(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    pin = verify_files(dataset, kms=kms, engine=HERE).pin
    before = read_tree(dataset)
    with pytest.raises(FileNotFoundError, match="did you mean 'one'"):
        remove_files(dataset, ["year=2025/*", "onee"], kms=kms)
    assert pin is not None
    with pytest.raises(IntegrityError, match="pin"):
        remove_files(dataset, "one", kms=kms, pin=f"{pin[:-1]}{'0' if pin[-1] != '0' else '1'}")
    assert read_tree(dataset) == before


def test_command(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--keystore", kms["kms.local.path"], "--key-file", kms["kms.local.key-file"]]
    assert main(["rm", str(dataset), "one", "year=2025/*", "--dry-run", "--json", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["planned"], said["still_in"], said["version"]) == (4, [2], 2)
    assert main(["rm", str(dataset), "one", "year=2025/*", *options]) == 0
    assert "Still in version 2, until expire" in capsys.readouterr().err
    assert main(["rm", str(dataset), "one", *options]) not in (0, 2)
    assert "no file of the dataset matches 'one'" in capsys.readouterr().err
