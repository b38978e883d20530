"""Read the Avro files of a dataset: the schema, the partitions of a DataFrame, and the rows of one partition.

The driver reads manifests, and headers only for the schema. A task decodes the blocks that belong to its part of a
file: those whose sync marker begins there.
"""

from __future__ import annotations

import difflib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.pandas.types import from_arrow_type

from ags_fast.avro import AvroFile
from ags_fast.avro.blocks import MAX_BLOCK_NBYTES
from ags_fast.errors import AgsError
from ags_fast.spark.datasource import conversion, parquet_schema
from ags_fast.spark.datasource.parts import FilesPartition, chosen, in_bins
from ags_fast.spark.datasource.paths import partition_schema, partition_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql.datasource import InputPartition

    from ags_fast.dataset.dataset import Dataset, SealedFile
    from ags_fast.spark.datasource.options import ReadOptions

__all__ = ["partitions", "read", "reader", "schema"]

HEADERS = 16  # that are read at a time
BATCH_ROWS = 16384


class Reader(DataSourceReader):
    """Reads a DataFrame."""

    def __init__(self, options: ReadOptions, schema: t.StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return what each task reads."""
        return partitions(self._options.place.open(), None, self._options, self._schema)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read what one task reads, as Arrow batches."""
        return read(self._options, self._schema, partition)


def reader(options: ReadOptions, schema: t.StructType) -> DataSourceReader:
    """Return the reader of a DataFrame."""
    return Reader(options, schema)


def schema(options: ReadOptions) -> t.StructType:
    """Return the schema of the files: their columns, those of their paths, and the metadata columns asked for.

    Raises:
        ValueError: There is no file; Spark has no type for a column; or files that should be merged do not go together.
        FormatError: A file is not an Avro file of records.
    """
    dataset = options.place.open()
    files = sorted(_chosen(dataset, options), key=lambda file: file.path)
    if not files:
        which = "no Avro file" if options.files is None else f"no file that matches {options.files!r}"
        raise ValueError(f"version {dataset.version} of {dataset.url} has {which}: declare a schema with .schema(...)")
    if options.merge_schema:
        with ThreadPoolExecutor(HEADERS) as pool:
            found = parquet_schema.merged(pool.map(lambda file: (file.path, _schema_of(file)), files))
    else:
        found = _schema_of(files[0])
    fields = {field.name: field for field in found.fields}
    # As in Spark, a column of the paths wins over a column of the files.
    fields |= {field.name: field for field in partition_schema(file.path for file in files).fields}
    fields |= {name: t.StructField(name, t.StringType(), True) for name in options.metadata}
    if options.columns is None:
        return t.StructType(list(fields.values()))
    wanted = []
    for name in (*options.columns, *(name for name in options.metadata if name not in options.columns)):
        index = conversion.field_index(list(fields), name)
        if index is None:
            near = difflib.get_close_matches(name, fields, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(fields)}"
            raise ValueError(f"there is no column {name!r}: {hint}")
        wanted.append(list(fields.values())[index])
    return t.StructType(wanted)


def partitions(
    dataset: Dataset, files: Iterable[SealedFile] | None, options: ReadOptions, schema: t.StructType
) -> list[InputPartition]:
    """Return what each task reads of some files. No file is read for that.

    Args:
        dataset: The dataset.
        files: Its files, of `Dataset.sealed_files`; None: those that the options choose.
        options: The options.
        schema: The schema of the DataFrame.
    """
    return list(in_bins(dataset, _chosen(dataset, options) if files is None else files, options.split_bytes))


def read(options: ReadOptions, schema: t.StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read what one task reads, as Arrow batches of exactly the schema.

    Raises:
        FormatError: A file is not an Avro file. The message names the file, as those of all errors do.
        IntegrityError: A file is not what was written.
        ValueError: A file has other columns than the schema.
    """
    target = conversion.arrow_schema(schema)
    for file, begin, end in partition.parts if isinstance(partition, FilesPartition) else ():
        with _opened(file, options.max_block_nbytes) as found:
            given: dict[str, Any] = partition_values(file.path, schema)
            of_file = {"_file": file.path, "_key_id": file.key_id}
            given |= {name: of_file[name] for name in options.metadata}
            sources = {
                name: None if name in given else conversion.field_index(found.schema.names, name)
                for name in target.names
            }
            if options.inferred and not options.merge_schema:
                _compare(found, schema, sources, given, options)
            # Without a column of the file, one column says how many rows there are.
            columns = sorted({i for i in sources.values() if i is not None}) or [0][: len(found.schema)]
            names = [found.schema.names[i] for i in columns]
            for batch in found.batches(begin, end, columns=names, decoder=options.decoder, batch_size=BATCH_ROWS):
                arrays = []
                for field in target:
                    source = sources[field.name]
                    if source is None:
                        array = conversion.repeated(given.get(field.name), field.type, len(batch))
                    else:
                        array = conversion.conform(batch.column(columns.index(source)), field.type, field.name)
                    if not field.nullable and array.null_count:
                        raise conversion.TypeMismatchError(
                            f"the column {field.name!r} has nulls, and is declared to have none"
                        )
                    arrays.append(array)
                if arrays:
                    yield pa.RecordBatch.from_arrays(arrays, schema=target)
                else:
                    yield pa.RecordBatch.from_struct_array(pa.array([{}] * len(batch), pa.struct([])))


def _chosen(dataset: Dataset, options: ReadOptions) -> Iterator[SealedFile]:
    """Iterate over the AGS1 files that the options choose: with a pattern all that match, else those named as Avro."""
    for file in chosen(dataset, options, None):
        if file.format == "ags1" and (options.files is not None or file.path.endswith(".avro")):
            yield file


@contextmanager
def _opened(file: SealedFile, max_block_nbytes: int = 0) -> Iterator[AvroFile]:
    """Use a file of the dataset as an Avro file. Every error names the file."""
    try:
        with file.open() as view:
            yield AvroFile(view, times=False, max_block_nbytes=max_block_nbytes or MAX_BLOCK_NBYTES)
    except (AgsError, ValueError) as error:
        if file.path in str(error) or not (
            isinstance(error, AgsError) or type(error) in (ValueError, conversion.TypeMismatchError)
        ):
            raise
        named = type(error)(f"{file.path}: {error}")
        vars(named).update(vars(error))  # where the damage is
        raise named from error


def _schema_of(file: SealedFile) -> t.StructType:
    with _opened(file) as found:
        return _spark_schema(found.schema)


def _spark_schema(schema: pa.Schema) -> t.StructType:
    """Return the schema in Spark, in which everything may be null, as in Spark's own sources."""
    return t.StructType(
        [t.StructField(field.name, parquet_schema.nullable(_spark_type(field.type)), True) for field in schema]
    )


def _spark_type(kind: pa.DataType) -> t.DataType:
    if pa.types.is_timestamp(kind):
        return t.TimestampNTZType() if kind.tz is None else t.TimestampType()
    if pa.types.is_struct(kind):
        return t.StructType([t.StructField(field.name, _spark_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return t.MapType(t.StringType(), _spark_type(kind.item_type))
    if pa.types.is_list(kind):
        return t.ArrayType(_spark_type(kind.value_type))
    found: t.DataType = from_arrow_type(kind)
    return found


def _compare(
    found: AvroFile, schema: t.StructType, sources: dict[str, int | None], given: dict[str, Any], options: ReadOptions
) -> None:
    """Raise ValueError if a file has other columns than the first file of the dataset, which gave the schema."""
    advice = "set the option mergeSchema to true, choose files with the option files, or declare a schema"
    own = _spark_schema(found.schema)
    for field in schema.fields:
        source = sources[field.name]
        if field.name in given:
            continue
        if source is None:
            raise ValueError(f"it has no column {field.name!r}, unlike the first file of the dataset: {advice}")
        kind = own.fields[source].dataType
        if kind != parquet_schema.nullable(field.dataType):
            raise ValueError(
                f"its column {field.name!r} is {kind.simpleString()}, and in the first file of the dataset "
                f"{field.dataType.simpleString()}: {advice}"
            )
    known = {i for i in sources.values() if i is not None}
    folded = {name.casefold() for name in given}
    more = [name for i, name in enumerate(own.names) if i not in known and name.casefold() not in folded]
    if more and options.columns is None:
        raise ValueError(f"it has a column {more[0]!r}, unlike the first file of the dataset: {advice}")
