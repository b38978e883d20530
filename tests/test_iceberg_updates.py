"""Edits as updates of the REST protocol, without a server."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyiceberg", reason="needs the extra `iceberg`")

from ags_fast.errors import UnsupportedChangeError
from ags_fast.metadata.updates import differences, fence, lost_keys, requirements


def entry(key_id: str, by: str, value: str = "x") -> dict[str, str]:
    return {"key-id": key_id, "encrypted-by-id": by, "encrypted-key-metadata": value}


def snapshot(number: int, **more: Any) -> dict[str, Any]:
    parent = {"parent-snapshot-id": number - 1} if number > 1 else {}
    return {"snapshot-id": number, "sequence-number": number, "key-id": f"list{number}", **parent, **more}


BASE: dict[str, Any] = {
    "format-version": 3,
    "table-uuid": "u",
    "location": "file:///t",
    "last-updated-ms": 10,
    "last-sequence-number": 2,
    "next-row-id": 7,
    "current-schema-id": 0,
    "last-column-id": 4,
    "last-partition-id": 1000,
    "default-spec-id": 1,
    "default-sort-order-id": 2,
    "properties": {"a": "1", "b": "2"},
    "snapshots": [snapshot(1), snapshot(2)],
    "refs": {"main": {"snapshot-id": 2, "type": "branch"}, "tag": {"snapshot-id": 1, "type": "tag"}},
    "encryption-keys": [entry("kek", "master"), entry("list1", "kek"), entry("list2", "kek")],
}


def test_nothing_changes() -> None:
    assert differences(BASE, {**BASE, "last-updated-ms": 11, "metadata-log": [], "snapshot-log": []}) == []


def test_properties_and_refs() -> None:
    refs = {"main": {"snapshot-id": 1, "type": "branch", "max-ref-age-ms": 5}}
    assert differences(BASE, {**BASE, "properties": {"b": "3", "c": "4"}, "refs": refs}) == [
        {"action": "set-properties", "updates": {"b": "3", "c": "4"}},
        {"action": "remove-properties", "removals": ["a"]},
        {"action": "set-snapshot-ref", "ref-name": "main", "snapshot-id": 1, "type": "branch", "max-ref-age-ms": 5},
        {"action": "remove-snapshot-ref", "ref-name": "tag"},
    ]


def test_an_entry_that_changes_is_removed_first() -> None:
    made = {**BASE, "encryption-keys": [entry("kek", "master", "y"), *BASE["encryption-keys"][1:]]}
    updates = differences(BASE, made)
    assert updates == [
        {"action": "remove-encryption-key", "key-id": "kek"},
        {"action": "add-encryption-key", "encryption-key": entry("kek", "master", "y")},
    ]
    assert fence(BASE, updates)


def test_a_new_snapshot_brings_its_kek_along() -> None:
    new = snapshot(3, **{"first-row-id": 7, "added-rows": 2})
    made = {
        **BASE,
        "next-row-id": 9,
        "snapshots": [*BASE["snapshots"], new],
        "encryption-keys": [*BASE["encryption-keys"], entry("list3", "kek")],
    }
    updates = differences(BASE, made)
    assert [one.get("encryption-key", {}).get("key-id") for one in updates] == ["kek", "list3", None]
    assert updates[-1] == {"action": "add-snapshot", "snapshot": new}
    assert not fence(BASE, updates)  # the snapshot has a parent


def test_snapshots_go_with_their_keys() -> None:
    made = {**BASE, "snapshots": [snapshot(2)], "encryption-keys": [*BASE["encryption-keys"][::2]]}
    updates = differences(BASE, made)
    assert updates == [
        {"action": "remove-encryption-key", "key-id": "list1"},
        {"action": "remove-snapshots", "snapshot-ids": [1]},
    ]
    assert fence(BASE, updates)


def test_the_fence_is_a_snapshot_after_all_others() -> None:
    add, remove = fence(BASE, [])
    made = add["snapshot"]
    assert (made["sequence-number"], made["parent-snapshot-id"], made["first-row-id"]) == (3, 2, 7)
    assert made["added-rows"] == 0
    assert made["timestamp-ms"] > BASE["last-updated-ms"]
    assert remove == {"action": "remove-snapshots", "snapshot-ids": [made["snapshot-id"]]}
    first, _ = fence({**BASE, "snapshots": []}, [{"action": "add-snapshot", "snapshot": snapshot(1)}])
    assert "parent-snapshot-id" in first["snapshot"]  # without one nothing is compared


def test_requirements_name_all_that_the_protocol_has_words_for() -> None:
    made = requirements(BASE, [{"action": "set-snapshot-ref", "ref-name": "new"}])
    assert made[5:] == [
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 4},
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 1000},
        {"type": "assert-default-spec-id", "default-spec-id": 1},
        {"type": "assert-default-sort-order-id", "default-sort-order-id": 2},
    ]
    assert made[:5] == [
        {"type": "assert-table-uuid", "uuid": "u"},
        {"type": "assert-ref-snapshot-id", "ref": "new", "snapshot-id": None},
        {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 2},
        {"type": "assert-ref-snapshot-id", "ref": "tag", "snapshot-id": 1},
        {"type": "assert-current-schema-id", "current-schema-id": 0},
    ]


def test_keys_that_snapshots_lost() -> None:
    known = {one["key-id"]: one for one in BASE["encryption-keys"]}
    assert lost_keys(BASE, known) == []
    assert lost_keys({**BASE, "encryption-keys": BASE["encryption-keys"][1:]}, known) == [known["kek"]]
    assert lost_keys({**BASE, "encryption-keys": []}, known) == [known["list1"], known["kek"], known["list2"]]
    assert lost_keys({**BASE, "encryption-keys": []}, {}) == []


@pytest.mark.parametrize(
    "change",
    [
        {"next-row-id": 8},
        {"snapshots": [snapshot(1, more=1), snapshot(2)]},
        {"schemas": []},
        {"later": {}},
    ],
)
def test_what_the_protocol_has_no_words_for(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedChangeError):
        differences(BASE, {**BASE, **change})
