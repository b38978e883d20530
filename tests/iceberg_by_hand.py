"""Reads an encrypted table of Iceberg without PyIceberg and without `ags_fast.iceberg`: metadata, manifests, files.

What is tested against this is the pieces: keys, streams, Avro and Parquet. Schemas are those of the files, so a table
whose schema has changed is not for here. Java's tables only: each file has a key.
"""

from __future__ import annotations

import io
import json
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fastavro
import pyarrow.parquet as pq
from pyroaring import BitMap

import ags_fast
from ags_fast.keys import StandardKeyMetadata
from ags_fast.keys.iceberg import manifest_list_key, read_encryption_keys
from ags_fast.keys.kms import load_kms
from ags_fast.parquet import open_plain

Row = dict[str, Any]


def local(location: str) -> str:
    """The path of a file:// location."""
    return location.removeprefix("file://").removeprefix("file:")


def read_avro(location: str, key_metadata: bytes) -> Iterator[Row]:
    """The records of an encrypted Avro file: a manifest list, a manifest, or rows."""
    with ags_fast.open(local(location), key_metadata=StandardKeyMetadata.decode(key_metadata)) as file:
        yield from fastavro.reader(io.BytesIO(file.read()))  # type: ignore[misc]


@dataclass
class Table:
    """A snapshot's live entries, as the manifests have them, with what they inherit."""

    metadata: Mapping[str, Any]
    entries: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, location: str, kms: Mapping[str, str]) -> Table:
        with open(local(location), encoding="utf-8") as file:
            raw = json.load(file)
        table = cls(raw)
        snapshot = next(one for one in raw["snapshots"] if one["snapshot-id"] == raw["current-snapshot-id"])
        keys = read_encryption_keys(raw["encryption-keys"])
        listed = manifest_list_key(keys, snapshot["key-id"], load_kms(kms))
        for manifest in read_avro(snapshot["manifest-list"], listed.encode()):
            for entry in read_avro(manifest["manifest_path"], manifest["key_metadata"]):
                if entry["sequence_number"] is None:
                    entry["sequence_number"] = manifest["sequence_number"]
                if entry["status"] != 2:
                    table.entries.append(entry)
        return table

    def rows(self) -> list[Row]:
        """All rows that are not deleted."""
        deletes = [entry for entry in self.entries if entry["data_file"]["content"] != 0]
        found = []
        for entry in self.entries:
            file = entry["data_file"]
            if file["content"] == 0:
                gone = {at for one in deletes for at in _positions(one, file["file_path"])}
                equal = [
                    self._equal(one)
                    for one in deletes
                    if one["data_file"]["content"] == 2 and one["sequence_number"] > entry["sequence_number"]
                ]
                for position, row in enumerate(self._records(file)):
                    if position not in gone and not any(matches(row) for matches in equal):
                        found.append(row)
        return found

    def _records(self, file: Row) -> list[Row]:
        metadata = StandardKeyMetadata.decode(file["key_metadata"])
        assert metadata.file_length == file["file_size_in_bytes"]
        if file["file_format"] == "AVRO":
            schema = self.metadata["schemas"][0]
            return [_from_avro(row, schema) for row in read_avro(file["file_path"], file["key_metadata"])]
        with open_plain(local(file["file_path"]), key_metadata=metadata) as plain:
            rows: list[Row] = pq.read_table(plain).to_pylist()
        return rows

    def _equal(self, entry: Row) -> Any:
        """Whether a row equals one of an equality delete."""
        names = {one["id"]: one["name"] for one in self.metadata["schemas"][0]["fields"]}
        columns = [names[one] for one in entry["data_file"]["equality_ids"]]
        gone = {tuple(row[name] for name in columns) for row in self._records(entry["data_file"])}
        return lambda row: tuple(row[name] for name in columns) in gone


def _from_avro(value: Any, kind: Any) -> Any:
    """A value that fastavro decoded, as pyarrow has it: fastavro does not know what Iceberg adds to Avro's types."""
    if value is None:
        return None
    if kind == "timestamp":
        return value.replace(tzinfo=None)
    if kind == "uuid":
        return uuid.UUID(bytes=value)
    if not isinstance(kind, dict):
        return value
    if kind["type"] == "struct":
        kinds = {one["name"]: one["type"] for one in kind["fields"]}
        return {name: _from_avro(one, kinds[name]) for name, one in value.items()}
    if kind["type"] == "list":
        return [_from_avro(one, kind["element"]) for one in value]
    pairs = value.items() if isinstance(value, dict) else [(one["key"], one["value"]) for one in value]
    return [(_from_avro(key, kind["key"]), _from_avro(one, kind["value"])) for key, one in pairs]


def _positions(entry: Row, path: str) -> Iterator[int]:
    """What a deletion vector deletes of a data file."""
    file = entry["data_file"]
    if file["file_format"] != "PUFFIN" or file["referenced_data_file"] != path:
        return
    with ags_fast.open(
        local(file["file_path"]), key_metadata=StandardKeyMetadata.decode(file["key_metadata"])
    ) as whole:
        whole.seek(file["content_offset"])
        blob = whole.read(file["content_size_in_bytes"])
    length, magic, bitmaps, high = *struct.unpack_from(">I4s", blob), *struct.unpack_from("<qI", blob, 8)
    assert (length, magic) == (len(blob) - 8, b"\xd1\xd3\x39\x64")
    assert (bitmaps, high) == (1, 0), "positions from 2^32 on are not for here"
    yield from BitMap.deserialize(blob[20:-4])
