"""Manifests and manifest lists of version 3 written anew: entries keep what they inherit, as values of their own.

All functions are pure: they take and return plaintext. Specification: Iceberg, "Manifests", "Sequence Number
Inheritance", "Row Lineage".
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError
from ags_fast.iceberg.container import Container, field_of, record_fields, write_container
from ags_fast.iceberg.manifests import DATA, DELETED, DELETES, NEW_FILE_FIELDS, NEW_LIST_FIELDS, add_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.iceberg.manifests import Known

__all__ = ["ADDED", "EXISTING", "Counts", "entries", "list_bytes", "list_record", "manifest_bytes", "new_entry"]

EXISTING, ADDED = 0, 1  # status of an entry

Record = dict[str, Any]  # an entry of a manifest, or a manifest in a list, by the names of Iceberg's fields


def entries(container: Container, manifest: Known) -> list[Record]:
    """Return the live entries of a manifest, decoded. What they inherit from its list is a value of their own.

    Args:
        container: The manifest, whose keys were not taken.
        manifest: What its list says of it.

    Returns:
        Entries of status `EXISTING`. Those of files that were deleted in an earlier snapshot are left out.
    """
    kept, next_row_id = [], manifest.first_row_id
    for entry in container.records():
        if entry["status"] == DELETED:
            continue
        for name, value in (
            ("snapshot_id", manifest.snapshot_id),
            ("sequence_number", manifest.sequence_number),
            ("file_sequence_number", manifest.sequence_number),
        ):
            if entry.get(name) is None:
                if entry["status"] != ADDED and name != "snapshot_id":
                    raise FormatError(f"an entry of {manifest.path} that was not added there has no {name}")
                entry[name] = value
        entry["status"] = EXISTING
        file = entry["data_file"]
        file.setdefault("content", DATA)
        if file["content"] == DATA and next_row_id is not None and file.get("first_row_id") is None:
            file["first_row_id"] = next_row_id
            next_row_id += file["record_count"]
        kept.append(entry)
    return kept


def new_entry(container: Container, snapshot_id: int, file: Mapping[str, Any]) -> Record:
    """Return an entry of status `ADDED`, whose sequence numbers are those of the snapshot.

    Args:
        container: A manifest of the same partition spec, for the names of the fields.
        snapshot_id: The snapshot that adds the file.
        file: The values of its data file; others are null.
    """
    outer = field_of(container.schema, 2)
    assert outer is not None
    names = [one["name"] for one in record_fields(outer)]
    return {
        "status": ADDED,
        "snapshot_id": snapshot_id,
        "sequence_number": None,
        "file_sequence_number": None,
        "data_file": dict.fromkeys(names) | dict(file),
    }


def manifest_bytes(container: Container, kept: Iterable[Record], content: int) -> bytes:
    """Return the plaintext of a manifest with other entries.

    Args:
        container: The manifest that it replaces, or one of the same partition spec: its schema and header are used.
        kept: The entries.
        content: `DATA` or `DELETES`.
    """
    schema = copy.deepcopy(container.schema)
    outer = field_of(schema, 2)
    assert outer is not None
    add_fields(record_fields(outer), NEW_FILE_FIELDS)
    meta = {
        **container.meta,
        "format-version": b"3",
        "content": b"deletes" if content == DELETES else b"data",
    }
    return write_container(schema, meta, kept)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many files and rows of each status a manifest has, and the least sequence number of its live files."""

    files: tuple[int, int, int]
    rows: tuple[int, int, int]
    min_sequence_number: int

    @classmethod
    def of(cls, kept: Iterable[Record], sequence_number: int) -> Counts:
        """Count entries. Those without a sequence number have that of the snapshot."""
        files, rows, least = [0, 0, 0], [0, 0, 0], sequence_number
        for entry in kept:
            files[entry["status"]] += 1
            rows[entry["status"]] += entry["data_file"]["record_count"]
            if entry["status"] != DELETED and entry["sequence_number"] is not None:
                least = min(least, entry["sequence_number"])
        return cls((files[0], files[1], files[2]), (rows[0], rows[1], rows[2]), least)


def list_record(written: Known, counts: Counts, *, like: Mapping[str, Any], content: int, snapshot: Record) -> Record:
    """Return what a manifest list says of a new manifest.

    Args:
        written: The new manifest.
        counts: Of its entries.
        like: What a list says of the manifest that it replaces, or of one of the same partition spec. The bounds of
            partitions stay if the content is the same, since entries only go.
        content: `DATA` or `DELETES`.
        snapshot: The new snapshot, of which ``snapshot-id`` and ``sequence-number`` are used.
    """
    assert written.key_metadata is not None
    existing, added, deleted = counts.files
    existing_rows, added_rows, deleted_rows = counts.rows
    return {
        **like,
        "manifest_path": written.path,
        "manifest_length": written.length,
        "content": content,
        "sequence_number": snapshot["sequence-number"],
        "min_sequence_number": counts.min_sequence_number,
        "added_snapshot_id": snapshot["snapshot-id"],
        "added_files_count": added,
        "existing_files_count": existing,
        "deleted_files_count": deleted,
        "added_rows_count": added_rows,
        "existing_rows_count": existing_rows,
        "deleted_rows_count": deleted_rows,
        "partitions": like.get("partitions") if content == (like.get("content") or DATA) else None,
        "key_metadata": written.key_metadata.encode(),
        "first_row_id": None,
    }


def list_bytes(container: Container, records: Iterable[Record], snapshot: Record) -> tuple[bytes, int]:
    """Return the plaintext of a manifest list of version 3, and how many row ids it takes.

    A data manifest without a first row id gets the next ones, as many as it has rows.

    Args:
        container: The list that it replaces.
        records: The manifests.
        snapshot: The new snapshot: ``snapshot-id``, ``parent-snapshot-id``, ``sequence-number`` and ``first-row-id``.
    """
    schema = copy.deepcopy(container.schema)
    add_fields(record_fields(schema), NEW_LIST_FIELDS)
    next_row_id, made = snapshot["first-row-id"], []
    for record in records:
        if (record.get("content") or DATA) == DATA and record.get("first_row_id") is None:
            record = {**record, "first_row_id": next_row_id}
            next_row_id += (record["added_rows_count"] or 0) + (record["existing_rows_count"] or 0)
        made.append(record)
    meta = {
        **container.meta,
        "snapshot-id": str(snapshot["snapshot-id"]).encode(),
        "parent-snapshot-id": str(snapshot.get("parent-snapshot-id", "null")).encode(),
        "sequence-number": str(snapshot["sequence-number"]).encode(),
        "first-row-id": str(snapshot["first-row-id"]).encode(),
        "format-version": b"3",
    }
    return write_container(schema, meta, made), next_row_id - snapshot["first-row-id"]
