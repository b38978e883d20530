"""Benchmarks of DataFrames and of the file system: encrypted datasets, and the same files in plaintext.

A query of Spark reads all columns and drops the rows (its "noop" sink), so that nothing but the reading is on the
clock. What is written comes from a DataFrame in memory.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow.parquet as pq

from ags_fast import AgsReader, AgsWriter, Dataset, jobs, parquet
from ags_fast.parquet import keytools
from benchmarks.cases import KEYS, Bench, contest, nothing, threads_name
from benchmarks.datasets import session_in, workspace
from benchmarks.keystore import MASTER_KEY, keystore
from benchmarks.measure import Case, Contest, Group, Row, Run, SkippedError
from benchmarks.parquet import plain_file, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

PARQUET_FILES = 6  # of 182 MB
AVRO_FILES, AVRO_ROWS = 4, 500_000
WRITTEN_ROWS = {"parquet": 4_000_000, "avro": 500_000}
CSV_ROWS = 1_000_000
PARTITIONS = 4
HEAP = "6g"


def frames(bench: Bench) -> Group:
    """Make the group."""
    cases = [
        Case("frames/read", functools.partial(reading, bench), rounds=1 / 3),
        Case("frames/write/parquet", functools.partial(writing, bench, "parquet"), rounds=1 / 3),
        Case("frames/write/avro", functools.partial(writing, bench, "avro"), rounds=1 / 3),
        Case("frames/avro", functools.partial(avro, bench), rounds=1 / 3),
        Case("frames/files", functools.partial(files, bench), rounds=1 / 2),
    ]
    return Group(
        "DataFrames and files of an encrypted dataset; beside: a Python data source, or the call, on plaintext; naive: "
        "Spark's own on plaintext, or mapPartitions over fastavro; best Py: Spark's own on encrypted Parquet",
        cases,
    )


def callers(bench: Bench) -> Group:
    """Make the group."""
    cases = [Case(f"callers/{name}", functools.partial(called, bench, name), rounds=1 / 2) for name in CALLERS]
    return Group("libraries read a stream from first to last; limit: the same of the plain file", cases)


GROUPS = {"frames": frames, "callers": callers}


def links(folder: Path, source: Path, count: int) -> tuple[Path, int]:
    """A folder in which one file is there N times, and the size of all."""
    folder.mkdir()
    for number in range(count):
        os.link(source, folder / f"part-{number:03d}{source.suffix}")
    return folder, count * source.stat().st_size


def encrypted(folder: Path, source: Path, kms: dict[str, str], **options: Any) -> str:
    """A dataset of the files in `source`."""
    dataset = str(folder / f"{source.name}.enc")
    jobs.encrypt_files(source, dataset, kms=kms, wrapping_key_id=MASTER_KEY, **options).raise_for_failures()
    return dataset


def drained(frame: DataFrame) -> None:
    """Read all of a DataFrame."""
    frame.write.format("noop").mode("overwrite").save()


# ---- Spark


@contextmanager
def reading(bench: Bench) -> Iterator[Contest]:
    """Read 1 GiB of Parquet."""
    from benchmarks.plain_source import PlainParquet
    from benchmarks.tour.parquet import jvm_classes, read_with_spark

    source = plain_file(bench, "snappy")
    with workspace(bench, "frames-read") as folder, ExitStack() as stack:
        kms = keystore(folder)
        plain, size = links(folder / "plain", source, PARQUET_FILES)
        dataset = encrypted(folder, plain, kms, format="parquet")
        classes = jvm_classes()
        spark = stack.enter_context(session_in(folder, HEAP, classes))
        spark.dataSource.register(PlainParquet)
        runs: dict[str, Run] = {
            "ours": nothing(lambda: drained(spark.read.format("ags_parquet").options(**kms).load(dataset))),
            "beside": nothing(lambda: drained(spark.read.format("plain_parquet").load(str(plain)))),
            "naive": nothing(lambda: drained(spark.read.parquet(str(plain)))),
        }
        if classes is not None:
            sealed = folder / "keytools.parquet"
            keys = keytools.CryptoFactory(kms).encryption_keys(MASTER_KEY, {})
            parquet.encrypt_file(source, sealed, keys)
            own, _ = links(folder / "keytools", sealed, PARQUET_FILES)
            runs["best"] = nothing(lambda: drained(read_with_spark(spark, own, kms)))
        yield contest(Row("frames/read/all", "Spark reads Parquet, all columns", nbytes=size), runs, 1)


@contextmanager
def writing(bench: Bench, kind: str) -> Iterator[Contest]:
    """Write a DataFrame that is in memory."""
    from benchmarks.plain_source import AVRO_CODEC, PlainAvro, PlainParquet

    rows = bench.size(WRITTEN_ROWS[kind])
    options = {"codec": AVRO_CODEC} if kind == "avro" else {}
    with workspace(bench, "frames-write") as folder, session_in(folder, HEAP) as spark:
        kms = keystore(folder)
        spark.dataSource.register(PlainAvro if kind == "avro" else PlainParquet)
        source = folder / "source.parquet"
        pq.write_table(table(rows), source, row_group_size=rows // PARTITIONS)
        frame = spark.read.parquet(str(source)).repartition(PARTITIONS).persist()
        frame.count()
        numbers = itertools.count()

        def into(write: Callable[[str], None]) -> Run:
            def run() -> None:
                if before := target.pop("was", None):
                    shutil.rmtree(before)
                target["was"] = str(folder / f"written-{next(numbers)}")
                write(target["was"])

            target: dict[str, str] = {}
            return run

        def ours(path: str) -> None:
            save(frame, f"ags_{kind}", path, wrappingKeyId=MASTER_KEY, **options, **kms)

        def plain(path: str) -> None:
            os.mkdir(path)
            save(frame, f"plain_{kind}", path)

        runs = {"ours": into(ours), "beside": into(plain)}
        if kind == "parquet":
            runs["naive"] = into(frame.write.parquet)
        row = Row(f"frames/write/{kind}", f"Spark writes {kind.title()}", nbytes=source.stat().st_size)
        yield contest(row, runs, 1)


def save(frame: DataFrame, kind: str, path: str, **options: str) -> None:
    """Append a DataFrame to what is at a path."""
    frame.write.format(kind).options(**options).mode("append").save(path)


@contextmanager
def avro(bench: Bench) -> Iterator[Contest]:
    """Read Avro."""
    from benchmarks.plain_source import PlainAvro

    if importlib.util.find_spec("datafusion") is None:
        raise SkippedError("datafusion is not installed")
    with workspace(bench, "frames-avro") as folder, session_in(folder, HEAP) as spark:
        kms = keystore(folder)
        plain, size = links(folder / "plain", avro_file(folder, bench.size(AVRO_ROWS)), AVRO_FILES)
        dataset = encrypted(folder, plain, kms)
        spark.dataSource.register(PlainAvro)
        runs = {
            "ours": nothing(lambda: drained(spark.read.format("ags_avro").options(**kms).load(dataset))),
            "beside": nothing(lambda: drained(spark.read.format("plain_avro").load(str(plain)))),
            "naive": nothing(counted_by_fastavro, spark, dataset, kms),
        }
        yield contest(Row("frames/avro/all", "Spark reads Avro, all columns", nbytes=size), runs, 1)


def avro_file(folder: Path, rows: int) -> Path:
    """An Avro file of eight columns, in blocks of 16 KB."""
    import fastavro

    from benchmarks.plain_source import avro_schema

    data = table(rows)
    path = folder / "rows.avro"
    with open(path, "wb") as file:
        fastavro.writer(file, avro_schema({one.name: str(one.type) for one in data.schema}), data.to_pylist())
    return path


def counted_by_fastavro(spark: SparkSession, dataset: str, kms: dict[str, str]) -> int:
    """What Spark's users do today: a task for each file, fastavro over the decrypted file. Rows stay in Python."""
    handle = Dataset.open(dataset, kms=kms)
    paths = [file.path for file in handle.files()]

    def count(some: Iterable[str]) -> Iterable[int]:
        import fastavro

        for path in some:
            with io.BufferedReader(handle.open_file(path), 1 << 20) as file:
                yield sum(1 for _ in fastavro.reader(file))

    total: int = spark.sparkContext.parallelize(paths, len(paths)).mapPartitions(count).sum()
    return total


# ---- streams


def read_avro(file: io.RawIOBase) -> None:
    import fastavro

    deque(fastavro.reader(io.BufferedReader(file, 1 << 20)), maxlen=0)


def read_csv(file: io.RawIOBase) -> None:
    import pandas as pd

    pd.read_csv(file)


def read_csv_to_arrow(file: io.RawIOBase) -> None:
    import pyarrow.csv

    pyarrow.csv.read_csv(file, pyarrow.csv.ReadOptions(use_threads=False))


CALLERS: dict[str, Callable[[io.RawIOBase], None]] = {
    "fastavro": read_avro,
    "pandas.read_csv": read_csv,
    "pyarrow.csv.read_csv": read_csv_to_arrow,
}


@contextmanager
def called(bench: Bench, name: str) -> Iterator[Contest]:
    """Let a library read a stream. What it reads of a plain file is what a reader gives that costs nothing."""
    import pyarrow.csv

    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise SkippedError(f"{name} is not installed")
    with workspace(bench, "callers") as folder:
        path, stream, call = folder / "rows.csv", folder / "stream", CALLERS[name]
        if name == "fastavro":
            path = avro_file(folder, bench.size(AVRO_ROWS) // 2)
        else:
            pyarrow.csv.write_csv(table(bench.size(CSV_ROWS)), path)
        with open(path, "rb") as plain, AgsWriter(stream, KEYS[0]) as writer:
            shutil.copyfileobj(plain, writer, 1 << 20)

        def read_plain() -> None:
            with open(path, "rb", buffering=0) as file:
                call(file)

        def read(threads: int) -> None:
            with AgsReader(stream, KEYS[0], length=writer.file_length, threads=threads) as file:
                call(file)

        rows, runs = [], {}
        for n in bench.threads:
            rows.append(row := Row(f"callers/{name}/{n}t", f"{name}, {threads_name(n)}", nbytes=path.stat().st_size))
            runs[row.name, "beside"] = nothing(read_plain)
            runs[row.name, "ours"] = nothing(read, n)
        yield Contest(rows, runs)


# ---- the file system


def pandas_csv(fs: Any, at: str) -> None:
    import pandas as pd

    with fs.open(f"{at}rows.csv", "rb") as file:
        pd.read_csv(file)


def polars_csv(fs: Any, at: str) -> None:
    import polars as pl

    with fs.open(f"{at}rows.csv", "rb") as file:
        pl.read_csv(file)


def pandas_parquet(fs: Any, at: str) -> None:
    import pandas as pd

    pd.read_parquet(f"{at}rows.parquet", filesystem=fs)


def pyarrow_dataset(fs: Any, at: str) -> None:
    import pyarrow.dataset

    pyarrow.dataset.dataset(f"{at}rows.parquet", filesystem=fs).to_table()


def duckdb_parquet(fs: Any, at: str) -> None:
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("set threads = 1")  # its threads share a file of fsspec, and move each other's position
        connection.register_filesystem(fs)
        name = fs.unstrip_protocol(f"{at}rows.parquet")
        connection.sql(f"select sum(hash(COLUMNS(*))) from read_parquet('{name}')").fetchall()


CALLS: dict[str, tuple[str, Callable[[Any, str], None]]] = {
    "csv/pandas": ("pandas.read_csv", pandas_csv),
    "csv/polars": ("polars.read_csv", polars_csv),
    "parquet/pandas": ("pandas.read_parquet", pandas_parquet),
    "parquet/pyarrow": ("pyarrow.dataset, to_table", pyarrow_dataset),
    "parquet/duckdb": ("DuckDB, all columns", duckdb_parquet),
}


@contextmanager
def files(bench: Bench) -> Iterator[Contest]:
    """Read a CSV and a Parquet file through fsspec by the tools that take a file system."""
    import pyarrow.csv

    for module in ("duckdb", "pandas", "polars"):
        if importlib.util.find_spec(module) is None:
            raise SkippedError(f"{module} is not installed")
    with workspace(bench, "frames-files") as folder:
        kms = keystore(folder)
        plain = folder / "plain"
        plain.mkdir()
        pyarrow.csv.write_csv(table(bench.size(CSV_ROWS)), plain / "rows.csv")
        os.link(plain_file(bench, "snappy"), plain / "rows.parquet")
        dataset = Dataset.create(folder / "sealed", kms=kms, wrapping_key_id=MASTER_KEY)
        ours = fsspec.filesystem("ags", dataset=dataset.url, kms=kms)
        ours.put(f"{plain}/", "", recursive=True)
        rows, runs = [], {}
        for name, (label, call) in CALLS.items():
            size = (plain / f"rows.{name.partition('/')[0]}").stat().st_size
            rows.append(row := Row(f"frames/files/{name}", label, nbytes=size))
            runs[row.name, "ours"] = nothing(call, ours, "")
            runs[row.name, "beside"] = nothing(call, fsspec.filesystem("file"), f"{plain}/")
        yield Contest(rows, runs)
