"""Python and Iceberg's Java change one table in turns, at random. After each step both read the right rows, every row
that should keep its row id has kept it, and every file passes `verify`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("thrift")

import pyarrow as pa
from iceberg_java import Judge
from iceberg_tables import KEY_ID, MASTER

from ags_fast.errors import IntegrityError
from ags_fast.iceberg import (
    check_pin,
    clear_cache,
    delete,
    expire,
    load_catalog,
    maintain,
    pin,
    rekey,
    rotate,
    seal,
    verify,
)
from ags_fast.jobs import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

SCHEMA = pa.schema([("id", pa.int64()), ("s", pa.string()), ("n", pa.int32())])
HERE = LocalEngine(0)

Rows = dict[int, tuple[str | None, int | None]]


class Walk:
    """A table in the judge's metastore, and the rows that it should have.

    A step returns whether it keeps the row ids of all rows that it does not change.
    """

    def __init__(self, judge: Judge, catalog: Catalog, seed: int) -> None:
        self.judge, self.random = judge, random.Random(seed)
        self.name = judge.name()
        self.table: Table = catalog.create_table(self.name, schema=SCHEMA, properties={KEY_ID: MASTER})
        self.rows: Rows = {}
        self.next = 0
        self.columns = ["id", "s", "n"]
        self.partitions = 0

    def new(self) -> Rows:
        count = self.random.randrange(1, 8)
        made: Rows = {self.next + i: (self.random.choice(["a", "b", None]), (self.next + i) % 7) for i in range(count)}
        self.next += count
        return made

    def arrow(self, rows: Rows) -> pa.Table:
        schema = self.table.schema().as_arrow()
        return pa.Table.from_pylist([{"id": key, "s": s, "n": n} for key, (s, n) in rows.items()], schema=schema)

    def some(self) -> tuple[str, set[int]]:
        """A filter that PyIceberg and SQL understand, and the ids of the rows that it matches."""
        if self.random.random() < 0.5:
            n = self.random.randrange(7)
            return f"n = {n}", {key for key, row in self.rows.items() if row[1] == n}
        low = self.random.randrange(self.next + 1)
        return f"id >= {low} AND id < {low + 3}", {key for key in self.rows if low <= key < low + 3}

    def drop(self, gone: set[int]) -> None:
        self.rows = {key: row for key, row in self.rows.items() if key not in gone}

    # ------------------------------------------------ Python's steps

    def python_appends(self) -> bool:
        new = self.new()
        self.table.append(self.arrow(new))
        self.rows |= new
        return True

    def python_deletes(self) -> bool:
        where, gone = self.some()
        self.table.delete(where)  # PyIceberg's own: rows that stay may move to new files
        self.drop(gone)
        return False

    def python_deletes_by_vectors(self) -> bool:
        where, gone = self.some()
        assert delete(self.table, where).rows == len(gone)
        self.drop(gone)
        return True

    def python_overwrites(self) -> bool:
        where, gone = self.some()
        new = self.new()
        self.table.overwrite(self.arrow(new), overwrite_filter=where)
        self.drop(gone)
        self.rows |= new
        return False

    def python_upserts(self) -> bool:
        snapshot = self.table.current_snapshot()
        if snapshot is None or snapshot.schema_id != self.table.schema().schema_id:
            return True  # PyIceberg compares with the columns of the snapshot, and fails on plaintext tables, too
        keys = self.random.sample(sorted(self.rows), min(2, len(self.rows)))
        changed: Rows = {key: ("upserted", self.rows[key][1]) for key in keys} | self.new()
        self.table.upsert(self.arrow(changed), join_cols=["id"])
        self.rows |= changed
        return False

    def python_changes_the_schema(self) -> bool:
        with self.table.update_schema() as change:
            name = f"more_{len(self.columns)}"
            change.add_column(name, self.table.schema().find_type("s"))
        self.columns.append(name)
        return True

    def python_rotates(self) -> bool:
        what: Any = self.random.choice(["kek", "mek"])
        forced = self.random.random() < 0.3
        rotate(self.table, what=what, force_expire=forced).raise_for_failures()
        clear_cache()
        return True

    def python_rekeys(self) -> bool:
        what: Any = self.random.choice(["manifests", "data"])
        forced = self.random.random() < 0.3
        rekey(self.table, what=what, engine=HERE, force_expire=forced).raise_for_failures()
        return True

    def python_maintains(self) -> bool:
        maintain(self.table, verify=0.5).raise_for_failures()
        return True

    def python_expires(self) -> bool:
        expire(self.table, keep=self.random.randrange(1, 4), engine=HERE).raise_for_failures()
        return True

    # ------------------------------------------------ Java's steps

    def java_appends(self) -> bool:
        new = self.new()
        nothing = (None,) * (len(self.columns) - 3)
        self.judge.append(self.name, [(key, *row, *nothing) for key, row in new.items()])
        self.rows |= new
        return True

    def java_deletes(self) -> bool:
        where, gone = self.some()
        self.judge.sql(f"DELETE FROM {self.name} WHERE {where}")  # copies on write, and keeps row ids
        self.drop(gone)
        return True

    def java_deletes_by_vectors(self) -> bool:
        where, gone = self.some()
        if gone:
            self.judge.delete(self.name, where)
        self.drop(gone)
        return True

    def java_updates(self) -> bool:
        where, changed = self.some()
        self.judge.sql(f"UPDATE {self.name} SET s = 'updated' WHERE {where}")
        self.rows |= {key: ("updated", self.rows[key][1]) for key in changed}
        return True

    def java_changes_partitions(self) -> bool:
        fields = ["bucket(3, id)", "truncate(1, s)", "n"]  # PyIceberg writes no two fields of one column
        if self.partitions < len(fields):
            self.judge.sql(f"ALTER TABLE {self.name} ADD PARTITION FIELD {fields[self.partitions]}")
            self.partitions += 1
        return True

    def java_compacts(self) -> bool:
        self.judge.sql(
            f"CALL hive.system.rewrite_data_files(table => '{self.name}', options => map('rewrite-all', 'true'))"
        )
        return True

    # ------------------------------------------------ what holds after each step

    def row_ids(self) -> dict[int, int]:
        return dict(self.judge.sql(f"SELECT id, _row_id FROM {self.name}"))

    def check(self, before: Rows, ids_before: dict[int, int], keeps: bool) -> dict[int, int]:
        self.table.refresh()
        expected = sorted((key, *row) for key, row in self.rows.items())
        java = self.judge.sql(f"SELECT id, s, n FROM {self.name} ORDER BY id")
        assert java == expected
        found = self.table.scan(selected_fields=("id", "s", "n")).to_arrow().to_pylist()
        assert sorted(tuple(row.values()) for row in found) == expected
        assert self.table.scan().count() == len(expected)
        ids = self.row_ids()
        assert len(set(ids.values())) == len(ids)
        if keeps:
            stay = before.keys() & self.rows.keys()
            assert {key: ids[key] for key in stay} == {key: ids_before[key] for key in stay}
        result = verify(self.table, snapshots="current", engine=HERE)
        assert not result.failed, result.failed
        return ids


@pytest.mark.more
@pytest.mark.timeout(300)
def test_two_versions_of_java_and_python(tmp_path: Path, judge: Judge) -> None:
    """Equal row for row wherever the table is read, and sealed wherever Python wrote last."""
    catalog = load_catalog("tests", kms=judge.kms, type="hive", uri=judge.hive_uri)
    name, rows = judge.name(), {(n, f"s{n}") for n in range(6)}
    judge.create(name, "id BIGINT, s STRING")
    judge.append(name, sorted(rows))

    def python(more: set[tuple[int, str]], gone: int, kept: str | None = None) -> str:
        table = catalog.load_table(name)
        seal(table, pin=kept).raise_for_failures()
        table.append(pa.Table.from_pylist([{"id": n, "s": s} for n, s in sorted(more)], table.schema().as_arrow()))
        assert delete(table, f"id = {gone}").rows == 1
        rows.update(more)
        rows.difference_update([one for one in rows if one[0] == gone])
        return check()

    def check() -> str:
        kept = pin(catalog.load_table(name))
        table = load_catalog("tests", kms=judge.kms, type="hive", uri=judge.hive_uri, pins={name: kept}).load_table(
            name
        )
        assert kept.startswith("ags1.")
        assert sorted(tuple(one.values()) for one in table.scan().to_arrow().to_pylist()) == sorted(rows)
        assert judge.rows(name) == sorted(rows)
        assert not verify(table, engine=HERE).failed
        return kept

    kept = python({(10, "python"), (11, "python")}, gone=2)
    with Judge(tmp_path, version="1.11", kms=judge.kms) as older:
        older.sql("CREATE NAMESPACE IF NOT EXISTS db")
        older.register(name, judge.metadata_location(name))
        assert older.rows(name) == sorted(rows)
        older.append(name, [(20, "older")])
        older.delete(name, "id = 4")
        older.sql(f"UPDATE {name} SET s = 'updated' WHERE id = 10")
        rows.symmetric_difference_update({(20, "older"), (4, "s4"), (10, "python"), (10, "updated")})
        lineage = older.lineage(name)
        judge.register(name, older.metadata_location(name))
    assert judge.lineage(name) == lineage
    with pytest.raises(IntegrityError, match=r"does not descend|changed after it was sealed"):
        load_catalog("tests", kms=judge.kms, type="hive", uri=judge.hive_uri, pins={name: kept}).load_table(name)
    last = python({(30, "python again")}, gone=20, kept=kept)
    check_pin(catalog.load_table(name), kept)
    assert last != kept


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=pytest.mark.more) for n in range(2)]
    + [pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12)],
)
def test_in_turns(judge: Judge, seed: int) -> None:
    catalog = load_catalog("tests", kms=judge.kms, type="hive", uri=judge.hive_uri)
    walk = Walk(judge, catalog, seed)
    names = [name for name in dir(Walk) if name.startswith(("python_", "java_"))]
    ids: dict[int, int] = {}
    steps: list[str] = []
    walk.random.shuffle(names)
    for name in ["python_appends", "java_appends", *names, *walk.random.choices(names, k=12)]:
        steps.append(name)
        step: Callable[[], Any] = getattr(walk, name)
        before = dict(walk.rows)
        walk.table.refresh()
        try:
            ids = walk.check(before, ids, step())
        except Exception as error:
            error.add_note(f"after {steps}")
            raise
