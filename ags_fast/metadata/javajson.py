"""Table metadata as Java writes them, and Java's hash of them.

A Hive metastore has the hash of the current metadata as the parameter ``metadata_hash`` of a table. Java parses the
file, writes it again as JSON, and refuses the table if that JSON has another hash. So the order of all fields counts,
and which fields are left out. This is the order of Iceberg Java 1.11 (`TableMetadataParser` and what it calls).
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["METADATA_HASH", "TABLE", "Raw", "in_java_order", "java_hash", "matches"]

Raw = dict[str, Any]

METADATA_HASH = "metadata_hash"  # the parameter of a table in a Hive metastore

TABLE = (
    *("format-version", "table-uuid", "location", "last-sequence-number", "last-updated-ms", "last-column-id"),
    *("current-schema-id", "schemas", "default-spec-id", "partition-specs", "last-partition-id"),
    *("default-sort-order-id", "sort-orders", "properties", "current-snapshot-id", "next-row-id"),
    *("encryption-keys", "refs", "snapshots", "statistics", "partition-statistics", "snapshot-log", "metadata-log"),
)
SNAPSHOT = (
    *("sequence-number", "snapshot-id", "parent-snapshot-id", "timestamp-ms", "summary", "manifest-list"),
    *("schema-id", "first-row-id", "added-rows", "key-id"),
)
SCHEMA = ("type", "schema-id", "identifier-field-ids", "fields")
COLUMN = ("id", "name", "required", "type", "doc", "initial-default", "write-default")
NESTED = {
    "struct": ("type", "fields"),
    "list": ("type", "element-id", "element", "element-required"),
    "map": ("type", "key-id", "key", "value-id", "value", "value-required"),
}
REF = ("snapshot-id", "type", "min-snapshots-to-keep", "max-snapshot-age-ms", "max-ref-age-ms")
KEY = ("key-id", "encrypted-key-metadata", "encrypted-by-id", "properties")
STATISTICS = ("snapshot-id", "statistics-path", "file-size-in-bytes", "file-footer-size-in-bytes", "blob-metadata")
BLOB = ("type", "snapshot-id", "sequence-number", "fields", "properties")
SPEC = ("name", "transform", "source-id", "field-id")
SORT_ORDER = ("transform", "source-id", "direction", "null-order")
LOGS = {  # lists that are written if they are empty, of objects without objects in them
    "partition-statistics": STATISTICS[:3],
    "snapshot-log": ("timestamp-ms", "snapshot-id"),
    "metadata-log": ("timestamp-ms", "metadata-file"),
}


class _Order:
    """Puts objects into Java's order. `exact` says whether Java would write all that there is, and nothing else."""

    def __init__(self) -> None:
        self.exact = True

    def fields(self, value: Mapping[str, Any], names: Iterable[str], unless_empty: str | None = None) -> Raw:
        """Fields of these names first; Java leaves out those that are null, and one if it is empty."""
        made = {name: value[name] for name in names if value.get(name) is not None}
        more = {name: one for name, one in value.items() if name not in names}
        self.exact = self.exact and not more
        if unless_empty is not None and not made.get(unless_empty):
            made.pop(unless_empty, None)
        return made | more

    def each(self, raw: Mapping[str, Any], name: str, change: Callable[[Any], Any]) -> list[Any]:
        return [change(one) for one in raw.get(name) or ()]

    def table(self, raw: Mapping[str, Any]) -> Raw:
        current = raw.get("current-snapshot-id")
        filled = {
            **raw,
            "properties": raw.get("properties") or {},
            "schemas": self.each(raw, "schemas", self.schema),
            "partition-specs": self.each(raw, "partition-specs", lambda one: self.numbered(one, "spec-id", SPEC)),
            "sort-orders": self.each(raw, "sort-orders", lambda one: self.numbered(one, "order-id", SORT_ORDER)),
            "encryption-keys": self.each(raw, "encryption-keys", self.key) or None,
            "refs": {name: self.fields(one, REF) for name, one in (raw.get("refs") or {}).items()},
            "snapshots": self.each(raw, "snapshots", self.snapshot),
            "statistics": self.each(raw, "statistics", self.statistics),
            "current-snapshot-id": -1,  # holds the place: null is written
        }
        for name, names in LOGS.items():
            filled[name] = [self.fields(one, names) for one in raw.get(name) or ()]
        made = self.fields(filled, TABLE)
        made["current-snapshot-id"] = None if current == -1 else current
        return made

    def snapshot(self, one: Mapping[str, Any]) -> Raw:
        made = self.fields(one, SNAPSHOT)
        if made.get("sequence-number") == 0:
            del made["sequence-number"]
        if "summary" in made:
            summary = made["summary"]
            made["summary"] = {name: summary[name] for name in ("operation",) if name in summary} | summary
        return made

    def key(self, one: Mapping[str, Any]) -> Raw:
        made = self.fields(one, KEY, "properties")
        self.exact = self.exact and len(made.get("properties") or ()) <= 1  # Java has them in a map of its own order
        return made

    def schema(self, one: Mapping[str, Any]) -> Raw:
        made = self.fields(one, SCHEMA, "identifier-field-ids")
        made["fields"] = self.each(made, "fields", self.column)
        return made

    def column(self, one: Mapping[str, Any]) -> Raw:
        made = self.fields(one, COLUMN)
        made["type"] = self.type(made.get("type"))
        defaults = (made.get("initial-default"), made.get("write-default"))
        self.exact = self.exact and not any(isinstance(one, float) for one in defaults)  # Java writes 1.0E10
        return made

    def type(self, value: Any) -> Any:
        """A type: text, or a struct, list or map."""
        if not isinstance(value, dict):
            return value
        made = self.fields(value, NESTED.get(value.get("type", ""), ()))
        for name in ("element", "key", "value"):
            if name in made:
                made[name] = self.type(made[name])
        if "fields" in made:
            made["fields"] = self.each(made, "fields", self.column)
        return made

    def numbered(self, one: Mapping[str, Any], number: str, names: tuple[str, ...]) -> Raw:
        """A partition spec or a sort order."""
        made = self.fields(one, (number, "fields"))
        made["fields"] = self.each(made, "fields", lambda field: self.fields(field, names))
        return made

    def statistics(self, one: Mapping[str, Any]) -> Raw:
        made = self.fields(one, STATISTICS)
        made["blob-metadata"] = self.each(made, "blob-metadata", lambda blob: self.fields(blob, BLOB, "properties"))
        return made


def in_java_order(raw: Mapping[str, Any]) -> Raw:
    """Return metadata of version 2 or 3 as Java orders them. Fields that Java does not know come last."""
    return _Order().table(raw)


def java_hash(raw: Mapping[str, Any]) -> str | None:
    """Return the ``metadata_hash`` that Java computes of metadata; None if Java would not write all that is in them."""
    order = _Order()
    made = order.table(raw)
    if not order.exact or "\\u00" in json.dumps(made, ensure_ascii=False):
        return None  # Java writes control characters with capital digits
    return _hash(made)


def matches(raw: Mapping[str, Any], expected: str) -> bool:
    """Tell whether parsed metadata have a ``metadata_hash``: as they were written, or as Java writes them again."""
    return expected == _hash(raw) or expected == _hash(in_java_order(raw))


def _hash(raw: Mapping[str, Any]) -> str:
    data = json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode()
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
