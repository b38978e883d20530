"""The shape of table metadata: the types of what is read of them here. Nobody authenticates the file.

PyIceberg checks the rest, and takes "7" for 7, so what it accepts is not yet right. A field that is absent or null is
no error here, nor is a field that is not listed: later versions and engines add some.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import pydantic
from pyiceberg.exceptions import ValidationError

from ags_fast.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_shape", "understood"]

Long = Annotated[int, msgspec.Meta(ge=-1 << 63, le=(1 << 63) - 1)]
Id = Annotated[int, msgspec.Meta(ge=-1 << 31, le=(1 << 31) - 1)]
Texts = dict[str, str]
Objects = list[dict[str, Any]]


def _type(name: str, needed: dict[str, Any], more: dict[str, Any]) -> Any:
    fields = {**needed, **{field: NotRequired[kind | None] for field, kind in more.items()}}
    return TypedDict(name, fields)  # type: ignore[operator]


def _list(kind: Any) -> Any:
    return list[kind]


Key = _type("Key", {"key-id": str}, {"encrypted-key-metadata": str, "encrypted-by-id": str, "properties": Texts})
Snapshot = _type(
    "Snapshot",
    {"snapshot-id": Long, "timestamp-ms": Long},
    {
        **dict.fromkeys(("parent-snapshot-id", "sequence-number", "first-row-id", "added-rows"), Long),
        "manifest-list": str,
        "manifests": list[str],
        "summary": Texts,
        "schema-id": Id,
        "key-id": str,
    },
)
Ref = _type(
    "Ref",
    {"snapshot-id": Long, "type": Literal["branch", "tag"]},
    {"max-ref-age-ms": Long, "max-snapshot-age-ms": Long, "min-snapshots-to-keep": Id},
)
Statistics = _type("Statistics", {"snapshot-id": Long, "statistics-path": str}, {"key-id": str})
Fields = _type("Fields", {"fields": Objects}, {"schema-id": Id, "spec-id": Id, "order-id": Id})
Metadata = _type(
    "Metadata",
    {"format-version": Id, "location": str, "last-updated-ms": Long, "last-column-id": Id},
    {
        "table-uuid": str,
        "properties": Texts,
        "schema": Fields,
        "partition-spec": Objects,
        **dict.fromkeys(("schemas", "partition-specs", "sort-orders"), _list(Fields)),
        **dict.fromkeys(("current-schema-id", "default-spec-id", "default-sort-order-id", "last-partition-id"), Id),
        **dict.fromkeys(("current-snapshot-id", "last-sequence-number", "next-row-id"), Long),
        "snapshots": _list(Snapshot),
        "refs": dict[str, Ref],  # type: ignore[valid-type]
        "snapshot-log": _list(_type("Entry", {"snapshot-id": Long, "timestamp-ms": Long}, {})),
        "metadata-log": _list(_type("File", {"metadata-file": str, "timestamp-ms": Long}, {})),
        "encryption-keys": _list(Key),
        "statistics": _list(Statistics),
        "partition-statistics": _list(Statistics),
    },
)


def check_shape(raw: Any, location: str) -> None:
    """Refuse parsed metadata in which something has another type than the specification says. FormatError."""
    try:
        msgspec.convert(raw, Metadata)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{location} is not table metadata: {error}") from None


@contextmanager
def understood() -> Iterator[None]:
    """Raise FormatError where PyIceberg does not understand metadata."""
    try:
        yield
    except (pydantic.ValidationError, ValidationError) as error:
        raise FormatError(f"PyIceberg does not understand the table's metadata: {error}") from None
