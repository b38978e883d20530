"""The reading half of the data source "ags_parquet", in this process: all but what only Spark itself can show."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import datasets
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import datasource as ds
from pyspark.sql import types as t

from ags_fast import Dataset, jobs
from ags_fast.errors import ExpiredError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys import clear_cache
from ags_fast.keys.kms import local
from ags_fast.spark.datasource import AgsAvro, AgsParquet
from ags_fast.spark.datasource.filters import Bounds, may_pass
from ags_fast.spark.datasource.options import ReadOptions, WriteOptions
from ags_fast.spark.datasource.paths import is_hidden, partition_schema, partition_texts, partition_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def make(
    dataset: Path, kms: Mapping[str, str], tables: Mapping[str, pa.Table], rows: int = 1 << 20, **more: Any
) -> None:
    """A dataset of Parquet files, or one more version of it."""
    src = dataset.parent / f"src {len(list(dataset.parent.glob('src *')))}"
    for path, table in tables.items():
        (src / path).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, src / path, row_group_size=rows)
    datasets.encrypt(src, dataset, kms, **{"format": "parquet", **more}).raise_for_failures()


class Read:
    """A read of a dataset, as Spark does it: every object travels by pickle to another process."""

    def __init__(
        self, dataset: Path | str, kms: Mapping[str, str], schema: t.StructType | None = None, **options: str
    ) -> None:
        source = AgsParquet(ds.CaseInsensitiveDict({"path": str(dataset), **kms, **options}))
        self.schema = source.schema() if schema is None else schema
        self.reader = pickle.loads(pickle.dumps(source)).reader(self.schema)

    def push(self, *filters: Any) -> Read:
        assert list(self.reader.pushFilters(list(filters))) == list(filters)
        return self

    @property
    def partitions(self) -> list[Any]:
        return [pickle.loads(pickle.dumps(one)) for one in self.reader.partitions()]

    def table(self) -> pa.Table:
        reader = pickle.loads(pickle.dumps(self.reader))
        batches = [batch for partition in self.partitions for batch in reader.read(partition)]
        return pa.Table.from_batches(batches) if batches else pa.table({})

    def rows(self) -> list[dict[str, Any]]:
        return self.table().to_pylist()


def numbers(count: int = 1000, begin: int = 0) -> pa.Table:
    ids = range(begin, begin + count)
    return pa.table({"id": list(ids), "name": [f"n{i:07d}" for i in ids], "x": [i / 4 for i in ids]})


# ---------------------------------------------------------------- options


def test_options_are_text_of_any_case(kms: dict[str, str]) -> None:
    options = ReadOptions.of(
        {
            **kms,
            "PATH": "s3://bucket/orders.enc",
            "minversion": "3",
            "FILES": "year=*/*",
            "columns": "a, b",
            "splitBytes": "64m",
            "Missing": "HIDE",
            "pushdown": "true",
            "metadata": '["_file"]',
            "mergeschema": "True",
            "storageoptions": '{"anon": true, "client_kwargs": {"region_name": "eu-west-1"}}',
        }
    )
    assert options.place.url == "s3://bucket/orders.enc"
    assert (options.place.min_version, options.place.version) == (3, None)
    assert options.place.storage_options == {"anon": True, "client_kwargs": {"region_name": "eu-west-1"}}
    assert (options.files, options.columns, options.split_bytes) == ("year=*/*", ("a", "b"), 64 << 20)
    assert (options.missing, options.pushdown, options.merge_schema) == ("hide", True, True)
    assert options.metadata == ("_file",)
    assert options.place.kms == kms
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("colums", "a", "did you mean 'columns'"),
        ("path", "", "name the dataset"),
        ("splitBytes", "many", "number of bytes"),
        ("splitBytes", "0", "at least 1"),
        ("version", "-1", "whole number"),
        ("missing", "drop", "error, hide"),
        ("pushdown", "yes", "true or false"),
        ("metadata", "_size", "_file"),
        ("storageOptions", "[]", "JSON object"),
        ("columns", "[1]", "JSON list of names"),
        ("wrappingKeyId", "master", "no option 'wrappingKeyId' here"),
        ("kms.local.pth", "x", "did you mean"),
    ],
)
def test_impossible_options(kms: dict[str, str], name: str, value: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ReadOptions.of({"path": "x", **kms, name: value})


def test_a_kms_is_required() -> None:
    with pytest.raises(ValueError, match="which KMS"):
        ReadOptions.of({"path": "x"})


KEY = hashlib.sha256(b"a key").digest()[:16]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", KEY.hex()),
        ("secret", "x"),
        ("password", "x"),
        ("fs.s3a.secret.key", "x"),
        ("encryption.key-id", KEY.hex()),
        ("kms.endpoint", base64.b64encode(KEY).decode()),
        ("wrappingKeyId", base64.b64encode(bytes(range(32))).decode()),
        ("columnKeys", json.dumps({"ssn": KEY.hex()})),
        ("storageOptions", '{"secret": "x"}'),
        ("storageOptions", '{"client_kwargs": {"aws_secret_access_key": "x"}}'),
        ("storageOptions", json.dumps({"headers": [KEY.hex()]})),
        ("kms", '{"vault.token": "x"}'),
        ("vault.token", "x"),
    ],
)
@pytest.mark.parametrize("kind", [AgsParquet, AgsAvro])
def test_what_looks_like_a_key_is_refused(kind: Any, kms: dict[str, str], name: str, value: str) -> None:
    """At the first moment: what Spark has made of the options is not pickled, and the message repeats no value."""
    with pytest.raises(ValueError, match=r"secret|key") as caught:
        kind({"path": "x", **kms, name: value})
    assert KEY.hex() not in str(caught.value)
    assert value not in str(caught.value) or value == "x"


def test_options_that_only_resemble_keys_are_taken(kms: dict[str, str]) -> None:
    pin = f"12-{os.urandom(32).hex()}"
    arn = "arn:aws:kms:eu-west-1:111122223333:key/mrk-" + os.urandom(16).hex()
    options = {"path": f"/data/{KEY.hex()}", **kms, "pin": pin, "files": KEY.hex()}
    assert ReadOptions.of(options).place.pin == pin
    assert WriteOptions.of({"path": "x", **kms, "wrappingKeyId": arn}).wrapping_key_id == arn
    assert WriteOptions.of({"path": "x", **kms, "columnKeys": '{"a.b": "hr"}'}).column_keys == {"a.b": "hr"}


def test_properties_with_capital_letters_come_as_json(kms: dict[str, str]) -> None:
    """Spark gives names of options in lower case, and an encryption context has names of any."""
    context = {"kms.encryption-context.Team": "sales", "encryption.kms-type": "aws"}
    pytest.importorskip("boto3")
    assert ReadOptions.of({"path": "x", "kms": json.dumps(context)}).place.kms == context


# ---------------------------------------------------------------- paths


def test_partition_values_of_paths() -> None:
    path = "a/year=2026/b%3Dc=x%2Fy%20z/n=__HIVE_DEFAULT_PARTITION__/part-0.parquet"
    assert partition_texts(path) == {"year": "2026", "b=c": "x/y z", "n": None}
    assert partition_texts("year=2026/raw/part-0.parquet") == {}
    assert partition_texts("year=2026") == {}


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-20"], "int"),
        (["1", "3000000000"], "bigint"),
        (["1", "30000000000000000000"], "decimal(20,0)"),
        (["3000000000", "123456789012345678901234"], "decimal(24,0)"),
        (["1", "1.5"], "double"),
        (["3000000000", "1.5"], "string"),
        (["2026-01-31"], "date"),
        (["2026-02-31"], "string"),
        (["2026-01-31", "1"], "string"),
        (["2026-01-01 00:00:00"], "string"),
        (["true"], "string"),
        (["007"], "int"),
        (["x", "1"], "string"),
        (["__HIVE_DEFAULT_PARTITION__", "1"], "int"),
        (["__HIVE_DEFAULT_PARTITION__"], "string"),
        (["\u0661"], "string"),
    ],
)
def test_types_of_partition_values(texts: list[str], kind: str) -> None:
    assert partition_schema(f"p={text}/f" for text in texts).simpleString() == f"struct<p:{kind}>"


def test_declared_types_of_partition_values() -> None:
    schema = t.StructType(
        [
            t.StructField("A", t.LongType()),
            t.StructField("b", t.DecimalType(5, 2)),
            t.StructField("c", t.TimestampNTZType()),
            t.StructField("d", t.BooleanType()),
        ]
    )
    values = partition_values("a=7/b=1.50/c=2026-01-01 10:00:00/d=TRUE/e=x/f", schema)
    assert values == {"A": 7, "b": Decimal("1.50"), "c": dt.datetime(2026, 1, 1, 10), "d": True}
    for path in ("a=x/f", "a=99999999999999999999/f", "b=1.555/f", "b=10000/f", "d=yes/f"):
        with pytest.raises(ValueError, match="the value"):
            partition_values(path, schema)
    with pytest.raises(ValueError, match="timestamp_ntz"):
        partition_values("a=2026-01-01 10:00:00/f", t.StructType([t.StructField("a", t.TimestampType())]))


def test_files_that_spark_passes_over() -> None:
    assert [path for path in ("_SUCCESS", "a/.b", "_tmp/a", "a/_metadata") if not is_hidden(path)] == []
    assert [path for path in ("a", "a/b_", "_year=1/a", "a.b") if is_hidden(path)] == []


def test_files_of_other_partitions_are_refused() -> None:
    with pytest.raises(ValueError, match="other partition columns"):
        partition_schema(["year=1/a", "month=1/a"])
    with pytest.raises(ValueError, match="has none"):
        partition_schema(["year=1/a", "a"])


# ---------------------------------------------------------------- rows


def test_partitions_of_a_tree(kms: dict[str, str], dataset: Path) -> None:
    tables = {
        f"year={y}/c={c}/p.parquet": numbers(10, 10 * y)
        for y in (1, 2)
        for c in ("a%20b", "__HIVE_DEFAULT_PARTITION__")
    }
    make(dataset, kms, {**tables})
    with (
        Dataset.open(dataset, kms=kms).transaction(fsync=False) as transaction,
        transaction.create("_old/x.parquet", "parquet") as file,
    ):
        parquet.write_table(numbers(1), file)
    read = Read(dataset, kms, metadata="_file,_key_id")
    assert (
        read.schema.simpleString()
        == "struct<id:bigint,name:string,x:double,year:int,c:string,_file:string,_key_id:string>"
    )
    rows = read.rows()
    assert len(rows) == 40
    for row in rows:
        assert row["_file"] == f"year={row['year']}/c={'a%20b' if row['c'] else '__HIVE_DEFAULT_PARTITION__'}/p.parquet"
        assert row["id"] // 10 == row["year"]
        assert row["c"] in ("a b", None)
    assert {row["_key_id"] for row in rows} == {file.key_id for file in Dataset.open(dataset, kms=kms).files()}
    assert len(Read(dataset, kms, files="*/c=__HIVE*").rows()) == 20
    assert [row["id"] for row in Read(dataset, kms, files="_old*").rows()] == [0]
    pruned = Read(dataset, kms, columns="year, id")
    assert pruned.schema.names == ["year", "id"]
    assert pruned.table().column_names == ["year", "id"]
    with pytest.raises(ValueError, match=r"no column 'yaer'.*did you mean 'year'"):
        Read(dataset, kms, columns="yaer")
    with pytest.raises(ValueError, match=r"no file that matches 'x\*'"):
        Read(dataset, kms, files="x*")


def test_only_the_columns_asked_for_are_decrypted(kms: dict[str, str], dataset: Path, monkeypatch: Any) -> None:
    from ags_fast.parquet import view

    make(dataset, kms, {"a.parquet": numbers(100_000)})
    opened: list[Any] = []
    begin = view.PlainView.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        opened.append(self)

    monkeypatch.setattr(view.PlainView, "__init__", init)
    columns = {}
    chunks = parquet.ParquetFile(dataset.parent / "src 0" / "a.parquet").metadata.row_group(0)
    for i in range(3):
        columns[chunks.column(i).path_in_schema] = chunks.column(i).total_compressed_size

    def decrypted(read: Read) -> int:
        opened.clear()
        assert read.table().num_rows == 100_000
        return sum(one.decrypted for one in opened)

    whole = decrypted(Read(dataset, kms))
    assert whole >= sum(columns.values())
    for read in (
        Read(dataset, kms, columns="x"),
        Read(dataset, kms, t.StructType([t.StructField("x", t.DoubleType())])),
    ):
        assert columns["x"] <= decrypted(read) < columns["x"] + 5_000
    assert decrypted(Read(dataset, kms, t.StructType([]))) < 100  # to count rows needs no page
    assert decrypted(Read(dataset, kms, t.StructType([t.StructField("absent", t.LongType())]))) < 100


def test_parts_of_a_struct_are_decrypted_apart(kms: dict[str, str], dataset: Path) -> None:
    table = pa.table({"s": [{"a": i, "b": {"c": f"{i}", "d": i / 2}} for i in range(10)]})
    make(dataset, kms, {"a.parquet": table})
    schema = t.StructType().add(
        "S", t.StructType().add("b", t.StructType().add("d", t.DoubleType())).add("new", t.LongType())
    )
    assert Read(dataset, kms, schema).rows() == [{"S": {"b": {"d": i / 2}, "new": None}} for i in range(10)]


@pytest.mark.parametrize("rows", [100, 333, 1000])
def test_splits_read_every_row_once(kms: dict[str, str], dataset: Path, rows: int) -> None:
    make(
        dataset,
        kms,
        {"a.parquet": numbers(5000), "b.parquet": numbers(1, 5000), "c.parquet": numbers(1).slice(0, 0)},
        rows,
    )
    for split in ("1k", "7777", "40000", "1g"):
        read = Read(dataset, kms, splitBytes=split)
        if split == "1k":
            assert len(read.partitions) > 20
        assert sorted(row["id"] for row in read.rows()) == list(range(5001))
    assert len(Read(dataset, kms).partitions) == 3  # each is small, and there are few


def test_small_files_are_put_together(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {f"{i:03d}.parquet": numbers(1, i) for i in range(200)})
    read = Read(dataset, kms)
    assert 32 <= len(read.partitions) <= 128
    assert [row["id"] for row in read.rows()] == list(range(200))


def test_a_task_gets_more_files_of_a_disk_than_of_an_object_store(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {f"{i:03d}.parquet": numbers(1, i) for i in range(200)})
    url = f"memory://{os.urandom(8).hex()}/ds"
    datasets.encrypt(dataset.parent / "src 0", url, kms, format="parquet").raise_for_failures()
    local, store = (Read(place, kms, splitBytes="8m") for place in (dataset, url))
    assert 60 <= len(local.partitions) <= 70
    assert len(store.partitions) == 200
    assert sorted(part.path for one in store.partitions for part, _, _ in one.parts) == sorted(
        part.path for one in local.partitions for part, _, _ in one.parts
    )


def test_a_read_stays_at_its_version(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": numbers(10)})
    first = Read(dataset, kms)
    make(dataset, kms, {"b.parquet": numbers(10, 10)})
    assert len(first.rows()) == 10
    assert len(Read(dataset, kms).rows()) == 20
    assert len(Read(dataset, kms, version="2").rows()) == 10
    pin = Dataset.open(dataset, kms=kms).pin
    assert pin is not None
    assert len(Read(dataset, kms, pin=pin, minVersion="3").rows()) == 20
    with pytest.raises(IntegrityError):
        Read(dataset, kms, pin=pin[:-1] + ("0" if pin[-1] != "0" else "1"))


def test_tasks_read_neither_versions_nor_manifests(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {f"{i}.parquet": numbers(10, i) for i in range(3)})
    read = Read(dataset, kms)
    partitions = read.partitions
    (dataset / "_ags").rename(dataset / "elsewhere")
    assert sum(batch.num_rows for one in partitions for batch in read.reader.read(one)) == 30


def test_an_expired_version_is_told_from_tampering(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": numbers(10)})
    read = Read(dataset, kms)
    partitions = read.partitions
    make(dataset, kms, {"a.parquet": numbers(10, 10)}, overwrite=True)
    newest = Read(dataset, kms)
    jobs.expire(dataset, kms=kms, keep=1)
    with pytest.raises(ExpiredError, match="version 2 was expired"):
        list(read.reader.read(partitions[0]))
    partitions = newest.partitions
    datasets.object_of(dataset, kms, "a.parquet").unlink()
    with pytest.raises(IntegrityError, match=r"a\..*parquet is missing"):
        list(newest.reader.read(partitions[0]))


def test_a_log_that_is_gone(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": numbers(10)})
    read = Read(dataset, kms)
    shutil.rmtree(dataset / "_ags/log")
    for ask in (lambda: Read(dataset, kms), lambda: Read(dataset, kms, version="2"), lambda: read.partitions):
        with pytest.raises(IntegrityError, match="gone"):
            ask()


def test_errors_name_the_file(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"d/a.parquet": numbers(1000)})
    path = datasets.object_of(dataset, kms, "d/a.parquet")
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"d/a\.parquet") as caught:
        Read(dataset, kms).rows()
    assert caught.value.module is not None
    make(dataset.parent / "other", kms, {"a.parquet": numbers(1)}, format="ags1")
    assert Read(dataset.parent / "other", kms).rows() == numbers(1).to_pylist()  # a Parquet file that is a stream
    for n, content in enumerate((b"", b"id,name\n1,x\n", b"PAR1 but not really PAR1")):
        other = dataset.parent / f"text{n}"
        src = datasets.write_tree(dataset.parent / f"csv{n}", {"t.csv": content})
        datasets.encrypt(src, other, kms).raise_for_failures()
        with pytest.raises(FormatError, match=r"t\.csv: it is not a Parquet file"):
            Read(other, kms)
        with pytest.raises(FormatError, match=r"t\.csv: it is not a Parquet file"):
            Read(other, kms, t.StructType([t.StructField("id", t.LongType())])).rows()


# ---------------------------------------------------------------- schemas of many files


def test_files_that_differ(kms: dict[str, str], dataset: Path) -> None:
    more = pa.table({"id": [7], "name": ["x"], "x": [0.5], "new": [{"a": 1}]})
    make(dataset, kms, {"a.parquet": numbers(2), "b.parquet": more})
    with pytest.raises(ValueError, match=r"b\.parquet: it has a column 'new', unlike the first file.*mergeSchema"):
        Read(dataset, kms).rows()
    assert len(Read(dataset, kms, columns="id,x").rows()) == 3
    merged = Read(dataset, kms, mergeSchema="true")
    assert merged.schema.simpleString() == "struct<id:bigint,name:string,x:double,new:struct<a:bigint>>"
    assert [row["new"] for row in merged.rows()] == [None, None, {"a": 1}]
    make(dataset, kms, {"0.parquet": numbers(1).drop_columns(["x"]).append_column("s", pa.array([1]))})
    with pytest.raises(ValueError, match=r"it has no column 's'"):
        Read(dataset, kms, columns="id,s").rows()
    make(dataset, kms, {"c.parquet": pa.table({"id": ["text"]})})
    with pytest.raises(ValueError, match=r"'id' is bigint in '0\.parquet' and string in 'c\.parquet'"):
        Read(dataset, kms, mergeSchema="true")
    with pytest.raises(ValueError, match=r"c\.parquet: its column 'id' is string, and in the first file.*bigint"):
        Read(dataset, kms, columns="id").rows()
    with pytest.raises(ValueError, match=r"c\.parquet: the column 'id' is string there"):
        Read(dataset, kms, t.StructType([t.StructField("id", t.LongType())])).rows()


def test_declared_schemas(kms: dict[str, str], dataset: Path) -> None:
    table = pa.table({"a": pa.array([1, None], pa.int32()), "d": pa.array([Decimal("1.5"), None], pa.decimal128(5, 1))})
    make(dataset, kms, {"a.parquet": table})

    def read(**columns: t.DataType) -> list[dict[str, Any]]:
        return Read(dataset, kms, t.StructType([t.StructField(name, kind) for name, kind in columns.items()])).rows()

    assert read(A=t.LongType()) == [{"A": 1}, {"A": None}]
    assert read(a=t.DoubleType(), absent=t.StringType()) == [{"a": 1.0, "absent": None}, {"a": None, "absent": None}]
    assert read(d=t.DecimalType(10, 3), a=t.DecimalType(12, 2))[0] == {"d": Decimal("1.500"), "a": Decimal("1.00")}
    for wrong in (t.StringType(), t.ShortType(), t.DateType(), t.DecimalType(9, 0), t.ArrayType(t.IntegerType())):
        with pytest.raises(ValueError, match=r"a\.parquet: the column 'a' is int32 there"):
            read(a=wrong)
    with pytest.raises(ValueError, match="declared to have none"):
        Read(dataset, kms, t.StructType([t.StructField("a", t.IntegerType(), nullable=False)])).rows()
    make(dataset, kms, {"b.parquet": pa.table({"bb": [1], "Bb": [2]})})
    assert Read(dataset, kms, t.StructType([t.StructField("Bb", t.LongType())]), files="b*").rows() == [{"Bb": 2}]
    with pytest.raises(ValueError, match=r"b\.parquet: it has several columns 'BB': bb, Bb"):
        Read(dataset, kms, t.StructType([t.StructField("BB", t.LongType())]), files="b*").rows()


# ---------------------------------------------------------------- columns that the KMS refuses


def refuse(kms: dict[str, str], key_id: str) -> dict[str, str]:
    """The properties of the same KMS for a caller who may not use a key."""
    clear_cache()
    return {**kms, "encryption.allowed-key-ids": ",".join(name for name in datasets.MASTERS if name != key_id)}


def test_columns_whose_key_is_refused(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": numbers(10)}, column_keys={"name": "hr", "x": "finance"})
    assert Read(dataset, kms).rows() == numbers(10).to_pylist()
    mine = refuse(kms, "hr")
    with pytest.raises(KeyAccessError, match=r"a\.parquet: column 'name'"):
        Read(dataset, mine)
    hidden = Read(dataset, mine, missing="hide")
    assert hidden.schema.names == ["id", "x"]
    assert hidden.rows() == numbers(10).drop_columns(["name"]).to_pylist()
    assert Read(dataset, mine, columns="x").rows() == numbers(10).select(["x"]).to_pylist()  # needs no other key
    declared = t.StructType([t.StructField("id", t.LongType()), t.StructField("name", t.StringType())])
    assert Read(dataset, mine, t.StructType(declared.fields[:1])).rows() == numbers(10).select(["id"]).to_pylist()
    with pytest.raises(KeyAccessError, match=r"a\.parquet: column 'name'"):
        Read(dataset, mine, declared).rows()
    with pytest.raises(KeyAccessError, match=r"a\.parquet: the KMS refuses the key of the column 'name'"):
        Read(dataset, mine, declared, missing="hide").rows()  # nulls would look like data
    with pytest.raises(ValueError, match="its key is refused"):
        Read(dataset, mine, columns="name", missing="hide")


def test_refused_columns_as_nulls(kms: dict[str, str], dataset: Path) -> None:
    """The schema stays, every part of a file has its rows, and filters on what is refused give none."""
    table = numbers(3000)
    structs = pa.array([None if i % 5 == 0 else {"a": i, "b": str(i)} for i in range(3000)])
    table = table.append_column("s", structs)
    make(dataset, kms, {"a.parquet": table}, 100, column_keys={"id": "hr", "x": "finance", "s.b": "hr"})
    mine = refuse(kms, "hr")
    masked = Read(dataset, mine, missing="null", splitBytes="10k", pushdown="true")
    assert masked.schema == Read(dataset, kms).schema
    assert len(masked.partitions) > 3
    expected = [
        {**row, "id": None, "s": None if row["s"] is None else {**row["s"], "b": None}} for row in table.to_pylist()
    ]
    assert masked.rows() == expected
    assert Read(dataset, mine, missing="null", columns="name,id").rows() == [
        {"name": row["name"], "id": None} for row in expected
    ]
    declared = t.StructType([t.StructField("id", t.LongType()), t.StructField("name", t.StringType())])
    assert Read(dataset, mine, declared, missing="null").table()["id"].null_count == 3000
    assert masked.push(ds.GreaterThan(("id",), 5)).rows() == []
    assert Read(dataset, mine, missing="null", pushdown="true").push(ds.IsNull(("id",))).rows() == expected
    everything = Read(dataset, mine, declared, missing="null", columns="id", splitBytes="10k")
    assert everything.table().num_rows == 3000


def test_the_kms_is_asked_once_for_a_refused_key(kms: dict[str, str], dataset: Path, monkeypatch: Any) -> None:
    make(dataset, kms, {f"{i}.parquet": numbers(10) for i in range(5)}, column_keys={"name": "hr"})
    mine = refuse(kms, "hr")
    asked: list[str] = []
    unwrap = local.LocalKms.unwrap_key

    def counting(self: Any, wrapped: bytes, key_id: str) -> bytes:
        asked.append(key_id)
        return unwrap(self, wrapped, key_id)

    monkeypatch.setattr(local.LocalKms, "unwrap_key", counting)
    files = list(Dataset.open(dataset, kms=mine).sealed_files(missing="hide"))
    assert len(files) == 5
    assert asked.count("hr") <= 1
    for file in pickle.loads(pickle.dumps(files)):
        with file.open() as opened:
            assert parquet.read_schema(opened).names == ["id", "x"]
    assert asked.count("hr") <= 1


def test_partitions_hold_no_key_and_little_else(kms: dict[str, str], dataset: Path, monkeypatch: Any) -> None:
    from ags_fast.keys import envelope

    deks = []
    unwrap = envelope.Envelope.unwrap

    def recording(self: Any, *args: Any) -> bytes:
        deks.append(unwrap(self, *args))
        return deks[-1]

    monkeypatch.setattr(envelope.Envelope, "unwrap", recording)
    make(dataset, kms, {f"{i}.parquet": numbers(10) for i in range(40)}, column_keys={"name": "hr"})
    read = Read(dataset, kms, splitBytes="1g")
    sent = pickle.dumps((read.reader, read.reader.partitions()))
    read.rows()
    assert len(deks) > 40
    assert not any(dek in sent or dek.hex().encode() in sent for dek in deks)
    assert len(sent) < 40 * 1000


# ---------------------------------------------------------------- filters


def groups_read(monkeypatch: Any) -> list[int]:
    read: list[int] = []
    batches = parquet.ParquetFile.iter_batches

    def iter_batches(self: Any, rows: int, groups: list[int], *args: Any, **options: Any) -> Any:
        read.extend(groups)
        return batches(self, rows, groups, *args, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    return read


@pytest.mark.parametrize(
    ("filters", "groups"),
    [
        ([ds.EqualTo(("id",), 450)], [4]),
        ([ds.EqualTo(("ID",), 450)], [4]),
        ([ds.EqualNullSafe(("id",), 450)], [4]),
        ([ds.GreaterThan(("id",), 799)], [8, 9]),
        ([ds.GreaterThanOrEqual(("id",), 799)], [7, 8, 9]),
        ([ds.LessThan(("id",), 100)], [0]),
        ([ds.LessThanOrEqual(("id",), 100)], [0, 1]),
        ([ds.GreaterThan(("id",), 250), ds.LessThan(("id",), 350)], [2, 3]),
        ([ds.In(("id",), (5, 950, None))], [0, 9]),
        ([ds.IsNull(("id",))], []),
        ([ds.Not(ds.IsNotNull(("id",)))], []),
        ([ds.IsNotNull(("some",))], [0]),
        ([ds.IsNull(("some",))], list(range(1, 10))),
        ([ds.StringStartsWith(("name",), "n00003")], [3]),
        ([ds.EqualTo(("name",), "n0000999")], [9]),
        ([ds.LessThan(("x",), 25.0)], [0]),
        ([ds.GreaterThan(("x",), 1000.0)], list(range(10))),  # could be NaN
        ([ds.EqualTo(("day",), dt.date(2026, 1, 6))], [5]),
        ([ds.EqualTo(("at",), dt.datetime(2026, 1, 6, tzinfo=dt.UTC))], [5]),
        ([ds.EqualTo(("at",), dt.datetime(2026, 1, 6))], list(range(10))),  # of another kind
        ([ds.EqualTo(("d",), Decimal("4.00"))], [4]),
        ([ds.EqualTo(("s", "v"), 450)], [4]),
        ([ds.EqualTo(("absent",), 1)], []),
        ([ds.IsNull(("absent",))], list(range(10))),
        ([ds.Not(ds.EqualTo(("id",), 1))], list(range(10))),
        ([ds.StringContains(("name",), "7")], list(range(10))),
        ([ds.EqualTo(("p",), 1)], list(range(10))),
        ([ds.EqualTo(("p",), 2)], []),
    ],
    ids=str,
)
def test_filters_reach_row_groups(
    kms: dict[str, str], dataset: Path, monkeypatch: Any, filters: Any, groups: Any
) -> None:
    days = [dt.date(2026, 1, 1 + i // 100) for i in range(1000)]
    table = numbers(1000)
    table = table.append_column("some", pa.array([i if i < 100 else None for i in range(1000)]))
    table = table.append_column("day", pa.array(days))
    table = table.append_column(
        "at", pa.array([dt.datetime(d.year, d.month, d.day) for d in days], pa.timestamp("us", "UTC"))
    )
    table = table.append_column("d", pa.array([Decimal(i // 100) for i in range(1000)], pa.decimal128(5, 2)))
    table = table.append_column("s", pa.array([{"v": i} for i in range(1000)]))
    make(dataset, kms, {"p=1/a.parquet": table}, 100)
    schema = Read(dataset, kms).schema.add("absent", t.LongType())
    read = groups_read(monkeypatch)
    assert Read(dataset, kms, schema, pushdown="true").push(*filters).table() is not None
    assert read == groups


def test_filters_leave_out_files_before_they_are_opened(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {f"year={y}/a.parquet": numbers(10, y) for y in range(2020, 2027)})
    read = Read(dataset, kms, pushdown="true").push(ds.GreaterThan(("year",), 2024), ds.IsNotNull(("YEAR",)))
    assert [[file.path for file, _, _ in one.parts] for one in read.partitions] == [
        ["year=2025/a.parquet"],
        ["year=2026/a.parquet"],
    ]


def test_without_pushdown_spark_must_not_call_it(kms: dict[str, str], dataset: Path) -> None:
    """Spark refuses a reader that overrides pushFilters while its own setting is off."""
    make(dataset, kms, {"a.parquet": numbers(1)})
    plain, pushing = (Read(dataset, kms, pushdown=text).reader for text in ("false", "true"))
    assert type(plain).pushFilters is ds.DataSourceReader.pushFilters
    assert type(pushing).pushFilters is not ds.DataSourceReader.pushFilters


VALUES = [None, -5, 0, 7, 2.5, float("nan"), "", "a", "ab", "b", b"x", True, Decimal("1.5"), dt.date(2026, 1, 1)]


def passes(one: Any, value: Any) -> bool:
    """Spark's semantics, for one value."""
    name, other = type(one).__name__, getattr(one, "value", None)
    if name in ("IsNull", "IsNotNull"):
        return (value is None) == (name == "IsNull")
    if value is None or other is None:
        return name == "EqualNullSafe" and value is other
    low, high = ((v != v, v) if isinstance(v, float) else (False, v) for v in (value, other))
    if name in ("EqualTo", "EqualNullSafe"):
        return low == high or (low[0] and high[0])
    result = {"LessThan": low < high, "GreaterThan": low > high}.get(name.removesuffix("OrEqual"))
    assert result is not None
    return result or (name.endswith("OrEqual") and low == high)


@pytest.mark.parametrize(
    "kind", ["EqualTo", "EqualNullSafe", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual"]
)
def test_no_filter_leaves_out_what_passes(kind: str) -> None:
    """For every group of values of one type and every filter: if a value passes, the group is read."""
    numbers_ = [v for v in VALUES if isinstance(v, (int, float, Decimal)) and not isinstance(v, bool)]
    for family in (numbers_, [v for v in VALUES if isinstance(v, str)]):
        for value in [*family, None]:
            one = getattr(ds, kind)(("c",), value)
            for group in ([a, b] for a in [*family, None] for b in [*family, None]):
                known = [v for v in group if v is not None and v == v]
                low, high = (min(known), max(known)) if known else (None, None)
                floats = any(isinstance(v, float) for v in group)
                bounds = Bounds(
                    low if low is None or not floats else float(low),
                    high if high is None or not floats else float(high),
                    None in group,
                    any(v is not None for v in group),
                )
                if any(passes(one, v) for v in group):
                    known_of: dict[tuple[str, ...], Bounds] = {("c",): bounds}
                    assert may_pass([one], known_of.__getitem__), (one, group)


# ---------------------------------------------------------------- types


def test_wide_rows_come_in_small_batches(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": pa.table({"b": [os.urandom(1 << 20) for _ in range(64)]})})
    read = Read(dataset, kms)
    sizes = [batch.nbytes for one in read.partitions for batch in read.reader.read(one)]
    assert len(sizes) >= 4
    assert max(sizes) <= 20 << 20


def test_a_footer_does_not_name_classes(kms: dict[str, str], dataset: Path) -> None:
    """Spark's schema in a footer may hold a user-defined type, whose module pyspark would import."""
    evil = {"type": "udt", "class": None, "pyClass": "this_module_is_not_there.X", "sqlType": "long"}
    spark = {"type": "struct", "fields": [{"name": "id", "type": evil, "nullable": True, "metadata": {}}]}
    table = numbers(1).select(["id"])
    table = table.replace_schema_metadata({"org.apache.spark.sql.parquet.row.metadata": json.dumps(spark)})
    make(dataset, kms, {"a.parquet": table})
    assert Read(dataset, kms).schema.simpleString() == "struct<id:bigint>"


@pytest.mark.parametrize(
    "column",
    [pa.array([1.5], pa.float16()), pa.array([1], pa.time64("us")), pa.array([1], pa.timestamp("ns"))],
    ids=lambda one: str(one.type),
)
def test_types_that_spark_does_not_read(kms: dict[str, str], dataset: Path, column: pa.Array) -> None:
    make(dataset, kms, {"a.parquet": pa.table({"id": [1], "c": column})})
    with pytest.raises(ValueError, match=r"a\.parquet: the column 'c' is of the type .* Spark does not read"):
        Read(dataset, kms)
    assert Read(dataset, kms, columns="id").rows() == [{"id": 1}]


def test_spark_finds_modules_that_import_little() -> None:
    """Spark imports them in every session that uses any data source."""
    code = (
        "import sys, pyspark_ags_parquet as p, pyspark_ags_avro as a;"
        "print(p.DefaultSource.name(), a.DefaultSource.name());"
        "print(sorted({m for m in sys.modules if m.startswith('ags_fast')}), 'pyarrow.parquet' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": ""}
    answer = subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True, capture_output=True, text=True)
    names, loaded = answer.stdout.splitlines()
    assert names == "ags_parquet ags_avro"
    expected = ["ags_fast", "ags_fast._lazy", "ags_fast.errors", "ags_fast.spark", "ags_fast.spark.datasource"]
    assert loaded == f"{[*expected, 'ags_fast.spark.datasource.sources']} False"


# ---------------------------------------------------------------- names and sizes that are rare


def test_no_partition_is_no_rows(kms: dict[str, str], dataset: Path) -> None:
    """Where the files or a filter leave none, Spark has the reader read None."""
    make(dataset, kms, {"year=2026/a.parquet": numbers(3)})
    schema = t.StructType().add("id", t.LongType()).add("year", t.IntegerType())
    for read in (
        Read(dataset, kms, schema, files="none/*"),
        Read(dataset, kms, schema, pushdown="true").push(ds.EqualTo(("year",), 2025)),
    ):
        assert read.partitions == []
        assert list(read.reader.read(None)) == []
    avro = AgsAvro(ds.CaseInsensitiveDict({"path": str(dataset), **kms})).reader(schema)
    assert list(avro.partitions()) == []
    assert list(avro.read(None)) == []


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_a_column_with_a_dot_beside_a_struct(kms: dict[str, str], dataset: Path, names: tuple[str, str]) -> None:
    columns = {"a.b": list(range(1000)), "a": [{"b": 5000 + i, "c": "x"} for i in range(1000)]}
    table = pa.table({name: columns[name] for name in names})
    make(dataset, kms, {"a.parquet": table}, rows=100)
    assert Read(dataset, kms).rows() == table.to_pylist()
    for path, value in ((("a", "b"), 5500), (("a.b",), 500)):
        found = Read(dataset, kms, pushdown="true").push(ds.EqualTo(path, value)).rows()
        assert table.to_pylist()[500] in found
    found = Read(dataset, kms, pushdown="true").push(ds.EqualTo(("a", "c"), "y")).rows()
    assert found == []  # a path that one column has is known


def test_names_that_differ_in_case(kms: dict[str, str], dataset: Path) -> None:
    """Of two columns each is read by its own name, also where a folder has the name of one."""
    table = pa.table({"id": [1, 2], "ID": [3, 4]})
    make(dataset, kms, {"a.parquet": table})
    assert Read(dataset, kms).rows() == table.to_pylist()
    assert Read(dataset, kms, columns="ID").rows() == [{"ID": 3}, {"ID": 4}]
    with pytest.raises(ValueError, match="several columns 'Id': id, ID"):
        Read(dataset, kms, columns="Id")
    other = dataset.with_name("other")
    make(other, kms, {"id=7/a.parquet": pa.table({"ID": [3, 4]})})
    schema = t.StructType().add("id", t.IntegerType()).add("ID", t.LongType())
    read = Read(other, kms, schema, pushdown="true").push(ds.EqualTo(("ID",), 3))
    assert read.rows() == [{"id": 7, "ID": 3}, {"id": 7, "ID": 4}]


def test_parts_of_a_file_are_alike(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": numbers(50_000)})
    size = next(Dataset.open(dataset, kms=kms).sealed_files()).plain_length
    read = Read(dataset, kms, splitBytes=str(size // 3 * 2))
    assert [(begin, end) for one in read.partitions for _, begin, end in one.parts] == [
        (0, -(-size // 2)),
        (-(-size // 2), size + 1),
    ]


def test_parts_are_not_without_number(kms: dict[str, str], dataset: Path) -> None:
    make(dataset, kms, {"a.parquet": numbers(50_000)}, rows=10_000)
    read = Read(dataset, kms, splitBytes="1")
    assert len(read.partitions) <= 10_000
    assert sorted(row["id"] for part in read.partitions for b in read.reader.read(part) for row in b.to_pylist()) == [
        *range(50_000)
    ]


def test_escapes_are_characters_as_in_spark() -> None:
    assert partition_texts("a%FE=%FEx%C3%A9%/f.parquet") == {"a\xfe": "\xfex\xc3\xa9%"}
    assert partition_texts("a=%2525/f.parquet") == {"a": "%25"}


def test_an_engine_takes_sessions_alone() -> None:
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.session import SparkSession as Connect

    from ags_fast.spark import SparkEngine

    for other in (Connect.builder, Connect.Builder(), DataFrame.__new__(DataFrame), Connect, None, "local[1]"):
        with pytest.raises(TypeError, match="a SparkSession is required, not"):
            SparkEngine(other)
