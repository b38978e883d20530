"""Jobs that move the files of a table, `rekey` and `encrypt`: killed, resumed, raced, and on Spark."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import MASTER, MIXED, SCHEMA, forget_encrypted, ids, new_table, rows, sql_catalog
from killing import killed_before_steps
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from test_iceberg_rekey import keys, lineage

from ags_fast.errors import PolicyError
from ags_fast.iceberg import clear_cache, delete, encrypt, expire, files, rekey, verify
from ags_fast.iceberg.catalogs.base import EncryptedCatalog
from ags_fast.iceberg.commit import edit
from ags_fast.iceberg.work import heads, moving
from ags_fast.jobs import JobResult, LocalEngine
from ags_fast.keys.kms import KmsClient, load_kms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

HERE = LocalEngine(0)


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms, **MIXED, **{"encryption.plaintext-files": "allow"})


def filled(catalog: Catalog, op: str) -> Table:
    table = new_table(catalog) if op == "rekey" else catalog.create_table("ns.t", schema=SCHEMA)
    for first in (0, 10):
        table.append(rows(first, first + 10))
    if op == "rekey":
        delete(table, "id = 3")
    return table


def expected(op: str) -> list[int]:
    return [i for i in range(20) if op == "encrypt" or i != 3]


WORKS: dict[str, Callable[..., JobResult]] = {
    "rekey": functools.partial(rekey, what="data"),
    "encrypt": functools.partial(encrypt, wrapping_key_id=MASTER),
}


def check_done(table: Table) -> None:
    """All files of the newest snapshot open, and the plan is gone."""
    checked = verify(table, snapshots="current", engine=HERE)
    assert checked.failed == []
    assert checked.counts["ok"]
    assert not list(Path(table.location().removeprefix("file://")).rglob("*.plan"))


@pytest.mark.more
@pytest.mark.parametrize("op", WORKS)
def test_killed(tmp_path: Path, catalog: Catalog, kms: dict[str, str], op: str) -> None:
    """Before each write and deletion, and before the commit: what is left reads, and a second run comes to the end."""
    table = filled(catalog, op)
    old, base = table.metadata_location, tmp_path / "base"
    clear_cache()

    def prepare() -> None:
        if not base.exists():
            base.mkdir()
            shutil.copytree(tmp_path / "wh", base / "wh")
            shutil.copy(tmp_path / "catalog.db", base)
        shutil.rmtree(tmp_path / "wh")
        shutil.copytree(base / "wh", tmp_path / "wh")
        shutil.copy(base / "catalog.db", tmp_path)
        clear_cache()
        forget_encrypted()

    def load() -> Table:
        return sql_catalog(tmp_path, kms, **MIXED, **{"encryption.plaintext-files": "allow"}).load_table("ns.t")

    def work() -> None:
        WORKS[op](load(), engine=HERE).raise_for_failures()

    places = [(PyArrowFile, "create"), (PyArrowFileIO, "delete"), (os, "replace"), (EncryptedCatalog, "commit_table")]
    seen = set()
    for step, by_itself in killed_before_steps(work, places, prepare=prepare):
        clear_cache()
        left, now = {str(path) for path in tmp_path.rglob("*.plan")}, load()
        committed = now.metadata_location != old
        assert ids(now) == expected(op), step
        seen.add((committed, bool(left)))
        if not committed or left:
            written = {path: path.stat().st_mtime_ns for path in (tmp_path / "wh").rglob("*.parquet")}
            result = WORKS[op](now, engine=HERE)
            result.raise_for_failures()
            assert len(result.rows) == (3 if op == "rekey" else 2), step
            assert {path: path.stat().st_mtime_ns for path in written} == written, step  # it went on
        if op == "encrypt":
            expire(now)
        check_done(now)
        assert ids(load()) == expected(op), step
        assert by_itself <= committed
    assert seen == {(False, False), (False, True), (True, True), (True, False)}


@pytest.mark.parametrize("op", WORKS)
def test_what_was_cut_is_written_again(tmp_path: Path, catalog: Catalog, op: str, monkeypatch: Any) -> None:
    table = filled(catalog, op)

    def fails(*args: object) -> None:
        raise OSError("the catalog is gone")

    with monkeypatch.context() as patch:
        patch.setattr(heads, "edit", fails)
        with pytest.raises(OSError, match="gone"):
            WORKS[op](table, engine=HERE)
    (plan,) = tmp_path.rglob("*.plan")
    assert b"parquet" not in plan.read_bytes()  # paths and keys are sealed
    new = sorted(tmp_path.rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)[-2:]
    new[0].write_bytes(new[0].read_bytes()[:-50])
    whole = new[1].stat().st_mtime_ns
    result = WORKS[op](table, engine=HERE)
    result.raise_for_failures()
    assert {row.dst for row in result.rows} >= {f"file://{path}" for path in new}
    assert new[1].stat().st_mtime_ns == whole
    assert ids(table) == expected(op)
    if op == "encrypt":
        expire(table)
    check_done(table)


def test_a_plan_that_was_changed_is_not_used(tmp_path: Path, catalog: Catalog, monkeypatch: Any) -> None:
    table = filled(catalog, "rekey")

    def fails(*args: object) -> None:
        raise OSError("the catalog is gone")

    with monkeypatch.context() as patch:
        patch.setattr(heads, "edit", fails)
        with pytest.raises(OSError, match="gone"):
            rekey(table, what="data", engine=HERE)
    (plan,) = tmp_path.rglob("*.plan")
    planned = {str(path) for path in tmp_path.rglob("*.parquet")}
    for change in (lambda data: data[:-1], lambda data: data[:-9] + bytes(9), lambda data: b"{}\n" + data):
        plan.write_bytes(change(plan.read_bytes()))
    result = rekey(table, what="data", engine=HERE)
    assert not {row.dst.removeprefix("file://") for row in result.rows if row.dst} & planned
    check_done(table)


def leave_plan(table: Table, op: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job that dies after its commit, before it deletes its plan."""
    with monkeypatch.context() as patch:
        patch.setattr(moving.Mover, "end", lambda _: None)
        result = WORKS[op](table, engine=HERE)
    result.raise_for_failures()
    return result


def test_a_plan_that_was_committed_is_ended(tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rekey makes new keys, since that is what its caller wants, and counts only what it does itself."""
    table = filled(catalog, "rekey")
    seen = [keys(table)]
    for change in (lambda: None, lambda: table.append(rows(20, 21)), lambda: expire(table)):
        before = leave_plan(table, "rekey", monkeypatch)
        change()
        assert list(tmp_path.rglob("*.plan"))
        files_before = {one.path for one in files(table) if one.kind not in ("manifest", "manifest-list")}
        seen.append(keys(table))
        again = rekey(table, what="data", engine=HERE)
        again.raise_for_failures()
        assert again.job_id != before.job_id
        assert {row.src for row in again.rows} == files_before
        assert again.counts == {"ok": len(files_before), "skipped": 0, "failed": 0}
        check_done(table)
        seen.append(keys(table))
        assert not set(seen[-1].values()) & set().union(*(some.values() for some in seen[:-1]))
    assert ids(table) == [*expected("rekey"), 20]


def test_encrypt_after_a_commit_whose_plan_is_left(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = filled(catalog, "encrypt")
    leave_plan(table, "encrypt", monkeypatch)
    again = WORKS["encrypt"](table, engine=HERE)
    assert again.counts == {"ok": 0, "skipped": 2, "failed": 0}
    assert {row.error_class for row in again.rows} == {"AlreadyThere"}
    with pytest.raises(PolicyError, match="already"):
        WORKS["encrypt"](table, engine=HERE)
    expire(table)
    check_done(table)


def test_a_plan_whose_base_is_gone_is_given_up(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells any more whether its keys were in use."""
    table = filled(catalog, "rekey")

    def fails(*args: object) -> None:
        raise OSError("the catalog is gone")

    def begin() -> set[str]:
        with monkeypatch.context() as patch:
            patch.setattr(heads, "edit", fails)
            with pytest.raises(OSError, match="gone"):
                rekey(table, what="data", engine=HERE)
        return {f"file://{path}" for path in tmp_path.rglob("*.p*") if path.suffix in (".parquet", ".puffin")}

    before = begin()
    table.append(rows(20, 21))
    assert {row.dst for row in rekey(table, what="data", engine=HERE).rows} & before  # it went on
    before = begin()
    for i in range(2):
        table.append(rows(30 + i, 31 + i))
    expire(table)
    assert not {row.dst for row in rekey(table, what="data", engine=HERE).rows} & before
    check_done(table)


def test_a_plan_that_cannot_be_deleted(tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    table = filled(catalog, "rekey")
    real = PyArrowFileIO.delete

    def delete(self: Any, location: Any) -> None:
        if str(location).endswith(".plan"):
            raise PermissionError(13, "Permission denied", location)
        real(self, location)

    monkeypatch.setattr(PyArrowFileIO, "delete", delete)
    result = rekey(table, what="data", engine=HERE)
    result.raise_for_failures()
    assert [one for one in result.warnings if ".plan could not be deleted" in one]
    before = keys(table)
    monkeypatch.undo()
    again = rekey(table, what="data", engine=HERE)
    again.raise_for_failures()
    assert not [one for one in again.warnings if ".plan" in one]
    assert not set(keys(table).values()) & set(before.values())
    check_done(table)


def test_a_plan_that_was_committed_and_rolled_back_is_given_up(
    tmp_path: Path, catalog: Catalog, monkeypatch: Any
) -> None:
    """A job that died after its commit leaves its plan. Once the table is rolled back, new keys are new ones."""
    table = filled(catalog, "rekey")
    head: Any = table.current_snapshot()
    seen = [keys(table)]
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(moving.Mover, "end", lambda _: None)
            rekey(table, what="data", engine=HERE).raise_for_failures()
        assert list(tmp_path.rglob("*.plan"))
        seen.append(keys(table))
        edit(table, lambda raw: with_main(raw, head.snapshot_id))
        assert ids(table) == expected("rekey")
    for i, some in enumerate(seen):
        for others in seen[:i]:
            assert not set(some.values()) & set(others.values())
    rekey(table, what="data", engine=HERE).raise_for_failures()
    assert not set(keys(table).values()) & set().union(*(some.values() for some in seen))
    check_done(table)


def with_main(raw: dict[str, Any], snapshot_id: int) -> dict[str, Any]:
    """Metadata that were rolled back."""
    refs = {**raw["refs"], "main": {**raw["refs"]["main"], "snapshot-id": snapshot_id}}
    return {**raw, "refs": refs, "current-snapshot-id": snapshot_id}


@pytest.mark.parametrize("op", WORKS)
def test_commits_in_between(catalog: Catalog, kms: dict[str, str], tmp_path: Path, op: str, monkeypatch: Any) -> None:
    """Files that another commit adds are moved, too; those that it removes are left out."""
    table = filled(catalog, op)
    other = sql_catalog(tmp_path, kms, **MIXED).load_table("ns.t")
    real: Any = heads.edit  # type: ignore[attr-defined]
    turns = iter((0, 1))

    def late(*args: Any) -> Any:
        turn = next(turns, None)
        if turn == 0:
            other.append(rows(20, 25))
        elif turn == 1:
            other.delete("id < 10")
        return real(*args)

    monkeypatch.setattr(heads, "edit", late)
    WORKS[op](table, engine=HERE).raise_for_failures()
    assert ids(table) == list(range(10, 25))
    if op == "encrypt":
        expire(table)
    check_done(table)


def test_a_file_that_fails_commits_nothing(tmp_path: Path, catalog: Catalog) -> None:
    table = filled(catalog, "rekey")
    before, entries = table.metadata_location, lineage(table)
    path = Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
    data = path.read_bytes()
    path.write_bytes(data[:400] + bytes([data[400] ^ 1]) + data[401:])
    result = rekey(table, what="data", engine=LocalEngine(2))
    assert [row.error_class for row in result.failed] == ["IntegrityError"]
    assert table.metadata_location == before
    path.write_bytes(data)
    again = rekey(table, what="data", engine=LocalEngine(2))
    again.raise_for_failures()
    assert again.job_id == result.job_id
    assert lineage(table) == entries
    check_done(table)


def test_a_client_that_does_not_travel(tmp_path: Path, kms: dict[str, str]) -> None:
    inner = load_kms(kms)

    class Mine(KmsClient):
        def initialize(self, properties: Mapping[str, str]) -> None:
            pass

        def wrap_key(self, key: Any, wrapping_key_id: str) -> bytes:
            return inner.wrap_key(key, wrapping_key_id)

        def unwrap_key(self, wrapped: Any, wrapping_key_id: str) -> bytes:
            return inner.unwrap_key(wrapped, wrapping_key_id)

    table = filled(sql_catalog(tmp_path, Mine()), "rekey")  # type: ignore[arg-type]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TypeError, match="cannot be sent"):
        rekey(table, what="data", engine=LocalEngine(2))
    assert sorted(tmp_path.rglob("*")) == before
    rekey(table, what="data", engine=HERE).raise_for_failures()
    check_done(table)
