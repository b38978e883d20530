"""Checks that a block of an Avro file holds whole records of its schema, before a decoder is given the block.

The engine does it for a schema that can be compiled. Others, such as one of a type that holds itself, are walked over
here, which is slower.
"""

from __future__ import annotations

import math
from array import array
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ags_fast._core import (
    AVRO_BYTES,
    AVRO_ENUM,
    AVRO_FIXED,
    AVRO_INT,
    AVRO_ITEMS,
    AVRO_NULL,
    AVRO_NUMBER,
    AVRO_RECORD,
    AVRO_UNION,
    avro_number,
    avro_pick,
)
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ags_fast._types import Buffer

__all__ = ["by_program", "checker", "is_decimal", "picking", "readable", "step"]

NESTING = 30  # of compiled records, arrays, maps and unions; the engine passes no deeper ones
NODES = 10_000  # of a compiled schema whose named types stand in each place that names them
DEPTH = 200  # of values of a type that holds itself: decoders call themselves for each
SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
PICKED = {"int": AVRO_NUMBER, "long": AVRO_NUMBER, "bytes": AVRO_BYTES, "string": AVRO_BYTES}
KINDS = {"null": AVRO_NULL, **PICKED, "int": AVRO_INT}
RECORDS = ("record", "error")
ITEMS = ("array", "map")


def checker(schema: Any, named: Mapping[str, Any]) -> Callable[[Buffer, int], object]:
    """Return what checks the body of a block, which is to hold a number of records.

    `schema` and `named`, the types with names, are as `fastavro.parse_schema` returns them. Raises FormatError for an
    array of items without bytes.
    """
    types = _Types(named)
    types.check(schema, set())
    try:
        return by_program(None if types.is_empty(schema, ()) else types.program(schema, ()))
    except _TooDeepError:
        return partial(_walk, types, schema)


def by_program(program: list[int] | None) -> Callable[[Buffer, int], object]:
    """Return what checks the body of a block by the program of its records; None: they have no bytes."""
    if program is None:
        return _check_empty
    steps = array("i", program)
    return lambda body, rows: avro_pick(steps, body, rows, 0)


def picking(schema: Any, named: Mapping[str, Any], slots: Mapping[int, int]) -> tuple[array[int], dict[int, int]]:
    """Return a program that picks the numbers, texts and bytes of some fields, and what each slot then has.

    `slots` are those of fields by ``field-id``, also of inner records, but not in an array or a map.
    """
    types = _Types(named, slots)
    try:
        return array("i", types.program(schema, ())), types.kinds
    except _TooDeepError:
        raise FormatError("the schema of the Avro file is nested too deeply") from None


def step(kind: str, inner: list[list[int]], size: Any, slot: int = 0) -> list[int]:
    """Return the program of a kind of values for `avro_pick`, around those of fields, branches, items or values.

    `size` is that of a fixed, in bytes, or how many symbols an enum has; `slot` that of the value, plus 1; 0 is none.
    """
    if kind in RECORDS:
        return _step(AVRO_RECORD, chain.from_iterable(inner))
    if kind == "union":
        return _step(AVRO_UNION, [len(inner), *map(len, inner), *chain.from_iterable(inner)])
    if kind == "array":
        return _step(AVRO_ITEMS, inner[0])
    if kind == "map":
        return _step(AVRO_ITEMS, _step(AVRO_RECORD, [*_step(AVRO_BYTES), *inner[0]]))
    if kind in ("boolean", "float", "double", "fixed"):
        return _step(AVRO_FIXED, [SIZES.get(kind, size)])
    return _step(AVRO_ENUM, [size]) if kind == "enum" else _step(KINDS[kind], slot=slot)


def _step(kind: int, rest: Iterable[int] = (), slot: int = 0) -> list[int]:
    numbers = list(rest)
    return [kind, 3 + len(numbers), slot, *numbers]


def _check_empty(body: Buffer, rows: int) -> None:
    if memoryview(body).nbytes:
        raise FormatError("the plaintext is not an intact Avro file: a block has bytes for no field")


def _walk(types: _Types, schema: Any, body: Buffer, rows: int) -> None:
    data = bytes(body)
    at = 0
    try:
        if rows > len(data):
            raise IndexError
        for _ in range(rows):
            at = types.skip(schema, data, at, 0)
        if at != len(data):
            raise IndexError
    except IndexError:
        raise FormatError("the plaintext is not an intact Avro file: a block has other records") from None


def readable(schema: Any) -> Any:
    """Return a schema without what readers must ignore: defaults of the writer, and impossible decimals."""
    if isinstance(schema, list):
        return [readable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    ignored = ("default", *["logicalType"] * (schema.get("logicalType") == "decimal" and not is_decimal(schema)))
    return {name: readable(value) for name, value in schema.items() if name not in ignored}


def is_decimal(schema: Mapping[str, Any]) -> bool:
    """Return whether the logical type of a schema is "decimal", with a possible precision and scale."""
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if schema.get("logicalType") != "decimal" or type(precision) is not int or type(scale) is not int:
        return False
    most = math.log10(2) * (8 * schema["size"] - 1) if schema["type"] == "fixed" else precision
    return 1 <= precision <= most and 0 <= scale <= precision


class _TooDeepError(Exception):
    """A schema that cannot be compiled."""


class _Types:
    """A schema whose named types are known."""

    def __init__(self, named: Mapping[str, Any], slots: Mapping[int, int] = {}) -> None:
        self._named, self._slots = named, slots
        self.kinds: dict[int, int] = {}  # what is in each slot that was filled
        self._nodes = 0

    def _resolved(self, schema: Any) -> tuple[str, Any]:
        """Return the kind of a schema, and the schema."""
        while not isinstance(schema, list):
            kind = schema if isinstance(schema, str) else schema["type"]
            if isinstance(schema, str) and kind not in SIZES and kind not in KINDS:
                schema = self._named[kind]
            elif isinstance(kind, str) and (kind in SIZES or kind in KINDS or isinstance(schema, dict)):
                if kind in self._named:
                    schema = self._named[kind]
                    continue
                return kind, schema
            else:
                schema = kind
        return "union", schema

    def is_empty(self, schema: Any, above: tuple[str, ...]) -> bool:
        """Return whether values have no bytes."""
        kind, schema = self._resolved(schema)
        if kind in RECORDS:
            name = schema["name"]
            return name not in above and all(self.is_empty(one["type"], (*above, name)) for one in schema["fields"])
        return kind == "null" or (kind == "fixed" and schema["size"] == 0)

    def check(self, schema: Any, seen: set[str]) -> None:
        """Raise FormatError for an array whose items have no bytes."""
        kind, schema = self._resolved(schema)
        if kind == "array" and self.is_empty(schema["items"], ()):
            raise FormatError("an array of items without bytes: a few bytes could count endless items")
        if kind in RECORDS:
            if schema["name"] in seen:
                return
            seen.add(schema["name"])
        for below in self._below(kind, schema):
            self.check(below, seen)

    def _below(self, kind: str, schema: Any) -> list[Any]:
        if kind in RECORDS:
            return [field["type"] for field in schema["fields"]]
        return (
            schema if kind == "union" else [schema["items" if kind == "array" else "values"]] if kind in ITEMS else []
        )

    def program(self, schema: Any, above: tuple[str, ...], slot: int | None = None) -> list[int]:
        """Compile a schema for `avro_pick`, which puts its value into a slot."""
        kind, schema = self._resolved(schema)
        self._nodes += 1
        name = schema["name"] if kind in RECORDS else ""
        if len(above) > NESTING or self._nodes > NODES or (name and name in above):
            raise _TooDeepError
        below = self._below(kind, schema)
        size = schema["size"] if kind == "fixed" else len(schema["symbols"]) if kind == "enum" else 0
        if type(size) is not int or not 0 <= size < 1 << 31:
            raise FormatError("the Avro file has a malformed schema")
        slots = [slot if kind == "union" else None] * len(below)
        if kind in RECORDS:
            slots = [self._slots.get(field.get("field-id")) for field in schema["fields"]]
        inner = [self.program(one, (*above, name), of) for one, of in zip(below, slots, strict=True)]
        if slot is None or kind not in PICKED:
            return step(kind, inner, size)
        if self.kinds.setdefault(slot, PICKED[kind]) != PICKED[kind]:
            raise FormatError("a field of the Avro file is a number or a text")
        return step(kind, inner, size, slot + 1)

    def skip(self, schema: Any, data: bytes, at: int, depth: int) -> int:
        """Return where a value ends. Raises IndexError if it is none."""
        if depth > DEPTH:
            raise FormatError(f"a record of the Avro file holds others more than {DEPTH} deep")
        kind, schema = self._resolved(schema)
        below = self._below(kind, schema)
        if kind in ("union", "enum"):
            index, at = avro_number(data, at)
            if not 0 <= index < len(below if kind == "union" else schema["symbols"]):
                raise IndexError
            return self.skip(below[index], data, at, depth + 1) if kind == "union" else at
        if kind in RECORDS:
            for one in below:
                at = self.skip(one, data, at, depth + 1)
            return at
        if kind in ITEMS:
            return self._skip_items([*["string"] * (kind == "map"), *below], data, at, depth)
        if kind in ("int", "long", "bytes", "string"):
            value, at = avro_number(data, at)
            size = value if kind in ("bytes", "string") else 0
            if kind == "int" and not -(1 << 31) <= value < 1 << 31:
                raise IndexError
        else:
            size = SIZES[kind] if kind in SIZES else schema["size"]
        if not 0 <= size <= len(data) - at:
            raise IndexError
        return at + size

    def _skip_items(self, item: list[Any], data: bytes, at: int, depth: int) -> int:
        """Return where the blocks of items of an array or map end. item: the schemas of what is in one."""
        while True:
            count, at = avro_number(data, at)
            if count < 0:
                _, at = avro_number(data, at)
            if count == 0:
                return at
            for _ in range(min(abs(count), len(data) + 1)):  # each has a byte
                for one in item:
                    at = self.skip(one, data, at, depth + 1)
