"""Manifests and manifest lists of version 3 written anew: entries keep what they inherit, as values of their own.

All functions are pure: they take and return plaintext. Specification: Iceberg, "Manifests", "Sequence Number
Inheritance", "Row Lineage".
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError
from ags_fast.iceberg.container import Container, field_of, record_fields, write_container
from ags_fast.iceberg.manifests import DATA, DELETED, DELETES, NEW_FILE_FIELDS, NEW_LIST_FIELDS, STATUSES, add_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.iceberg.manifests import Known

__all__ = ["ADDED", "EXISTING", "entries", "list_bytes", "list_record", "live_counts", "manifest_bytes"]
__all__ += ["moved_record", "new_entry"]

EXISTING, ADDED = 0, 1  # status of an entry

Record = dict[str, Any]  # an entry of a manifest, or a manifest in a list, by the names of Iceberg's fields


def entries(container: Container, manifest: Known) -> list[Record]:
    """Return the live entries of a manifest whose keys were not taken, decoded, with the status `EXISTING`.

    What they inherit from its list is a value of their own.
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

    The fields are those of `container`, a manifest of the same partition spec; what `file` does not have is null.
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


def manifest_bytes(container: Container, kept: Iterable[Record], content: int, codec: str) -> bytes:
    """Return the plaintext of a manifest with other entries, and a content of `DATA` or `DELETES`.

    The schema and header are those of `container`: the manifest that it replaces, or one of the same partition spec.
    """
    schema = copy.deepcopy(container.schema)
    outer = field_of(schema, 2)
    assert outer is not None
    add_fields(record_fields(outer), NEW_FILE_FIELDS)
    meta = {**container.meta, "format-version": b"3", "content": b"deletes" if content == DELETES else b"data"}
    return write_container(schema, meta, kept, codec)


def list_record(written: Known, kept: Iterable[Record], *, like: Mapping[str, Any], snapshot: Record) -> Record:
    """Return what a manifest list says of a new manifest, of which `kept` are the entries.

    Entries without a sequence number have that of the snapshot. `like` is what a list says of the manifest that it
    replaces, or of one of the same partition spec. The bounds of partitions stay if the content is the same, since
    entries only go.
    """
    files, rows, least = [0, 0, 0], [0, 0, 0], snapshot["sequence-number"]  # the first two by status
    for entry in kept:
        files[entry["status"]] += 1
        rows[entry["status"]] += entry["data_file"]["record_count"]
        if entry["status"] != DELETED and entry["sequence_number"] is not None:
            least = min(least, entry["sequence_number"])
    return {
        **_record(like, written, files, rows, snapshot),
        "content": written.content,
        "min_sequence_number": least,
        "partitions": like.get("partitions") if written.content == (like.get("content") or DATA) else None,
        "first_row_id": None,
    }


def live_counts(manifest: Known) -> tuple[int, int]:
    """Return how many live files and rows a manifest has, as its list says. FormatError if the list does not say."""
    added, existing, _, added_rows, existing_rows, _ = manifest.counts
    if added is None or existing is None or added_rows is None or existing_rows is None:
        raise FormatError(f"the manifest list does not say how many files and rows {manifest.path} has")
    return added + existing, added_rows + existing_rows


def moved_record(old: Known, moved: Known, *, like: Mapping[str, Any], snapshot: Record) -> Record:
    """Return what a manifest list says of a manifest that was written anew with its live entries alone.

    `like` is what the list said of the `old` one, whose entries have their row ids as values of their own.
    """
    files, rows = live_counts(old)
    return _record(like, moved, [files, 0, 0], [rows, 0, 0], snapshot)


def _record(
    like: Mapping[str, Any], written: Known, files: Sequence[int], rows: Sequence[int], snapshot: Record
) -> Record:
    assert written.key_metadata is not None
    return {
        **like,
        "manifest_path": written.path,
        "manifest_length": written.length,
        "sequence_number": snapshot["sequence-number"],
        "added_snapshot_id": snapshot["snapshot-id"],
        **{f"{name}_files_count": files[status] for name, status in STATUSES},
        **{f"{name}_rows_count": rows[status] for name, status in STATUSES},
        "key_metadata": written.key_metadata.encode(),
    }


def list_bytes(container: Container, records: list[Record], snapshot: Record, codec: str) -> tuple[bytes, int]:
    """Return the plaintext of a manifest list of version 3, and how many row ids it takes.

    A data manifest without a first row id gets the next ones, in `records`, as many as it has rows. `container` is the
    list that it replaces, or the list as PyIceberg wrote it.
    """
    schema = copy.deepcopy(container.schema)
    add_fields(record_fields(schema), NEW_LIST_FIELDS)
    next_row_id = snapshot["first-row-id"]
    for record in records:
        if (record.get("content") or DATA) == DATA and record.get("first_row_id") is None:
            record["first_row_id"] = next_row_id
            next_row_id += (record["added_rows_count"] or 0) + (record["existing_rows_count"] or 0)
    meta = {
        **container.meta,
        "snapshot-id": str(snapshot["snapshot-id"]).encode(),
        "parent-snapshot-id": str(snapshot.get("parent-snapshot-id", "null")).encode(),
        "sequence-number": str(snapshot["sequence-number"]).encode(),
        "first-row-id": str(snapshot["first-row-id"]).encode(),
        "format-version": b"3",
    }
    return write_container(schema, meta, records, codec), next_row_id - snapshot["first-row-id"]
