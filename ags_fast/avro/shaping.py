"""Make of what a decoder gives the Arrow types that a schema has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from ags_fast.avro.schema import Node

DECIMAL_NBYTES = 16


def shape(node: Node, values: pa.Array) -> pa.Array:
    """Return values of a node's plain type, or of one that means the same, as an array of the node's type."""
    if node.kind == "optional":
        return shape(node.children[0], values)
    if node.kind == "record":
        return _record(node, values)
    if node.kind == "union":
        return _union(node, values)
    if node.kind == "array":
        return _items(node, values)
    if node.kind == "map":
        return _pairs(node, values)
    if node.kind == "enum":
        return pa.array(node.names, pa.string()).take(values)
    if values.type == node.type:
        return values
    if node.kind in ("int", "long"):  # date, time, timestamp: the same bits
        return values.view(node.type)
    if pa.types.is_decimal(node.type):
        return _decimals(node.type, values.cast(pa.binary()))
    return values.cast(node.type)


def nothing(node: Node, length: int) -> pa.Array:
    """Return values of a node that has no bytes."""
    if node.kind == "null":
        return pa.nulls(length)
    return _struct(node, [nothing(child, length) for child in node.children], length, None)


def _struct(node: Node, children: list[pa.Array], length: int, mask: pa.Array | None) -> pa.Array:
    if not children:
        return pa.array([None if null else {} for null in mask.to_pylist()] if mask else [{}] * length, node.type)
    return pa.StructArray.from_arrays(children, fields=list(node.type), mask=mask)


def _record(node: Node, values: pa.Array) -> pa.Array:
    decoded = iter(range(values.type.num_fields))
    children = [
        nothing(child, len(values)) if child.empty else shape(child, values.field(next(decoded)))
        for child in node.children
    ]
    return _struct(node, children, len(values), values.is_null() if values.null_count else None)


def _union(node: Node, values: pa.Array) -> pa.Array:
    if not node.names:  # one type only, or numbers that became the wider one
        rest = [child for child in node.children if child.kind != "null"]
        return shape(rest[0], values) if len(rest) == 1 else values.cast(node.type)
    members = [i for i, child in enumerate(node.children) if child.kind != "null"]
    given = [values.field(i) for i in members]
    is_null = None
    if node.nullable:
        is_null = given[0].is_null()
        for member in given[1:]:
            is_null = pc.and_(is_null, member.is_null())
    children = [shape(node.children[i], member) for i, member in zip(members, given, strict=True)]
    return pa.StructArray.from_arrays(children, fields=list(node.type), mask=is_null)


def _items(node: Node, values: pa.Array) -> pa.Array:
    if not pa.types.is_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    return pa.Array.from_buffers(
        node.type, len(values), values.buffers()[:2], values.null_count, values.offset,
        [shape(node.children[0], values.values)],
    )  # fmt: skip


def _pairs(node: Node, values: pa.Array) -> pa.Array:
    keys, items = values.keys.cast(pa.string()), shape(node.children[0], values.items)
    fields = [node.type.key_field, node.type.item_field]
    pairs = pa.StructArray.from_arrays([keys, items], fields=fields)
    found = pa.Array.from_buffers(
        node.type, len(values), values.buffers()[:2], values.null_count, values.offset, [pairs]
    )
    if _repeats(found):  # the last value counts, as for readers that make a dict of a map
        rows = [None if row is None else list(dict(row).items()) for row in found.to_pylist()]
        return pa.array(rows, node.type)
    return found


def _repeats(maps: pa.Array) -> bool:
    """Return whether a map has a key twice."""
    keys = pa.Array.from_buffers(
        pa.list_(pa.string()), len(maps), maps.buffers()[:2], maps.null_count, maps.offset, [maps.keys]
    )
    entries = pa.table([pc.list_parent_indices(keys), pc.list_flatten(keys)], ["map", "key"])
    return bool(entries.group_by(["map", "key"], use_threads=False).aggregate([]).num_rows < entries.num_rows)


def _decimals(target: pa.DataType, values: pa.Array) -> pa.Array:
    """Return decimals of big-endian numbers in two's complement."""
    highest = 10**target.precision
    numbers = [None if value is None else int.from_bytes(value, "big", signed=True) for value in values.to_pylist()]
    if any(number is not None and not -highest < number < highest for number in numbers):
        raise FormatError(f"a decimal has more than the {target.precision} digits that the schema of the file allows")
    data = b"".join((number or 0).to_bytes(DECIMAL_NBYTES, "little", signed=True) for number in numbers)
    validity = pc.is_valid(values).buffers()[1] if values.null_count else None
    return pa.Array.from_buffers(target, len(values), [validity, pa.py_buffer(data)])
