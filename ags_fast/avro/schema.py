"""Avro schemas: what they become in Arrow, and how they are told to decoders.

A decoder gets the schema in a plain form that encodes records in the same bytes: without logical types, defaults and
documentation, each name used once, and without fields that have no bytes. So all decoders are asked for little, and
`shape` makes of what they give the types that the schema has in Arrow, which are those of Spark's own Avro source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ags_fast.avro.checking import NESTING, NODES, is_decimal, step
from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_PRECISION = 38  # of a decimal, in Spark and in Arrow's 128 bits

PRIMITIVES = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
LOGICAL = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
COMPLEX = ("array", "enum", "error", "fixed", "map", "record")
WIDENED = ({"int": "long", "long": "long"}, {"float": "double", "double": "double"})


@dataclass(frozen=True)
class Node:
    """A place in a schema.

    Attributes:
        kind: The Avro type; "optional" for a union of null and one other type.
        type: The Arrow type.
        children: Nodes of fields, items, values or branches.
        names: The names of fields, the symbols of an enum.
        number: Bytes of a fixed; symbols of an enum; which branch of an "optional" is null.
    """

    kind: str
    type: pa.DataType
    children: tuple[Node, ...] = ()
    names: tuple[str, ...] = ()
    number: int = 0

    @property
    def nullable(self) -> bool:
        """Whether it can be null."""
        return self.kind in ("null", "optional") or (
            self.kind == "union" and any(child.kind == "null" for child in self.children)
        )

    @property
    def empty(self) -> bool:
        """Whether it has no bytes."""
        return self.kind == "null" or (self.kind == "record" and all(child.empty for child in self.children))

    def all(self) -> Iterator[Node]:
        """Iterate over it and all below it."""
        yield self
        for child in self.children:
            yield from child.all()


def parse(text: bytes | str, times: bool = True) -> Node:
    """Return the node of the records of a file by its schema in JSON. Without `times` times of day stay numbers.

    Raises FormatError if the schema is malformed, is not one of records, or is one that Arrow cannot express: a type
    that holds itself, a decimal of more than 38 digits, an array of items without bytes.
    """
    try:
        schema = json.loads(text)
        node = _Parser(times).node(schema, "", 0)
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError("the Avro file has a malformed schema") from None
    if node.kind != "record":
        raise FormatError(f"the Avro file is not one of records, but of {node.kind}")
    return node


class _Parser:
    def __init__(self, times: bool) -> None:
        self._times = times
        self._named: dict[str, tuple[Any, str]] = {}
        self._open: list[str] = []  # the records around this place
        self._count = 0

    def node(self, schema: Any, space: str, depth: int) -> Node:
        self._count += 1
        if depth > NESTING or self._count > NODES:
            raise FormatError("the schema of the Avro file is nested too deeply, or too large")
        if isinstance(schema, list):
            return _union([self.node(one, space, depth + 1) for one in schema])
        if isinstance(schema, str):
            if schema in PRIMITIVES:
                return Node(schema, PRIMITIVES[schema])
            full = f"{space}.{schema}"
            name = full if "." not in schema and full in self._named else schema
            return self._of_name(*self._named[name], name, depth)
        kind = schema["type"]
        if isinstance(kind, (dict, list)) or kind not in {*COMPLEX, *PRIMITIVES}:
            return self.node(kind, space, depth + 1)
        return self._scalar(kind, schema) if kind in PRIMITIVES else self._complex(kind, schema, space, depth)

    def _complex(self, kind: str, schema: Any, space: str, depth: int) -> Node:
        if kind == "array":
            item = self.node(schema["items"], space, depth + 1)
            if item.empty or (item.kind == "fixed" and not item.number):
                raise FormatError("an array of items without bytes: a few bytes could count endless items")
            return Node(kind, pa.list_(pa.field("element", item.type, item.nullable)), (item,))
        if kind == "map":
            value = self.node(schema["values"], space, depth + 1)
            return Node(kind, pa.map_(pa.string(), pa.field("value", value.type, value.nullable)), (value,))
        name = str(schema["name"])
        if "." not in name and (space := str(schema.get("namespace", space) or "")):
            name = f"{space}.{name}"
        self._named[name] = schema, name.rpartition(".")[0]
        return self._of_name(*self._named[name], name, depth)

    def _scalar(self, kind: str, schema: Any) -> Node:
        if kind == "bytes" and (decimal := _decimal(schema)):
            return Node(kind, decimal)
        logical = schema.get("logicalType")
        found = LOGICAL.get((kind, logical)) if isinstance(logical, str) else None
        return Node(kind, PRIMITIVES[kind] if found is None or (pa.types.is_time(found) and not self._times) else found)

    def _of_name(self, schema: Any, space: str, name: str, depth: int) -> Node:
        if schema["type"] == "fixed":
            size = schema["size"]
            if type(size) is not int or not 0 <= size < 1 << 31:
                raise ValueError
            return Node("fixed", _decimal(schema) or pa.binary(), number=size)
        if schema["type"] == "enum":
            symbols = tuple(str(symbol) for symbol in schema["symbols"])
            return Node("enum", pa.string(), names=symbols, number=len(symbols))
        if name in self._open:
            raise FormatError(f"the Avro type {name} holds itself: no column of Arrow or Spark has such a type")
        self._open.append(name)
        names = tuple(str(field["name"]) for field in schema["fields"])
        children = tuple(self.node(field["type"], space, depth + 1) for field in schema["fields"])
        self._open.pop()
        if len(set(names)) < len(names):
            raise ValueError
        return _struct("record", names, children)


def _struct(kind: str, names: tuple[str, ...], children: tuple[Node, ...]) -> Node:
    fields = [
        pa.field(name, child.type, child.nullable or kind == "union")
        for name, child in zip(names, children, strict=True)
    ]
    return Node(kind, pa.struct(fields), children, names)


def _union(branches: list[Node]) -> Node:
    rest = [branch for branch in branches if branch.kind != "null"]
    if any(branch.kind in ("optional", "union") for branch in branches) or not branches:
        raise ValueError("a union in a union")
    if not rest:
        return Node("union", pa.null(), tuple(branches))
    kinds = [branch.kind for branch in rest]
    if len(rest) == 1:
        if len(branches) == 2:
            return Node("optional", rest[0].type, (rest[0],), number=int(branches[0].kind != "null"))
        return Node("union", rest[0].type, tuple(branches))
    for wide in WIDENED:
        if set(kinds) == wide.keys() and len(rest) == 2:
            return Node("union", PRIMITIVES[wide[kinds[0]]], tuple(branches))
    names = tuple(f"member{i}" for i in range(len(rest)))
    return Node("union", _struct("union", names, tuple(rest)).type, tuple(branches), names)


def _decimal(schema: dict[str, Any]) -> pa.DataType | None:
    """Return the type of a decimal; None if the schema's logical type is another, or impossible and thus ignored."""
    if not is_decimal(schema):
        return None
    if schema["precision"] > MAX_PRECISION:
        raise FormatError(f"a decimal of {schema['precision']} digits: Arrow and Spark have at most {MAX_PRECISION}")
    return pa.decimal128(schema["precision"], schema.get("scale", 0))


# ---- what decoders are told


def plain_schema(node: Node, columns: Iterable[int] | None = None, decimals: bool = False) -> dict[str, Any]:
    """Return the plain form of a record's schema, with fields f0, f1 ..., or `columns` of them, that have bytes.

    With `decimals` these keep their logical type.
    """
    numbers = count()

    def plain(node: Node, only: set[int] | None = None) -> Any:
        if node.kind == "record":
            fields = [
                {"name": f"f{i}", "type": plain(child)}
                for i, child in enumerate(node.children)
                if not child.empty and (only is None or i in only)
            ]
            return {"type": "record", "name": f"r{next(numbers)}", "fields": fields}
        if node.kind == "optional":
            both = [plain(node.children[0])]
            both.insert(node.number, "null")
            return both
        if node.kind == "union":
            if node.names:  # each branch in a record, which has the same bytes and says which branch it is
                fields = [{"name": f"f{i}", "type": plain(child)} for i, child in enumerate(node.children)]
                return [{"type": "record", "name": f"b{next(numbers)}", "fields": [field]} for field in fields]
            return [plain(child) for child in node.children]
        if node.kind == "array":
            return {"type": "array", "items": plain(node.children[0])}
        if node.kind == "map":
            return {"type": "map", "values": plain(node.children[0])}
        logical: dict[str, Any] = {}
        if decimals and pa.types.is_decimal(node.type):
            logical = {"logicalType": "decimal", "precision": node.type.precision, "scale": node.type.scale}
        if node.kind == "fixed":
            return {"type": "fixed", "name": f"r{next(numbers)}", "size": node.number, **logical}
        if node.kind == "enum":  # the number of the symbol, which `shape` looks up: fastavro takes -1 for the last one
            return "int"
        return {"type": node.kind, **logical} if logical else node.kind

    result: dict[str, Any] = plain(node, None if columns is None else set(columns))
    return result


def plain_type(node: Node) -> pa.DataType:
    """Return the Arrow type of what `plain_schema` decodes to."""
    if node.kind == "record":
        return pa.struct([(f"f{i}", plain_type(child)) for i, child in enumerate(node.children) if not child.empty])
    if node.kind == "optional":
        return plain_type(node.children[0])
    if node.kind == "union":
        if not node.names:
            return node.type if len(node.children) > 1 else plain_type(node.children[0])
        return pa.struct([(f"f{i}", plain_type(child)) for i, child in enumerate(node.children)])
    if node.kind == "array":
        return pa.list_(plain_type(node.children[0]))
    if node.kind == "map":
        return pa.map_(pa.string(), plain_type(node.children[0]))
    return PRIMITIVES[{"fixed": "bytes", "enum": "int"}.get(node.kind, node.kind)]


def program(node: Node) -> list[int]:
    """Compile a schema for `avro_pick`, which then checks that a block holds whole records."""
    inner = [program(child) for child in node.children]
    if node.kind == "optional":
        inner.insert(node.number, step("null", [], 0))
        return step("union", inner, 0)
    return step(node.kind, inner, node.number)
