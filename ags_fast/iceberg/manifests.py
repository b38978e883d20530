"""Manifests and manifest lists of encrypted tables: what they say of other files, as a facade, and as v3 files.

A manifest list names manifests with their keys (fields 500, 519), a manifest names data files with theirs (100, 131).
All functions here work on decrypted bytes. Specification: Iceberg, "Manifests" and "Manifest Lists", version 3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg.container import Container, field_of
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["DATA", "DELETED", "DELETES", "STATUSES", "Known"]
__all__ += ["data_files", "facade", "is_list", "manifests", "sealed_entry"]

DATA, DELETES = 0, 1  # content of a manifest
DELETED = 2  # status of an entry
STATUSES = (("added", 1), ("existing", 0), ("deleted", DELETED))  # in the order of a list's counts
KEY_METADATA, LIST_KEY_METADATA = 131, 519
BLANK = 100_000  # added to the id of the field with key metadata, so that a reader of the facade skips the field

# Ids of the fields of a manifest in a list, and of an entry and its data file, in the order in which they are taken.
LISTED = (500, 501, 519, 517, 512, 513, 520, 503, 515, 502)
COUNTED = (*LISTED, 504, 505, 506, 514)
ENTRY = (100, 104, 131, 134, 101, 103, 142, 143, 144, 145, 0, 1, 3)

# What version 3 adds to a data file and to a manifest in a list.
NEW_FILE_FIELDS = (
    ("first_row_id", 142, "long"),
    ("referenced_data_file", 143, "string"),
    ("content_offset", 144, "long"),
    ("content_size_in_bytes", 145, "long"),
)
NEW_LIST_FIELDS = (("first_row_id", 520, "long"),)


@dataclass(slots=True, repr=False)
class Known:
    """What a manifest list says of a manifest, or a manifest of a file.

    Attributes:
        length: Bytes on storage, as the list or manifest says.
        key_metadata: Its key, or None if the file is in plaintext.
        content: Of a manifest 0 (data) or 1 (deletes); of a file 0 (data), 1 (position deletes), 2 (equality deletes).
        format: Of a file: AVRO, PARQUET, ORC or PUFFIN. Of a manifest: None.
        record_count: Of a file: its rows, or deleted positions.
        first_row_id: The first row id of a manifest, or of a data file, inherited or its own; None if it has none.
        referenced_data_file: Of a deletion vector: the data file that it belongs to.
        content_offset, content_size: Where a deletion vector's blob begins in the decrypted Puffin file, and its bytes.
        status: Of a file: 0 (existing), 1 (added), 2 (deleted).
        snapshot_id: Of a file: the snapshot that added or deleted it; None is inherited.
        sequence_number: Of a manifest, or of a file; None is inherited.
        spec_id: Of a manifest: its partition spec.
        split_offsets: Of a data file that this session wrote: where its row groups begin in the encrypted file.
        counts: Of a manifest, if they were taken: its added, existing and deleted files, then their rows; None where
            the list does not say.
    """

    path: str
    length: int
    key_metadata: StandardKeyMetadata | None
    content: int = DATA
    format: str | None = None
    record_count: int = 0
    first_row_id: int | None = None
    referenced_data_file: str | None = None
    content_offset: int | None = None
    content_size: int | None = None
    status: int = 0
    snapshot_id: int | None = None
    sequence_number: int | None = None
    spec_id: int | None = None
    split_offsets: list[int] | None = None
    counts: tuple[int | None, ...] = ()

    @property
    def kind(self) -> str:
        """What a file of a manifest is: ``data``, ``deletion-vector``, or the kind of its deletes."""
        if self.format == "PUFFIN":
            return "deletion-vector"
        return ("data", "position-deletes", "equality-deletes")[self.content]

    def __repr__(self) -> str:
        return f"<Known {self.path} length={self.length} {'encrypted' if self.key_metadata else 'plaintext'}>"

    def __reduce__(self) -> str:
        raise TypeError("what is known of a file has its key, and is never pickled")


def is_list(container: Container) -> bool:
    """Tell a manifest list from a manifest. FormatError if the container is neither."""
    return bool(container.layout.derived(_is_list))


def _is_list(schema: dict[str, Any]) -> bool:
    if field_of(schema, LISTED[0]) is not None:
        return True
    entry = field_of(schema, 2)
    if entry is None or field_of(entry, ENTRY[0]) is None:
        raise FormatError("the Avro file is neither a manifest nor a manifest list")
    return False


def manifests(container: Container, *, counts: bool = False) -> list[Known]:
    """Return the manifests that a list names, in its order. FormatError if the list is malformed.

    counts: also take what it says of the files and rows of each. The keys in the container are zeros afterwards.
    """
    known = []
    taken = container.take(COUNTED if counts else LISTED, LIST_KEY_METADATA)
    for path, length, key, content, added, existing, row_id, snapshot_id, number, spec_id, *more in taken:
        one = Known(_text(path), _number(length), _metadata(key), content or DATA)
        one.record_count = (added or 0) + (existing or 0)
        if more:
            one.counts = (*more[:3], added, existing, more[3])
        one.first_row_id, one.snapshot_id, one.sequence_number, one.spec_id = row_id, snapshot_id, number, spec_id
        known.append(one)
    return known


def data_files(container: Container, manifest: Known) -> list[Known]:
    """Return the files that a manifest names, in its order, deleted ones too. FormatError if it is malformed.

    A data file without a row id inherits one from what the list says of the `manifest`, and a file without a sequence
    number or snapshot theirs (specification: "Row Lineage", "Sequence Number Inheritance"). The keys in the container
    are zeros afterwards.
    """
    known, next_row_id = [], manifest.first_row_id
    taken = container.take(ENTRY, KEY_METADATA)
    for path, length, key, content, kind, records, row_id, referenced, offset, size, *more in taken:
        one = Known(_text(path), _number(length), _metadata(key), content or DATA, _text(kind).upper())
        one.record_count, one.first_row_id = _number(records), row_id
        one.referenced_data_file = None if referenced is None else _text(referenced)
        one.content_offset, one.content_size = offset, size
        status, snapshot_id, number = more
        one.status = _number(status)
        one.snapshot_id = manifest.snapshot_id if snapshot_id is None else snapshot_id
        one.sequence_number = manifest.sequence_number if number is None else number
        if one.content == DATA and one.status != DELETED:
            if next_row_id is None:
                one.first_row_id = None
            elif one.first_row_id is None:
                one.first_row_id = next_row_id
                next_row_id += one.record_count
        known.append(one)
    return known


def facade(container: Container) -> bytes:
    """Return a manifest or list as a reader may see it, once its keys were taken: they are in a field of zeros."""
    return container.encode(container.layout.derived(_blank))


def _blank(schema: dict[str, Any]) -> bytes:
    """Return a schema, as text, in which key metadata are a field that no reader knows."""
    for outer in (schema, field_of(schema, 2)):
        for field_id in (KEY_METADATA, LIST_KEY_METADATA):
            field = None if outer is None else field_of(outer, field_id)
            if field is not None:
                field["field-id"] = field_id + BLANK
                field["name"] += "_blank"
    return json.dumps(schema).encode()


def sealed_entry(record: dict[str, Any], look_up: Callable[[str], Known | None]) -> dict[str, Any]:
    """Return an entry of version 3, made in place of one that PyIceberg wrote for the facade.

    `look_up` returns what is known of a data file: its key, and what version 2 has no field for. PolicyError if it has
    no key, that is, it is in plaintext.
    """
    file = record["data_file"]
    known = look_up(file["file_path"])
    if known is None or known.key_metadata is None:
        raise PolicyError(
            f"{file['file_path']} is in plaintext, and an encrypted table takes no such file: append its rows instead"
        )
    if file["file_format"].upper() == "PUFFIN":  # version 2 has no fields for what its entry says of a vector
        raise PolicyError(f"the deletion vectors in {known.path} are kept by ags_fast.iceberg only, not by PyIceberg")
    if known.length != file["file_size_in_bytes"]:
        raise FormatError(f"{file['file_path']} has {known.length} bytes, its entry says {file['file_size_in_bytes']}")
    file["key_metadata"] = known.key_metadata.encode()
    file["first_row_id"] = known.first_row_id if file.get("content", DATA) == DATA else None
    file["referenced_data_file"] = known.referenced_data_file
    file["content_offset"] = file["content_size_in_bytes"] = None
    if known.split_offsets is not None:  # PyIceberg took those of a new file from its plaintext
        file["split_offsets"] = known.split_offsets
    return record


def add_fields(fields: list[dict[str, Any]], new: Iterable[tuple[str, int, str]]) -> None:
    ids = {field.get("field-id") for field in fields}
    for name, field_id, kind in new:
        if field_id not in ids:
            fields.append({"name": name, "type": ["null", kind], "default": None, "field-id": field_id})


def _metadata(value: bytes | None) -> StandardKeyMetadata | None:
    return None if value is None else StandardKeyMetadata.decode(value)


def _text(value: bytes | None) -> str:
    if not value:
        raise FormatError("an entry of a manifest, or of a list, has no path or format")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise FormatError("an entry of a manifest, or of a list, has text that is not UTF-8") from None


def _number(value: int | None) -> int:
    if value is None or value < 0:
        raise FormatError("an entry of a manifest, or of a list, has no length, count or status, or a negative one")
    return value
