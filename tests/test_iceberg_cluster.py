"""Jobs on tables on a real cluster whose executors are killed: nothing is lost, and the jobs come to their end."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")
pytest.importorskip("pyspark")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

from deadly_kms import Rules
from iceberg_tables import MASTER, MIXED, SCHEMA, ids, rows, sql_catalog
from spark_jobs import Driver, executor_of, spark_env, spark_home, wait_for

from ags_fast.iceberg import clear_cache, expire, verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]

COUNT = 10  # files


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    return Rules(tmp_path / "kms")


@pytest.fixture
def driver(tmp_path: Path, rules: Rules) -> Iterator[Driver]:
    home = spark_home(tmp_path / "home", tmp_path / "work")
    conf = {"spark.local.dir": str(tmp_path / "scratch")}
    running = Driver("local-cluster[2,1,1024]", tmp_path / "driver.log", conf, spark_env(SPARK_HOME=str(home)))
    try:
        yield running
    finally:
        running.close()


def stored(folder: Path) -> set[Path]:
    return {path for path in (folder / "wh").rglob("*") if path.is_file() and path.suffix != ".json"}


def test_executors_that_die(tmp_path: Path, rules: Rules, driver: Driver) -> None:
    allows = {**MIXED, "encryption.plaintext-files": "allow"}
    catalog = sql_catalog(tmp_path, rules.kms, **allows)
    table: Any = catalog.create_table("ns.t", schema=SCHEMA)
    for i in range(COUNT):
        table.append(rows(10 * i, 10 * i + 10))
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/wh"}
    properties |= allows
    options = {"catalog": properties, "kms": rules.kms}

    def killed_on_the_way(job: str, **more: Any) -> dict[str, Any]:
        """Kill the executor of the first worker that asks for the job's KEK, and one when some files are done."""
        before = stored(tmp_path)
        rules.set(wait=0.5, spared=(driver.pid,))
        driver.start(f"iceberg.{job}", "ns.t", target_bytes=1, **options, **more)
        first = wait_for("a worker", rules.calls)[0][0]
        os.kill(executor_of(first), signal.SIGKILL)
        last = wait_for("another worker", lambda: [call for call in rules.calls() if call[0] != first])[-1][0]
        if job in ("encrypt", "rekey"):
            wait_for("some files", lambda: len(stored(tmp_path) - before) >= COUNT // 4)
        os.kill(executor_of(last), signal.SIGKILL)
        result = driver.result()
        assert result["counts"]["failed"] == 0
        assert max(row["attempt"] for row in result["rows"]) >= 1
        rules.set()
        clear_cache()
        table.refresh()
        assert ids(table) == list(range(10 * COUNT))
        return result

    assert killed_on_the_way("encrypt", wrapping_key_id=MASTER)["counts"]["ok"] == COUNT
    expire(table).raise_for_failures()
    assert {path.open("rb").read(4) for path in stored(tmp_path)} == {b"PARE", b"AGS1"}
    assert killed_on_the_way("rekey", what="data")["counts"]["ok"] == COUNT
    assert killed_on_the_way("verify", snapshots="current")["counts"]["ok"] == COUNT + 1 + 1 + COUNT
    planned = {row.src for row in expire(table, dry_run=True).rows}
    rules.set(spared=(driver.pid,))
    expired = driver.run("iceberg.expire", "ns.t", target_bytes=1, **options)
    assert {row["src"] for row in expired["rows"]} >= {src for src in planned if src.endswith((".parquet", ".avro"))}
    rules.set()
    table.refresh()
    done = verify(table, orphans=True)
    assert (done.failed, done.counts["skipped"]) == ([], 0)
    assert ids(table) == list(range(10 * COUNT))
