"""Partition values in the paths of files: ``year=2026/country=__HIVE_DEFAULT_PARTITION__/part-0.parquet``.

Names and values are percent-escaped. Types are found as Spark's own file sources find them, with one difference: the
time zone of the session is not known here, so a value that looks like a timestamp is text.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as t

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["is_hidden", "partition_schema", "partition_texts", "partition_values"]

NULL = "__HIVE_DEFAULT_PARTITION__"
INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
FLOAT = re.compile(r"[+-]?(NaN|Infinity|(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)", re.ASCII)
DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
INTEGERS: dict[type[t.IntegralType], int] = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}  # bits


def is_hidden(path: str) -> bool:
    """Return whether Spark's file sources pass over a file: a part of its path begins with "." or, without "=", "_"."""
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def partition_texts(path: str) -> dict[str, str | None]:
    """Return the partition values of a file as text, the outermost first. None is null."""
    found = []
    for folder in reversed(path.split("/")[:-1]):
        name, separator, value = folder.partition("=")
        if not separator or not name or not value:
            break
        found.append((_unescaped(name), None if value == NULL else _unescaped(value)))
    return dict(reversed(found))


def _unescaped(text: str) -> str:
    """Undo percent-escapes as Spark does: each is a character, and no byte of UTF-8."""
    return re.sub("%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), text)


def partition_schema(paths: Iterable[str]) -> t.StructType:
    """Return the partition columns of files, with the narrowest types that hold all values.

    Raises:
        ValueError: Two files have other partition columns.
    """
    first = ""
    names: list[str] | None = None
    values: dict[str, set[str | None]] = {}
    for path in paths:
        texts = partition_texts(path)
        if names is None:
            first, names = path, list(texts)
            values = {name: set() for name in names}
        elif names != list(texts):
            raise ValueError(
                f"files have other partition columns: {first!r} has {', '.join(names) or 'none'}, {path!r} has "
                f"{', '.join(texts) or 'none'}. Choose files of one kind with the option files"
            )
        for name, text in texts.items():
            values[name].add(text)
    return t.StructType([t.StructField(name, _type_of(found), True) for name, found in values.items()])


def _type_of(texts: Iterable[str | None]) -> t.DataType:
    """Return the type of a partition column with these values."""
    kinds = {type_ for text in texts if text is not None for type_ in [_type_of_one(text)]}
    if len(kinds) == 1:
        return kinds.pop()
    if not kinds or not all(isinstance(kind, (*INTEGERS, t.DecimalType, t.DoubleType)) for kind in kinds):
        return t.StringType()
    if t.DoubleType() in kinds:
        return t.DoubleType() if kinds == {t.DoubleType(), t.IntegerType()} else t.StringType()
    decimals = [kind.precision for kind in kinds if isinstance(kind, t.DecimalType)]
    return t.DecimalType(max(20 if t.LongType() in kinds else 10, *decimals), 0) if decimals else t.LongType()


def _type_of_one(text: str) -> t.DataType:
    if INTEGER.fullmatch(text):
        number = int(text)
        if _fits(number, 32):
            return t.IntegerType()
        if _fits(number, 64):
            return t.LongType()
        digits = len(str(abs(number)))
        return t.DecimalType(digits, 0) if digits <= 38 else t.DoubleType()
    if FLOAT.fullmatch(text):
        return t.DoubleType()
    if DATE.fullmatch(text):
        try:
            dt.date.fromisoformat(text)
            return t.DateType()
        except ValueError:
            pass
    return t.StringType()


def _fits(number: int, bits: int) -> bool:
    return -(1 << (bits - 1)) <= number < 1 << (bits - 1)


def partition_values(path: str, columns: t.StructType) -> dict[str, Any]:
    """Return those of `columns` that a file's path has values of, as Python values of the columns' types.

    Names are compared without regard to case, unless two columns differ in nothing else.

    Raises:
        ValueError: A value is not of its column's type.
    """
    declared = {field.name.casefold(): field for field in columns.fields}
    declared |= {field.name: field for field in columns.fields}
    found = {}
    for name, text in partition_texts(path).items():
        field = declared.get(name, declared.get(name.casefold()))
        if field is not None:
            try:
                found[field.name] = None if text is None else _parsed(text, field.dataType)
            except (ValueError, ArithmeticError) as error:
                hint = f": {error}" if isinstance(error, _NoSuchTypeError) else ""
                kind = field.dataType.simpleString()
                raise ValueError(f"{path!r}: the value {text!r} of {name!r} is not a {kind}{hint}") from None
    return found


class _NoSuchTypeError(ValueError):
    """A type that no path can have."""


def _parsed(text: str, kind: t.DataType) -> Any:
    if isinstance(kind, t.StringType):
        return text
    if isinstance(kind, t.IntegralType):
        number = int(text)
        if not INTEGER.fullmatch(text) or not _fits(number, INTEGERS[type(kind)]):
            raise ValueError
        return number
    if isinstance(kind, (t.DoubleType, t.FloatType)):
        if not FLOAT.fullmatch(text):
            raise ValueError
        return math.nan if text.endswith("NaN") else float(text)
    if isinstance(kind, t.DecimalType):
        number_ = Decimal(text)
        if number_ != number_.quantize(Decimal(1).scaleb(-kind.scale)) or number_.adjusted() >= (
            kind.precision - kind.scale
        ):
            raise ValueError
        return number_
    if isinstance(kind, t.DateType):
        return dt.date.fromisoformat(text)
    if isinstance(kind, t.TimestampNTZType):
        value = dt.datetime.fromisoformat(text)
        if value.tzinfo is not None:
            raise ValueError
        return value
    if isinstance(kind, t.BooleanType):
        return {"true": True, "false": False}.get(text.lower()) if text.lower() in ("true", "false") else _raise()
    raise _NoSuchTypeError(
        "declare it as string, or leave it out"
        if not isinstance(kind, t.TimestampType)
        else "declare it as timestamp_ntz or string, because the session's time zone is not known here"
    )


def _raise() -> Any:
    raise ValueError
