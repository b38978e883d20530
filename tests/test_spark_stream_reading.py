"""Streams of datasets: each file comes once, with the version that added it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("fastavro")

import pyarrow as pa
from datasets import MASTER, encrypt
from pyarrow import parquet
from pyspark.sql import datasource as ds
from test_spark_avro import ORDER, orders, write

from ags_fast import Dataset, ExpiredError, jobs
from ags_fast.spark.datasource import AgsAvro, AgsParquet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from spark_sessions import LocalSpark


class Stream:
    """A streaming query, as Spark does it: by pickle, and with offsets that outlive the reader."""

    def __init__(self, dataset: Path, kms: Mapping[str, str], source: Any = AgsAvro, **options: str) -> None:
        self.source = source(ds.CaseInsensitiveDict({"path": str(dataset), **kms, **options}))
        self.schema = self.source.schema()
        self.reader = self.source.streamReader(self.schema)
        self.at = self.reader.initialOffset()

    def batch(self) -> list[int]:
        """The ids of the next batch."""
        end = self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
        begin, self.at = self.at, end
        return self.replay(begin, end)

    def replay(self, begin: Any, end: Any) -> list[int]:
        parts = self.reader.partitions(begin, end)
        reader = pickle.loads(pickle.dumps(self.reader))
        found = [batch for part in parts for batch in reader.read(pickle.loads(pickle.dumps(part)))]
        return sorted(i for batch in found for i in batch.column("id").to_pylist())


def test_each_file_comes_once(dataset: Path, kms: dict[str, str]) -> None:
    write(dataset, kms, {"a.avro": (ORDER, orders(0, 3))})
    stream = Stream(dataset, kms)
    assert stream.batch() == [0, 1, 2]
    assert stream.batch() == []
    write(dataset, kms, {"b.avro": (ORDER, orders(3, 5))})
    write(dataset, kms, {"c.avro": (ORDER, orders(5, 6)), "d.txt": (ORDER, orders(7, 9))})
    begin = stream.at
    assert stream.batch() == [3, 4, 5]
    assert stream.replay(begin, stream.at) == [3, 4, 5]
    jobs.rekey_files(dataset, kms=kms, progress=False).raise_for_failures()
    jobs.rotate(dataset, what="kek", kms=kms)
    assert stream.batch() == []
    with Dataset.open(str(dataset), kms=kms).transaction() as transaction, transaction.create("e.avro") as file:
        file.write(plain(9))
    assert stream.batch() == [9]
    with Dataset.open(str(dataset), kms=kms).transaction() as transaction:
        transaction.remove("e.avro")
        with transaction.create("e.avro") as file:
            file.write(plain(10))
    assert stream.batch() == [10]


def test_a_batch_reads_no_manifests_of_older_versions(
    dataset: Path, kms: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a version brought is in the manifests that its own job wrote, however many files are there."""
    from ags_fast.dataset.tables import Tables

    for i in range(12):
        write(dataset, kms, {f"{i}.avro": (ORDER, orders(i, i + 1))})
    stream = Stream(dataset, kms, startingVersion="7")
    opened: list[str] = []
    rows_of = Tables.rows

    def counted(self: Tables, table: Any, envelope: Any) -> Any:
        opened.append(table.path)
        return rows_of(self, table, envelope)

    monkeypatch.setattr(Tables, "rows", counted)
    versions = [Dataset.open(str(dataset), kms=kms, version=number) for number in range(7, 14)]
    for number, version in enumerate(versions, 5):
        assert [file.path for file in version.sealed_files(added=True)] == [f"{number}.avro"]
    assert len(opened) == len(versions)
    assert stream.batch() == list(range(5, 12))


def plain(number: int) -> bytes:
    import io

    import fastavro

    file = io.BytesIO()
    fastavro.writer(file, ORDER, orders(number, number + 1))
    return file.getvalue()


def test_starting_version_and_limits(dataset: Path, kms: dict[str, str]) -> None:
    for i in range(5):
        write(dataset, kms, {f"{i}.avro": (ORDER, orders(i, i + 1))})
    newest = Dataset.open(str(dataset), kms=kms).version or 0
    assert Stream(dataset, kms, startingVersion=str(newest - 1)).batch() == [3, 4]
    assert Stream(dataset, kms, startingVersion="latest").batch() == []
    limited = Stream(dataset, kms, startingVersion=str(newest - 3), maxFilesPerTrigger="2")
    assert [limited.batch(), limited.batch(), limited.batch()] == [[1, 2], [3, 4], []]
    ending = Stream(dataset, kms)
    ending.reader.prepareForTriggerAvailableNow()
    write(dataset, kms, {"9.avro": (ORDER, orders(9, 10))})
    assert ending.batch() == [0, 1, 2, 3, 4]
    for wrong in ({"startingVersion": "0"}, {"maxFilesPerTrigger": "0"}, {"version": "1"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Stream(dataset, kms, **wrong)
    with pytest.raises(ValueError, match="newest version"):
        Stream(dataset, kms, startingVersion="99")


def test_expired_version_is_an_error_that_says_what_to_do(dataset: Path, kms: dict[str, str]) -> None:
    for i in range(3):
        write(dataset, kms, {f"{i}.avro": (ORDER, orders(i, i + 1))})
    stream = Stream(dataset, kms, startingVersion="1")
    jobs.expire(dataset, keep=1, kms=kms)
    with pytest.raises(ExpiredError, match="new checkpoint"):
        stream.batch()
    assert Stream(dataset, kms).batch() == [0, 1, 2]


def test_files_of_a_resumed_job_come_once(dataset: Path, kms: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    table(source / "0.parquet", 0)
    encrypt(source, dataset, kms, format="parquet").raise_for_failures()
    stream = Stream(dataset, kms, AgsParquet)
    assert stream.batch() == [0]
    table(source / "1.parquet", 1)
    (source / "2.parquet").write_bytes(b"not yet")
    first = encrypt(source, dataset, kms, format="parquet")
    assert len(first.failed) == 1
    assert stream.batch() == [1]
    table(source / "2.parquet", 2)
    second = encrypt(source, dataset, kms, format="parquet", resume="length")
    assert second.job_id != first.job_id  # a job makes one version
    assert stream.batch() == [2]


def table(path: Path, number: int) -> None:
    parquet.write_table(pa.table({"id": [number]}), path)


@pytest.fixture
def session(local_spark: LocalSpark) -> SparkSession:
    return local_spark.fresh()


def run(frame: DataFrame, sink: str, checkpoint: Path, target: Path, **options: str) -> None:
    """Run a query with all that is there now."""
    writer = frame.writeStream.format(sink).option("checkpointLocation", str(checkpoint)).options(**options)
    assert writer.trigger(availableNow=True).start(str(target)).awaitTermination(120)


@pytest.mark.spark
@pytest.mark.more
@pytest.mark.timeout(300)
def test_query_goes_on_from_its_checkpoint(
    dataset: Path, kms: dict[str, str], tmp_path: Path, session: SparkSession
) -> None:
    write(dataset, kms, {"a.avro": (ORDER, orders(0, 50))})
    for _ in range(2):
        frame = session.readStream.format("ags_avro").options(**kms).load(str(dataset)).select("id")
        run(frame, "parquet", tmp_path / "checkpoint", tmp_path / "out")
        if Dataset.open(str(dataset), kms=kms).version == 2:
            write(dataset, kms, {"b.avro": (ORDER, orders(50, 80))})
    found = sorted(row.id for row in session.read.parquet(str(tmp_path / "out")).collect())
    batch = session.read.format("ags_avro").options(**kms).load(str(dataset))
    assert found == sorted(row.id for row in batch.select("id").collect()) == list(range(80))


@pytest.mark.spark
@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["ags_parquet", "ags_avro"])
def test_from_dataset_to_dataset(format: str, kms: dict[str, str], tmp_path: Path, session: SparkSession) -> None:
    """What tasks have written, in DataFrames and in streams, comes once, and so does what a stream makes of it."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    writes = {"wrappingKeyId": MASTER, **kms}
    for number in range(3):
        frame = session.range(number * 100, number * 100 + 100, numPartitions=2)
        frame.write.format(format).options(**writes).mode("append").save(str(first))
        for source, target in ((first, second), (second, third)):
            stream = session.readStream.format(format).options(**kms).load(str(source))
            run(stream, format, tmp_path / f"checkpoint-{target.name}", target, **writes)
    for place in (first, second, third):
        found = session.read.format(format).options(**kms).load(str(place)).collect()
        assert sorted(row.id for row in found) == list(range(300)), place.name
    assert len(list(Dataset.open(str(third), kms=kms).files())) >= 3
