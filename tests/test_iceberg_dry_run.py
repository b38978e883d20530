"""Dry runs of rotate, rekey and encrypt: what they say is what is done, and they write nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from iceberg_tables import MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog

from ags_fast.errors import KeyAccessError, PolicyError
from ags_fast.iceberg import delete, encrypt, rekey, rotate
from ags_fast.jobs import LocalEngine
from ags_fast.keys.kms import local

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HERE = LocalEngine(0)


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Any:
    return sql_catalog(tmp_path, kms, **MIXED)


def stored(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in (folder / "wh").rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def check(folder: Path, table: Any, call: Callable[..., Any], **options: Any) -> None:
    """The rows of the dry run are those of the run, but for what it makes."""
    before, location = stored(folder), table.metadata_location
    planned = call(table, dry_run=True, **options)
    assert stored(folder) == before
    assert table.refresh().metadata_location == location
    assert {row.status for row in planned.rows} == {"planned"}
    assert {row.dst for row in planned.rows if row.format not in ("kek", "manifest-list-key")} <= {None}
    done = call(table, **options)
    done.raise_for_failures()
    assert stored(folder) != before
    there = {row.src for row in done.rows}
    made = {row.src for row in done.rows if row.format == "kek" and row.dst is None}
    assert {row.src for row in planned.rows if row.src in there} == there - made
    assert len(planned.rows) == len(done.rows)


def test_rotate(tmp_path: Path, catalog: Any, kms: dict[str, str]) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    check(tmp_path, table, rotate)
    local.rotate_key(kms, MASTER)
    check(tmp_path, table, rotate, what="mek")
    assert {row.status for row in rotate(table, what="mek", dry_run=True).rows} == {"skipped"}
    with pytest.raises(KeyAccessError):
        rotate(table, wrapping_key_id="absent", dry_run=True)


def test_rekey(tmp_path: Path, catalog: Any) -> None:
    table = new_table(catalog)
    assert rekey(table, dry_run=True).rows == rekey(table, what="data", engine=HERE, dry_run=True).rows == []
    table.append(rows(0, 3))
    table.append(rows(3, 6))
    delete(table, "id = 1")
    check(tmp_path, table, rekey)
    check(tmp_path, table, rekey, what="data", engine=HERE)
    assert ids(table) == [0, 2, 3, 4, 5]


def test_encrypt(tmp_path: Path, catalog: Any) -> None:
    table = catalog.create_table("ns.t", schema=SCHEMA)
    assert encrypt(table, wrapping_key_id=MASTER, engine=HERE, dry_run=True).rows == []
    table.append(rows(0, 3))
    table.append(rows(3, 6))
    check(tmp_path, table, encrypt, wrapping_key_id=MASTER, engine=HERE)
    assert ids(table) == list(range(6))
    with pytest.raises(PolicyError, match="already"):
        encrypt(table, wrapping_key_id=MASTER, engine=HERE, dry_run=True)
