"""Cut the rows of a write into partitions: folders named as Spark names them, ``year=2026/country=de``."""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import compute
from pyspark.sql import types as t

from ags_fast.spark.datasource.paths import NULL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Partitioner"]

# As org.apache.spark.sql.catalyst.catalog.ExternalCatalogUtils has them, and NUL, which no path may have.
ESCAPED = re.compile(r"""[\x00-\x1f"#%'*/:=?\\\x7f{\[\]^]""")
NO_FOLDERS = (t.ArrayType, t.MapType, t.StructType, t.DayTimeIntervalType, t.YearMonthIntervalType, t.NullType)


class Partitioner:
    """Cuts batches by the values of columns, and leaves these columns out. Pickles.

    Args:
        columns: The names of the columns, the outermost folder first. Without any, all rows are in one partition.
        schema: The schema of the DataFrame.

    Raises:
        ValueError: There is no such column, its type cannot be in a path, or no other column is left.
    """

    def __init__(self, columns: Sequence[str], schema: t.StructType) -> None:
        names = schema.fieldNames()
        self.columns: list[str] = []
        for wanted in columns:
            found = [name for name in names if name == wanted] or [
                name for name in names if name.casefold() == wanted.casefold()
            ]
            if len(found) != 1 or found[0] in self.columns:
                raise ValueError(f"partitionBy names each column once, of {', '.join(names)}, not {wanted!r}")
            kind = schema[found[0]].dataType
            if isinstance(kind, NO_FOLDERS) or type(kind).__name__ in ("VariantType", "UserDefinedType"):
                raise ValueError(
                    f"the column {found[0]!r} is {kind.simpleString()}: partitionBy cannot put it in a path"
                )
            self.columns.append(found[0])
        self.schema = t.StructType([field for field in schema.fields if field.name not in self.columns])
        if not self.schema.fields:
            raise ValueError("partitionBy names all columns: one at least must stay in the files")

    def cut(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the folder of each partition that the batch has rows of, with "/" at its end, and these rows."""
        if not self.columns:
            yield "", batch
            return
        numbers, folders = self._numbered(batch)
        rest = batch.select(self.schema.fieldNames())
        if len(folders) == 1:
            yield folders[0], rest
            return
        order = compute.sort_indices(numbers)
        start = 0
        for one in compute.value_counts(numbers.take(order)):
            number, count = one["values"].as_py(), one["counts"].as_py()
            yield folders[number], rest.take(order.slice(start, count))
            start += count

    def _numbered(self, batch: pa.RecordBatch) -> tuple[pa.Array, list[str]]:
        """Return for each row the number of its folder, and the folders."""
        numbers, folders = pa.nulls(batch.num_rows, pa.int64()).fill_null(0), [""]
        for name in self.columns:
            column = batch.column(name).dictionary_encode(null_encoding="encode")
            texts = [f"{escape(name)}={folder_of(value)}/" for value in texts_of(column.dictionary)]
            codes = compute.add(
                compute.multiply(numbers, pa.scalar(len(texts), pa.int64())), column.indices.cast(pa.int64())
            )
            # Number the combinations that occur: their count is at most that of the rows.
            combined = codes.dictionary_encode()
            pairs = [divmod(code, len(texts)) for code in combined.dictionary.to_pylist()]
            folders = [folders[before] + texts[here] for before, here in pairs]
            numbers = combined.indices.cast(pa.int64())
        # Two values may have one name: null and the empty string, or floats that are written alike.
        places = {folder: number for number, folder in enumerate(dict.fromkeys(folders))}
        if len(places) < len(folders):
            moved = pa.array([places[folder] for folder in folders], pa.int64())
            numbers, folders = moved.take(numbers), list(places)
        return numbers, folders


def escape(text: str) -> str:
    """Return a name or a value as it is in a path."""
    return ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)


def folder_of(text: str | None) -> str:
    """Return a value as it is in a path. Null and the empty string have one name, as Spark has it."""
    return escape(text) if text else NULL


def texts_of(values: pa.Array) -> list[str | None]:
    """Return values as Spark casts them to strings: timestamps in the time zone of their type."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        local = values if kind.tz is None else compute.local_timestamp(values)
        return [None if one is None else _moment(one) for one in local.to_pylist()]
    if pa.types.is_floating(kind):
        return [None if one is None else _number(one) for one in values.cast(pa.string()).to_pylist()]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [None if one is None else one.decode("utf-8", "replace") for one in values.to_pylist()]
    if pa.types.is_time(kind):
        return [None if one is None else _trimmed(one) for one in values.cast(pa.string()).to_pylist()]
    if pa.types.is_date(kind):
        return [None if one is None else _day(one) for one in values.to_pylist()]
    if pa.types.is_boolean(kind):
        return [None if one is None else str(one).lower() for one in values.to_pylist()]
    if pa.types.is_decimal(kind):
        return [None if one is None else f"{one:f}" for one in values.to_pylist()]
    return [None if one is None else str(one) for one in values.to_pylist()]


def _day(value: date) -> str:
    return f"{value.year:04d}-{value.month:02d}-{value.day:02d}"


def _moment(value: datetime) -> str:
    return _trimmed(f"{_day(value)} {value.hour:02d}:{value.minute:02d}:{value.second:02d}.{value.microsecond:06d}")


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _number(text: str) -> str:
    """Return a floating-point number, as Arrow writes it, as Java does."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    if not digits[0].isdigit():
        return sign + {"inf": "Infinity", "nan": "NaN"}[digits]
    mantissa, _, exponent = digits.partition("e")
    whole, _, fraction = mantissa.partition(".")
    point = len(whole) + int(exponent or 0)
    significant = (whole + fraction).lstrip("0")
    point -= len(whole + fraction) - len(significant)
    significant = significant.rstrip("0")
    if not significant:
        return f"{sign}0.0"
    if -3 < point <= 7:  # 0.001 <= |x| < 10^7
        padded = significant.ljust(point, "0")
        before = padded[:point] if point > 0 else "0"
        after = padded[point:] if point > 0 else "0" * -point + significant
        return f"{sign}{before}.{after or '0'}"
    return f"{sign}{significant[0]}.{significant[1:] or '0'}E{point - 1}"
