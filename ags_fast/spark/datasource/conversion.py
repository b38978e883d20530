"""Arrow data as Spark wants it: exactly the declared types, by name, and wider where that loses nothing."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import compute
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TypeMismatchError", "arrow_schema", "conform", "field_index", "repeated"]

WIDER = {  # the types that hold every value of a type, as Spark's own Parquet reader widens them
    "int8": ("int16", "int32", "int64", "float", "double"),
    "int16": ("int32", "int64", "float", "double"),
    "int32": ("int64", "double"),
    "float": ("double",),
    "uint8": ("int16", "int32", "int64", "float", "double"),
    "uint16": ("int32", "int64", "float", "double"),
    "uint32": ("int64", "double"),
}
DIGITS = {"int8": 3, "int16": 5, "int32": 10, "int64": 19, "uint8": 3, "uint16": 5, "uint32": 10, "uint64": 20}


class TypeMismatchError(ValueError):
    """A column of a file cannot be read as the type that is declared."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of a DataFrame's batches."""
    # PySpark before 4.2 has UTC without being told.
    timezone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_type).parameters else {}
    fields = []
    for field in schema.fields:
        kind = to_arrow_type(field.dataType, **timezone)
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
    return pa.schema(fields)


def field_index(names: Sequence[str], name: str) -> int | None:
    """Return which of `names` is `name`; if none is, which is when case is not regarded. None: none is.

    Raises:
        TypeMismatchError: Several are, when case is not regarded.
    """
    exact = [i for i, one in enumerate(names) if one == name]
    found = exact or [i for i, one in enumerate(names) if one.casefold() == name.casefold()]
    if len(found) > 1:
        raise TypeMismatchError(f"it has several columns {name!r}: {', '.join(names[i] for i in found)}")
    return found[0] if found else None


def repeated(value: Any, kind: pa.DataType, length: int) -> pa.Array:
    """Return an array of one value."""
    return pa.nulls(length, kind) if value is None else pa.repeat(pa.scalar(value, kind), length)


def conform(array: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    """Return an array as another type: parts of structs by their names, missing parts as nulls, values unchanged.

    Args:
        array: What a file has.
        target: What Spark expects.
        name: The column, for errors.

    Raises:
        TypeMismatchError: The types do not go together, or a value does not fit.
    """
    if array.type == target:
        return array
    if isinstance(array, pa.ExtensionArray):
        return conform(array.storage, target, name)
    source = array.type
    if pa.types.is_dictionary(source):
        return conform(array.dictionary_decode(), target, name)
    if pa.types.is_null(source):
        return pa.nulls(len(array), target)
    if pa.types.is_struct(target) and pa.types.is_struct(source):
        return _struct(array, target, name)
    if pa.types.is_map(target) and pa.types.is_map(source):
        return _map(array, target, name)
    if pa.types.is_list(target) and _is_list(source):
        return _list(array, target, name)
    if not _goes(source, target):
        raise TypeMismatchError(f"the column {name!r} is {source} there, which cannot be read as {target}")
    if pa.types.is_duration(target) or pa.types.is_duration(source):
        return array.view(target) if source.bit_width == target.bit_width else array.cast(target)
    try:
        if pa.types.is_timestamp(source) and pa.types.is_timestamp(target) and source.unit == "ns":
            return array.cast(target, safe=False)  # INT96: Spark drops what is less than a microsecond, too
        return array.cast(target)
    except pa.ArrowInvalid as error:
        raise TypeMismatchError(f"the column {name!r} has a value that is not a {target}: {error}") from None


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _goes(source: pa.DataType, target: pa.DataType) -> bool:
    """Return whether every value of a type can be read as another."""
    text, data = (pa.types.is_string, pa.types.is_large_string), (pa.types.is_binary, pa.types.is_large_binary)
    if pa.types.is_string(target):
        return any(is_(source) for is_ in (*text, *data)) or source == pa.string_view()
    if pa.types.is_binary(target):
        fixed = pa.types.is_fixed_size_binary(source) and not pa.types.is_decimal(source)
        return fixed or any(is_(source) for is_ in (*data, *text)) or source == pa.binary_view()
    if pa.types.is_timestamp(target):
        if pa.types.is_timestamp(source):
            return source.tz is None or target.tz is not None
        return target.tz is None and pa.types.is_date(source)
    if pa.types.is_decimal(target):
        whole = target.precision - target.scale
        if pa.types.is_decimal(source):
            return bool(target.scale >= source.scale and whole >= source.precision - source.scale)
        return str(source) in DIGITS and bool(whole >= DIGITS[str(source)])
    if pa.types.is_date(target):
        return bool(pa.types.is_date(source))
    if pa.types.is_duration(target) or pa.types.is_duration(source):
        return {str(source), str(target)} <= {"int64", "duration[us]", "duration[ms]", "duration[ns]", "duration[s]"}
    return str(target) in WIDER.get(str(source), ())


def _struct(array: pa.StructArray, target: pa.StructType, name: str) -> pa.StructArray:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    fields = [target.field(i) for i in range(target.num_fields)]
    children = []
    for field in fields:
        index = field_index(names, field.name)
        if index is None:
            children.append(pa.nulls(len(array), field.type))
        else:
            children.append(conform(array.field(index), field.type, f"{name}.{field.name}"))
    mask = compute.is_null(array) if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _list(array: pa.Array, target: pa.ListType, name: str) -> pa.ListArray:
    if not pa.types.is_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    values = conform(array.values, target.value_type, f"{name}.element")
    return _rebuilt(array, target, [values])


def _map(array: pa.MapArray, target: pa.MapType, name: str) -> pa.MapArray:
    keys = conform(array.keys, target.key_type, f"{name}.key")
    items = conform(array.items, target.item_type, f"{name}.value")
    entries = pa.StructArray.from_arrays([keys, items], fields=[target.key_field, target.item_field])
    return _rebuilt(array, target, [entries])


def _rebuilt(array: pa.Array, target: pa.DataType, children: list[pa.Array]) -> pa.Array:
    """Return a list or map array with other children, which begin where those of the whole array begin."""
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        target, len(array), [validity, offsets], offset=array.offset, children=children, null_count=array.null_count
    )
