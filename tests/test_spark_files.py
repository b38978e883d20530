"""The writing half of the data sources, in this process. What only Spark can show is in test_spark_writing.py."""

from __future__ import annotations

import datetime as dt
import io
import pickle
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from datasets import MASTER, leftovers, make_kms, operations, read_tree

pytest.importorskip("pyspark")
fastavro = pytest.importorskip("fastavro")

import pyarrow as pa  # noqa: E402
from pyarrow import parquet  # noqa: E402
from pyspark.sql import types as t  # noqa: E402
from pyspark.sql.datasource import CaseInsensitiveDict  # noqa: E402

from ags_fast import Dataset  # noqa: E402
from ags_fast.errors import ConcurrentChangeError, JobEndedError  # noqa: E402
from ags_fast.jobs import sweep, verify_files  # noqa: E402
from ags_fast.spark.datasource import AgsAvro, AgsParquet, row_files  # noqa: E402
from ags_fast.spark.datasource.conversion import arrow_schema  # noqa: E402
from ags_fast.spark.datasource.partitioning import Partitioner, escape, texts_of  # noqa: E402
from ags_fast.spark.datasource.paths import partition_texts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOURCES = {"parquet": AgsParquet, "avro": AgsAvro}
FORMATS = pytest.mark.parametrize("format", ["parquet", "avro"])


class Write:
    """A write to a dataset, as Spark does it: what goes to another process goes by pickle."""

    def __init__(self, folder: Path, schema: t.StructType, format: str = "parquet", **options: Any) -> None:
        self.kms = make_kms(folder, keys=(MASTER, "other")) if not (folder / "kms.json").exists() else kms_of(folder)
        self.url = folder / "ds"
        self.schema, self.format = schema, format
        self.options = {"path": str(self.url), "wrappingKeyId": MASTER, **self.kms, **options}
        self.messages: list[Any] = []
        self.writer: Any = None

    def begin(self, overwrite: bool = False) -> Write:
        source = SOURCES[self.format](CaseInsensitiveDict(self.options))
        self.writer = pickle.loads(pickle.dumps(source)).writer(self.schema, overwrite)
        return self

    def task(self, batches: Iterable[pa.RecordBatch], number: int = 0) -> Any:
        """What a task does, once it has looked which partition it has."""
        message = pickle.loads(pickle.dumps(self.writer)).write_partition(number, batches)
        self.messages.append(pickle.loads(pickle.dumps(message)))
        return message

    def commit(self) -> Dataset:
        pickle.loads(pickle.dumps(self.writer)).commit(self.messages)
        return self.dataset

    def abort(self) -> None:
        pickle.loads(pickle.dumps(self.writer)).abort([None, *self.messages])

    @property
    def dataset(self) -> Dataset:
        return Dataset.open(self.url, kms=self.kms)

    def rows(self, pattern: str | None = None) -> list[dict[str, Any]]:
        dataset = self.dataset
        return [row for path in sorted(f.path for f in dataset.files(pattern)) for row in rows_of(dataset, path)]

    def clean(self) -> bool:
        return leftovers(self.url, self.kms) == []


def kms_of(folder: Path) -> dict[str, str]:
    file = str(folder / "kms.json")
    return {"encryption.kms-type": "local", "kms.local.path": file, "kms.local.key-file": f"{file}.key"}


def rows_of(dataset: Dataset, path: str) -> list[dict[str, Any]]:
    with dataset.open_file(path) as file:
        if path.endswith(".avro"):
            return list(fastavro.reader(io.BufferedReader(file)))
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows


def numbers(count: int, begin: int = 0, step: int = 100) -> Iterator[pa.RecordBatch]:
    for start in range(begin, begin + count, step):
        ids = range(start, min(start + step, begin + count))
        yield pa.RecordBatch.from_pydict(
            {"id": ids, "text": [f"a marker {n}" for n in ids], "k": [n % 3 if n % 7 else None for n in ids]},
            arrow_schema(SIMPLE),
        )


SIMPLE = t.StructType(
    [
        t.StructField("id", t.LongType(), False),
        t.StructField("text", t.StringType()),
        t.StructField("k", t.IntegerType()),
    ]
)


@FORMATS
def test_tasks_and_a_commit(tmp_path: Path, format: str) -> None:
    write = Write(tmp_path, SIMPLE, format).begin()
    write.task(numbers(250))
    write.task(numbers(250, 250), 1)
    write.task([], 2)
    assert write.dataset.version == 1
    assert sweep(write.url, kms=write.kms).rows == []
    dataset = write.commit()
    assert dataset.version == 2
    assert len(list(dataset.files())) == 2
    assert [row["id"] for row in write.rows()] == list(range(500))
    assert write.clean()
    verify_files(write.url, kms=write.kms).raise_for_failures()
    again = Write(tmp_path, SIMPLE, format).begin(overwrite=True)
    again.task(numbers(3))
    assert len(list(again.commit().files())) == 1
    assert again.clean()
    stored = b"".join(read_tree(write.url).values())
    assert b"a marker" not in stored


@FORMATS
def test_abort(tmp_path: Path, format: str) -> None:
    write = Write(tmp_path, SIMPLE, format).begin()
    write.task(numbers(250))
    write.abort()
    write.abort()  # Spark aborts, too, after a commit that has failed
    assert operations(write.dataset) == ["end"]
    assert not [path for path in read_tree(write.url) if not path.startswith("_ags/")]
    assert write.clean()
    with pytest.raises(JobEndedError, match="over"):
        write.task(numbers(1))  # of an attempt that Spark has not stopped yet


def test_the_second_attempt_counts(tmp_path: Path) -> None:
    write = Write(tmp_path, SIMPLE).begin()
    write.task(numbers(250))
    write.messages.clear()
    write.task(numbers(250))
    write.commit()
    assert len(write.rows()) == 250
    assert sum(not path.startswith("_ags/") for path in read_tree(write.url)) == 1
    assert write.clean()


@FORMATS
def test_no_rows(tmp_path: Path, format: str) -> None:
    """As Spark does it, a file keeps the schema."""
    write = Write(tmp_path, SIMPLE, format).begin()
    write.task([])
    (file,) = write.commit().files()
    with write.dataset.open_file(file.path) as opened:
        if format == "avro":
            assert len(fastavro.reader(io.BufferedReader(opened)).writer_schema["fields"]) == 3
        else:
            assert parquet.read_schema(opened).names == ["id", "text", "k"]
    more = Write(tmp_path, SIMPLE, format).begin()
    more.task([])
    assert operations(more.commit()) == ["write", "end"]  # there is nothing to add
    gone = Write(tmp_path, SIMPLE, format, partitionBy="k").begin(overwrite=True)
    gone.task([])
    assert list(gone.commit().files()) == []
    assert gone.clean()


@FORMATS
def test_rows_per_file(tmp_path: Path, format: str) -> None:
    write = Write(tmp_path, SIMPLE, format, maxRecordsPerFile="30").begin()
    write.task(numbers(200, step=70))
    dataset = write.commit()
    paths = sorted(file.path for file in dataset.files())
    assert [len(rows_of(dataset, path)) for path in paths] == [30] * 6 + [20]
    assert [row["id"] for row in write.rows()] == list(range(200))


@FORMATS
def test_partitions(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "OPEN_FILES", 2)
    monkeypatch.setattr(row_files, "BUFFER_NBYTES", 3000)
    write = Write(tmp_path, SIMPLE, format, partitionBy="K").begin()
    write.task(numbers(500))
    write.commit()
    nulls = write.rows("k=__HIVE_DEFAULT_PARTITION__/*")
    assert [row["id"] for row in nulls] == [n for n in range(500) if n % 7 == 0]
    assert nulls[0].keys() == {"id", "text"}
    for k in range(3):
        assert sorted(row["id"] for row in write.rows(f"k={k}/*")) == [n for n in range(500) if n % 7 and n % 3 == k]
    assert write.clean()


def test_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the files that are open nor the rows that are held grow with the number of partitions."""
    monkeypatch.setattr(row_files, "OPEN_FILES", 3)
    monkeypatch.setattr(row_files, "BUFFER_NBYTES", 20_000)
    most = {"open": 0, "held": 0}
    real = row_files.Rows.add

    def add(self: row_files.Rows, batch: pa.RecordBatch) -> None:
        real(self, batch)
        most["open"] = max(most["open"], sum(part.file is not None for part in self._parts.values()))
        most["held"] = max(most["held"], sum(rows.nbytes for part in self._parts.values() for rows in part.held))
        assert self._nbytes == sum(rows.nbytes for part in self._parts.values() for rows in part.held)

    monkeypatch.setattr(row_files.Rows, "add", add)
    schema = t.StructType([t.StructField("id", t.LongType()), t.StructField("p", t.LongType())])
    rows = pa.RecordBatch.from_pydict({"id": range(20_000), "p": [n * n % 50 for n in range(20_000)]})
    write = Write(tmp_path, schema, partitionBy="p").begin()
    write.task(rows.slice(start, 500) for start in range(0, 20_000, 500))
    dataset = write.commit()
    assert sorted(row["id"] for row in write.rows()) == list(range(20_000))
    for file in dataset.files():
        value = int(partition_texts(file.path)["p"] or -1)
        assert {row["id"] ** 2 % 50 for row in rows_of(dataset, file.path)} == {value}
    assert most["open"] == 3
    assert 10_000 < most["held"] <= 20_000


def test_names_of_partitions() -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 600, dt.UTC)
    for array, texts in (
        (pa.array([1, -1, None]), ["1", "-1", None]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array([dt.date(2026, 1, 2), dt.date(1, 1, 1)]), ["2026-01-02", "0001-01-01"]),
        (pa.array([moment], pa.timestamp("us", "UTC")), ["2026-01-02 03:04:05.0006"]),
        (pa.array([moment], pa.timestamp("us", "Asia/Tokyo")), ["2026-01-02 12:04:05.0006"]),
        (pa.array([moment.replace(tzinfo=None, microsecond=0)], pa.timestamp("us")), ["2026-01-02 03:04:05"]),
        (pa.array([Decimal("1.50"), Decimal("-0.00")], pa.decimal128(38, 2)), ["1.50", "0.00"]),
        (pa.array(["x y", ""]), ["x y", ""]),
        (pa.array([b"bin\xff"]), ["bin\ufffd"]),
        (
            pa.array([0.0, -0.0, 1.0, 0.1, 123456.789, 1e7, 9999999.0, 1e-3, 9.99e-4, 1.5e300, float("nan")]),
            ["0.0", "-0.0", "1.0", "0.1", "123456.789", "1.0E7", "9999999.0", "0.001", "9.99E-4", "1.5E300", "NaN"],
        ),
        (pa.array([float("inf"), -float("inf"), 100.0, -1234.5]), ["Infinity", "-Infinity", "100.0", "-1234.5"]),
        (pa.array([0.1, 3.4e38], pa.float32()), ["0.1", "3.4E38"]),
    ):
        assert texts_of(array) == texts, array.type
    assert escape("a=b/c%d:e\n{[]^} 'x\"#*?\\\x7fü.") == ("a%3Db%2Fc%25d%3Ae%0A%7B%5B%5D%5E} %27x%22%23%2A%3F%5C%7Fü.")


def test_partitions_that_share_a_name(tmp_path: Path) -> None:
    """Null and the empty string, as in Spark; by two columns, with values that must be escaped."""
    schema = t.StructType([t.StructField(name, t.StringType()) for name in ("a/b", "c", "v")])
    rows = [("", "1", "x"), (None, "1", "y"), ("/../", None, "z"), ("", None, "w"), ("", "1", "x2")]
    batch = pa.RecordBatch.from_pylist([dict(zip(("a/b", "c", "v"), row, strict=True)) for row in rows])
    write = Write(tmp_path, schema, partitionBy='["a/b", "c"]').begin()
    write.task([batch, batch.slice(0, 0)])
    dataset = write.commit()
    null = "__HIVE_DEFAULT_PARTITION__"
    folders = {file.path.rpartition("/")[0]: [r["v"] for r in rows_of(dataset, file.path)] for file in dataset.files()}
    assert folders == {
        f"a%2Fb={null}/c=1": ["x", "y", "x2"],
        f"a%2Fb=%2F..%2F/c={null}": ["z"],
        f"a%2Fb={null}/c={null}": ["w"],
    }
    assert partition_texts(f"a%2Fb=%2F..%2F/c={null}/x") == {"a/b": "/../", "c": None}


@pytest.mark.parametrize(
    ("columns", "message"),
    [(("nope",), "each column once"), (("k", "K"), "each column once"), (("id", "text", "k"), "at least must stay")],
)
def test_partitions_that_are_refused(columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partitioner(columns, SIMPLE)
    with pytest.raises(ValueError, match="cannot put it in a path"):
        Partitioner(["a"], t.StructType([t.StructField("a", t.ArrayType(t.LongType())), *SIMPLE.fields]))


@FORMATS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "nope"}, "the option co"),
        ({"version": "1"}, "for reading"),
        ({"columnKeys": '{"nope": "other"}'}, "nope|for ags_parquet"),
        ({"ifExists": "error"}, "mode append"),
    ],
)
def test_what_is_refused(tmp_path: Path, format: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Write(tmp_path, SIMPLE, format, **options).begin(overwrite=True)
    assert not (tmp_path / "ds").exists()


def test_if_exists(tmp_path: Path) -> None:
    """A dataset without files, such as a write that failed leaves, does not count."""
    Write(tmp_path, SIMPLE).begin().abort()
    first = Write(tmp_path, SIMPLE, ifExists="error").begin()
    first.task(numbers(3))
    first.commit()
    with pytest.raises(FileExistsError):
        Write(tmp_path, SIMPLE, ifExists="error").begin()
    ignored = Write(tmp_path, SIMPLE, ifExists="ignore").begin()
    ignored.task(numbers(3))
    ignored.writer.commit(ignored.messages)
    ignored.writer.abort([])
    assert operations(first.dataset) == ["end", "write"]
    options = {"path": str(tmp_path / "other"), **first.kms}
    with pytest.raises(ValueError, match="wrappingKeyId"):
        AgsParquet(CaseInsensitiveDict(options)).writer(SIMPLE, False)


def test_key_material(tmp_path: Path) -> None:
    """Spark's own reader opens what is written so: see test_dataset_keytools.py."""
    write = Write(tmp_path, SIMPLE, columnKeys='{"text": "other"}', keyMaterial="keytools").begin()
    write.task(numbers(3))
    write.commit()
    assert {file.key_material for file in write.dataset.files()} == {"keytools"}
    assert len(write.rows()) == 3
    for options in ({"keyMaterial": "pkmt1"}, {"keyMaterial": "keytools", "dekLength": "32"}):
        with pytest.raises(ValueError, match="key_material"):
            Write(tmp_path, SIMPLE, **options).begin()
    with pytest.raises(ValueError, match="ags_parquet"):
        Write(tmp_path, SIMPLE, "avro", keyMaterial="keytools").begin()


def test_keys_of_columns_and_codecs(tmp_path: Path) -> None:
    for number, codec in enumerate(("", "none", "uncompressed", "gzip", "zstd", "lz4", "brotli")):
        write = Write(tmp_path, SIMPLE, columnKeys='{"text": "other"}', compression=codec, dekLength="32").begin()
        write.task(numbers(10), number)
        write.commit()
    dataset = write.dataset
    assert len(write.rows()) == 70
    found = set()
    for file in dataset.files():
        with dataset.open_file(file.path) as opened:
            compression = parquet.ParquetFile(opened).metadata.row_group(0).column(0).compression
            found.add((compression, file.path.partition("-c000")[2]))
    assert found == {
        ("SNAPPY", ".snappy.parquet"),
        ("UNCOMPRESSED", ".parquet"),
        ("GZIP", ".gz.parquet"),
        ("ZSTD", ".zstd.parquet"),
        ("LZ4", ".lz4raw.parquet"),
        ("BROTLI", ".brotli.parquet"),
    }
    assert write.clean()


@pytest.mark.parametrize("codec", ["", "null", "deflate", "snappy", "zstandard", "uncompressed"])
def test_codecs_of_avro(tmp_path: Path, codec: str) -> None:
    write = Write(tmp_path, SIMPLE, "avro", codec=codec, blockSize="4k").begin()
    write.task(numbers(1000))
    write.commit()
    assert [row["id"] for row in write.rows()] == list(range(1000))


def test_the_schema_of_avro(tmp_path: Path) -> None:
    """Spark's names and unions; values outside of what Python's datetime has."""
    inner = t.StructType([t.StructField("z", t.DateType()), t.StructField("p", t.DecimalType(5, 1), False)])
    schema = t.StructType(
        [
            t.StructField("d", t.DecimalType(38, 10)),
            t.StructField("ts", t.TimestampType(), False),
            t.StructField("ntz", t.TimestampNTZType()),
            t.StructField("s", t.StructType([t.StructField("a", t.ArrayType(inner, False))])),
            t.StructField("m", t.MapType(t.StringType(), t.TimestampType())),
            t.StructField("b", t.BinaryType()),
        ]
    )
    write = Write(tmp_path, schema, "avro").begin()
    micros = 253_402_300_800_000_000 + 5  # the year 10000
    ntz = pa.array([micros, None], pa.int64()).cast(pa.timestamp("us"))
    arrow = arrow_schema(schema)
    columns = [
        pa.array([Decimal("1.5"), None], arrow.field("d").type),
        pa.array([-1, micros], pa.int64()).cast(pa.timestamp("us", "UTC")),
        ntz,
        pa.array([{"a": [{"z": dt.date(1, 1, 1), "p": Decimal("-1.5")}]}, None], arrow.field("s").type),
        pa.array([{"k": dt.datetime(2026, 1, 1)}, None], arrow.field("m").type),
        pa.array([b"\xff", None]),
    ]
    write.task([pa.RecordBatch.from_arrays(columns, schema=arrow)])
    dataset = write.commit()
    (file,) = dataset.files()
    with dataset.open_file(file.path) as opened:
        reader = fastavro.reader(io.BufferedReader(opened))
        fields = {field["name"]: field["type"] for field in reader.writer_schema["fields"]}
    assert reader.writer_schema["name"] == "topLevelRecord"
    decimal = {"type": "fixed", "logicalType": "decimal", "precision": 38, "scale": 10, "size": 16}
    assert fields["d"] == [{**decimal, "name": "topLevelRecord.d.fixed"}, "null"]
    assert fields["ts"] == {"type": "long", "logicalType": "timestamp-micros"}
    assert fields["ntz"] == [{"type": "long", "logicalType": "local-timestamp-micros"}, "null"]
    record = fields["s"][0]["fields"][0]["type"][0]["items"]
    assert record["name"] == "topLevelRecord.s.a"
    assert record["fields"][1]["type"]["name"] == "topLevelRecord.s.a.p.fixed"
    assert record["fields"][1]["type"]["size"] == 3


def test_types_that_avro_has_not(tmp_path: Path) -> None:
    for field, message in (
        (t.StructField("m", t.MapType(t.LongType(), t.LongType())), "map by bigint"),
        (t.StructField("not a name", t.LongType()), "not a name in Avro"),
    ):
        with pytest.raises(ValueError, match=message):
            Write(tmp_path, t.StructType([field]), "avro").begin()


def test_types_that_parquet_has_not(tmp_path: Path) -> None:
    for kind, name in ((t.NullType(), "x"), (t.ArrayType(t.VariantType()), "x.element")):
        with pytest.raises(ValueError, match=f"the column '{name}' is .*cast it"):
            Write(tmp_path, t.StructType([*SIMPLE.fields, t.StructField("x", kind)])).begin()


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Appends go side by side. Of overwrites, one wins; what was appended meanwhile stays."""
    writes = [Write(tmp_path, SIMPLE).begin() for _ in range(3)]
    for number, write in enumerate(writes):
        write.task(numbers(10, 10 * number))
        write.commit()
    assert sorted(row["id"] for row in writes[0].rows()) == list(range(30))
    assert writes[0].dataset.version == 4
    over, other = (Write(tmp_path, SIMPLE).begin(overwrite=True) for _ in range(2))
    late = Write(tmp_path, SIMPLE).begin()
    for number, write in enumerate((late, over, other)):
        write.task(numbers(10, 100 * number))
    late.commit()
    over.commit()
    with pytest.raises(ConcurrentChangeError):
        other.commit()
    other.abort()
    assert sorted(row["id"] for row in late.rows()) == [*range(10), *range(100, 110)]
    assert late.clean()
