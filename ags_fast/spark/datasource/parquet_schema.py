"""The Spark schema of a Parquet file, as Spark's own reader sees it, and the schema of many files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as t

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyarrow.parquet import FileMetaData, ParquetSchema

__all__ = ["merged", "nullable", "spark_schema"]

SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"  # the schema that Spark writes into a file's footer
KINDS = {
    pa.bool_(): t.BooleanType(),
    pa.int8(): t.ByteType(),
    pa.int16(): t.ShortType(),
    pa.int32(): t.IntegerType(),
    pa.int64(): t.LongType(),
    pa.uint8(): t.ShortType(),
    pa.uint16(): t.IntegerType(),
    pa.uint32(): t.LongType(),
    pa.uint64(): t.DecimalType(20, 0),
    pa.float32(): t.FloatType(),
    pa.float64(): t.DoubleType(),
    pa.string(): t.StringType(),
    pa.large_string(): t.StringType(),
    pa.string_view(): t.StringType(),
    pa.binary(): t.BinaryType(),
    pa.large_binary(): t.BinaryType(),
    pa.binary_view(): t.BinaryType(),
    pa.date32(): t.DateType(),
    pa.date64(): t.DateType(),
}
OTHER_KINDS = {  # what Spark's own schema may say of a column that the file alone shows as another
    "IntegerType": ("YearMonthIntervalType", "NullType"),
    "LongType": ("DayTimeIntervalType",),
    "BooleanType": ("NullType",),
    "StringType": ("CharType", "VarcharType", "StringType"),
}


def spark_schema(metadata: FileMetaData, columns: Sequence[str] | None = None) -> t.StructType:
    """Return the schema of a Parquet file; every column and part of one may be null.

    Args:
        metadata: The file's footer.
        columns: Only these columns of the top level, whatever their case; None: all.

    Raises:
        ValueError: Spark has no type for a column.
    """
    leaves = _Leaves(metadata.schema)
    wanted = None if columns is None else {name.casefold() for name in columns}
    try:
        arrow = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, NotImplementedError) as error:
        raise ValueError(f"its schema cannot be read: {error}") from None
    fields = []
    for field in arrow:
        begun = leaves.position
        if wanted is not None and field.name.casefold() not in wanted:
            leaves.skip(field.type)
            continue
        fields.append(t.StructField(field.name, _kind(field.type, leaves, field.name), True))
        assert leaves.position > begun
    return _as_written(t.StructType(fields), (metadata.metadata or {}).get(SPARK_SCHEMA))


class _Leaves:
    """The physical types of a file's leaf columns, one after the other."""

    def __init__(self, schema: ParquetSchema) -> None:
        self._schema = schema
        self.position = 0

    def next(self) -> tuple[str, str]:
        """Return the physical and the logical type of the next leaf."""
        column = self._schema.column(self.position)
        self.position += 1
        return column.physical_type, column.logical_type.type

    def skip(self, arrow: pa.DataType) -> None:
        """Pass over the leaves of a column."""
        children = [arrow.field(i).type for i in range(arrow.num_fields)] if _is_nested(arrow) else []
        if pa.types.is_map(arrow):
            children = [arrow.key_type, arrow.item_type]
        for child in children:
            self.skip(child)
        if not children:
            self.position += 1


def _is_nested(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_nested(arrow)) and not pa.types.is_dictionary(arrow)


def _kind(arrow: pa.DataType, leaves: _Leaves, name: str) -> t.DataType:
    """Return Spark's type for a column that pyarrow shows as `arrow`."""
    if isinstance(arrow, pa.BaseExtensionType):
        if arrow.extension_name == "arrow.json":
            leaves.next()
            return t.StringType()
        raise ValueError(f"the column {name!r} is of the type {arrow}, which Spark does not read")
    if pa.types.is_dictionary(arrow):
        return _kind(arrow.value_type, leaves, name)
    if pa.types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return t.StructType([t.StructField(f.name, _kind(f.type, leaves, f"{name}.{f.name}")) for f in fields])
    if pa.types.is_map(arrow):
        return t.MapType(_kind(arrow.key_type, leaves, name), _kind(arrow.item_type, leaves, name))
    if _is_nested(arrow):
        return t.ArrayType(_kind(arrow.value_type, leaves, name))
    kind = _leaf(arrow, *leaves.next())
    if kind is None:
        raise ValueError(f"the column {name!r} is of the type {arrow}, which Spark does not read")
    return kind


def _leaf(arrow: pa.DataType, physical: str, logical: str) -> t.DataType | None:
    if logical in ("ENUM", "JSON"):
        return t.StringType()
    if arrow in KINDS:
        return KINDS[arrow]
    if pa.types.is_decimal(arrow) and arrow.precision <= 38:
        return t.DecimalType(arrow.precision, arrow.scale)
    if pa.types.is_fixed_size_binary(arrow):
        return t.BinaryType()
    if pa.types.is_timestamp(arrow):
        if physical == "INT96":
            return t.TimestampType()
        if arrow.unit != "ns":
            return t.TimestampNTZType() if arrow.tz is None else t.TimestampType()
    if pa.types.is_null(arrow):
        return {"INT32": t.IntegerType(), "BOOLEAN": t.BooleanType(), "INT64": t.LongType()}.get(physical)
    if pa.types.is_duration(arrow):
        return t.LongType()
    return None


def _as_written(found: t.StructType, written: bytes | None) -> t.StructType:
    """Return a schema with the types and metadata that Spark put into the footer, where they fit the file."""
    if written is None or b'"udt"' in written:  # a user-defined type would import a module that the file names
        return found
    try:
        declared = t.StructType.fromJson(json.loads(written))
    except Exception:  # of another version of Spark
        return found
    refined = _refined(found, declared)
    return refined if isinstance(refined, t.StructType) else found


def _refined(found: t.DataType, declared: t.DataType) -> t.DataType:
    if isinstance(found, t.StructType):
        if type(declared).__name__ == "VariantType":
            return nullable(declared) if set(found.names) == {"metadata", "value"} else found
        if isinstance(declared, t.StructType):
            by_name = {field.name: field for field in declared.fields}
            return t.StructType([_refined_field(field, by_name.get(field.name)) for field in found.fields])
    if isinstance(found, t.ArrayType) and isinstance(declared, t.ArrayType):
        return t.ArrayType(_refined(found.elementType, declared.elementType))
    if isinstance(found, t.MapType) and isinstance(declared, t.MapType):
        return t.MapType(_refined(found.keyType, declared.keyType), _refined(found.valueType, declared.valueType))
    return declared if type(declared).__name__ in OTHER_KINDS.get(type(found).__name__, ()) else found


def _refined_field(found: t.StructField, declared: t.StructField | None) -> t.StructField:
    if declared is None:
        return found
    return t.StructField(found.name, _refined(found.dataType, declared.dataType), True, declared.metadata)


def nullable(kind: Any) -> Any:
    """Return a type all of whose parts may be null, as Spark's file sources show every schema."""
    if isinstance(kind, t.StructType):
        fields = kind.fields
        return t.StructType([t.StructField(f.name, nullable(f.dataType), True, f.metadata) for f in fields])
    if isinstance(kind, t.ArrayType):
        return t.ArrayType(nullable(kind.elementType), True)
    if isinstance(kind, t.MapType):
        return t.MapType(nullable(kind.keyType), nullable(kind.valueType), True)
    return kind


def merged(schemas: Iterator[tuple[str, t.StructType]]) -> t.StructType:
    """Return the schema that has the columns of all files, in the order in which they come.

    Args:
        schemas: The path and the schema of each file.

    Raises:
        ValueError: Two files have a column of one name and of types that do not go together.
    """
    fields: dict[str, t.StructField] = {}
    homes: dict[str, str] = {}
    for path, schema in schemas:
        for field in schema.fields:
            had = fields.get(field.name)
            if had is None:
                fields[field.name], homes[field.name] = field, path
                continue
            kind = _merged(had.dataType, field.dataType)
            if kind is None:
                raise ValueError(
                    f"the column {field.name!r} is {had.dataType.simpleString()} in {homes[field.name]!r} and "
                    f"{field.dataType.simpleString()} in {path!r}: choose files or columns with the options files and "
                    "columns, or declare a schema with .schema(...) that both can be read as"
                )
            fields[field.name] = t.StructField(field.name, kind, True, had.metadata)
    return t.StructType(list(fields.values()))


def _merged(one: t.DataType, other: t.DataType) -> t.DataType | None:
    """Return the type that holds two, or None: Spark merges the fields of structs, and decimals of one scale."""
    if one == other:
        return one
    if isinstance(one, t.StructType) and isinstance(other, t.StructType):
        fields = {field.name: field for field in one.fields}
        for field in other.fields:
            had = fields.get(field.name)
            kind = field.dataType if had is None else _merged(had.dataType, field.dataType)
            if kind is None:
                return None
            fields[field.name] = t.StructField(field.name, kind, True, (had or field).metadata)
        return t.StructType(list(fields.values()))
    if isinstance(one, t.ArrayType) and isinstance(other, t.ArrayType):
        element = _merged(one.elementType, other.elementType)
        return None if element is None else t.ArrayType(element)
    if isinstance(one, t.MapType) and isinstance(other, t.MapType):
        key, value = _merged(one.keyType, other.keyType), _merged(one.valueType, other.valueType)
        return None if key is None or value is None else t.MapType(key, value)
    if isinstance(one, t.DecimalType) and isinstance(other, t.DecimalType) and one.scale == other.scale:
        return t.DecimalType(max(one.precision, other.precision), one.scale)
    return None
