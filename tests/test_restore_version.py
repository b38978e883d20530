"""A version with the files of an older one: restore_version, and what other jobs do meanwhile."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from datasets import QUIET, add_tree, decrypted, leftovers, make_kms, read_tree, version_of
from killing import killed_before_steps

from ags_fast import cli, jobs
from ags_fast.dataset.job import Job
from ags_fast.errors import ConcurrentChangeError, ExpiredError
from ags_fast.fs.local import LocalStore
from ags_fast.jobs import expire, rekey_files, remove_files, restore_version, rotate, sweep, verify_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST = {"a": b"one", "b/c": b"two", "b/d": bytes(5000)}
THEN = {"a": b"changed", "b/c": b"two", "e": b"new"}


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path)


@pytest.fixture
def dataset(tmp_path: Path, kms: dict[str, str]) -> Path:
    """Version 2 has FIRST; 3 and 4 lead to THEN."""
    dataset = tmp_path / "dataset"
    add_tree(dataset, kms, FIRST)
    add_tree(dataset, kms, {path: THEN[path] for path in ("a", "e")}, overwrite=True)
    remove_files(dataset, "b/d", kms=kms)
    assert decrypted(dataset, kms) == THEN
    return dataset


def check(dataset: Path, kms: Any, wanted: dict[str, bytes]) -> None:
    assert decrypted(dataset, kms) == wanted
    assert verify_files(dataset, kms=kms, **QUIET).counts["failed"] == 0


def test_a_version_comes_back(dataset: Path, kms: dict[str, str]) -> None:
    before = read_tree(dataset)
    planned = restore_version(dataset, 2, kms=kms, dry_run=True)
    assert planned.counts["planned"] == 4
    assert planned.version == 4
    assert read_tree(dataset) == before
    done = restore_version(dataset, 2, kms=kms)
    assert (done.version, done.op, done.counts["ok"]) == (5, "restore", 4)
    assert [(row.src, row.dst) for row in planned.rows] == [(row.src, row.dst) for row in done.rows]
    after = read_tree(dataset)
    assert {path for path in after if path.endswith(".ags") and not path.startswith("_ags")} == {
        path for path in before if path.endswith(".ags") and not path.startswith("_ags")
    }
    check(dataset, kms, FIRST)
    assert decrypted(dataset, kms, version=4) == THEN
    assert leftovers(dataset, kms) == []
    again = restore_version(dataset, 2, kms=kms)
    assert (again.version, again.rows) == (5, [])
    assert restore_version(dataset, 4, kms=kms).version == 6
    check(dataset, kms, THEN)
    with pytest.raises(FileNotFoundError, match="no version 9"):
        restore_version(dataset, 9, kms=kms)


@pytest.mark.parametrize("what", ["kek", "double-wrap"])
def test_keys_that_were_replaced_stay_replaced(dataset: Path, kms: dict[str, str], what: Any) -> None:
    """What comes back is wrapped by the KEKs of today, so the old ones may go."""
    rotate(dataset, kms=kms, what=what, **QUIET)
    rekey_files(dataset, kms=kms, paths="a", **QUIET)
    old = {key["key_id"] for key in jobs.key_status(dataset, kms=kms)["keys"] if key["state"] == "retired"}
    assert bool(old) == (what == "kek")
    restore_version(dataset, 2, kms=kms)
    check(dataset, kms, FIRST)
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    assert old.isdisjoint(key["key_id"] for key in jobs.key_status(dataset, kms=kms)["keys"])
    check(dataset, kms, FIRST)
    with pytest.raises(FileNotFoundError):
        restore_version(dataset, 2, kms=kms)


def test_compacted_single_wrapped_and_numbered(tmp_path: Path, kms: dict[str, str]) -> None:
    dataset = tmp_path / "dataset"
    add_tree(dataset, kms, {"0": b"0", "1": b"1"}, double_wrap=False, aad_prefix="set.part{n}")
    remove_files(dataset, "0", kms=kms)
    jobs.compact(dataset, kms=kms)
    restore_version(dataset, 2, kms=kms)
    check(dataset, kms, {"0": b"0", "1": b"1"})


def in_between(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, work: Callable[[], object]) -> None:
    """Do something before the first call of a function."""
    function = getattr(owner, name)
    done: list[int] = []

    def call(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(1)
            work()
        return function(*args, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_an_expiry_that_is_earlier(
    dataset: Path, kms: dict[str, str], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_between(monkeypatch, Job, step, lambda: expire(dataset, kms=kms, keep=1, skip_grace=True))
    with pytest.raises(ExpiredError):
        restore_version(dataset, 2, kms=kms)
    check(dataset, kms, THEN)
    assert leftovers(dataset, kms) == []


def test_a_writer_that_is_earlier(dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole version comes back, or nothing. Files at other paths are the other writer's business."""
    in_between(monkeypatch, Job, "commit", lambda: rekey_files(dataset, kms=kms, paths="a", **QUIET))
    with pytest.raises(ConcurrentChangeError):
        restore_version(dataset, 2, kms=kms)
    check(dataset, kms, THEN)
    assert leftovers(dataset, kms) == []
    monkeypatch.undo()
    in_between(monkeypatch, Job, "commit", lambda: add_tree(dataset, kms, {"other": b"x"}))
    restore_version(dataset, 2, kms=kms)
    check(dataset, kms, FIRST | {"other": b"x"})


def test_an_object_that_is_gone(dataset: Path, kms: dict[str, str]) -> None:
    gone = version_of(dataset, kms, 2).file("b/d").file
    os.remove(dataset / gone)
    before = read_tree(dataset)
    with pytest.raises(FileNotFoundError, match=rf"version 2 of .* cannot come back: {re.escape(gone)} is gone"):
        restore_version(dataset, 2, kms=kms)
    assert read_tree(dataset) == before


def test_killed_before_each_step(dataset: Path, kms: dict[str, str]) -> None:
    """What a dead job has left does not harm the version it wanted back, nor does its removal."""
    places = [(LocalStore, "create_exclusive"), (LocalStore, "delete"), (LocalStore, "lock")]
    wanted = 2

    def work() -> None:
        restore_version(dataset, wanted, kms=kms)

    for step, ended in killed_before_steps(work, places):
        assert decrypted(dataset, kms) in (FIRST, THEN)
        assert decrypted(dataset, kms, version=2) == FIRST
        if step % 2:
            sweep(dataset, kms=kms)
            assert leftovers(dataset, kms) == []
            assert decrypted(dataset, kms, version=2) == FIRST
        wanted = 2 if decrypted(dataset, kms) == THEN else 4
        assert ended or step < 40
    expire(dataset, kms=kms, keep=1, skip_grace=True)
    sweep(dataset, kms=kms)
    assert verify_files(dataset, kms=kms, **QUIET).counts["failed"] == 0
    assert leftovers(dataset, kms) == []


def test_in_a_shell(dataset: Path, kms: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--kms={name}={value}" for name, value in kms.items()]
    assert cli.main(["restore", str(dataset), "--version", "2", "--json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["operation"], told["version"], told["ok"]) == ("restore", 5, 4)
    assert cli.main(["restore", str(dataset), "--version", "9", *options]) == 5
    assert "the newest one is 5" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["restore", str(dataset), *options])
    assert "--version" in capsys.readouterr().err
