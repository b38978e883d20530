"""The examples read snapshots of encrypted tables, as PyIceberg does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("duckdb")
pytest.importorskip("polars")

from iceberg_tables import MIXED, ids, new_table, rows, sql_catalog
from pyiceberg.types import StringType
from support import flip, python_env

from ags_fast.errors import IntegrityError
from ags_fast.iceberg import delete, files

if TYPE_CHECKING:
    from types import ModuleType

    from pyiceberg.catalog import Catalog

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

if not EXAMPLES.is_dir():
    pytest.skip("the tests run without the source tree", allow_module_level=True)


@pytest.fixture
def catalog(tmp_path: Path, kms: dict[str, str]) -> Catalog:
    return sql_catalog(tmp_path, kms, **MIXED)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        from importlib import import_module

        return import_module(name)

    return load


def both(example: Any, table: Any, snapshot_id: int | None = None) -> list[list[int]]:
    frame = example("iceberg_polars").read(table, snapshot_id)
    connection = example("iceberg_duckdb").connect(table, snapshot_id)
    found = [row[0] for row in connection.execute("SELECT id FROM t ORDER BY id").fetchall()]
    return [sorted(frame["id"].to_list()) if len(frame.columns) else [], found]


def test_snapshots_with_deletion_vectors(catalog: Catalog, example: Any) -> None:
    table = new_table(catalog)
    assert both(example, table) == [[], []]
    table.append(rows(0, 50))
    table.append(rows(50, 100))
    first = table.current_snapshot().snapshot_id
    delete(table, "id >= 40 and id < 60")
    delete(table, "id >= 35 and id < 45")
    expected = [*range(35), *range(60, 100)]
    assert both(example, table) == [expected, expected] == [ids(table)] * 2
    assert both(example, table, first) == [list(range(100))] * 2
    frame = example("iceberg_polars").read(table, columns=["name"])
    assert frame.columns == ["name"]
    assert frame.height == len(expected)


def test_what_the_examples_do_not_read(catalog: Catalog, example: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 3))
    with table.update_schema() as update:
        update.add_column("more", StringType())
    table.append(rows(3, 5).append_column("more", [["x", "y"]]))
    for name, function in (("iceberg_polars", "read"), ("iceberg_duckdb", "connect")):
        with pytest.raises(NotImplementedError, match=r"table\.scan\(\)"):
            getattr(example(name), function)(table)


def test_position_and_equality_deletes_are_refused(
    catalog: Catalog, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    table = new_table(catalog)
    table.append(rows(0, 10))
    delete(table, "id = 3")
    snapshot = example("iceberg_snapshot")
    for kind in ("position-deletes", "equality-deletes"):
        found = [replace(one, kind=kind) if one.kind == "deletion-vector" else one for one in files(table)]
        monkeypatch.setattr(snapshot, "files", lambda *_, found=found, **__: found)
        with pytest.raises(NotImplementedError, match=kind):
            list(snapshot.data_files(table))


def test_changed_files_are_refused(catalog: Catalog, example: Any) -> None:
    table = new_table(catalog)
    table.append(rows(0, 1000))
    (path,) = [one.path.removeprefix("file://") for one in files(table) if one.kind == "data"]
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(flip(data, 8 * 100))
    with pytest.raises(IntegrityError):
        example("iceberg_polars").read(table)
    import duckdb

    connection = example("iceberg_duckdb").connect(table)
    with pytest.raises((IntegrityError, duckdb.Error)):
        connection.execute("SELECT sum(id), max(name) FROM t").fetchall()


@pytest.mark.more
@pytest.mark.parametrize("name", ["iceberg_polars", "iceberg_duckdb"])
def test_as_programs(catalog: Catalog, kms: dict[str, str], name: str) -> None:
    table = new_table(catalog)
    table.append(rows(0, 7))
    delete(table, "id = 3")
    options = [word for key, value in kms.items() for word in ("--kms", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), table.metadata_location, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=python_env(),
        cwd=os.path.dirname(EXAMPLES),
    )
    assert done.returncode == 0, done.stderr
    assert "name 4" in done.stdout
    assert "name 3" not in done.stdout
