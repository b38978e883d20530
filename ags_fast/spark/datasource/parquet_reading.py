"""Read the Parquet files of a dataset: the schema, the partitions of a DataFrame, and the rows of one partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql.types import StructType

    from ags_fast.dataset.dataset import Dataset, SealedFile
    from ags_fast.spark.datasource.options import ReadOptions

__all__ = ["partitions", "read", "reader", "schema"]


class FilesPartition(InputPartition):
    """What one task reads: parts of files, with wrapped keys."""

    def __init__(self, parts: tuple[SealedFile, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"<{len(self.parts)} files>"


class Reader(DataSourceReader):
    """Reads a DataFrame."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return what each task reads."""
        return partitions(self._options.place.open(), None, self._options, self._schema)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read what one task reads, as Arrow batches."""
        return read(self._options, self._schema, partition)


def reader(options: ReadOptions, schema: StructType) -> DataSourceReader:
    """Return the reader of a DataFrame."""
    return Reader(options, schema)


def schema(options: ReadOptions) -> StructType:
    """Return the schema of the files."""
    dataset = options.place.open()
    first = min(dataset.sealed_files(options.files, columns=options.columns), key=lambda file: file.path)
    with first.open() as file:
        return from_arrow_schema(parquet.read_schema(file))


def partitions(
    dataset: Dataset, files: Iterable[SealedFile] | None, options: ReadOptions, schema: StructType
) -> list[InputPartition]:
    """Return what each task reads of these files; None: of those that the options choose."""
    if files is None:
        files = dataset.sealed_files(options.files, columns=schema.fieldNames(), missing=options.missing)
    return [FilesPartition((file,)) for file in files]


def read(options: ReadOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read what one task reads, as Arrow batches of the schema."""
    assert isinstance(partition, FilesPartition)
    target = to_arrow_schema(schema, timezone="UTC")
    for part in partition.parts:
        with part.open() as file, parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(columns=schema.fieldNames()):
                yield batch.cast(target)
