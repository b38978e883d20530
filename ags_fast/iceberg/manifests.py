"""Manifests and manifest lists of encrypted tables: what they say of other files, as a facade, and as v3 files.

A manifest list names manifests with their keys (fields 500, 519), a manifest names data files with theirs (100, 131).
All functions here work on decrypted bytes. Specification: Iceberg, "Manifests" and "Manifest Lists", version 3.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg.container import Container, array_of, field_of, record_fields, write_container
from ags_fast.keys.metadata import StandardKeyMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "DATA",
    "DELETED",
    "DELETES",
    "Known",
    "SealedList",
    "data_files",
    "facade",
    "is_list",
    "manifest_of",
    "manifests",
    "sealed_list",
]

DATA, DELETES = 0, 1  # content of a manifest
DELETED = 2  # status of an entry
KEY_METADATA, LIST_KEY_METADATA = 131, 519
BLANK = 100_000  # added to the id of the field with key metadata, so that a reader of the facade skips the field

# Field ids of the parts of an entry, and of a manifest in a list, by the name they have here.
ENTRY = {"status": 0, "snapshot_id": 1, "sequence_number": 3, "file_sequence_number": 4}
FILE = {
    "content": 134,
    "path": 100,
    "file_format": 101,
    "record_count": 103,
    "length": 104,
    "key_metadata": 131,
    "first_row_id": 142,
    "referenced_data_file": 143,
    "content_offset": 144,
    "content_size": 145,
}
LISTED = {
    "path": 500,
    "length": 501,
    "spec_id": 502,
    "content": 517,
    "sequence_number": 515,
    "added_snapshot_id": 503,
    "added_rows": 512,
    "existing_rows": 513,
    "key_metadata": 519,
    "first_row_id": 520,
}

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
        path: Its location.
        length: Bytes on storage, as the list or manifest says.
        key_metadata: Its key, or None if the file is in plaintext.
        content: Of a manifest 0 (data) or 1 (deletes); of a file 0 (data), 1 (position deletes), 2 (equality deletes).
        format: Of a file: AVRO, PARQUET, ORC or PUFFIN. Of a manifest: None.
        record_count: Of a file: its rows, or deleted positions.
        first_row_id: The first row id of a manifest, or of a data file, inherited or its own; None if it has none.
        referenced_data_file: Of a deletion vector: the data file that it belongs to.
        content_offset: Of a deletion vector: where its blob begins, in bytes of the decrypted Puffin file.
        content_size: Of a deletion vector: bytes of its blob.
        status: Of a file: 0 (existing), 1 (added), 2 (deleted).
        snapshot_id: Of a file: the snapshot that added or deleted it; None is inherited.
        sequence_number: Of a manifest, or of a file; None is inherited.
        spec_id: Of a manifest: its partition spec.
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

    def __repr__(self) -> str:
        return f"<Known {self.path} length={self.length} {'encrypted' if self.key_metadata else 'plaintext'}>"

    def __reduce__(self) -> str:
        raise TypeError("what is known of a file has its key, and is never pickled")


@dataclass(frozen=True, slots=True)
class SealedList:
    """A manifest list of version 3, ready to be encrypted.

    Attributes:
        data: Its plaintext.
        first_row_id: The first row id that it takes.
        added_rows: How many row ids it takes.
        assigned: The first row id of each manifest that gets one, by path.
    """

    data: bytes
    first_row_id: int
    added_rows: int
    assigned: dict[str, int]


def is_list(container: Container) -> bool:
    """Tell a manifest list from a manifest. FormatError if the container is neither."""
    if field_of(container.schema, LISTED["path"]) is not None:
        return True
    entry = field_of(container.schema, 2)
    if entry is None or field_of(entry, FILE["path"]) is None:
        raise FormatError("the Avro file is neither a manifest nor a manifest list")
    return False


def manifests(container: Container) -> list[Known]:
    """Return the manifests that a list names, in its order. FormatError if the list is malformed."""
    names = container.layout.derived(_list_names)
    known = []
    for record in container.records(_list_part):
        value = {name: record.get(own) for name, own in names.items()}
        known.append(
            Known(
                _text(value, "path"),
                _number(value, "length"),
                _metadata(value.get("key_metadata")),
                content=value.get("content") or DATA,
                record_count=(value.get("added_rows") or 0) + (value.get("existing_rows") or 0),
                first_row_id=value.get("first_row_id"),
                snapshot_id=value.get("added_snapshot_id"),
                sequence_number=value.get("sequence_number"),
                spec_id=value.get("spec_id"),
            )
        )
    return known


def data_files(container: Container, manifest: Known | None = None) -> list[Known]:
    """Return the files that a manifest names, in its order, deleted ones too. FormatError if it is malformed.

    Args:
        container: The manifest.
        manifest: What its list says of it. A data file without a row id inherits one from there, and a file without a
            sequence number or snapshot theirs (specification: "Row Lineage", "Sequence Number Inheritance").
    """
    names, inner, data_file = container.layout.derived(_entry_names)
    known, next_row_id = [], None if manifest is None else manifest.first_row_id
    for record in container.records(_entry_part):
        file = record[data_file]
        value = {name: file.get(own) for name, own in inner.items()}
        status = _number(record, names.get("status", "status"))
        one = Known(
            _text(value, "path"),
            _number(value, "length"),
            _metadata(value.get("key_metadata")),
            value.get("content") or DATA,
            _text(value, "file_format").upper(),
            _number(value, "record_count"),
            value.get("first_row_id"),
            value.get("referenced_data_file"),
            value.get("content_offset"),
            value.get("content_size"),
            status,
            record.get(names.get("snapshot_id", "")),
            record.get(names.get("sequence_number", "")),
        )
        if manifest is not None:
            _inherit(one, manifest)
        if one.content == DATA and status != DELETED:
            if next_row_id is None:
                one.first_row_id = None
            elif one.first_row_id is None:
                one.first_row_id = next_row_id
                next_row_id += one.record_count
        known.append(one)
    return known


def _inherit(one: Known, manifest: Known) -> None:
    if one.snapshot_id is None:
        one.snapshot_id = manifest.snapshot_id
    if one.sequence_number is None:
        one.sequence_number = manifest.sequence_number


def facade(container: Container, known: Iterable[Known]) -> bytes:
    """Return a manifest or list as a reader may see it: with the keys overwritten, in a field that no reader knows.

    Args:
        container: The file. Its blocks are changed.
        known: What it says, in its order.
    """
    number, at = 0, 0
    for one in known:
        if one.key_metadata is None:
            continue
        encoded = one.key_metadata.encode()
        while number < len(container.blocks) and (found := container.blocks[number][1].find(encoded, at)) < 0:
            number, at = number + 1, 0
        if number == len(container.blocks):
            raise FormatError(f"the key metadata of {one.path} are not encoded as Iceberg encodes them")
        block = container.blocks[number][1]
        at = found + len(encoded)
        block[found:at] = bytes(len(encoded))
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


def manifest_of(container: Container, look_up: Callable[[str], Known | None]) -> bytes:
    """Return the plaintext of a v3 manifest, made of one that PyIceberg wrote for the facade.

    Args:
        container: What PyIceberg wrote: version 2, without keys.
        look_up: Returns what is known of a data file: its key, and what version 2 has no field for.

    Raises:
        PolicyError: A file in it has no key, that is, it is in plaintext.
    """
    schema = copy.deepcopy(container.schema)
    entry = field_of(schema, 2)
    assert entry is not None
    _add_fields(record_fields(entry), NEW_FILE_FIELDS)
    return write_container(
        schema, {**container.meta, "format-version": b"3"}, (_sealed(one, look_up) for one in container.records())
    )


def _sealed(record: dict[str, Any], look_up: Callable[[str], Known | None]) -> dict[str, Any]:
    file = record["data_file"]
    known = look_up(file["file_path"])
    if known is None or known.key_metadata is None:
        raise PolicyError(
            f"{file['file_path']} is in plaintext, and an encrypted table takes no such file: append its rows instead"
        )
    if known.length != file["file_size_in_bytes"]:
        raise FormatError(f"{file['file_path']} has {known.length} bytes, its entry says {file['file_size_in_bytes']}")
    file["key_metadata"] = known.key_metadata.encode()
    file["first_row_id"] = known.first_row_id if file.get("content", DATA) == DATA else None
    file["referenced_data_file"] = known.referenced_data_file
    file["content_offset"], file["content_size_in_bytes"] = known.content_offset, known.content_size
    if known.sequence_number is None:
        file["split_offsets"] = None  # PyIceberg took them from the plaintext file
    return record


def sealed_list(container: Container, look_up: Callable[[str], Known | None], first_row_id: int) -> SealedList:
    """Return the plaintext of a v3 manifest list, made of one that PyIceberg wrote for the facade.

    Args:
        container: What PyIceberg wrote: version 2, without keys.
        look_up: Returns what is known of a manifest.
        first_row_id: The next row id of the table. Data manifests without a first row id get theirs from there on.

    Raises:
        PolicyError: A manifest in it has no key.
    """
    schema = copy.deepcopy(container.schema)
    _add_fields(record_fields(schema), NEW_LIST_FIELDS)
    next_row_id, records, assigned = first_row_id, [], {}
    for record in container.records():
        path = record["manifest_path"]
        known = look_up(path)
        if known is None or known.key_metadata is None:
            raise PolicyError(f"the manifest {path} is in plaintext, in an encrypted table")
        record["key_metadata"] = known.key_metadata.encode()
        record["manifest_length"] = known.length
        record["first_row_id"] = known.first_row_id
        if record["content"] == DATA and known.first_row_id is None:
            record["first_row_id"] = assigned[path] = next_row_id
            next_row_id += record["added_rows_count"] + record["existing_rows_count"]
        records.append(record)
    meta = {**container.meta, "format-version": b"3", "first-row-id": str(first_row_id).encode()}
    return SealedList(write_container(schema, meta, records), first_row_id, next_row_id - first_row_id, assigned)


def _add_fields(fields: list[dict[str, Any]], new: Iterable[tuple[str, int, str]]) -> None:
    ids = {field.get("field-id") for field in fields}
    for name, field_id, kind in new:
        if field_id not in ids:
            fields.append({"name": name, "type": ["null", kind], "default": None, "field-id": field_id})


def _list_names(schema: dict[str, Any]) -> dict[str, str]:
    return _names(record_fields(schema), LISTED)


def _list_part(schema: dict[str, Any]) -> Any:
    return array_of(_only(schema, set(_list_names(schema).values())))


def _entry_names(schema: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], str]:
    """Return the names of the fields of an entry, of those of its data file, and of the latter itself."""
    entry = field_of(schema, 2)
    if entry is None:
        raise FormatError("the Avro file is not a manifest")
    return _names(record_fields(schema), ENTRY), _names(record_fields(entry), FILE), entry["name"]


def _entry_part(schema: dict[str, Any]) -> Any:
    names, inner, data_file = _entry_names(schema)
    return array_of(_only(schema, {*names.values(), *inner.values(), data_file}))


def _names(fields: list[dict[str, Any]], wanted: Mapping[str, int]) -> dict[str, str]:
    """Return the names in the file of the fields that are wanted by id."""
    by_id = {field.get("field-id"): field["name"] for field in fields}
    return {name: by_id[field_id] for name, field_id in wanted.items() if field_id in by_id}


def _only(schema: Any, names: set[str]) -> Any:
    """Return a schema with the fields of these names only, in the outer record and the record of its data file."""
    made = {**schema, "fields": []}
    for field in record_fields(schema):
        if field["name"] in names:
            if field.get("field-id") == 2:
                field = {**field, "type": _only(field["type"], names)}
            made["fields"].append(field)
    return made


def _metadata(value: bytes | None) -> StandardKeyMetadata | None:
    return None if value is None else StandardKeyMetadata.decode(value)


def _text(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise FormatError(f"an entry of a manifest, or of a list, has no {name}")
    return text


def _number(value: Mapping[str, Any], name: str) -> int:
    number = value.get(name)
    if not isinstance(number, int) or number < 0:
        raise FormatError(f"an entry of a manifest, or of a list, has no {name}, or a negative one")
    return number
