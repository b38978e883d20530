"""Streams written to datasets: a version for each micro-batch, and each batch exactly once, whatever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, leftovers, make_kms, operations
from spark_jobs import spark_env

pytest.importorskip("pyspark")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

import pyarrow as pa
from pyarrow import parquet

from ags_fast import Dataset
from ags_fast.jobs import rekey_files, rotate, sweep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from spark_sessions import LocalSpark

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(400)]

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.unix.domain.socket.enabled": "true",
}


@pytest.fixture
def spark(local_spark: LocalSpark) -> SparkSession:
    return local_spark.fresh()


class Stream:
    """Files that come one by one, a query that writes them to a dataset, and what is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kms = make_kms(folder)
        self.url, self.checkpoint, self.source = folder / "ds", folder / "checkpoint", folder / "source"
        self.source.mkdir()

    def put(self, *numbers: int) -> None:
        for number in numbers:
            new = self.folder / f"{number}.json"
            new.write_text("".join(json.dumps({"id": number * 10 + n}) + "\n" for n in range(10)))
            os.utime(new, (1_700_000_000 + number,) * 2)  # the order in which they are read
            new.rename(self.source / new.name)

    def options(self) -> dict[str, str]:
        return {**self.kms, "wrappingKeyId": MASTER, "checkpointLocation": str(self.checkpoint)}

    def run(self, spark: SparkSession, format: str = "ags_parquet", mode: str = "append") -> None:
        """Write all that is there, a file in each batch."""
        rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(self.source))
        if mode == "complete":
            rows = rows.groupBy().count()
        writer = rows.writeStream.format(format).options(**self.options()).outputMode(mode)
        query = writer.trigger(availableNow=True).start(str(self.url))
        assert query.awaitTermination(200)
        assert query.exception() is None

    def forget(self, batch: int) -> None:
        """Make Spark forget that a batch was committed, as if it had been killed just before it wrote that down."""
        for name in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink()

    @property
    def dataset(self) -> Dataset:
        return Dataset.open(self.url, kms=self.kms)

    def ids(self) -> list[int]:
        found = []
        for file in self.dataset.files():
            with self.dataset.open_file(file.path) as opened:
                found += parquet.read_table(opened).to_pydict()["id"]
        return sorted(found)


def test_each_batch_is_a_version(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.put(0, 1, 2)
    stream.run(spark)
    assert stream.dataset.version == 1 + 3
    assert stream.ids() == list(range(30))
    # Spark commits batch 2 again, since it does not know that it has.
    stream.forget(2)
    stream.run(spark)
    assert operations(stream.dataset).count("write") == 3
    assert stream.ids() == list(range(30))
    stream.forget(2)
    with stream.dataset.transaction() as other:  # the record outlives versions of other jobs
        other.create("other/file").close()
        other.remove("other/file")
        other.create("x.parquet", "parquet").abort()
        for file in list(stream.dataset.files())[:1]:
            other.remove(file.path)
    stream.put(3)
    stream.run(spark)
    assert operations(stream.dataset).count("write") == 5
    assert len(stream.ids()) == 30
    assert leftovers(stream.url, stream.kms) == []
    assert sweep(stream.url, kms=stream.kms).rows == []


def test_complete_mode_replaces(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.put(0, 1)
    stream.run(spark, mode="complete")
    assert stream.dataset.version == 3
    (file,) = stream.dataset.files()
    with stream.dataset.open_file(file.path) as opened:
        assert parquet.read_table(opened).to_pydict() == {"count": [20]}


def test_two_queries_write_to_one_dataset(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.put(0, 1)
    stream.run(spark)
    stream.checkpoint = tmp_path / "another"
    stream.run(spark)  # with batch numbers that the first query has used
    assert stream.dataset.version == 5
    assert stream.ids() == sorted([*range(20), *range(20)])


PROGRAM = """
import sys, json
from pathlib import Path
from pyspark.sql import SparkSession
from ags_fast.spark.datasource import register
folder, (conf, source, options) = Path(sys.argv[1]), map(json.loads, sys.argv[2:])
spark = SparkSession.builder.master("local[2,4]").config(map=conf).getOrCreate()
register(spark)
print("begins", flush=True)
reader = spark.readStream.options(maxFilesPerTrigger=1, **source)
rows = reader.format("ags_parquet").load(str(folder / "source.enc")) if source else (
    reader.schema("id long").json(str(folder / "source")))
query = rows.writeStream.format("ags_parquet").options(**options).trigger(availableNow=True).start(str(folder / "ds"))
query.awaitTermination()
print("done", flush=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", ["json", "ags_parquet"])
def test_a_query_that_is_killed(tmp_path: Path, source: str, kills: int) -> None:
    """kill -9, again and again, of driver, JVM and Python workers at any moment: every row is there once.

    If the query reads from a dataset, that is re-keyed and rotated meanwhile.
    """
    stream, count = Stream(tmp_path), 12
    if source == "json":
        stream.put(*range(count))
    else:
        given = Dataset.create(tmp_path / "source.enc", kms=stream.kms, wrapping_key_id=MASTER)
        for number in range(count):
            with given.transaction(fsync=False) as new, new.create(f"{number}.parquet", "parquet") as file:
                parquet.write_table(pa.table({"id": range(number * 10, number * 10 + 10)}), file)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = [json.dumps(one) for one in (CONF, {} if source == "json" else stream.kms, stream.options())]
    versions = stream.url / "_ags/log/0000000"
    for attempt in range(12):
        if source != "json" and attempt:
            change = rekey_files if attempt % 2 else rotate
            change(given.url, kms=stream.kms, progress=False)
        with (tmp_path / "log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, str(program), str(tmp_path), *options],
                env=spark_env(),
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n", (tmp_path / "log").read_text()[-3000:]
        seen = len(list(versions.glob("*")))
        until = time.monotonic() + 200  # a busy machine takes a minute to the first version
        while child.poll() is None and time.monotonic() < until:
            now = len(list(versions.glob("*")))
            if attempt < kills and now > seen + 1:
                time.sleep(0.11 * attempt * 4 / kills)
                os.killpg(child.pid, signal.SIGKILL)
                break
            time.sleep(0.005)
        if child.wait() == 0:
            break
    assert child.stdout is not None
    assert child.stdout.readline() == "done\n", (tmp_path / "log").read_text()[-3000:]
    assert attempt > 0, "nothing was killed"
    assert stream.ids() == list(range(10 * count))
    assert operations(stream.dataset).count("write") <= count
    sweep_at_once(stream)
    assert leftovers(stream.url, stream.kms) == []
    assert stream.ids() == list(range(10 * count))


def sweep_at_once(stream: Stream) -> Any:
    from datetime import timedelta

    return sweep(stream.url, kms=stream.kms, older_than=timedelta(0))
