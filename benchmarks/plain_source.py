"""Data sources for Spark, in Python, of the shape of ours and without encryption: what a data source can do at best."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from ags_fast.avro import AvroFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

SPLIT_BYTES = 64 << 20
AVRO_BATCH_ROWS = 16384
AVRO_CODEC, AVRO_SYNC_BYTES = "deflate", 64 << 10  # deflate needs no other package
ROW_GROUP_BYTES = 64 << 20  # of batches that a writer collects


@dataclass
class Groups(InputPartition):
    """Row groups of a file."""

    path: str
    numbers: list[int]


@dataclass
class Written(WriterCommitMessage):
    """The file of a task, or none."""

    path: str | None


class PlainParquet(DataSource):
    """Parquet files of a folder, read and written by pyarrow."""

    @classmethod
    def name(cls) -> str:
        return "plain_parquet"

    def schema(self) -> StructType:
        import pyarrow.parquet as pq
        from pyspark.sql.pandas.types import from_arrow_schema

        folder = self.options["path"]
        first = min(name for name in os.listdir(folder) if name.endswith(".parquet"))
        return from_arrow_schema(pq.read_schema(os.path.join(folder, first)))

    def reader(self, schema: StructType) -> PlainReader:
        return PlainReader(self.options["path"], schema.fieldNames())

    def writer(self, schema: StructType, overwrite: bool) -> PlainWriter:
        return PlainWriter(self.options["path"])


@dataclass
class WholeFile(InputPartition):
    """A file."""

    path: str


class PlainAvro(DataSource):
    """Avro files of a folder, read by datafusion and written by fastavro."""

    @classmethod
    def name(cls) -> str:
        return "plain_avro"

    def schema(self) -> StructType:
        import pyarrow as pa
        from pyspark.sql.pandas.types import from_arrow_schema

        with open(min(avro_paths(self.options["path"])), "rb") as file:
            found = AvroFile(file).schema
        return from_arrow_schema(pa.schema([field.with_nullable(True) for field in found]))  # as files are in Spark

    def reader(self, schema: StructType) -> PlainAvroReader:
        return PlainAvroReader(self.options["path"])

    def writer(self, schema: StructType, overwrite: bool) -> PlainAvroWriter:
        return PlainAvroWriter(self.options["path"])


class PlainAvroReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def partitions(self) -> Sequence[InputPartition]:
        return [WholeFile(path) for path in sorted(avro_paths(self.folder))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import datafusion
        import pyarrow as pa

        assert isinstance(partition, WholeFile)
        config = datafusion.SessionConfig().with_target_partitions(1).with_batch_size(AVRO_BATCH_ROWS)
        frame = datafusion.SessionContext(config).read_avro(partition.path)
        for batch in frame.execute_stream():
            found = batch.to_pyarrow()
            yield pa.RecordBatch.from_arrays(found.columns, found.schema.names)


def avro_paths(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in os.listdir(folder)]


class PlainReader(DataSourceReader):
    def __init__(self, folder: str, columns: list[str]) -> None:
        self.folder = folder
        self.columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        import pyarrow.parquet as pq

        found: list[InputPartition] = []
        for name in sorted(os.listdir(self.folder)):
            path = os.path.join(self.folder, name)
            size, numbers = 0, []
            metadata = pq.read_metadata(path)
            for number in range(metadata.num_row_groups):
                size += metadata.row_group(number).total_byte_size
                numbers.append(number)
                if size >= SPLIT_BYTES:
                    found.append(Groups(path, numbers))
                    size, numbers = 0, []
            if numbers:
                found.append(Groups(path, numbers))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        assert isinstance(partition, Groups)
        with pq.ParquetFile(partition.path, pre_buffer=False) as file:
            yield from file.iter_batches(row_groups=partition.numbers, columns=self.columns, use_threads=False)


class FilesWriter(DataSourceArrowWriter):
    """Writes a file for each task. Files count as soon as they are there."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        for message in messages:
            if isinstance(message, Written) and message.path:
                os.unlink(message.path)


class PlainWriter(FilesWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = os.path.join(self.folder, f"part-{uuid.uuid4()}.parquet")
        writer, batches, nbytes = None, [], 0
        try:
            for batch in iterator:
                writer = writer or pq.ParquetWriter(path, batch.schema, compression="snappy")
                batches.append(batch)
                nbytes += batch.nbytes
                if nbytes >= ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(batches))
                    batches, nbytes = [], 0
            if writer is not None and batches:
                writer.write_table(pa.Table.from_batches(batches))
        finally:
            if writer is not None:
                writer.close()
        return Written(path if writer else None)


class PlainAvroWriter(FilesWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        import fastavro.write

        path = os.path.join(self.folder, f"part-{uuid.uuid4()}.avro")
        writer = None
        with open(path, "wb") as file:
            for batch in iterator:
                if writer is None:
                    schema = avro_schema({field.name: str(field.type) for field in batch.schema}, nullable=True)
                    writer = fastavro.write.Writer(file, schema, AVRO_CODEC, AVRO_SYNC_BYTES)
                names = batch.schema.names
                columns = [column.to_pylist() for column in batch.columns]
                for row in zip(*columns, strict=True):
                    writer.write(dict(zip(names, row, strict=True)))
            if writer is not None:
                writer.flush()
        return Written(path)


def avro_schema(types: dict[str, str], nullable: bool = False) -> dict[str, Any]:
    """Return the schema of records of these Arrow types."""
    kinds = {"int64": "long", "int32": "int", "double": "double", "string": "string"}
    fields = [
        {"name": name, "type": [kinds[kind], "null"] if nullable else kinds[kind]} for name, kind in types.items()
    ]
    return {"type": "record", "name": "row", "fields": fields}
