"""Tables re-keyed and encrypted in the tasks of Spark, with the rows that the local engine reports."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("pyspark")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

from iceberg_tables import MASTER, MIXED, SCHEMA, ids, new_table, rows, sql_catalog
from spark_jobs import connect_session
from spark_sessions import SESSIONS
from test_iceberg_rekey import keys, lineage

from ags_fast.iceberg import clear_cache, delete, encrypt, expire, rekey, verify
from ags_fast.spark import SparkEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.more, pytest.mark.timeout(300)]


@pytest.fixture(params=SESSIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[SparkEngine]:
    if request.param == "classic":
        yield SparkEngine(request.getfixturevalue("local_spark").session(), target_bytes=4 << 10)
        return
    with connect_session(request.getfixturevalue("shared_connect").url) as remote:
        yield SparkEngine(remote, target_bytes=4 << 10)


def test_encrypt_and_rekey(tmp_path: Path, kms: dict[str, str], engine: SparkEngine) -> None:
    allows = {**MIXED, "encryption.plaintext-files": "allow"}  # to expire what is in plaintext
    table = sql_catalog(tmp_path, kms, **allows).create_table("ns.t", schema=SCHEMA)
    for first in (0, 10, 20, 30):
        table.append(rows(first, first + 10))
    result = encrypt(table, wrapping_key_id=MASTER, engine=engine)
    result.raise_for_failures()
    assert result.counts["ok"] == 4
    assert ids(table) == list(range(40))
    delete(table, "id = 3 or id = 14")
    before, entries = keys(table), lineage(table)
    clear_cache()
    result = rekey(table, what="data", engine=engine)
    result.raise_for_failures()
    assert result.counts["ok"] == 5
    assert not set(before.values()) & set(keys(table).values())
    assert lineage(table) == entries
    assert ids(table) == [i for i in range(40) if i not in (3, 14)]
    # The driver opens the table's KEK, and at most each of Spark's two workers the KEK of the job.
    assert 1 <= result.kms_calls["local", "unwrap"] <= 4
    planned = {row.src for row in expire(table, dry_run=True).rows}
    expired = expire(table, engine=engine)
    expired.raise_for_failures()
    assert {row.src for row in expired.rows} == planned
    assert not [path for path in planned if path.startswith("file:") and os.path.exists(path.removeprefix("file://"))]
    assert verify(table, snapshots="current").failed == []
    here, there = verify(table), verify(table, engine=engine)
    assert [row[:10] for row in sorted(there.rows)] == [row[:10] for row in sorted(here.rows)]
    assert there.counts["failed"] == 0


def test_a_damaged_file_is_a_row(tmp_path: Path, kms: dict[str, str], engine: SparkEngine) -> None:
    table = new_table(sql_catalog(tmp_path, kms))
    table.append(rows(0, 10))
    table.append(rows(10, 20))
    location = table.metadata_location
    path = next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://")
    with open(path, "r+b") as file:
        file.truncate(100)
    for result in (rekey(table, what="data", engine=engine), verify(table, engine=engine)):
        assert [(row.src, row.error_class) for row in result.failed] == [(f"file://{path}", "IntegrityError")]
    assert table.metadata_location == location


def tasks_of(spark: Any) -> int:
    """How many tasks of Spark have ended well."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)  # noqa: SLF001 (PySpark knows jobs by group only)
    return sum(jobs.apply(i).numCompletedTasks() for i in range(jobs.size()))


def test_each_manifest_is_a_task(
    request: pytest.FixtureRequest, tmp_path: Path, kms: dict[str, str], engine: SparkEngine
) -> None:
    table = new_table(sql_catalog(tmp_path, kms))
    for first in (0, 10, 20, 30):
        table.append(rows(first, first + 10))
    before, entries, manifests = keys(table), lineage(table), table.inspect.manifests()["path"].to_pylist()
    classic = request.node.callspec.params["engine"] == "classic"  # a client of Spark Connect sees no tasks
    spark = request.getfixturevalue("local_spark").session() if classic else None
    ended = tasks_of(spark) if classic else 0
    result = rekey(table, engine=engine)
    result.raise_for_failures()
    assert {row.src for row in result.rows} == set(manifests)
    assert {row.format for row in result.rows} == {"manifest"}
    if classic:
        assert tasks_of(spark) > ended
    # The driver opens the table's KEK and that of the job, and each of Spark's two workers that of the job.
    assert result.kms_calls["local", "unwrap"] >= 2
    data = {path for path in before if path.endswith(".parquet")}
    assert {path for path in before if path in keys(table)} == data
    assert lineage(table) == entries
    assert ids(table) == list(range(40))
    assert verify(table, snapshots="current").failed == []
