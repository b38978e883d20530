"""Table metadata: the raw JSON of version 3, and the facade of version 2 that PyIceberg is shown.

The raw JSON is the truth. What PyIceberg writes is merged over it, so that fields which PyIceberg does not know stay:
keys, row ids, and what later writers add. Specification: Iceberg, "Table Metadata", version 3.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg.javajson import TABLE, Raw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MARK", "Raw", "dump", "facade", "merge", "new_snapshots", "parse"]

MARK = "ags_fast.edit"  # a property of the facade only: the commit that carries it is an edit of the raw metadata
GZIP_SUFFIX = ".gz.metadata.json"
OWN_OF_TABLE = ("encryption-keys", "next-row-id")
OWN_OF_SNAPSHOT = ("key-id", "first-row-id", "added-rows")
# What PyIceberg writes of version 2: a field of these that is gone was removed. It does not know others.
FACADE_FIELDS = frozenset(TABLE) - frozenset(OWN_OF_TABLE)
# Lists whose items have an id: an item of the base is carried over as it was.
NUMBERED = {
    "schemas": ("schema-id",),
    "partition-specs": ("spec-id",),
    "sort-orders": ("order-id",),
    "snapshots": ("snapshot-id",),
    "statistics": ("snapshot-id", "statistics-path"),
    "partition-statistics": ("snapshot-id", "statistics-path"),
}


def parse(data: bytes, location: str) -> Raw:
    """Return the metadata in a metadata file, which may be compressed. FormatError if they are malformed."""
    try:
        raw = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError):
        raise FormatError(f"{location} is not table metadata: it is not JSON") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("format-version"), int):
        raise FormatError(f"{location} is not table metadata: it has no format-version")
    return raw


def dump(raw: Mapping[str, Any], location: str) -> bytes:
    """Return the bytes of a metadata file, as Java writes them."""
    data = json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode()
    return gzip.compress(data) if location.endswith(GZIP_SUFFIX) else data


def facade(raw: Mapping[str, Any]) -> Raw:
    """Return what PyIceberg is shown of an encrypted table: version 2, without keys and row ids."""
    shown = {name: value for name, value in raw.items() if name not in OWN_OF_TABLE}
    shown["format-version"] = 2
    if "snapshots" in raw:
        shown["snapshots"] = [
            {name: value for name, value in snapshot.items() if name not in OWN_OF_SNAPSHOT}
            for snapshot in raw["snapshots"]
        ]
    return shown


def new_snapshots(base: Mapping[str, Any] | None, shown: Mapping[str, Any]) -> list[Raw]:
    """Return the snapshots of a changed facade that its base does not have, oldest first."""
    old = {one["snapshot-id"] for one in (base or {}).get("snapshots") or ()}
    new = [one for one in shown.get("snapshots") or () if one["snapshot-id"] not in old]
    return sorted(new, key=lambda one: one.get("sequence-number") or 0)


def merge(base: Mapping[str, Any] | None, shown: Mapping[str, Any], seal: Callable[[Raw, list[Raw]], None]) -> Raw:
    """Return the raw metadata of a commit.

    Args:
        base: The raw metadata that the commit changes; None for a new table.
        shown: The facade that PyIceberg writes.
        seal: Gives new snapshots their key and row ids: called with the raw metadata and those of their snapshots that
            are new, oldest first; changes both.

    Raises:
        PolicyError: The facade is another table's than the base.
    """
    if base is not None and base.get("table-uuid") != shown.get("table-uuid"):
        raise PolicyError("the commit is one of another table: the table-uuid of its metadata is another")
    raw: Raw = dict.fromkeys(base or ())
    for name, value in shown.items():
        raw[name] = value
    for name, value in (base or {}).items():
        if name not in FACADE_FIELDS:
            raw[name] = value  # of version 3, or of later writers
        elif name not in shown:
            del raw[name]
        elif name in NUMBERED:
            raw[name] = _carried_over(value, shown[name], NUMBERED[name])
        elif name == "refs":
            raw[name] = {
                ref: {**value.get(ref, {}), **one} if value.get(ref, {}).get("type") == one.get("type") else one
                for ref, one in shown[name].items()
            }
    raw["format-version"] = 3
    raw.setdefault("next-row-id", 0)
    raw["snapshots"] = [dict(one) for one in raw.get("snapshots") or ()]
    new = {one["snapshot-id"] for one in new_snapshots(base, shown)}
    fresh = [one for one in raw["snapshots"] if one["snapshot-id"] in new]
    seal(raw, sorted(fresh, key=lambda one: one.get("sequence-number") or 0))
    return raw


def _carried_over(base: list[Raw] | None, shown: list[Raw], ids: tuple[str, ...]) -> list[Raw]:
    old = {tuple(one.get(name) for name in ids): one for one in base or ()}
    return [old.get(tuple(one.get(name) for name in ids), one) for one in shown]
