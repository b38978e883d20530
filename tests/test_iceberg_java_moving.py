"""Java reads, equal row for row, what we re-key and encrypt, appends to that, and we read the append."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from datasets import MASTER
from iceberg_tables import MIXED, sql_catalog

from ags_fast.iceberg import encrypt, expire, load_catalog, rekey, verify
from ags_fast.jobs import LocalEngine
from ags_fast.keys import clear_cache

if TYPE_CHECKING:
    from pathlib import Path

    from iceberg_java import Judge
    from pyiceberg.table import Table

pytestmark = pytest.mark.more  # a JVM

HERE = LocalEngine(0)
MERGE = {"write_delete_mode": "merge-on-read"}


def check_newest(table: Table) -> None:
    checked = verify(table, snapshots="current", engine=HERE)
    assert checked.failed == []
    assert checked.counts["ok"]


@pytest.mark.parametrize("what", ["manifests", "data"])
@pytest.mark.parametrize("key_length", [16, 32])
def test_rekey(tmp_path: Path, judge: Judge, what: Any, key_length: int) -> None:
    """Parquet, Avro, deletion vectors, equality deletes, and partitions of two kinds."""
    name = judge.name()
    judge.create(name, "id BIGINT, name STRING", key_length=key_length)
    for i in range(3):
        judge.append(name, [(10 * i + j, f"name {j}") for j in range(10)])
    judge.write(name, [{"id": 100 + j, "name": "avro"} for j in range(10)], format="avro")
    judge.delete(name, "id IN (3, 14, 15, 28)")
    judge.delete_equal(name, [{"id": 7}, {"id": 104}])
    judge.append(name, [(200, "later"), (7, "again")])
    judge.sql(f"ALTER TABLE {name} ADD PARTITION FIELD bucket(4, id)")
    judge.append(name, [(300 + j, "in buckets") for j in range(5)])
    first = judge.sql(f"SELECT snapshot_id FROM {name}.snapshots ORDER BY committed_at")[0][0]
    before, old = judge.lineage(name), judge.rows(name, at=first)
    table = sql_catalog(tmp_path, judge.kms, **MIXED).register_table("ns.t", judge.metadata_location(name))
    result = rekey(table, what=what, engine=HERE)
    result.raise_for_failures()
    check_newest(table)
    judge.register(name, table.metadata_location)
    assert judge.lineage(name) == before
    assert judge.rows(name, at=first) == old
    judge.append(name, [(1000, "Java's")])
    judge.delete(name, "id = 302")
    assert judge.rows(name) == [row[:2] for row in before if row[0] != 302] + [(1000, "Java's")]
    again = sql_catalog(tmp_path, judge.kms, **MIXED).register_table("ns.again", judge.metadata_location(name))
    expire(again)
    check_newest(again)
    judge.register(name, again.metadata_location)
    assert len(judge.rows(name)) == len(before)


@pytest.mark.parametrize("partitioned", ["", "bucket(3, id), name"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_encrypt(tmp_path: Path, judge: Judge, version: int, partitioned: str) -> None:
    name = judge.name()
    more: Any = MERGE if version > 1 else {}
    judge.create(name, "id BIGINT, name STRING", encrypted=False, version=version, partitioned=partitioned, **more)
    for i in range(3):
        judge.append(name, [(10 * i + j, f"name {j % 2}") for j in range(10)])
    judge.sql(f"DELETE FROM {name} WHERE id IN (3, 14, 15, 28)")
    judge.sql(f"DELETE FROM {name} WHERE id IN (4, 14, 16)")
    judge.append(name, [(200, "later"), (3, "again")])
    before = judge.lineage(name) if version == 3 else judge.rows(name)
    clear_cache()
    table = sql_catalog(tmp_path, judge.kms, **MIXED).register_table("ns.t", judge.metadata_location(name))
    result = encrypt(table, wrapping_key_id=MASTER, data_key_length=32, engine=HERE)
    result.raise_for_failures()
    check_newest(table)
    ours = sorted(tuple(row.values()) for row in table.scan().to_arrow().to_pylist())
    assert ours == sorted(row[:2] for row in before)
    new = judge.name()
    judge.register(new, table.metadata_location)
    assert (judge.lineage(new) if version == 3 else judge.rows(new)) == before
    row_ids = [row[2] for row in judge.lineage(new)]
    assert None not in row_ids
    assert len(set(row_ids)) == len(row_ids)
    judge.append(new, [(1000, "Java's")])
    again = sql_catalog(tmp_path, judge.kms, **MIXED).register_table("ns.again", judge.metadata_location(new))
    ours = sorted(tuple(row.values()) for row in again.scan().to_arrow().to_pylist())
    assert ours == sorted([*(row[:2] for row in before), (1000, "Java's")])
    expire(again)
    check_newest(again)
    judge.register(new, again.metadata_location)
    assert len(judge.rows(new)) == len(before) + 1


@pytest.mark.parametrize("version", [2, 3])
def test_one_metastore(judge: Judge, version: int) -> None:
    """A table of Java's that we encrypt and re-key in Java's own metastore, without registering it anew."""
    name = judge.name()
    judge.create(name, "id BIGINT, name STRING", encrypted=False, version=version)
    judge.append(name, [(i, f"name {i}") for i in range(10)])
    catalog = load_catalog("hive", kms=judge.kms, type="hive", uri=judge.hive_uri, **MIXED)
    table = catalog.load_table(name)
    encrypt(table, wrapping_key_id=MASTER, engine=HERE).raise_for_failures()
    assert judge.rows(name) == [(i, f"name {i}") for i in range(10)]
    judge.append(name, [(10, "name 10")])
    rekey(table, what="data", engine=HERE).raise_for_failures()
    expire(table)
    check_newest(table)
    judge.append(name, [(11, "name 11")])
    assert judge.rows(name) == [(i, f"name {i}") for i in range(12)]
    check_newest(catalog.load_table(name))  # Java's append is encrypted
