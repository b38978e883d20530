"""A driver that reads and writes Avro by Spark's own source and by ours: python spark_avro_peer.py JAR FOLDER '{KMS}'.

The folder has plain files in "types", and a dataset of them, "types.enc". Prints what differs, as JSON: names, and what
Spark's own source and ours gave.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import fastavro
import fastavro.schema
import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from ags_fast import jobs
from ags_fast.spark.datasource import register

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

AT = dt.datetime(2026, 2, 3, 12, 30, 45, 123456)
POINT = t.StructType([t.StructField("x", t.DoubleType()), t.StructField("tags", t.ArrayType(t.StringType()))])
# Types and values; each column is null in a row, too.
COLUMNS: list[tuple[t.DataType, list[Any]]] = [
    (t.BooleanType(), [True, False]),
    (t.ByteType(), [-128, 127]),
    (t.ShortType(), [-(2**15), 2**15 - 1]),
    (t.IntegerType(), [-(2**31), 2**31 - 1]),
    (t.LongType(), [-(2**63), 2**63 - 1]),
    (t.FloatType(), [0.5, float("-inf"), float("nan")]),
    (t.DoubleType(), [0.1, -1e300, float("nan")]),
    (t.StringType(), ["", "é\U0001f600", "x" * 3000]),
    (t.BinaryType(), [b"", b"\x00\xff", bytes(3000)]),
    (t.DateType(), [dt.date(1969, 12, 31), dt.date(9999, 12, 31)]),
    (t.TimestampType(), [AT, dt.datetime(1969, 12, 31, 23, 59, 59, 999999)]),
    (t.TimestampNTZType(), [AT, dt.datetime(1901, 1, 1)]),
    (t.DecimalType(9, 2), [Decimal("-9999999.99"), Decimal("0.01")]),
    (t.DecimalType(18, 0), [Decimal(10**18 - 1), Decimal(-1)]),
    (t.DecimalType(38, 10), [Decimal(f"-{'9' * 28}.{'9' * 10}"), Decimal("1.5")]),
    (t.ArrayType(t.LongType()), [[], [1, None, -1]]),
    (t.ArrayType(t.ArrayType(t.DateType())), [[[], None, [dt.date(2026, 1, 1), None]]]),
    (t.MapType(t.StringType(), t.IntegerType()), [{}, {"a": 1, "": None}]),
    (t.MapType(t.StringType(), t.DecimalType(20, 5)), [{"d": Decimal("1.00001")}]),
    (t.MapType(t.StringType(), POINT), [{"p": (0.5, ["q", None]), "n": None}]),
    (POINT, [(None, None), (1.5, ["é"])]),
    (t.ArrayType(POINT), [[(1.0, []), None]]),
    (t.StructType([t.StructField("at", t.TimestampNTZType()), t.StructField("in", POINT)]), [(AT, (2.0, None))]),
]


def frame(spark: SparkSession) -> DataFrame:
    """Every type, with nulls at any depth, and a column that has none."""
    schema = t.StructType([t.StructField(f"c{i}", kind) for i, (kind, _) in enumerate(COLUMNS)])
    schema.add("n", t.LongType(), False)
    rows = [
        (*(None if k % (len(values) + 1) == 0 else values[k % len(values)] for _, values in COLUMNS), k)
        for k in range(60)
    ]
    return spark.createDataFrame(rows, schema)


def outcome(read: Callable[[], DataFrame]) -> list[str]:
    """A schema and rows; what a reader raises in place of them."""
    try:
        found = read()
        return [found.schema.simpleString(), *sorted(repr(row) for row in found.collect())]
    except Exception as error:
        return [type(error).__name__, str(error)[:200]]


def main() -> None:
    jar, folder, kms = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    settings: dict[str, Any] = {
        "spark.master": "local[1]",
        "spark.jars": jar,
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
    }
    spark = SparkSession.builder.config(map=settings).getOrCreate()
    register(spark)
    different: dict[str, Any] = {}

    def theirs(path: Path) -> list[str]:
        return outcome(lambda: spark.read.format("avro").load(str(path)))

    def ours(dataset: Path, **options: str) -> list[str]:
        return outcome(lambda: spark.read.format("ags_avro").options(**kms, **options).load(str(dataset)))

    def compare(name: str, one: Any, other: Any) -> None:
        if one != other:
            different[name] = [one, other]

    for path in sorted((folder / "types").iterdir()):
        compare(path.name, theirs(path), ours(folder / "types.enc", files=path.name))

    written = frame(spark).coalesce(1)
    written.write.format("avro").save(str(folder / "theirs"))
    options = {**kms, "wrappingKeyId": datasets.MASTER, "codec": "deflate"}
    written.write.format("ags_avro").options(**options).mode("append").save(str(folder / "ours.enc"))
    jobs.decrypt_files(folder / "ours.enc", folder / "ours", kms=kms, **datasets.QUIET).raise_for_failures()
    datasets.encrypt(folder / "theirs", folder / "theirs.enc", kms).raise_for_failures()
    expected = theirs(folder / "theirs")
    assert len(expected) == 61, expected
    compare("what ours wrote, read by Spark's", expected, theirs(folder / "ours"))
    compare("what ours wrote", expected, ours(folder / "ours.enc"))
    compare("what Spark's wrote", expected, ours(folder / "theirs.enc"))
    schemas = []
    for name in ("theirs", "ours"):
        with open(next((folder / name).glob("**/*.avro")), "rb") as file:
            schemas.append(fastavro.schema.to_parsing_canonical_form(fastavro.reader(file).writer_schema))
    compare("schemas", *schemas)
    spark.stop()
    print(json.dumps({"version": pyspark.__version__, "different": different}))


if __name__ == "__main__":
    main()
