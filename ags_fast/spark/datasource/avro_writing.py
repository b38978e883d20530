"""DataFrames as Avro: the schema that spark-avro writes, and Arrow's columns as the engine encodes them."""

from __future__ import annotations

import io
import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import fastavro.write
import pyarrow as pa
from pyspark.sql import types as t

from ags_fast._core import AVRO_DECIMAL, AVRO_FIXED, AVRO_INT, AVRO_ITEMS, AVRO_NULL, AVRO_RECORD, avro_records
from ags_fast.avro.decoders import FLAT

__all__ = ["AvroFile", "AvroFormat", "avro_schema"]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
SYNC_NBYTES = 64 << 10  # of a block, before compression: 64,000 in Avro's Java library
CODECS = {"uncompressed": "null", "none": "null", "zstd": "zstandard"}
NEEDS: dict[str, tuple[str, ...]] = {"null": (), "deflate": (), "snappy": ("cramjam",)}
NEEDS |= {"zstandard": ("zstandard", "backports.zstd", "compression.zstd")}
KINDS = {name: kind for name, (kind, _) in FLAT.items()}  # in the engine
KINDS |= {"null": AVRO_NULL, "fixed": AVRO_DECIMAL, "array": AVRO_ITEMS, "map": AVRO_ITEMS, "record": AVRO_RECORD}
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
        self.codec = codec
        self.suffix = ".avro"
        self.schema = schema
        self.avro = avro_schema(schema)

    def target(self, arrow: pa.Schema) -> pa.Schema:
        """Return the Arrow schema of what is written."""
        return arrow

    def create(self, attempt: Any, path: str) -> AvroFile:
        """Create a file in an attempt of a task."""
        return AvroFile(attempt.create(path, "ags1"), self)


class AvroFile:
    """An Avro file in the making."""

    def __init__(self, file: Any, how: AvroFormat) -> None:
        self._file = file
        self._schema = how.avro
        self._writer = fastavro.write.Writer(file, how.avro, how.codec)
        self._rows, self._block = 0, io.BytesIO()

    def write_table(self, table: pa.Table) -> None:
        """Write all rows."""
        for records in table.to_struct_array().chunks:
            records.validate(full=True)  # as UTF-8
            arrays, row = arrays_of(self._schema, records), 0
            while row < len(records):
                rows, encoded = avro_records(arrays, row, len(records), SYNC_NBYTES - self._block.tell())
                row += rows
                self._rows += rows
                self._block.write(encoded)
                if self._block.tell() >= SYNC_NBYTES:
                    self._end_block()

    def _end_block(self) -> None:
        self._writer.write_block(SimpleNamespace(num_records=self._rows, bytes_=self._block))
        self._rows, self._block = 0, io.BytesIO()

    def close(self) -> None:
        """Complete the file."""
        if self._rows:
            self._end_block()
        self._file.close()


def arrays_of(avro: Any, array: pa.Array) -> list[Any]:
    """Return an array as `avro_records` takes it, and then those inside of it."""
    optional, avro = (True, avro[0]) if isinstance(avro, list) else (False, avro)
    name, rest = (avro["type"], avro) if isinstance(avro, dict) else (avro, {})
    parts = []
    if name == "record":
        parts = [(field["type"], array.field(i)) for i, field in enumerate(rest["fields"])]
    elif name == "array":
        parts = [(rest["items"], array.values)]
    elif name == "map":
        parts = [("string", array.keys), (rest["values"], array.items)]
    inside = [one for part in parts for one in arrays_of(*part)]
    size = array.type.bit_width // 8 if KINDS[name] in (AVRO_INT, AVRO_FIXED) else rest.get("size", 0)
    return [(KINDS[name], optional, size, 1 + len(inside), array.offset, len(array), array.buffers()), *inside]


def avro_schema(schema: t.StructType) -> dict[str, Any]:
    """Return the Avro schema that spark-avro makes of a DataFrame.

    Raises:
        ValueError: Avro has no such type or name.
    """
    return _record(schema, "topLevelRecord", "")


def _of(kind: t.DataType, nullable: bool, name: str, space: str) -> Any:
    """Return a type. name: of the record around it, or of the field; space: the namespace of that."""
    found = _not_null(kind, name, space)
    return found if found == "null" or not nullable else [found, "null"]


def _not_null(kind: t.DataType, name: str, space: str) -> Any:
    if isinstance(kind, t.UserDefinedType):
        kind = kind.sqlType()
    if isinstance(kind, t.DecimalType):
        fixed = {"type": "fixed", "name": f"{space + '.' if space else ''}{name}.fixed"}
        size = (10**kind.precision - 1).bit_length() // 8 + 1  # a bit more than that, for the sign
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


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
