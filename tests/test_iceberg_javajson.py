"""The order of metadata's fields, and the hash, without Java: test_iceberg_hive.py asks Java."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from ags_fast.metadata.javajson import in_java_order, java_hash, matches

RAW: dict[str, Any] = {
    "location": "file:///t",
    "table-uuid": "u",
    "last-updated-ms": 5,
    "format-version": 3,
    "last-sequence-number": 1,
    "last-column-id": 1,
    "current-schema-id": 0,
    "default-spec-id": 0,
    "last-partition-id": 999,
    "default-sort-order-id": 0,
    "next-row-id": 3,
    "schemas": [
        {
            "fields": [{"required": False, "id": 1, "type": "long", "name": "id"}],
            "type": "struct",
            "schema-id": 0,
            "identifier-field-ids": [],
        }
    ],
    "partition-specs": [{"fields": [], "spec-id": 0}],
    "sort-orders": [{"fields": [], "order-id": 0}],
    "properties": {"b": "2", "a": "ü"},
    "refs": {"main": {"type": "branch", "snapshot-id": 7, "max-ref-age-ms": None}},
    "current-snapshot-id": 7,
    "snapshots": [
        {
            "key-id": "k",
            "snapshot-id": 7,
            "sequence-number": 1,
            "timestamp-ms": 5,
            "manifest-list": "l",
            "summary": {"total": "3", "operation": "append"},
            "schema-id": 0,
            "first-row-id": 0,
            "added-rows": 3,
        }
    ],
    "encryption-keys": [{"encrypted-by-id": "m", "key-id": "k", "encrypted-key-metadata": "AA==", "properties": {}}],
}
# Written by hand after TableMetadataParser of Iceberg Java 1.11.
JAVA = (
    '{"format-version":3,"table-uuid":"u","location":"file:///t","last-sequence-number":1,"last-updated-ms":5,'
    '"last-column-id":1,"current-schema-id":0,"schemas":[{"type":"struct","schema-id":0,"fields":[{"id":1,"name":"id",'
    '"required":false,"type":"long"}]}],"default-spec-id":0,"partition-specs":[{"spec-id":0,"fields":[]}],'
    '"last-partition-id":999,"default-sort-order-id":0,"sort-orders":[{"order-id":0,"fields":[]}],'
    '"properties":{"b":"2","a":"ü"},"current-snapshot-id":7,"next-row-id":3,"encryption-keys":[{"key-id":"k",'
    '"encrypted-key-metadata":"AA==","encrypted-by-id":"m"}],"refs":{"main":{"snapshot-id":7,"type":"branch"}},'
    '"snapshots":[{"sequence-number":1,"snapshot-id":7,"timestamp-ms":5,"summary":{"operation":"append","total":"3"},'
    '"manifest-list":"l","schema-id":0,"first-row-id":0,"added-rows":3,"key-id":"k"}],"statistics":[],'
    '"partition-statistics":[],"snapshot-log":[],"metadata-log":[]}'
)


def dumped(raw: dict[str, Any]) -> str:
    return json.dumps(raw, separators=(",", ":"), ensure_ascii=False)


def test_order() -> None:
    assert dumped(in_java_order(RAW)) == JAVA
    assert in_java_order(json.loads(JAVA)) == json.loads(JAVA)


def test_hash() -> None:
    right = base64.b64encode(hashlib.sha256(JAVA.encode()).digest()).decode()
    assert java_hash(RAW) == java_hash(json.loads(JAVA)) == right
    assert matches(RAW, right)
    assert not matches({**RAW, "last-updated-ms": 6}, right)
    as_written = base64.b64encode(hashlib.sha256(dumped(RAW).encode()).digest()).decode()
    assert matches(RAW, as_written)


def test_a_table_without_snapshots() -> None:
    empty = {**RAW, "snapshots": [], "refs": {}, "encryption-keys": []}
    for current in (None, -1):
        made = in_java_order({**empty, "current-snapshot-id": current})
        assert made["current-snapshot-id"] is None
        assert "encryption-keys" not in made


@pytest.mark.parametrize(
    "change",
    [
        {"new": 1},
        {"snapshots": [{**RAW["snapshots"][0], "new": 1}]},
        {"refs": {"main": {"type": "branch", "snapshot-id": 7, "new": 1}}},
        {"encryption-keys": [{**RAW["encryption-keys"][0], "properties": {"b": "1", "a": "2"}}]},
        {"properties": {"a": "\x1f"}},
        {"schemas": [{"type": "struct", "fields": [{"id": 1, "name": "f", "type": "double", "write-default": 1e10}]}]},
    ],
)
def test_no_hash_where_java_would_write_other_bytes(change: dict[str, Any]) -> None:
    assert java_hash({**RAW, **change}) is None


def test_nothing_is_lost() -> None:
    """Fields that Java does not know stay, at the end."""
    made = in_java_order({**RAW, "new": {"a": [1]}, "snapshots": [{**RAW["snapshots"][0], "more": 1}]})
    assert list(made)[-1] == "new"
    assert list(made["snapshots"][0])[-1] == "more"
