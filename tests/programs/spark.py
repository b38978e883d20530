"""Drivers of Spark."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ags_fast import AgsCodec


def read_split(path: Path, conf: Path) -> None:
    """An encrypted file in several tasks, and what they find."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.files.maxPartitionBytes", "4000").config("spark.sql.files.openCostInBytes", "0")
    for line in conf.read_text().splitlines():
        builder = builder.config(*line.split("\t"))
    spark = builder.getOrCreate()
    frame = spark.read.parquet(str(path))
    print("tasks", frame.rdd.getNumPartitions())
    print("rows", sorted(row.id for row in frame.select("id").collect()) == list(range(600)))
    print("filtered", [row.id for row in frame.where("id = 333").collect()], frame.where("text = 'b'").count())
    spark.stop()


def keytools(
    src: str,
    dataset: str,
    kms: dict[str, str],
    less: dict[str, str],
    columns: dict[str, str],
    classes: str,
    out: str,
) -> None:
    """Encrypt a dataset of Parquet files with key material in Spark, and read it by Spark's own reader.

    less: a KMS that refuses the master key hr.
    """
    from pyspark.sql import SparkSession

    from ags_fast.dataset.dataset import Dataset
    from ags_fast.jobs import encrypt_files, rekey_files, verify_files
    from ags_fast.spark import SparkEngine

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.extraClassPath", classes).getOrCreate()
    common: Any = {"engine": SparkEngine(spark), "progress": False, "kms": kms}
    wanted: Any = {"wrapping_key_id": "master", "format": "parquet", "column_keys": columns, "key_material": "keytools"}
    encrypt_files(src, dataset, **common, **wanted).raise_for_failures()

    def read(paths: list[str], kms: dict[str, str], **options: str) -> Any:
        return spark.read.options(
            **{
                "parquet.crypto.factory.class": "org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory",
                "parquet.encryption.kms.client.class": "ags.tour.LocalKeystore",
                "kms.local.path": kms["kms.local.path"],
                "kms.local.key-file": kms["kms.local.key-file"],
                **options,
            }
        ).parquet(*paths)

    def error(call: Any) -> str:
        try:
            call()
        except Exception as found:  # Py4J's, or Spark's of several kinds
            return str(found)
        return "none"

    handle = Dataset.open(dataset, kms=kms)
    paths = [file.url for file in sorted(handle.files())]
    for n, path in enumerate(paths):
        read([path], kms).coalesce(1).orderBy("id").write.parquet(f"{out}/{n}")
    whole = read(paths, kms, basePath=dataset)
    # Another connection's properties: keys are cached by the KMS instance and the access token of a caller.
    token = {"parquet.encryption.key.access.token": "less"}
    partly = read(paths, less, **token)
    found = {
        "by_year": [[str(row.year), row["count"]] for row in whole.groupBy("year").count().orderBy("year").collect()],
        "filtered": whole.where("id = 33").select("text", "number").count(),
        "without hr": len(partly.select("id", "number", "real").collect()),
        "text without hr": error(lambda: partly.select("text").collect()),
    }
    rekey_files(dataset, **common).raise_for_failures()
    handle.refresh()
    found["after rekey"] = read([file.url for file in handle.files()], kms).select("text").count()
    found["folder after rekey"] = read([dataset], kms, recursiveFileLookup="true").count()
    first, second, third = sorted(file.url for file in handle.files())
    shutil.copy(second, first)
    shutil.copy(f"{src}/year=2024/part-0.parquet", third)
    found["after an attack"] = read([first, second, third], kms).count()
    found["verified"] = [row.status for row in sorted(verify_files(dataset, **common).rows)]
    print(json.dumps(found))
    spark.stop()


def use_threads(_: object) -> Iterator[tuple[int, int, int, int]]:
    """A task's CPUs, its threads by default and with 64, and its address space in MiB."""
    from pyspark import TaskContext

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    big = bytes(32 << 20)
    AgsCodec(bytes(16), block_size=4096).encrypt(big)
    by_default = threads()
    codec = AgsCodec(bytes(16), block_size=4096, threads=64)
    sealed = codec.encrypt(big)
    assert codec.decrypt(sealed, length=len(sealed)) == big
    context: Any = TaskContext.get()
    yield context.cpus(), by_default, threads(), limit >> 20


def start_beside_threads() -> None:
    """Forks the JVM while helper threads work."""
    codec = AgsCodec(bytes(16), block_size=4096, threads=2)
    data = bytes(1 << 20)
    started = threading.Event()

    def work() -> None:
        while not started.is_set():
            codec.encrypt(data)

    worker = threading.Thread(target=work)
    worker.start()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.task.cpus", "2").config("spark.executor.pyspark.memory", "512m")
    spark = builder.getOrCreate()
    started.set()
    worker.join()
    sealed = codec.encrypt(data)
    assert codec.decrypt(sealed, length=len(sealed)) == data
    print(json.dumps(spark.sparkContext.parallelize([0], 1).mapPartitions(use_threads).collect()))
    spark.stop()


def tour_twice(source: Path, output: Path) -> None:
    """The second time a decrypted file is changed behind the tour's back."""
    from benchmarks.tour import __main__ as tour
    from benchmarks.tour import avro

    arguments = ["--input", str(source), "--output", str(output), "--rounds", "0", "--records", "1000"]
    assert tour.main(arguments) == 0
    assert os.listdir(tempfile.gettempdir()) == []
    right = avro.decrypt_on_spark

    def wrong(spark: Any, folder: Any, lengths: Any, target: Any, key_file: Any) -> None:
        right(spark, folder, lengths, target, key_file)
        with open(Path(target, "notes.txt"), "r+b") as file:
            file.write(b"!")

    avro.decrypt_on_spark = wrong
    print("=" * 20)
    assert tour.main(arguments) == 1
