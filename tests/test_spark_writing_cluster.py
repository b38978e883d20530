"""DataFrames written to datasets through Spark Connect, and on a cluster whose executors are killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, data_files, keys_of, leftovers, make_kms
from spark_jobs import (
    connect_session,
    parent,
    spark_env,
    spark_home,
    wait_for,
    where,
)

pytest.importorskip("pyspark")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

from pyarrow import parquet

from ags_fast import Dataset
from ags_fast.jobs import sweep, verify_files
from ags_fast.spark.datasource import register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark_sessions import ConnectServer

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]


def ids(dataset: Dataset) -> list[int]:
    found: list[int] = []
    for file in dataset.files():
        with dataset.open_file(file.path) as opened:
            found += parquet.read_table(opened).to_pydict()["id"]
    return sorted(found)


def test_through_spark_connect(shared_connect: ConnectServer, tmp_path: Path) -> None:
    """A DataFrame, a failure, a stream; no key in what the server writes down."""
    kms, url = make_kms(tmp_path), tmp_path / "ds"
    options, control = {**kms, "wrappingKeyId": MASTER}, secrets.token_hex(8)
    with connect_session(shared_connect.url) as spark:
        register(spark)

        def write(frame: Any, mode: str = "append", **more: str) -> None:
            frame.write.format("ags_parquet").options(**options, **more).mode(mode).save(str(url))

        write(spark.range(1000).selectExpr("id", "id % 3 k", f"'{control}' control"), partitionBy="k")
        write(spark.range(100), mode="overwrite")
        before = data_files(url)
        with pytest.raises(Exception, match="no number"):
            write(
                spark.range(1000).selectExpr("cast(if(id > 900, assert_true(false, 'no number'), null) as int) x", "id")
            )
        with pytest.raises(Exception, match="looks like a secret"):
            write(spark.range(1), password="x")
        assert data_files(url) == before
        rows = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=10, numPartitions=2).load()
        writer = rows.selectExpr("value + 1000 id").writeStream.format("ags_parquet").options(**options)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(url))
        try:
            wait_for("batches", lambda: (Dataset.open(url, kms=kms).version or 0) >= 5)
        finally:
            query.stop()
    found = ids(Dataset.open(url, kms=kms))
    assert found[:100] == list(range(100))
    assert found[100:] == list(range(1000, 1000 + len(found) - 100))
    assert where([control.encode()], shared_connect.events) != set(), "this is not where the events are"
    keys = keys_of(url, kms)
    assert where(keys, shared_connect.events) == set()
    assert where(keys, shared_connect.folder) == set()


SPECULATION = """
import json, sys, time
from pathlib import Path
from pyspark import TaskContext
from pyspark.sql import SparkSession
from ags_fast.spark.datasource import register
conf, options, url, attempts = (json.loads(text) for text in sys.argv[1:])
spark = SparkSession.builder.config(map=conf).getOrCreate()
register(spark)

def slowly(rows):
    context = TaskContext.get()
    Path(attempts, f"{context.partitionId()}-{context.attemptNumber()}").touch()
    for batch in rows:
        yield batch
        if context.partitionId() == 0 and context.attemptNumber() == 0:
            time.sleep(120)  # Spark ends the attempt that is outrun

wide = spark.range(0, 60_000, 1, 4).selectExpr("id", "repeat('x', 300) x")
frame = wide.mapInArrow(slowly, wide.schema)
frame.write.format("ags_parquet").options(**options).mode("append").save(url)
print("done", flush=True)
"""

PROGRAM = """
import json, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from ags_fast.spark.datasource import register
conf, options, url, marker = (json.loads(text) for text in sys.argv[1:])
spark = SparkSession.builder.config(map=conf).getOrCreate()
register(spark)

def slowly(rows):
    for batch in rows:
        yield batch
        for _ in range(600):
            if Path(marker).exists():
                break
            time.sleep(0.1)

wide = spark.range(0, 60_000, 1, 4).selectExpr("id", "repeat('x', 300) x")
frame = wide.mapInArrow(slowly, wide.schema)
frame.write.format("ags_parquet").options(**options).mode("append").save(url)
print("done", flush=True)
"""


def executors(driver: int) -> list[int]:
    """The executors of an application, whose processes descend from its driver's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            if b"CoarseGrainedExecutorBackend" not in (folder / "cmdline").read_bytes():
                continue
            while pid not in (1, driver):
                pid = parent(pid)
        except OSError:
            continue
        if pid == driver:
            found.append(int(folder.name))
    return found


@contextmanager
def on_a_cluster(tmp_path: Path, text: str, options: dict[str, str], *more: str, **conf: str) -> Iterator[int]:
    """Run a program as the driver of two executors. Yields its pid, and waits for its end."""
    home = spark_home(tmp_path / "home", tmp_path / "work")
    conf = {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.local.dir": str(tmp_path / "scratch"),
        **conf,
    }
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, str(program), *(json.dumps(one) for one in (conf, options, *more))]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            command, env=spark_env(SPARK_HOME=str(home)), stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    killer = threading.Timer(250, os.killpg, (child.pid, signal.SIGKILL))
    killer.start()
    try:
        yield child.pid
        output, _ = child.communicate()
    finally:
        killer.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert output == b"done\n", (tmp_path / "log").read_text()[-3000:]


def test_attempts_that_speculation_runs_twice(standalone: str, tmp_path: Path) -> None:
    """The first attempt of a task hangs behind its first file; another one outruns it. One of them counts."""
    kms, url, attempts = make_kms(tmp_path), tmp_path / "ds", tmp_path / "attempts"
    attempts.mkdir()
    options = {**kms, "wrappingKeyId": MASTER, "maxRecordsPerFile": "4000"}
    conf = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.2",
        "spark.speculation.minTaskRuntime": "200ms",
    }
    with on_a_cluster(tmp_path, SPECULATION, options, str(url), str(attempts), **{"spark.master": standalone}, **conf):
        wait_for("a second attempt, on another host", (attempts / "0-1").exists, 150)
    dataset = Dataset.open(url, kms=kms)
    assert dataset.version == 2
    assert ids(dataset) == list(range(60_000))
    assert len(list(dataset.files())) == 16
    sweep(url, kms=kms)
    assert leftovers(url, kms) == []
    verify_files(url, kms=kms).raise_for_failures()


def test_an_executor_that_is_killed(tmp_path: Path) -> None:
    kms, url, marker = make_kms(tmp_path), tmp_path / "ds", tmp_path / "go on"
    options = {**kms, "wrappingKeyId": MASTER, "maxRecordsPerFile": "4000"}
    with on_a_cluster(tmp_path, PROGRAM, options, str(url), str(marker)) as driver:
        wait_for("files of two tasks", lambda: url.exists() and len(data_files(url)) >= 4, 150)
        os.kill(executors(driver)[0], signal.SIGKILL)
        marker.touch()
    dataset = Dataset.open(url, kms=kms)
    assert dataset.version == 2
    assert ids(dataset) == list(range(60_000))
    assert len(data_files(url)) == len(list(dataset.files()))
    sweep(url, kms=kms)
    assert leftovers(url, kms) == []
    verify_files(url, kms=kms).raise_for_failures()
