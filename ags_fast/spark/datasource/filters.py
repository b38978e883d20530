"""Filters that Spark pushes down: whether a row group, or a file by its partition values, may have a row that passes.

A filter only ever leaves out what cannot pass. Spark applies every filter again, so keeping too much is harmless.
"""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Bounds", "may_pass"]

ORDERED = (bool, int, float, Decimal, str, bytes, dt.datetime, dt.date)


@dataclass(frozen=True)
class Bounds:
    """What is known of a column's values in one place.

    Attributes:
        low: No value is less; None: not known.
        high: No value is greater; None: not known.
        nulls: Whether some values are null; None: not known.
        values: Whether some values are not null; None: not known.
    """

    low: Any = None
    high: Any = None
    nulls: bool | None = None
    values: bool | None = None

    @classmethod
    def of(cls, value: Any) -> Bounds:
        """Return the bounds of a column that has one value everywhere."""
        return cls(value, value, value is None, value is not None)


UNKNOWN = Bounds()


def may_pass(filters: Iterable[Any], bounds_of: Callable[[tuple[str, ...]], Bounds]) -> bool:
    """Return whether some row may pass all of these filters of ``pyspark.sql.datasource``.

    Args:
        filters: The filters, of which all must hold.
        bounds_of: Returns what is known of a column, by its path.
    """
    return all(_may_pass(one, bounds_of) for one in filters)


def _may_pass(one: Any, bounds_of: Callable[[tuple[str, ...]], Bounds]) -> bool:
    name = type(one).__name__
    if name == "Not":
        inner = type(one.child).__name__
        if inner in ("IsNull", "IsNotNull"):
            bounds = bounds_of(one.child.attribute)
            return (bounds.values if inner == "IsNull" else bounds.nulls) is not False
        return True
    test = TESTS.get(name)
    if test is None:
        return True
    bounds = bounds_of(one.attribute)
    try:
        return test(bounds, getattr(one, "value", None))
    except TypeError:
        return True  # of another type than the column's


def _equal(bounds: Bounds, value: Any) -> bool:
    if bounds.values is False or value is None:
        return False
    return not _known(value) or not (_less(value, bounds.low) or _less(bounds.high, value))


def _null_safe(bounds: Bounds, value: Any) -> bool:
    return bounds.nulls is not False if value is None else _equal(bounds, value)


def _less_than(bounds: Bounds, value: Any, *, or_equal: bool = False) -> bool:
    if bounds.values is False or value is None:
        return False
    if not _known(value):
        return True
    return not _less(value, bounds.low) and (or_equal or not _same(value, bounds.low))


def _greater_than(bounds: Bounds, value: Any, *, or_equal: bool = False) -> bool:
    if bounds.values is False or value is None:
        return False
    if not _known(value) or isinstance(bounds.high, float):  # Spark: NaN is the greatest, and no bound tells of it
        return True
    return not _less(bounds.high, value) and (or_equal or not _same(value, bounds.high))


def _starts(bounds: Bounds, value: Any) -> bool:
    if bounds.values is False or value is None:
        return False
    if not isinstance(value, str) or not isinstance(bounds.low, str) or not isinstance(bounds.high, str):
        return True
    return bounds.low[: len(value)] <= value and bounds.high >= value


def _known(value: Any) -> bool:
    return isinstance(value, ORDERED) and not (isinstance(value, float) and math.isnan(value))


def _less(one: Any, other: Any) -> bool:
    """Return whether one value is known to be less than another."""
    return one is not None and other is not None and _alike(one, other) and one < other


def _same(one: Any, other: Any) -> bool:
    return other is not None and _alike(one, other) and one == other


def _alike(one: Any, other: Any) -> bool:
    """Return whether Python compares two values as Spark does."""
    numbers = (int, float, Decimal)
    if isinstance(one, bool) or isinstance(other, bool):
        return isinstance(one, bool) and isinstance(other, bool)
    if isinstance(one, dt.datetime) or isinstance(other, dt.datetime):
        times = isinstance(one, dt.datetime) and isinstance(other, dt.datetime)
        return times and (one.tzinfo is None) == (other.tzinfo is None)
    return type(one) is type(other) or (isinstance(one, numbers) and isinstance(other, numbers))


TESTS: dict[str, Callable[[Bounds, Any], bool]] = {
    "EqualTo": _equal,
    "EqualNullSafe": _null_safe,
    "LessThan": _less_than,
    "LessThanOrEqual": lambda bounds, value: _less_than(bounds, value, or_equal=True),
    "GreaterThan": _greater_than,
    "GreaterThanOrEqual": lambda bounds, value: _greater_than(bounds, value, or_equal=True),
    "In": lambda bounds, values: any(_equal(bounds, value) for value in values),
    "IsNull": lambda bounds, _: bounds.nulls is not False,
    "IsNotNull": lambda bounds, _: bounds.values is not False,
    "StringStartsWith": _starts,
}
