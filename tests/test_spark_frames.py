"""The data source "ags_parquet" in real Spark, against Spark's own reader of the same files in plaintext."""

from __future__ import annotations

import datetime as dt
import math
import os
import shutil
import signal
import threading
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pytest
from datasets import object_of, rows_of, version_of
from deadly_kms import Rules
from spark_jobs import wait_for

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
    pytest.skip("there is no Java runtime", allow_module_level=True)

import pyarrow as pa
from pyarrow import parquet

from ags_fast import Dataset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession
    from spark_sessions import LocalSpark

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.timeout(300)]

NOW = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)


@pytest.fixture
def spark(local_spark: LocalSpark) -> SparkSession:
    return local_spark.fresh(
        {
            "spark.sql.session.timeZone": "America/New_York",
            "spark.sql.python.filterPushdown.enabled": "true",
            "spark.sql.parquet.filterPushdown": "false",  # with it, Spark's reader loses rows of NaN
        }
    )


def ours(spark: Any, dataset: Path, kms: Mapping[str, str], schema: str | None = None, **options: str) -> Any:
    read = spark.read.format("ags_parquet").options(**kms, **options)
    return (read if schema is None else read.schema(schema)).load(str(dataset))


def encrypted(src: Path, dataset: Path, kms: Mapping[str, str], **more: Any) -> Path:
    datasets.encrypt(src, dataset, kms, **{"format": "parquet", **more}).raise_for_failures()
    return dataset


def plain(value: Any) -> Any:
    """A value as something that is equal to itself and has an order."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, dict):
        return sorted((plain(key), plain(one)) for key, one in value.items())
    if hasattr(value, "asDict"):
        return {name: plain(one) for name, one in value.asDict().items()}
    if type(value).__name__ == "VariantVal":
        return value.toJson()
    return [plain(one) for one in value] if isinstance(value, list) else value


def rows(frame: Any) -> list[str]:
    return sorted(str([plain(value) for value in row]) for row in frame.collect())


def same(mine: Any, spark_s: Any) -> None:
    assert mine.schema == spark_s.schema
    assert rows(mine) == rows(spark_s)


# ---------------------------------------------------------------- types

LEAVES = pa.struct({"k": pa.list_(pa.binary())})
MOMENTS = pa.struct({"a": pa.uint8(), "at": pa.timestamp("us", "UTC")})
COLUMNS: dict[str, pa.Array] = {
    "bool": pa.array([True, None, False]),
    "i8": pa.array([-128, None, 127], pa.int8()),
    "i16": pa.array([-(1 << 15), None, 1], pa.int16()),
    "i32": pa.array([-(1 << 31), None, 1], pa.int32()),
    "i64": pa.array([-(1 << 63), None, (1 << 63) - 1]),
    "u8": pa.array([255, None, 0], pa.uint8()),
    "u16": pa.array([65535, None, 0], pa.uint16()),
    "u32": pa.array([(1 << 32) - 1, None, 0], pa.uint32()),
    "u64": pa.array([(1 << 64) - 1, None, 0], pa.uint64()),
    "f32": pa.array([math.nan, None, -0.0], pa.float32()),
    "f64": pa.array([math.inf, None, 1e-300]),
    "nothing": pa.nulls(3),
    "dec5": pa.array([Decimal("-1.23"), None, Decimal("999.99")], pa.decimal128(5, 2)),
    "dec18": pa.array([Decimal("-1.23"), None, Decimal(10**15)], pa.decimal128(18, 2)),
    "dec38": pa.array([Decimal(10**35), None, Decimal("-0.01")], pa.decimal128(38, 2)),
    "dec38_38": pa.array([Decimal("0." + "9" * 38), None, None], pa.decimal128(38, 38)),
    "date": pa.array([dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
    "date64": pa.array([dt.date(1500, 2, 28), None, None], pa.date64()),
    "ntz_s": pa.array([NOW, None, None], pa.timestamp("s")),
    "ntz_ms": pa.array([NOW, None, None], pa.timestamp("ms")),
    "ntz_us": pa.array([NOW, None, dt.datetime(1, 1, 1)], pa.timestamp("us")),
    "utc_us": pa.array([NOW, None, dt.datetime(1500, 1, 1)], pa.timestamp("us", "UTC")),
    "berlin_ms": pa.array([NOW, None, None], pa.timestamp("ms", "Europe/Berlin")),
    "text": pa.array(["", None, "ünïcode 日本 \0 🔑"]),
    "large": pa.array(["x", None, ""], pa.large_string()),
    "view": pa.array(["x" * 20, None, ""], pa.string_view()),
    "dictionary": pa.array(["x", None, "x"]).dictionary_encode(),
    "json": pa.array(['{"a": 1}', None, "[]"], pa.json_()),
    "bytes": pa.array([b"", None, b"\0\xff"]),
    "fixed": pa.array([b"abc", None, b"\0\0\0"], pa.binary(3)),
    "large_bytes": pa.array([b"x", None, b""], pa.large_binary()),
    "duration": pa.array([5, None, -5], pa.duration("us")),
    "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
    "fixed_list": pa.array([[1, 2], None, [3, None]], pa.list_(pa.uint8(), 2)),
    "large_list": pa.array([["a"], None, []], pa.large_list(pa.large_string())),
    "lists": pa.array([[[1], None, []], None, []], pa.list_(pa.list_(pa.uint16()))),
    "map": pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
    "deep_map": pa.array([[(1, [{"k": [b"x", None]}])], None, []], pa.map_(pa.uint8(), pa.list_(LEAVES))),
    "struct": pa.array([{"x": 1, "y": {"z": "q", "d": Decimal("1.5")}}, None, {"x": None, "y": None}]),
    "structs": pa.array([[{"a": 255, "at": NOW}, None], None, []], pa.list_(MOMENTS)),
}  # fmt: skip


def test_types_of_arrow(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    table = pa.table(COLUMNS)
    parquet.write_table(pa.concat_tables([table] * 4), src / "a.parquet", row_group_size=5)
    parquet.write_table(table.slice(0, 0), src / "empty.parquet")
    parquet.write_table(table, src / "v2.parquet", data_page_version="2.0", compression="zstd", store_schema=False)
    dataset = encrypted(src, tmp_path / "ds", kms)
    # Without Arrow's own schema a file has other types: date64 is date, a duration a number, as Spark sees all of them.
    same(ours(spark, dataset, kms), spark.read.parquet(str(src)))
    some = ["deep_map", "utc_us", "i8", "struct"]
    same(ours(spark, dataset, kms, columns=",".join(some)), spark.read.parquet(str(src)).select(some))
    streams = encrypted(src, tmp_path / "streams", kms, format="ags1")
    same(ours(spark, streams, kms), spark.read.parquet(str(src)))
    assert ours(spark, dataset, kms).count() == 15
    assert ours(spark, dataset, kms, "absent int").count() == 15


@pytest.mark.parametrize("kind", ["INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"])
def test_types_of_spark(spark: SparkSession, kms: dict[str, str], tmp_path: Path, kind: str) -> None:
    spark.conf.set("spark.sql.parquet.outputTimestampType", kind)
    src = tmp_path / "src"
    frame = spark.sql(
        "select id, cast(id as byte) b, cast(id as short) s, cast(null as void) v, id % 3 = 0 t, "
        "timestamp'1900-01-01 00:00:00' + make_dt_interval(id, 3) ts, timestamp'9999-12-30 23:59:59' far, "
        "timestamp_ntz'0001-01-01 00:00:00' ntz, date'0001-01-01' + cast(id as int) d, "
        "make_dt_interval(cast(id as int)) i, cast('abc' as char(5)) c, cast('abc' as varchar(7)) vc, "
        "cast(id as decimal(9, 3)) d9, cast(id as decimal(20, 3)) d20, cast('x' as binary) bin, "
        "array(named_struct('x', id, 'y', array(cast(id as string)))) l, "
        "map('a', named_struct('at', timestamp'2024-01-01 00:00:00')) m "
        "from range(100)"
    )
    frame.repartition(3).write.parquet(str(src))
    dataset = encrypted(src, tmp_path / "ds", kms)
    same(ours(spark, dataset, kms), spark.read.parquet(str(src)))
    spark.conf.unset("spark.sql.parquet.outputTimestampType")


def test_variants(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    src = tmp_path / "src"
    spark.conf.set("spark.sql.variant.writeShredding.enabled", "false")
    spark.sql("select parse_json('{\"a\": [1, null]}') v, array(parse_json('1')) l").write.parquet(str(src))
    spark.conf.unset("spark.sql.variant.writeShredding.enabled")
    same(ours(spark, encrypted(src, tmp_path / "ds", kms), kms), spark.read.parquet(str(src)))


def test_declared_types(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    """Spark's reader widens the same types in the same way, and takes parts of structs by their names."""
    src = tmp_path / "src"
    src.mkdir()
    parquet.write_table(pa.table(COLUMNS), src / "a.parquet")
    dataset = encrypted(src, tmp_path / "ds", kms)
    for schema in (
        "i8 int, i16 bigint, i32 bigint, u8 int",
        "i32 double, f32 double",
        "i8 decimal(10, 0), i32 decimal(12, 2), dec5 decimal(7, 3)",
        "date timestamp_ntz, utc_us timestamp",
        "I32 int, TEXT string, new string",
        "struct struct<y: struct<z: string>>, structs array<struct<at: timestamp>>, text string",
        "bytes binary, fixed binary, text binary",
        "dictionary string, u32 bigint, u64 decimal(20, 0)",
    ):
        same(ours(spark, dataset, kms, schema), spark.read.schema(schema).parquet(str(src)))


# ---------------------------------------------------------------- trees


def test_partitioned_trees(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    src = tmp_path / "src"
    frame = spark.sql(
        "select id, case when id % 5 = 0 then null else id % 5 end n, concat('a/b %=', id % 2) text, "
        "date'2026-01-01' + cast(id % 2 as int) day, id % 2 + 0.5D f from range(60)"
    )
    frame.write.partitionBy("n", "text", "day", "f").parquet(str(src))
    dataset = encrypted(src, tmp_path / "ds", kms)
    theirs = spark.read.parquet(str(src))
    mine = ours(spark, dataset, kms)
    same(mine, theirs)
    assert theirs.schema["n"].dataType.simpleString() == "int"
    for where in ("n = 3 and id > 10", "n is null", "text like 'a%1'", "day > '2026-01-01'", "f < 1", "n in (1, 2)"):
        filtered = ours(spark, dataset, kms, pushdown="true").where(where)
        assert rows(filtered) == rows(theirs.where(where))
        assert filtered.rdd.getNumPartitions() <= mine.rdd.getNumPartitions()
    assert (
        ours(spark, dataset, kms, pushdown="true").where("n = 3").rdd.getNumPartitions() < mine.rdd.getNumPartitions()
    )
    names = ours(spark, dataset, kms, metadata="_file").select("_file").distinct().collect()
    assert {row["_file"] for row in names} == {file.path for file in Dataset.open(dataset, kms=kms).files()}


def test_files_whose_schemas_differ(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    for number, letter, digits in ((1, "a", 5), (2, "b", 9)):
        decimals = pa.array([Decimal(1)], pa.decimal128(digits, 2))
        table = pa.table({letter: [number], "s": [{letter: 1}], "d": decimals})
        parquet.write_table(table, src / f"{number}.parquet")
    dataset = encrypted(src, tmp_path / "ds", kms)
    theirs = spark.read.option("mergeSchema", "true").parquet(str(src))
    same(ours(spark, dataset, kms, mergeSchema="true"), theirs)
    with pytest.raises(Exception, match=r"2\.parquet.*mergeSchema"):
        ours(spark, dataset, kms).collect()


# ---------------------------------------------------------------- filters


def test_filters_of_spark(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    """Whatever is pushed, the rows are Spark's. Each query has a DataFrame of its own: see the next test."""
    src = tmp_path / "src"
    src.mkdir()
    table = pa.table(
        {
            "id": list(range(1000)),
            "x": [math.nan if i % 200 == 7 else i / 8 for i in range(1000)],
            "s": [None if i < 100 else f"n{i:04d}" for i in range(1000)],
            "at": pa.array([NOW + dt.timedelta(hours=i) for i in range(1000)], pa.timestamp("us", "UTC")),
            "local": pa.array([NOW + dt.timedelta(hours=i) for i in range(1000)], pa.timestamp("us")),
            "day": [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(1000)],
            "d": pa.array([Decimal(i) / 4 for i in range(1000)], pa.decimal128(9, 2)),
            "n": [{"v": i} for i in range(1000)],
            "flag": [i > 500 for i in range(1000)],
            "u": pa.array(range(1000), pa.uint32()),
        }
    )
    parquet.write_table(table, src / "a.parquet", row_group_size=50)
    dataset = encrypted(src, tmp_path / "ds", kms)
    theirs = spark.read.parquet(str(src))
    for where in (
        "id = 77", "id <=> 77", "id > 990", "id >= 990 and id < 995", "id in (1, 500, 2000)", "not id = 5", "id != 5",
        "x > 124", "x = double('NaN')", "x < 1", "not x < 100", "s is null", "s is not null and s < 'n0105'",
        "s like 'n09%'", "s = 'n0500'", "at > timestamp'2024-06-01 00:00:00'",
        "local > timestamp_ntz'2024-06-01 00:00:00'",
        "day = date'2024-02-01'", "day between date'2024-02-01' and date'2024-02-03'", "d = 2.5", "d > 249", "n.v = 3",
        "flag", "not flag", "u > 990", "id > 10 or s is null", "id + 1 = 5",
    ):  # fmt: skip
        frame = ours(spark, dataset, kms, pushdown="true")
        assert rows(frame.where(where)) == rows(theirs.where(where)), where


def test_spark_keeps_filters_with_a_frame(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    """A fault of Spark 4.1 to 4.3, of which docs/spark.md warns. When Spark has mended this, the warning can go."""
    src = datasets.write_tree(tmp_path / "src", {})
    parquet.write_table(pa.table({"id": list(range(100))}), src / "a.parquet", row_group_size=10)
    dataset = encrypted(src, tmp_path / "ds", kms)
    frame = ours(spark, dataset, kms, pushdown="true")
    assert frame.where("id >= 95").count() == 5
    assert frame.count() == 10, "the row groups of the query before"
    assert ours(spark, dataset, kms, pushdown="true").count() == 100
    frame = ours(spark, dataset, kms)  # without pushdown there is nothing to keep
    assert frame.where("id >= 95").count() == 5
    assert frame.count() == 100


def test_pushdown_that_spark_does_not_allow(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    src = datasets.write_tree(tmp_path / "src", {})
    parquet.write_table(pa.table({"a": [1]}), src / "a.parquet")
    dataset = encrypted(src, tmp_path / "ds", kms)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert ours(spark, dataset, kms).where("a = 1").count() == 1
        with pytest.raises(Exception, match=r"spark\.sql\.python\.filterPushdown\.enabled"):
            ours(spark, dataset, kms, pushdown="true").where("a = 1").count()
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


# ---------------------------------------------------------------- errors, deaths


def test_errors_come_through(spark: SparkSession, kms: dict[str, str], tmp_path: Path) -> None:
    src = datasets.write_tree(tmp_path / "src", {"t.csv": b"id,name\n1,x\n" * 100})
    other = encrypted(src, tmp_path / "other", kms, format="ags1")
    with pytest.raises(Exception, match=r"FormatError.*t\.csv: it is not a Parquet file"):
        ours(spark, other, kms)
    with pytest.raises(Exception, match="did you mean 'columns'"):
        ours(spark, other, kms, colums="a")
    with pytest.raises(Exception, match="looks like a secret") as caught:
        ours(spark, other, kms, password="canary-canary")
    assert "canary-canary" not in str(caught.value)
    parquet.write_table(pa.table({"a": list(range(10_000)), "b": list(range(10_000))}), src / "a.parquet")
    (src / "t.csv").unlink()
    dataset = encrypted(src, tmp_path / "ds", kms, column_keys={"b": "hr"})
    refused = {**kms, "encryption.allowed-key-ids": "master"}
    assert ours(spark, dataset, refused, missing="hide").columns == ["a"]
    masked = ours(spark, dataset, refused, missing="null", pushdown="true")
    assert masked.dtypes == [("a", "bigint"), ("b", "bigint")]
    masked.createOrReplaceTempView("masked")
    one = spark.sql("SELECT count(*), count(a), count(b), sum(b), sum(a) FROM masked").first()
    assert one == (10_000, 10_000, 0, None, sum(range(10_000)))
    assert spark.sql("SELECT * FROM masked WHERE a = 7").collect() == [(7, None)]
    for condition, count in (("b >= 0", 0), ("b IS NULL", 10_000)):  # filters stay with a frame: each has its own
        again = ours(spark, dataset, refused, missing="null", pushdown="true")
        assert again.where(condition).count() == count, condition
    assert ours(spark, dataset, refused, "a bigint").count() == 10_000
    with pytest.raises(Exception, match=r"KeyAccessError.*column 'b'"):
        ours(spark, dataset, refused)
    file = object_of(dataset, kms, "a.parquet")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match=r"IntegrityError.*a\.parquet"):
        ours(spark, dataset, kms).count()


def test_a_table_of_the_catalog_says_that_it_cannot(
    spark: SparkSession, kms: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Spark keeps neither path nor options of it: whoever reads it is told the way that works."""
    name = f"ags_{tmp_path.name}"
    write = spark.range(5).write.format("ags_parquet").options(**kms, wrappingKeyId="master").mode("append")
    with pytest.raises(Exception, match=r"saveAsTable.*cannot be one: use save\(URL\)"):
        write.saveAsTable(name)
    request.addfinalizer(lambda: spark.sql(f"DROP TABLE IF EXISTS {name}"))
    write.option("path", str(tmp_path / "ds")).saveAsTable(name)
    with pytest.raises(Exception, match=r"saveAsTable.*cannot be one: use save\(URL\)"):
        spark.table(name).collect()
    assert ours(spark, tmp_path / "ds", kms).count() == 5


def test_workers_that_are_killed(spark: SparkSession, tmp_path: Path) -> None:
    """In the middle of a file, twice; the rows are there once each."""
    rules = Rules(tmp_path / "kms")
    src = tmp_path / "src"
    src.mkdir()
    for i in range(6):
        parquet.write_table(pa.table({"a": list(range(1000 * i, 1000 * i + 1000))}), src / f"{i}.parquet")
    dataset = encrypted(src, tmp_path / "ds", rules.kms, double_wrap=False)  # asks for each file
    dataset_id, file = version_of(dataset, rules.kms).entry.dataset_id, rows_of(dataset, rules.kms)["3.parquet"].file
    rules.set(dataset_id=dataset_id, kill={file: 2}, files=(file,))
    frame = ours(spark, dataset, rules.kms, "a bigint")
    assert sorted(row.a for row in frame.collect()) == list(range(6000))
    assert sum(name == file for _, name in rules.calls()) >= 3
    rules.set(dataset_id=dataset_id, wait=0.3)

    def kill() -> bool:
        callers = [pid for pid, _ in rules.calls() if pid != os.getpid()]
        if len(callers) < 3:
            return False
        os.kill(callers[-1], signal.SIGKILL)
        return True

    killer = threading.Thread(target=wait_for, args=("a task", kill))
    killer.start()
    assert frame.groupBy().sum("a").collect()[0][0] == sum(range(6000))
    killer.join()
