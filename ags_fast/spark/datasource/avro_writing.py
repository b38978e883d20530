"""DataFrames as Avro: the schema that spark-avro writes, and the rows as fastavro takes them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import fastavro.write
import pyarrow as pa
from pyspark.sql import types as t

from ags_fast._extras import lacks

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AvroFile", "AvroFormat", "avro_schema"]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
SYNC_NBYTES = 64 << 10  # of a block, before compression: 64,000 in Avro's Java library
CODECS = {"uncompressed": "null", "none": "null", "zstd": "zstandard"}
NEEDS: dict[str, tuple[str, ...]] = {"null": (), "deflate": (), "snappy": ("cramjam",)}
NEEDS |= {"zstandard": ("zstandard", "backports.zstd", "compression.zstd")}
ROWS = 10_000  # that are Python objects at a time
PLAIN: dict[type[t.DataType], Any] = {
    t.BooleanType: "boolean",
    t.ByteType: "int",
    t.ShortType: "int",
    t.IntegerType: "int",
    t.LongType: "long",
    t.FloatType: "float",
    t.DoubleType: "double",
    t.StringType: "string",
    t.BinaryType: "bytes",
    t.NullType: "null",
    t.DateType: {"type": "int", "logicalType": "date"},
    t.TimestampType: {"type": "long", "logicalType": "timestamp-micros"},
    t.TimestampNTZType: {"type": "long", "logicalType": "local-timestamp-micros"},
}


class AvroFormat:
    """How the files of a write are made. Pickles.

    Args:
        schema: The columns of the files.
        codec: "null", "deflate", "snappy" or "zstandard"; "": snappy if cramjam is installed, else deflate.

    Raises:
        ValueError: The codec is unknown, or Avro has no such type or name.
    """

    def __init__(self, schema: t.StructType, codec: str) -> None:
        codec = CODECS.get(codec.lower(), codec.lower()) or ("snappy" if _installed("cramjam") else "deflate")
        if codec not in NEEDS:
            raise ValueError(f"the option codec is null, deflate, snappy or zstandard, not {codec!r}")
        if NEEDS[codec] and not any(map(_installed, NEEDS[codec])):
            raise ValueError(f"the codec {codec} needs a package: pip install {NEEDS[codec][0]}")
        if "map<" in schema.simpleString() and int(pa.__version__.partition(".")[0]) < 20:  # the first with such dicts
            raise lacks("a map in Avro", "pyarrow 20 or newer", "spark", f"{pa.__version__} is installed")
        self.codec = codec
        self.suffix = ".avro"
        self.schema = schema
        self.avro = avro_schema(schema)

    def target(self, arrow: pa.Schema) -> pa.Schema:
        """Return the Arrow schema whose values Avro has: dates and timestamps are numbers."""
        return pa.schema([field.with_type(_numbers(field.type)) for field in arrow])

    def create(self, attempt: Any, path: str) -> AvroFile:
        """Create a file in an attempt of a task."""
        return AvroFile(attempt.create(path, "ags1"), self)


class AvroFile:
    """An Avro file in the making, which takes tables of the schema `AvroFormat.target`."""

    def __init__(self, file: Any, how: AvroFormat) -> None:
        self._file = file
        self._writer = fastavro.write.Writer(file, how.avro, how.codec, SYNC_NBYTES)

    def write_table(self, table: pa.Table) -> None:
        """Write all rows."""
        write = self._writer.write
        for batch in table.to_batches(max_chunksize=ROWS):
            for record in records(batch):
                write(record)

    def close(self) -> None:
        """Complete the file."""
        self._writer.flush()
        self._file.close()


def records(batch: pa.RecordBatch) -> Iterable[dict[str, Any]]:
    """Return rows as fastavro takes them."""
    names = batch.schema.names
    options = {"maps_as_pydicts": "strict"} if "map<" in str(batch.schema) else {}
    columns = [column.to_pylist(**options) for column in batch.columns]
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def avro_schema(schema: t.StructType) -> dict[str, Any]:
    """Return the Avro schema that spark-avro makes of a DataFrame.

    Raises:
        ValueError: Avro has no such type or name.
    """
    found: dict[str, Any] = _record(schema, "topLevelRecord", "")
    return found


def _of(kind: t.DataType, nullable: bool, name: str, space: str) -> Any:
    """Return a type. name: of the record around it, or of the field; space: the namespace of that."""
    found = _not_null(kind, name, space)
    return found if found == "null" or not nullable else [found, "null"]


def _not_null(kind: t.DataType, name: str, space: str) -> Any:
    if isinstance(kind, t.UserDefinedType):
        kind = kind.sqlType()
    if isinstance(kind, t.DecimalType):
        fixed = {"type": "fixed", "name": f"{space + '.' if space else ''}{name}.fixed"}
        size = _bytes_for(kind.precision)
        return {**fixed, "size": size, "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if isinstance(kind, t.ArrayType):
        return {"type": "array", "items": _of(kind.elementType, kind.containsNull, name, space)}
    if isinstance(kind, t.MapType):
        if not isinstance(kind.keyType, t.StringType):
            raise ValueError(f"the column {name!r} is a map by {kind.keyType.simpleString()}: Avro has maps by string")
        return {"type": "map", "values": _of(kind.valueType, kind.valueContainsNull, name, space)}
    if isinstance(kind, t.StructType):
        return _record(kind, name, space)
    if isinstance(kind, t.DayTimeIntervalType):
        return {"type": "long", "spark.sql.catalyst.type": kind.simpleString()}
    for known, avro in PLAIN.items():
        if type(kind) is known or (known is t.StringType and isinstance(kind, t.StringType)):
            return dict(avro) if isinstance(avro, dict) else avro
    raise ValueError(f"the column {name!r} is {kind.simpleString()}, which Avro does not have")


def _record(kind: t.StructType, name: str, space: str) -> dict[str, Any]:
    inner = f"{space}.{name}" if space else name
    fields = []
    for field in kind.fields:
        if not NAME.fullmatch(field.name):
            raise ValueError(f"{field.name!r} is not a name in Avro: it has letters, digits and _ only")
        fields.append({"name": field.name, "type": _of(field.dataType, field.nullable, field.name, inner)})
    return {"type": "record", "name": name, **({"namespace": space} if space else {}), "fields": fields}


def _bytes_for(precision: int) -> int:
    """Return the bytes of the largest number with so many digits, and its sign."""
    nbytes = 1
    while 1 << (8 * nbytes - 1) < 10**precision:
        nbytes += 1
    return nbytes


def _numbers(kind: pa.DataType) -> pa.DataType:
    """Return a type with numbers in place of dates, timestamps and durations."""
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_date(kind):
        return pa.int32()
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(_numbers(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_numbers(kind.value_type)))
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_numbers(field.type)) for field in fields])
    return kind


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
