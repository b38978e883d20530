"""DataFrames as Parquet files with the types that Spark's own writer gives them."""

from __future__ import annotations

from functools import cached_property
from inspect import signature
from os import urandom
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import types as t

from ags_fast.parquet import Keys
from ags_fast.parquet.reading import Encryption
from ags_fast.parquet.table_writer import Encoder, TableWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ParquetFormat"]

# Spark's names, and pyarrow's.
CODECS = {
    "none": "none",
    "uncompressed": "none",
    "snappy": "snappy",
    "gzip": "gzip",
    "brotli": "brotli",
    "lz4": "lz4",
    "lz4_raw": "lz4",
    "lz4raw": "lz4",
    "zstd": "zstd",
}
SUFFIXES = {"none": "", "gzip": ".gz", "lz4": ".lz4raw"}
ROW_METADATA = "org.apache.spark.sql.parquet.row.metadata"  # Spark's own schema: what Parquet's types do not tell
REFUSED = ("NullType", "VariantType", "CalendarIntervalType", "YearMonthIntervalType", "GeographyType", "GeometryType")
WISHES = {"store_schema": False, "store_decimal_as_integer": True, "write_page_index": True}


class ParquetFormat:
    """How the files of a write are made. Pickles.

    Args:
        schema: The columns of the files.
        codec: The compression, by Spark's names; "": snappy.
        column_keys: The columns that have keys of their own.

    Raises:
        ValueError: The codec is unknown, a type cannot be written, or there is no column that a key is for.
    """

    def __init__(self, schema: t.StructType, arrow: pa.Schema, codec: str, column_keys: Mapping[str, str]) -> None:
        codec = codec.lower() or "snappy"
        if codec not in CODECS:
            raise ValueError(f"the option compression is {', '.join(CODECS)}, not {codec!r}")
        self.codec = CODECS[codec]
        self.suffix = SUFFIXES.get(self.codec, f".{self.codec}") + ".parquet"
        self.schema = schema
        self._arrow = arrow
        for field in schema.fields:
            _check(field.dataType, field.name)
        keys = Keys(urandom(16), dict.fromkeys(column_keys, urandom(16)))
        TableWriter(self._encoder, bytearray(), keys, Encryption()).abort()  # refuses columns that are not there

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_encoder"}

    def target(self, arrow: pa.Schema) -> pa.Schema:
        """Return the Arrow schema of what is written."""
        return pa.schema([field.with_type(_micros(field.type)) for field in arrow])

    def create(self, attempt: Any, path: str) -> Any:
        """Create a file in an attempt of a task."""
        return attempt.create_tables(path, self._encoder)

    @cached_property
    def _encoder(self) -> Encoder:
        known = signature(parquet.ParquetWriter.__init__).parameters
        options = {name: value for name, value in WISHES.items() if name in known}
        metadata = {ROW_METADATA: self.schema.json()}
        return Encoder(self.target(self._arrow), {"compression": self.codec, **options}, metadata)


def _check(kind: t.DataType, name: str) -> None:
    """Refuse what Spark's own writer refuses, and what would be written without its annotation. Raises ValueError."""
    if isinstance(kind, t.StructType):
        for field in kind.fields:
            _check(field.dataType, f"{name}.{field.name}")
    elif isinstance(kind, t.ArrayType):
        _check(kind.elementType, f"{name}.element")
    elif isinstance(kind, t.MapType):
        _check(kind.keyType, f"{name}.key")
        _check(kind.valueType, f"{name}.value")
    elif type(kind).__name__ in REFUSED:
        raise ValueError(f"the column {name!r} is {kind.simpleString()}, which ags_parquet does not write: cast it")


def _micros(kind: pa.DataType) -> pa.DataType:
    """Return a type with the units that Spark writes."""
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_map(kind):
        key = kind.key_field.with_type(_micros(kind.key_type))
        return pa.map_(key, kind.item_field.with_type(_micros(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_micros(kind.value_type)))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_micros(field.type)) for field in fields])
    return kind
