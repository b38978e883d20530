"""The data source "ags_avro" reads Avro files of datasets, in this process and in Spark."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import string
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("fastavro")

import fastavro
from iceberg_java import avro_jar, pyspark_folder
from pyspark.sql import datasource as ds
from pyspark.sql import types as t
from test_avro_arrow import TYPES, schema_of

from ags_fast.errors import FormatError
from ags_fast.spark.datasource import AgsAvro

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spark_sessions import LocalSpark

ORDER = {
    "type": "record",
    "name": "order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "tags", "type": {"type": "map", "values": ["null", "string"]}},
    ],
}
AT = dt.datetime(2026, 1, 2, 3, 4, 5, 6000, dt.UTC)


def orders(begin: int, end: int) -> list[dict[str, Any]]:
    return [{"id": i, "at": AT, "clock": dt.time(0, 0, 1), "tags": {"a": None, "b": str(i)}} for i in range(begin, end)]


def write(dataset: Path, kms: Mapping[str, str], files: Mapping[str, tuple[Any, list[Any]]], **options: Any) -> None:
    """A dataset of Avro files, or one more version of it."""
    src = dataset.parent / f"src {len(list(dataset.parent.glob('src *')))}"
    for path, (schema, rows) in files.items():
        (src / path).parent.mkdir(parents=True, exist_ok=True)
        with open(src / path, "wb") as file:
            fastavro.writer(file, schema, rows, **options)
    datasets.encrypt(src, dataset, kms).raise_for_failures()


class Read:
    """A read of a dataset, as Spark does it: every object travels by pickle to another process."""

    def __init__(self, dataset: Path, kms: Mapping[str, str], schema: Any = None, **options: str) -> None:
        source = AgsAvro(ds.CaseInsensitiveDict({"path": str(dataset), **kms, **options}))
        self.schema = source.schema() if schema is None else schema
        self.reader = pickle.loads(pickle.dumps(source)).reader(self.schema)
        self.partitions = [pickle.loads(pickle.dumps(one)) for one in self.reader.partitions()]

    def rows(self) -> list[dict[str, Any]]:
        reader = pickle.loads(pickle.dumps(self.reader))
        found = [row for one in self.partitions for batch in reader.read(one) for row in batch.to_pylist()]
        return sorted(found, key=str)


def test_types_are_those_of_spark_avro(dataset: Path, kms: dict[str, str]) -> None:
    write(dataset, kms, {"2026/a.avro": (ORDER, orders(0, 5)), "b.txt": (ORDER, []), "c.data": (ORDER, orders(5, 6))})
    read = Read(dataset, kms)
    kinds = [field.dataType.simpleString() for field in read.schema]
    assert kinds == ["bigint", "timestamp", "int", "map<string,string>"]
    assert all(field.nullable for field in read.schema)
    rows = read.rows()
    assert rows[3] == {"id": 3, "at": AT, "clock": 1000, "tags": [("a", None), ("b", "3")]}
    assert [row["id"] for row in rows] == list(range(5))
    assert [row["id"] for row in Read(dataset, kms, files="c.*").rows()] == [5]


@pytest.mark.parametrize("decoder", ["auto", "fastavro"])
def test_splits_columns_partitions_and_metadata(dataset: Path, kms: dict[str, str], decoder: str) -> None:
    files = {f"day={day}/x.avro": (ORDER, orders(day * 500, day * 500 + 500)) for day in (1, 2)}
    write(dataset, kms, files, sync_interval=300, codec="deflate")
    read = Read(dataset, kms, columns="day,id", metadata="_file", splitBytes="700", decoder=decoder)
    assert len(read.partitions) > 5
    assert [field.name for field in read.schema] == ["day", "id", "_file"]
    expected = [{"day": i // 500, "id": i, "_file": f"day={i // 500}/x.avro"} for i in range(500, 1500)]
    assert read.rows() == sorted(expected, key=str)
    only = t.StructType([t.StructField("day", t.StringType()), t.StructField("new", t.DoubleType())])
    assert Read(dataset, kms, only).rows() == sorted(
        [{"day": "1", "new": None}, {"day": "2", "new": None}] * 500, key=str
    )
    with pytest.raises(ValueError, match="did you mean 'clock'"):
        Read(dataset, kms, columns="clokc")


def test_schemas_that_differ_are_refused_or_merged(dataset: Path, kms: dict[str, str]) -> None:
    other = {
        "type": "record",
        "name": "o",
        "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": "string"}],
    }
    write(dataset, kms, {"a.avro": (ORDER, orders(0, 1)), "b.avro": (other, [{"id": 9, "note": "n"}])})
    with pytest.raises(ValueError, match=r"b\.avro.*mergeSchema"):
        Read(dataset, kms).rows()
    merged = Read(dataset, kms, mergeSchema="true")
    assert [field.name for field in merged.schema] == ["id", "at", "clock", "tags", "note"]
    assert [(row["id"], row["note"]) for row in merged.rows()] == [(0, None), (9, "n")]


def test_errors_name_the_file(dataset: Path, kms: dict[str, str]) -> None:
    write(dataset, kms, {"a.avro": ("string", ["x"])})
    with pytest.raises(FormatError, match=r"a\.avro"):
        Read(dataset, kms)
    with pytest.raises(ValueError, match="no file that matches"):
        Read(dataset, kms, files="*.orc")


def test_every_type(dataset: Path, kms: dict[str, str]) -> None:
    """Spark takes each type; the values are those that test_avro_arrow compares with fastavro."""
    files = {
        f"{string.ascii_lowercase[i % 26]}{i}.avro": (schema_of(kind), [{"c0": value} for value in values])
        for i, (kind, _, values, _) in enumerate(TYPES)
    }
    write(dataset, kms, files)
    for path, (_, rows) in files.items():
        assert len(Read(dataset, kms, files=path).rows()) == len(rows)


# ---- Spark itself

# What Spark's own source refuses, or gives another type of null.
APART = ("time-micros", "timestamp-nanos")
GOOD = [
    (kind, values, expected)
    for kind, arrow, values, expected in TYPES
    if arrow != "null" and not (isinstance(kind, dict) and kind.get("logicalType") in APART)
]


def all_types(count: int) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """A schema with a column of each type that Spark's own source takes; rows; and rows as Spark has them."""
    kinds = [json.loads(json.dumps(kind).replace('"inner"', f'"inner{i}"')) for i, (kind, _, _) in enumerate(GOOD)]
    given = [[values[k % len(values)] for _, values, _ in GOOD] for k in range(count)]
    expected = [[(found or values)[k % len(values)] for _, values, found in GOOD] for k in range(count)]

    def rows(found: list[list[Any]]) -> list[dict[str, Any]]:
        return [{f"c{i}": value for i, value in enumerate(row)} for row in found]

    return schema_of(*kinds), rows(given), rows(expected)


def as_spark_has_it(value: Any) -> Any:
    """A value of Avro as a row of PySpark has it: timestamps in local time, times of day as numbers."""
    if isinstance(value, dt.datetime) and value.tzinfo:
        return value.astimezone().replace(tzinfo=None)
    if isinstance(value, dt.time):
        return (value.hour * 3600 + value.minute * 60 + value.second) * 1000 + value.microsecond // 1000
    return value


@pytest.mark.spark
@pytest.mark.more
@pytest.mark.timeout(300)
def test_in_spark(dataset: Path, kms: dict[str, str], local_spark: LocalSpark) -> None:
    """Every type, read from what fastavro wrote, and written and read again: the values that were given."""
    schema, rows, expected = all_types(50)
    write(dataset, kms, {"a.avro": (schema, rows), "day=3/b.avro": (schema, rows)})
    session = local_spark.fresh()
    read = session.read.format("ags_avro").options(**kms, files="a.avro").load(str(dataset))
    found = [row.asDict(recursive=True) for row in read.collect()]
    assert len(found) == 50
    for i, (kind, _, _) in enumerate(GOOD):
        name = f"c{i}"
        wanted = [as_spark_has_it(row[name]) for row in expected]
        assert [row[name] for row in found] == wanted, kind
    assert read.filter("c1 > 0").count() == sum(row["c1"] > 0 for row in rows)
    copy = dataset.parent / "copy"
    options = {**kms, "wrappingKeyId": datasets.MASTER}
    read.coalesce(1).write.format("ags_avro").options(**options).mode("append").save(str(copy))
    again = session.read.format("ags_avro").options(**kms).load(str(copy))
    assert again.schema == read.schema
    assert [row.asDict(recursive=True) for row in again.collect()] == found


@pytest.mark.spark
@pytest.mark.more
@pytest.mark.timeout(300)
def test_like_sparks_own_source(tmp_path: Path, kms: dict[str, str]) -> None:
    """Spark's own Avro source gives of plain files what ours gives of sealed ones, and both write the same."""
    from spark_jobs import spark_env

    schema, rows, _ = all_types(20)
    (tmp_path / "types").mkdir()
    for codec in ("null", "deflate", "snappy", "bzip2", "xz", "zstandard"):
        with open(tmp_path / "types" / f"{codec}.avro", "wb") as file:
            fastavro.writer(file, schema, rows, codec=codec, sync_interval=1000)
    datasets.encrypt(tmp_path / "types", tmp_path / "types.enc", kms).raise_for_failures()
    env = spark_env(TZ="UTC")
    env["PYTHONPATH"] = os.pathsep.join([str(pyspark_folder()), env["PYTHONPATH"]])
    driver = Path(__file__).with_name("spark_avro_peer.py")
    command = [sys.executable, str(driver), str(avro_jar()), str(tmp_path), json.dumps(kms)]
    done = subprocess.run(command, capture_output=True, env=env, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[done.stderr.find("Traceback") :][:5000]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"].startswith("4.1.")
    assert answer["different"] == {}
