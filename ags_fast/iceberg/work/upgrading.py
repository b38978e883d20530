"""Metadata, manifest lists and manifests of tables in plaintext, of version 1, 2 or 3, as version 3 has them.

Specification: Iceberg, "Format Versioning" (Version 2, Version 3), "Manifests", "Manifest Lists".
"""

from __future__ import annotations

import copy
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyiceberg.manifest import MANIFEST_LIST_FILE_SCHEMAS
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.container import field_of, read_container, record_fields, write_container
from ags_fast.iceberg.manifests import DATA, NEW_FILE_FIELDS, add_fields, data_files
from ags_fast.iceberg.reading import Node
from ags_fast.iceberg.work.heads import Head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.metadata import Raw

__all__ = ["upgraded_head", "upgraded_metadata"]

FIRST_PARTITION_ID = 1000

NEW_ENTRY_FIELDS = (("sequence_number", 3, "long"), ("file_sequence_number", 4, "long"))
NEW_DATA_FILE_FIELDS = (("key_metadata", 131, "bytes"), ("sort_order_id", 140, "int"), *NEW_FILE_FIELDS)
ARRAYS = (("split_offsets", 132, "long", 133), ("equality_ids", 135, "int", 136))
CONTENT, BLOCK_SIZE = 134, 105  # the second is version 1's

LIST_SCHEMA: Any = AvroSchemaConversion().iceberg_to_avro(MANIFEST_LIST_FILE_SCHEMAS[3], "manifest_file")


def upgraded_metadata(raw: Mapping[str, Any], wrapping_key_id: str, data_key_length: int) -> Raw:
    """Return the metadata of a table in plaintext as those of an encrypted one, whose snapshots are in plaintext.

    Row ids begin at 0 for versions 1 and 2; snapshots that are there have none. `raw` stays as it is, and
    `data_key_length` is in bytes.

    Raises:
        PolicyError: The table is encrypted already, or its properties name a client's setting.
    """
    if policy.is_encrypted(raw) or raw.get("encryption-keys"):
        raise PolicyError("the table is encrypted already: ags_fast.iceberg.rekey gives its files new keys")
    made = copy.deepcopy(dict(raw))
    if raw["format-version"] == 1:
        _upgrade_1(made)
    properties = dict(raw.get("properties") or {})
    properties.pop(policy.PLAINTEXT_FILES, None)  # earlier releases set it; it permits nothing
    policy.check_settings(properties, "the table")
    properties |= {policy.KEY_ID: wrapping_key_id, policy.KEY_LENGTH: str(data_key_length)}
    plain = [str(one["snapshot-id"]) for one in made.get("snapshots") or ()]
    if plain:
        properties[policy.PLAINTEXT_SNAPSHOTS] = ",".join(plain)
    made.update({"format-version": 3, "properties": properties})
    made.setdefault("next-row-id", 0)
    return made


def _upgrade_1(raw: Raw) -> None:
    """Give metadata of version 1 the fields that version 2 requires."""
    schema, spec = raw.pop("schema", None), raw.pop("partition-spec", None)
    if not raw.get("schemas"):
        if schema is None:
            raise FormatError("the table's metadata have no schema")
        raw["schemas"] = [{"schema-id": 0, **schema}]
        raw["current-schema-id"] = raw["schemas"][0]["schema-id"]
    if not raw.get("partition-specs"):
        raw["partition-specs"], raw["default-spec-id"] = [{"spec-id": 0, "fields": spec or []}], 0
    last = FIRST_PARTITION_ID - 1
    for one in raw["partition-specs"]:
        for i, field in enumerate(one["fields"]):
            field.setdefault("field-id", FIRST_PARTITION_ID + i)
            last = max(last, field["field-id"])
    raw.setdefault("last-partition-id", last)
    raw.setdefault("sort-orders", [{"order-id": 0, "fields": []}])
    raw.setdefault("default-sort-order-id", 0)
    raw.setdefault("table-uuid", str(uuid.uuid4()))
    raw.setdefault("last-sequence-number", 0)
    current = raw.get("current-snapshot-id")
    if current not in (None, -1) and not raw.get("refs"):
        raw["refs"] = {"main": {"snapshot-id": current, "type": "branch"}}


def upgraded_head(head: Head) -> Head:
    """Return a snapshot whose list and manifests have the fields of version 3."""
    names = {one["field-id"]: one["name"] for one in record_fields(LIST_SCHEMA)}
    fields = record_fields(head.listed.schema)
    given = {one["name"]: names[one["field-id"]] for one in fields if one.get("field-id") in names}
    made = []
    for one in head.manifests:
        record: dict[str, Any] = dict.fromkeys(names.values())
        for name, value in one.record.items():
            if name in given:
                record[given[name]] = value
        for name in ("content", "sequence_number", "min_sequence_number"):
            record[name] = record[name] or 0
        for summary in record["partitions"] or ():
            summary.setdefault("contains_nan", None)
        known, plain = replace(one.known, sequence_number=record["sequence_number"]), _manifest(one.container())
        named = data_files(read_container(plain), known)
        made.append(Node(known, plain=plain, named=named, record=record, seconds=0.0))
    listed = read_container(write_container(LIST_SCHEMA, head.listed.meta, (), "null"))
    return Head(head.snapshot, listed, made, head.tree)


def _manifest(container: Container) -> bytes:
    schema = copy.deepcopy(container.schema)
    entry = field_of(schema, 2)
    assert entry is not None
    numbered = field_of(schema, 3) is not None
    add_fields(record_fields(schema), NEW_ENTRY_FIELDS)
    fields = record_fields(entry)
    fields[:] = [one for one in fields if one.get("field-id") != BLOCK_SIZE]
    ids = {one.get("field-id") for one in fields}
    if CONTENT not in ids:
        fields.insert(0, {"name": "content", "type": "int", "field-id": CONTENT})
    add_fields(fields, NEW_DATA_FILE_FIELDS)
    for name, number, kind, element in ARRAYS:
        if number not in ids:
            items = {"type": "array", "items": kind, "element-id": element}
            fields.append({"name": name, "type": ["null", items], "default": None, "field-id": number})
    records = list(container.records())
    for record in records:
        if not numbered:  # version 1: the sequence number of all files is 0
            record["sequence_number"] = record["file_sequence_number"] = 0
        record["data_file"].setdefault("content", DATA)
    return write_container(schema, container.meta, records, "null")
