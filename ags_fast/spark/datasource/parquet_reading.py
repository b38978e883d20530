"""Read the Parquet files of a dataset: the schema, the partitions of a DataFrame, and the rows of one partition.

The driver reads manifests, and footers only for the schema. A task opens each of its files by the wrapped keys that
its partition brings, and reads the row groups that begin in its part of the file.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader

from ags_fast.errors import AgsError, FormatError, KeyAccessError
from ags_fast.spark.datasource import conversion, parquet_schema
from ags_fast.spark.datasource.filters import UNKNOWN, Bounds, may_pass
from ags_fast.spark.datasource.options import METADATA_COLUMNS
from ags_fast.spark.datasource.parts import FilesPartition, chosen, in_bins
from ags_fast.spark.datasource.paths import partition_schema, partition_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql.datasource import InputPartition

    from ags_fast.dataset.dataset import Dataset, SealedFile
    from ags_fast.spark.datasource.options import ReadOptions

__all__ = ["partitions", "read", "reader", "schema"]

MAGIC = b"PAR1"
BATCH_ROWS, BATCH_NBYTES = 1 << 16, 16 << 20  # the most of one Arrow batch, about
NAMED = (ValueError, conversion.TypeMismatchError)
FOOTERS = 16  # that are read at a time


class Reader(DataSourceReader):
    """Reads a DataFrame."""

    def __init__(self, options: ReadOptions, schema: t.StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters: tuple[Any, ...] = ()

    def partitions(self) -> list[InputPartition]:
        """Return what each task reads."""
        return partitions(self._options.place.open(), None, self._options, self._schema, self._filters)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read what one task reads, as Arrow batches."""
        return read(self._options, self._schema, partition, self._filters)


class FilteringReader(Reader):
    """Reads a DataFrame, without row groups and files in which no row can pass Spark's filters.

    A class of its own, since Spark refuses a reader that takes filters unless its own setting allows that.
    """

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 (Spark's name)
        """Take filters. Spark is to apply all of them again."""
        self._filters = tuple(filters)
        return filters


def reader(options: ReadOptions, schema: t.StructType) -> DataSourceReader:
    """Return the reader of a DataFrame."""
    return (FilteringReader if options.pushdown else Reader)(options, schema)


# ---------------------------------------------------------------------------------------------------------- the schema


def schema(options: ReadOptions) -> t.StructType:
    """Return the schema of the files: their columns, those of their paths, and the metadata columns asked for.

    Raises:
        ValueError: There is no file; Spark has no type for a column; or files that should be merged do not go together.
        KeyAccessError: The KMS refuses a column's key, and the option missing is "error".
    """
    dataset = options.place.open()
    files = sorted(chosen(dataset, options, options.columns), key=lambda file: file.path)
    if not files:
        which = "no file" if options.files is None else f"no file that matches {options.files!r}"
        raise ValueError(f"version {dataset.version} of {dataset.url} has {which}: declare a schema with .schema(...)")
    if options.merge_schema:
        with ThreadPoolExecutor(FOOTERS) as pool:
            found = parquet_schema.merged(pool.map(lambda file: (file.path, _schema_of(file, options.columns)), files))
    else:
        found = _schema_of(files[0], options.columns)
    fields = {field.name: field for field in found.fields}
    # As in Spark, a column of the paths wins over a column of the files.
    fields |= {field.name: field for field in partition_schema(file.path for file in files).fields}
    fields |= {name: t.StructField(name, t.StringType(), True) for name in options.metadata}
    if options.columns is None:
        return t.StructType(list(fields.values()))
    more = (name for name in options.metadata if name not in options.columns)
    indices = {name: conversion.field_index(list(fields), name) for name in (*options.columns, *more)}
    for name, index in indices.items():
        if index is None:
            with _opened(files[0]) as (_, opened):
                raise _no_column(name, [*opened.schema_arrow.names, *fields])
    return t.StructType([list(fields.values())[index] for index in indices.values() if index is not None])


def _no_column(name: str, names: list[str]) -> ValueError:
    near = difflib.get_close_matches(name, names, 1, 0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(dict.fromkeys(names))}"
    return ValueError(f"there is no column {name!r}, or its key is refused and the option missing hides it: {hint}")


def _schema_of(file: SealedFile, columns: Sequence[str] | None) -> t.StructType:
    with _opened(file) as (_, found):
        return parquet_schema.spark_schema(found.metadata, columns)


# ------------------------------------------------------------------------------------------------------- the partitions


def partitions(
    dataset: Dataset,
    files: Iterable[SealedFile] | None,
    options: ReadOptions,
    schema: t.StructType,
    filters: Sequence[Any] = (),
) -> list[InputPartition]:
    """Return what each task reads of some files. No file is read for that.

    Args:
        dataset: The dataset.
        files: Its files, of `Dataset.sealed_files`; None: those that the options choose.
        options: The options.
        schema: The schema of the DataFrame.
        filters: Spark's filters; files whose partition values cannot pass are left out.
    """
    if files is None:
        files = chosen(dataset, options, schema.fieldNames())
    passing = (file for file in files if not filters or _may_have(file, schema, filters))
    return list(in_bins(dataset, passing, options.split_bytes))


def _may_have(file: SealedFile, schema: t.StructType, filters: Sequence[Any]) -> bool:
    """Return whether the values of a file's path may pass the filters."""
    values, names = partition_values(file.path, schema), schema.fieldNames()

    def bounds_of(path: tuple[str, ...]) -> Bounds:
        index = conversion.field_index(names, path[0])
        known = len(path) == 1 and index is not None and names[index] in values
        return Bounds.of(values[names[index or 0]]) if known else UNKNOWN

    return may_pass(filters, bounds_of)


# ------------------------------------------------------------------------------------------------------------- the rows


def read(
    options: ReadOptions, schema: t.StructType, partition: InputPartition, filters: Sequence[Any] = ()
) -> Iterator[pa.RecordBatch]:
    """Read what one task reads, as Arrow batches of exactly the schema.

    Raises:
        FormatError: A file is not a Parquet file. The message names the file, as those of all errors do.
        IntegrityError: A file is not what was written.
        KeyAccessError: The KMS refuses a key.
        ValueError: A file has other columns than the schema.
    """
    target = conversion.arrow_schema(schema)
    for file, begin, end in partition.parts if isinstance(partition, FilesPartition) else ():
        with _opened(file) as (view, found):
            plan = _Plan(options, schema, target, file, found, frozenset(getattr(view, "hidden", ())))
            masked, count = getattr(view, "masked", ()), found.metadata.num_row_groups
            starts = [_start(found.metadata.row_group(number), masked) for number in range(count)]
            yield from plan.batches([i for i in range(count) if begin <= starts[i] < end and plan.may_have(i, filters)])


@contextmanager
def _opened(file: SealedFile) -> Iterator[tuple[Any, parquet.ParquetFile]]:
    """Use a file of the dataset as a Parquet file. Every error names the file."""
    try:
        with file.open() as view:
            if view.seek(0, 2) < 12 or (view.seek(0), view.read(len(MAGIC)))[1] != MAGIC:
                raise FormatError("it is not a Parquet file: choose files with the option files")
            view.seek(0)
            try:
                found = parquet.ParquetFile(view, coerce_int96_timestamp_unit="us")
            except pa.ArrowInvalid as error:
                raise FormatError(f"it is not a Parquet file that can be read: {error}") from None
            with found:
                yield view, found
    except (AgsError, ValueError) as error:
        if file.path in str(error) or not (isinstance(error, AgsError) or type(error) in NAMED):
            raise
        named = type(error)(f"{file.path}: {error}")
        vars(named).update(vars(error))  # where the damage is
        raise named from error


def _start(group: Any, masked: Sequence[str]) -> int:
    """Return where a row group begins in its file: pages of nulls are elsewhere."""
    columns = (group.column(i) for i in range(group.num_columns))
    column = next((column for column in columns if column.path_in_schema not in masked), None)
    if column is None:
        return 0
    pages = (column.dictionary_page_offset, column.data_page_offset)
    return int(min(offset for offset in pages if offset is not None))


class _Plan:
    """How one file gives the columns of the schema."""

    def __init__(
        self,
        options: ReadOptions,
        schema: t.StructType,
        target: pa.Schema,
        file: SealedFile,
        found: parquet.ParquetFile,
        hidden: frozenset[str],
    ) -> None:
        self._schema, self._target, self._found = schema, target, found
        self._names: list[str] = found.schema_arrow.names
        paths = [found.schema.column(i).path for i in range(len(found.schema))]
        # A column "a.b" and the field b of a struct a have one path: of these, nothing is known.
        counts = Counter(paths)
        self._leaves = {path: i if counts[path] == 1 else None for i, path in enumerate(paths)}
        self._given = partition_values(file.path, schema)
        if METADATA_COLUMNS[0] in options.metadata:
            self._given["_file"] = file.path
        if METADATA_COLUMNS[1] in options.metadata:
            self._given["_key_id"] = file.key_id
        self._sources = {  # by the name of a column: its name in the file, or None
            name: None if name in self._given else self._source(name, hidden) for name in schema.fieldNames()
        }
        if options.inferred:
            self._compare(options)

    def _source(self, name: str, hidden: frozenset[str]) -> str | None:
        index = conversion.field_index(self._names, name)
        if index is not None:
            return self._names[index]
        folded = name.casefold()
        if any(one.casefold() == folded or one.casefold().startswith(folded + ".") for one in hidden):
            raise KeyAccessError(f"the KMS refuses the key of the column {name!r}, which the schema has")
        return None

    def _compare(self, options: ReadOptions) -> None:
        """Raise ValueError if the schema was taken from a file that has other columns than this file."""
        advice = "set the option mergeSchema, or declare a schema with .schema(...)"
        own = parquet_schema.spark_schema(self._found.metadata, [name for name in self._sources.values() if name])
        kinds = {field.name: field.dataType for field in own.fields}
        for field in self._schema.fields:
            source = self._sources[field.name]
            if field.name in self._given or options.merge_schema:
                continue
            if source is None:
                raise ValueError(f"it has no column {field.name!r}, unlike the first file of the dataset: {advice}")
            if kinds[source] != parquet_schema.nullable(field.dataType):
                raise ValueError(
                    f"its column {field.name!r} is {kinds[source].simpleString()}, and in the first file of the "
                    f"dataset {field.dataType.simpleString()}: {advice}"
                )
        if options.columns is None and not options.merge_schema:
            known = {name for name in self._sources.values() if name} | {name.casefold() for name in self._given}
            more = [name for name in self._names if name not in known and name.casefold() not in known]
            if more:
                raise ValueError(f"it has a column {more[0]!r}, unlike the first file of the dataset: {advice}")

    def may_have(self, number: int, filters: Sequence[Any]) -> bool:
        """Return whether a row group may have rows that pass, by its statistics."""
        group = self._found.metadata.row_group(number)
        if not group.num_rows:
            return False
        return may_pass(filters, lambda path: self._bounds(group, path)) if filters else True

    def _bounds(self, group: Any, path: tuple[str, ...]) -> Bounds:
        index = conversion.field_index(self._schema.fieldNames(), path[0])
        if index is None:
            return UNKNOWN
        field = self._schema.fields[index]
        if field.name in self._given:
            return Bounds.of(self._given[field.name]) if len(path) == 1 else UNKNOWN
        source = self._sources[field.name]
        if source is None:
            return Bounds.of(None) if len(path) == 1 else UNKNOWN
        leaf = self._leaves.get(".".join((source, *path[1:])))
        return UNKNOWN if leaf is None else _statistics(group.column(leaf), self._found.schema.column(leaf))

    def batches(self, groups: list[int]) -> Iterator[pa.RecordBatch]:
        """Read row groups."""
        sources = list(dict.fromkeys(name for name in self._sources.values() if name is not None))
        metadata = self._found.metadata
        if not sources:
            for number in groups:
                left = metadata.row_group(number).num_rows
                while left > 0:
                    yield self._batch(None, min(left, BATCH_ROWS))
                    left -= BATCH_ROWS
            return
        if groups:
            rows = _rows_per_batch(metadata, groups, sources)
            for batch in self._found.iter_batches(rows, groups, self._wanted(sources), use_threads=False):
                yield self._batch(batch, batch.num_rows)

    def _wanted(self, sources: list[str]) -> list[str]:
        """Return the leaves to read: all of a column, or those of a struct that the schema has."""
        kinds = {field.name: field.dataType for field in self._schema.fields}
        by_source = {source: kinds[name] for name, source in self._sources.items() if source is not None}
        wanted: list[str] = []
        for source in sources:
            kind = by_source[source]
            parts = [f"{source}.{name}" for name in kind.names] if isinstance(kind, t.StructType) else []
            there = [
                leaf for leaf in self._leaves if any(leaf == part or leaf.startswith(part + ".") for part in parts)
            ]
            wanted += there or [source]
        return wanted

    def _batch(self, batch: pa.RecordBatch | None, length: int) -> pa.RecordBatch:
        """Return the columns of the schema, for a batch of the file's columns."""
        names = [] if batch is None else batch.schema.names
        arrays = []
        for field in self._target:
            source = self._sources[field.name]
            if batch is None or source is None:
                array = conversion.repeated(self._given.get(field.name), field.type, length)
            else:
                array = conversion.conform(batch.column(names.index(source)), field.type, field.name)
            if not field.nullable and array.null_count:
                raise conversion.TypeMismatchError(f"the column {field.name!r} has nulls, and is declared to have none")
            arrays.append(array)
        if arrays:
            return pa.RecordBatch.from_arrays(arrays, schema=self._target)
        return pa.RecordBatch.from_struct_array(pa.array([{}] * length, pa.struct([])))


def _rows_per_batch(metadata: Any, groups: list[int], sources: list[str]) -> int:
    """Return how many rows a batch has: few, if rows are large."""
    rows = nbytes = 0
    wanted = set(sources)
    for number in groups:
        group = metadata.row_group(number)
        rows += group.num_rows
        for i in range(group.num_columns):
            column = group.column(i)
            if not wanted.isdisjoint((column.path_in_schema, column.path_in_schema.split(".", 1)[0])):
                nbytes += column.total_uncompressed_size
    return max(1, min(BATCH_ROWS, BATCH_NBYTES * rows // max(nbytes, 1)))


def _statistics(chunk: Any, leaf: Any) -> Bounds:
    """Return what the footer says of a column chunk."""
    if leaf.max_repetition_level or not chunk.is_stats_set:
        return UNKNOWN
    found = chunk.statistics
    nulls = values = None
    if found.has_null_count:
        nulls, values = found.null_count > 0, found.null_count < chunk.num_values
    if not found.has_min_max or leaf.physical_type == "INT96" or leaf.logical_type.type in ("INTERVAL", "FLOAT16"):
        return Bounds(nulls=nulls, values=values)
    try:
        low, high = found.min, found.max
    except (ValueError, OverflowError, ArithmeticError, NotImplementedError):  # dates that Python does not have
        return Bounds(nulls=nulls, values=values)
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        return Bounds(nulls=nulls, values=values)
    return Bounds(low, high, nulls, values)
