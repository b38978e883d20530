"""DataFrames written to datasets by real Spark: what is written, and what is left when something dies.

Rows to files without Spark are in test_spark_files.py, streams in test_spark_streams.py, clusters and Spark Connect in
test_spark_writing_cluster.py.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, keys_of, leftovers, make_kms, operations, read_tree
from spark_jobs import parent, wait_for, where
from spark_sessions import activate

pytest.importorskip("pyspark")
pytest.importorskip("fastavro")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

from pyarrow import parquet
from pyspark.errors import AnalysisException, PySparkException

from ags_fast import Dataset
from ags_fast.jobs import sweep, verify_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from spark_sessions import LocalSpark

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]

TYPES = """
    select id, cast(id % 100 as byte) b, cast(id as short) s, cast(id as int) i, cast(id / 3 as float) f, id / 7 d,
    cast(id as decimal(7,2)) d7, cast(id as decimal(15,3)) d15, cast(-id as decimal(38,5)) d38, cast(id as string) st,
    cast(cast(id as string) as binary) bin, id % 2 = 0 bo, date_add(date'1969-01-01', cast(id as int)) da,
    timestamp'1969-12-31 23:59:59.9' + make_dt_interval(0, 0, 0, id / 1000.0) ts,
    cast(timestamp'2020-01-01 00:00:00.123456' as timestamp_ntz) ntz, array(id, null) arr, map('a', id, 'b', null) m,
    named_struct('x', id, 'y', array(named_struct('z', date'2021-02-03', 'p', cast(id % 100 as decimal(5,1))))) st2,
    if(id % 3 = 0, null, id) nn, make_dt_interval(cast(id as int)) iv, map('k', timestamp'2020-01-01 00:00:00') mt,
    cast(null as string) nul, if(id % 5 = 0, null, named_struct('q', if(id % 4 = 0, null, 'x'))) ns
    from range(3000)
"""


@pytest.fixture
def spark(local_spark: LocalSpark) -> SparkSession:
    return local_spark.fresh()


@pytest.fixture
def kms(tmp_path: Path) -> dict[str, str]:
    return make_kms(tmp_path, keys=(MASTER, "other"))


def write(
    frame: DataFrame, url: Path, kms: dict[str, str], format: str = "parquet", mode: str = "append", **o: Any
) -> None:
    writer = frame.write.format(f"ags_{format}").options(**kms, **{"wrappingKeyId": MASTER, **o})
    writer.mode(mode).save(str(url))


def plain_copy(url: Path, kms: dict[str, str], target: Path) -> Path:
    dataset = Dataset.open(url, kms=kms)
    for found in dataset.files():
        (target / found.path).parent.mkdir(parents=True, exist_ok=True)
        with (target / found.path).open("wb") as file:
            dataset.copy_file(found.path, file)
    return target


def is_clean(url: Path, kms: dict[str, str]) -> bool:
    return leftovers(url, kms) == []


def files(url: Path) -> set[str]:
    return {path for path in read_tree(url) if not path.startswith("_ags/")}


def test_types_are_those_of_sparks_own_parquet(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    frame = spark.sql(TYPES)
    write(frame, tmp_path / "ds", kms)
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    try:
        frame.write.parquet(str(tmp_path / "plain"))
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    mine = plain_copy(tmp_path / "ds", kms, tmp_path / "mine")
    ours, theirs = (sorted(folder.glob("*.parquet")) for folder in (mine, tmp_path / "plain"))
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        lines = [str(parquet.ParquetFile(path).schema).split("\n")[2:] for path in (one, other)]
        assert lines[0] == lines[1]
        tables = [parquet.read_table(path) for path in (one, other)]
        assert tables[0].equals(tables[1])
        metadata = [parquet.read_metadata(path) for path in (one, other)]
        key = b"org.apache.spark.sql.parquet.row.metadata"
        assert json.loads(metadata[0].metadata[key]) == json.loads(metadata[1].metadata[key])
        chunks = [found.row_group(0).column(0) for found in metadata]
        assert [chunk.compression for chunk in chunks] == ["SNAPPY", "SNAPPY"]
        assert [chunk.has_column_index for chunk in chunks] == [True, True]
    back = spark.read.parquet(str(mine))  # by parquet-java
    assert back.schema == spark.read.parquet(str(tmp_path / "plain")).schema
    rows = [{row["id"]: row for row in found.collect()} for found in (back, frame)]
    assert rows[0] == rows[1]
    read = spark.read.format("ags_parquet").options(**kms).load(str(tmp_path / "ds"))
    assert {row["id"]: row for row in read.collect()} == rows[1]


def test_avro_is_read_back(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    import io

    import fastavro

    frame = spark.sql(TYPES)
    write(frame, tmp_path / "ds", kms, "avro")
    dataset = Dataset.open(tmp_path / "ds", kms=kms)
    found: list[Any] = []
    for file in dataset.files():
        with dataset.open_file(file.path) as opened:
            found += fastavro.reader(io.BufferedReader(opened))
    rows = {row["id"]: row.asDict(recursive=True) for row in frame.collect()}
    assert len(found) == len(rows) == 3000
    for row in found:
        wanted = rows[row["id"]]
        for name in (
            "b",
            "s",
            "i",
            "d",
            "d7",
            "d15",
            "d38",
            "st",
            "bin",
            "bo",
            "da",
            "ntz",
            "arr",
            "m",
            "st2",
            "nn",
            "ns",
        ):
            assert row[name] == wanted[name], name
        assert row["ts"].astimezone().replace(tzinfo=None) == wanted["ts"]
        assert row["iv"] == wanted["iv"].days * 86_400_000_000
    if find_spec("ags_fast.spark.datasource.avro_reading") is None:
        return
    read = spark.read.format("ags_avro").options(**kms).load(str(tmp_path / "ds"))
    assert {row["id"]: row["st2"] for row in read.select("id", "st2").collect()} == {
        row["id"]: row["st2"] for row in frame.select("id", "st2").collect()
    }


def test_modes(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    """Spark itself refuses two of its modes for such sources, and its own partitionBy. Options take their places."""
    url = tmp_path / "ds"
    frame = spark.range(100)
    for mode in ("error", "ignore"):
        with pytest.raises(AnalysisException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
            write(frame, url, kms, mode=mode)
    with pytest.raises(PySparkException, match="partitioning"):
        frame.write.format("ags_parquet").options(**kms).partitionBy("id").mode("append").save(str(url))
    assert not url.exists()
    write(frame, url, kms, ifExists="error")
    with pytest.raises(PySparkException, match="FileExistsError"):
        write(frame, url, kms, ifExists="error")
    write(frame, url, kms, ifExists="ignore")
    dataset = Dataset.open(url, kms=kms)
    first = dataset.version
    write(frame, url, kms)
    write(spark.range(5), url, kms, mode="overwrite")
    assert operations(dataset).count("write") == 3

    def count(version: int) -> int:
        options = {**kms, "version": str(version)}
        return spark.read.format("ags_parquet").options(**options).load(str(url)).count()

    assert [count(first + n) for n in range(3)] == [100, 200, 5]
    write(spark.range(0), url, kms, mode="overwrite")
    assert count(first + 3) == 0
    with pytest.raises(PySparkException, match="wrappingKeyId"):
        frame.write.format("ags_parquet").options(**kms).mode("append").save(str(tmp_path / "none"))
    with pytest.raises(PySparkException, match="did you mean"):
        write(frame, url, kms, partitionby2="id")
    assert is_clean(url, kms)


def test_partitions_are_those_of_spark(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        frame = spark.sql(
            """select id v, id % 3 = 0 bo, cast(id % 2 as byte) i,
            if(id % 5 = 0, null, concat('a/=%:é ', id % 3)) `s p`,
            cast(id % 4 as decimal(9,2)) de, date_add(date'2026-01-01', cast(id % 3 as int)) da,
            timestamp'2026-01-01 00:00:00.5' + make_dt_interval(0, 0, 0, id % 2) ts, cast(id % 2 as double) * 1e7 d,
            cast(id % 3 as float) / 10 f, cast(concat('x', id % 2) as binary) bin from range(60)"""
        )
        columns = ["bo", "i", "s p", "de", "da", "ts", "d", "f", "bin"]
        frame.write.partitionBy(*columns).parquet(str(tmp_path / "plain"))
        write(frame, tmp_path / "ds", kms, partitionBy=",".join(columns))
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    theirs = {
        path.parent.relative_to(tmp_path / "plain").as_posix() for path in (tmp_path / "plain").rglob("*.parquet")
    }
    ours = {file.path.rpartition("/")[0] for file in Dataset.open(tmp_path / "ds", kms=kms).files()}
    assert ours == theirs
    mine = plain_copy(tmp_path / "ds", kms, tmp_path / "mine")
    rows = [Counter(map(str, spark.read.parquet(str(path)).collect())) for path in (mine, tmp_path / "plain")]
    assert rows[0] == rows[1]


# ---------------------------------------------------------------------------------------- what fails


def failing(rows: Any, marker: Path, times: int) -> Any:
    """Fail in the middle, a number of times."""
    for number, batch in enumerate(rows):
        yield batch
        if number == 1:
            made = marker.with_name(f"{marker.name}.{len(list(marker.parent.glob(marker.name + '.*')))}")
            if not made.name.endswith(f".{times}"):
                made.touch()
                raise RuntimeError("as the test wants it")


@pytest.mark.parametrize("format", ["parquet", "avro"])
@pytest.mark.parametrize("times", [2, 100])
def test_tasks_that_fail(spark: SparkSession, kms: dict[str, str], tmp_path: Path, format: str, times: int) -> None:
    """Twice: the third attempt's files count. Always: there is no version, and no file."""
    url, marker = tmp_path / "ds", tmp_path / "failed"
    write(spark.range(10), url, kms, format)
    before = files(url)
    frame = spark.range(0, 60_000, 1, 2).mapInArrow(lambda rows: failing(rows, marker, times), "id long")
    options = {"maxRecordsPerFile": "5000"}  # so that files are complete when the task fails
    if times == 2:
        write(frame, url, kms, format, **options)
        assert len(files(url)) == len(list(Dataset.open(url, kms=kms).files())) == 14
    else:
        with pytest.raises(PySparkException, match="as the test wants it"):
            write(frame, url, kms, format, **options)
        assert operations(Dataset.open(url, kms=kms)) == ["write", "end"]
        sweep(url, kms=kms)
        assert files(url) == before
    assert is_clean(url, kms)
    verify_files(url, kms=kms).raise_for_failures()


def workers() -> set[int]:
    """The Python workers of this process's Spark."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            parents[pid] = parent(pid)
            commands[pid] = (folder / "cmdline").read_bytes()
        except OSError:
            pass

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    daemons = {pid for pid in parents if b"pyspark.daemon" in commands.get(pid, b"")}
    return {pid for pid in daemons if parents[pid] in daemons and is_ours(pid)}


def slowly(rows: Any, marker: Path) -> Any:
    """Wait in the middle until the marker is there."""
    import time

    for batch in rows:
        yield batch
        for _ in range(600):
            if marker.exists():
                break
            time.sleep(0.1)


def test_a_worker_that_is_killed(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    """With complete files. What it leaves is gone after the commit."""
    url, marker = tmp_path / "ds", tmp_path / "go on"
    write(spark.range(10), url, kms, "avro")
    before = files(url)
    wide = spark.range(0, 60_000, 1, 2).selectExpr("id", "repeat('x', 300) x")
    frame = wide.mapInArrow(lambda rows: slowly(rows, marker), wide.schema)
    failed: list[BaseException] = []

    def job() -> None:
        try:
            activate(spark)
            write(frame, url, kms, "avro", maxRecordsPerFile="4000")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=job)
    thread.start()
    try:
        wait_for("files of two tasks", lambda: len(files(url) - before) >= 4)
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
    finally:
        marker.touch()
        thread.join()
    assert not failed
    dataset = Dataset.open(url, kms=kms)
    assert dataset.version == 3
    assert spark_rows(dataset) == sorted([*range(60_000), *range(10)])
    assert len(files(url)) == len(list(dataset.files()))
    assert is_clean(url, kms)


def spark_rows(dataset: Dataset) -> list[int]:
    import io

    import fastavro

    found: list[Any] = []
    for file in dataset.files():
        with dataset.open_file(file.path) as opened:
            found += fastavro.reader(io.BufferedReader(opened))
    return sorted(row["id"] for row in found)


def test_jobs_at_once(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    """Appends, also those that create the dataset, and an overwrite: each row is there once, whatever was first."""
    url = tmp_path / "ds"
    failed: list[str] = []

    def job(number: int, mode: str) -> None:
        try:
            activate(spark)
            write(spark.range(number * 100, number * 100 + 100), url, kms, mode=mode)
        except BaseException as error:
            failed.append(f"{error} {getattr(error, 'java_exception', '')}")

    def run(*modes: str) -> None:
        threads = [threading.Thread(target=job, args=one) for one in enumerate(modes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ids() -> list[int]:
        read = spark.read.format("ags_parquet").options(**kms).load(str(url))
        return sorted(row[0] for row in read.collect())

    run("append", "append", "append")
    assert not failed
    assert ids() == list(range(300))
    assert operations(Dataset.open(url, kms=kms)) == ["write"] * 3
    run("append", "overwrite")
    assert not failed  # what is appended after the overwrite has begun stays
    assert ids() in (list(range(100, 200)), list(range(200)))
    run("overwrite", "overwrite")
    assert len(failed) <= 1
    assert all("ConcurrentChangeError" in error for error in failed)
    assert ids() in (list(range(100)), list(range(100, 200)))
    assert is_clean(url, kms)


# ---------------------------------------------------------------------------------------- keys


def test_no_key_in_what_spark_keeps(
    spark: SparkSession, local_spark: LocalSpark, kms: dict[str, str], tmp_path: Path
) -> None:
    """The event log, shuffle and spill, and the dataset itself."""
    url = tmp_path / "ds"
    control = secrets.token_hex(8)
    frame = spark.range(1000).selectExpr("id", "id % 2 k", f"concat('{control}', id) control").repartition(3)
    write(frame, url, kms, columnKeys='{"id": "other"}', partitionBy="k")
    keys = keys_of(url, kms)
    assert len(keys) > 10
    local_spark.wait_for_events()
    assert where([control.encode()], local_spark.events) != set(), "this is not where the events are"
    assert where([control.encode()], local_spark.local) != set(), "this is not where the shuffle is"
    assert where(keys, local_spark.events) == set()
    assert where(keys, local_spark.local) == set()
    stored = b"".join(read_tree(url).values())
    assert not [key for key in keys if key in stored]
