"""An edit of raw table metadata as the updates and requirements of Iceberg's REST protocol.

A REST server makes the metadata by itself, so an edit is sent as what it changes. Specification: Iceberg's REST
catalog, `CommitTableRequest`.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from ags_fast.errors import UnsupportedChangeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.metadata.javajson import Raw

__all__ = ["KEYS", "differences", "entries", "fence", "lost_keys", "requirements", "updates_of_keys"]

KEYS = "encryption-keys"
# What a server derives from the updates.
DERIVED = frozenset(
    {"current-snapshot-id", "last-sequence-number", "last-updated-ms", "metadata-log", "next-row-id", "snapshot-log"}
)
VERSION_1 = frozenset({"schema", "partition-spec"})  # go when a table becomes one of a later version
EXPRESSED = frozenset(
    {"format-version", "location", "properties", KEYS, "snapshots", "refs", "statistics", "partition-statistics"}
)


ASSERTED = {
    "current-schema-id": "current-schema-id",
    "last-assigned-field-id": "last-column-id",
    "last-assigned-partition-id": "last-partition-id",
    "default-spec-id": "default-spec-id",
    "default-sort-order-id": "default-sort-order-id",
}


def entries(raw: Mapping[str, Any] | None) -> dict[str, Raw]:
    """Return the entries of a table's ``encryption-keys`` by id."""
    return {one["key-id"]: one for one in (raw or {}).get(KEYS) or ()}


def requirements(base: Mapping[str, Any], updates: Iterable[Mapping[str, Any]]) -> list[Raw]:
    """Return the requirements that a table is as it is in `base`. The protocol has none for all: see `fence`."""
    refs = {name: one["snapshot-id"] for name, one in (base.get("refs") or {}).items()}
    refs = {one["ref-name"]: None for one in updates if one["action"] == "set-snapshot-ref"} | refs
    return [
        {"type": "assert-table-uuid", "uuid": base["table-uuid"]},
        *({"type": "assert-ref-snapshot-id", "ref": name, "snapshot-id": at} for name, at in refs.items()),
        *({"type": f"assert-{name}", name: base[field]} for name, field in ASSERTED.items()),
    ]


def differences(base: Mapping[str, Any], made: Mapping[str, Any]) -> list[Raw]:
    """Return the updates that make `made` of `base`. What a server derives, such as its logs, is not compared.

    UnsupportedChangeError if the protocol has no update for a change.
    """
    derived = DERIVED | VERSION_1 if base["format-version"] != made["format-version"] else DERIVED
    for name in sorted((base.keys() | made.keys()) - derived - EXPRESSED):
        if base.get(name) != made.get(name):
            raise UnsupportedChangeError(f"an edit of {name!r} cannot be sent to a REST catalog: it has no such update")
    return [
        *_version_and_place(base, made),
        *_properties(base.get("properties") or {}, made.get("properties") or {}),
        *updates_of_keys(entries(base), entries(made)),
        *_new_snapshots(base, made),
        *_refs(base.get("refs") or {}, made.get("refs") or {}),
        *_statistics(base, made),
        *_removed_snapshots(base, made),
    ]


def _version_and_place(base: Mapping[str, Any], made: Mapping[str, Any]) -> list[Raw]:
    updates: list[Raw] = []
    if base["format-version"] != made["format-version"]:
        updates.append({"action": "upgrade-format-version", "format-version": made["format-version"]})
    if base.get("location") != made.get("location"):
        updates.append({"action": "set-location", "location": made["location"]})
    return updates


def _compared(base: Mapping[Any, Any], made: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return the entries that are new or have changed, and the names that are gone."""
    new = {name: one for name, one in made.items() if base.get(name) != one}
    return new, [name for name in base if name not in made]


def _properties(base: Mapping[str, str], made: Mapping[str, str]) -> list[Raw]:
    new, gone = _compared(base, made)
    updates: list[Raw] = [{"action": "set-properties", "updates": new}] if new else []
    return [*updates, *([{"action": "remove-properties", "removals": gone}] if gone else ())]


def updates_of_keys(base: Mapping[str, Raw], made: Mapping[str, Raw]) -> list[Raw]:
    """Return the updates that change ``encryption-keys``.

    A server ignores an entry whose id it has, so an entry that changes is removed first. The KEK of a new entry is sent
    even if `base` has that KEK: if another commit has removed the KEK meanwhile, the new entry still opens.
    """
    gone = [key_id for key_id, one in base.items() if made.get(key_id) != one]
    new = [one for key_id, one in made.items() if base.get(key_id) != one]
    keks = {one["encrypted-by-id"]: None for one in new if one.get("encrypted-by-id") in made}
    changed = {one["key-id"] for one in new}
    sent = [*(made[key_id] for key_id in keks if key_id not in changed), *new]
    return [
        *({"action": "remove-encryption-key", "key-id": key_id} for key_id in gone),
        *({"action": "add-encryption-key", "encryption-key": one} for one in sent),
    ]


def _by_id(raw: Mapping[str, Any], name: str = "snapshots") -> dict[int, Raw]:
    return {one["snapshot-id"]: one for one in raw.get(name) or ()}


def _new_snapshots(base: Mapping[str, Any], made: Mapping[str, Any]) -> list[Raw]:
    old = _by_id(base)
    changed, _ = _compared(old, _by_id(made))
    for snapshot_id in changed.keys() & old:
        raise UnsupportedChangeError(f"snapshot {snapshot_id} is there: a REST catalog has no update that edits it")
    new = sorted(changed.values(), key=lambda one: one["sequence-number"])
    taken = (base.get("next-row-id") or 0) + sum(one.get("added-rows") or 0 for one in new)
    if (made.get("next-row-id") or 0) != taken:
        raise UnsupportedChangeError("a REST catalog takes row ids for new snapshots only, as many as they add rows")
    return [{"action": "add-snapshot", "snapshot": one} for one in new]


def _refs(base: Mapping[str, Raw], made: Mapping[str, Raw]) -> list[Raw]:
    moved, gone = _compared(base, made)
    return [
        *({"action": "set-snapshot-ref", "ref-name": name, **ref} for name, ref in moved.items()),
        *({"action": "remove-snapshot-ref", "ref-name": name} for name in gone),
    ]


def _statistics(base: Mapping[str, Any], made: Mapping[str, Any]) -> list[Raw]:
    updates: list[Raw] = []
    for name in ("statistics", "partition-statistics"):
        new, gone = _compared(_by_id(base, name), _by_id(made, name))
        updates += [{"action": f"set-{name}", "snapshot-id": at, name: one} for at, one in new.items()]
        updates += [{"action": f"remove-{name}", "snapshot-id": at} for at in gone]
    return updates


def _removed_snapshots(base: Mapping[str, Any], made: Mapping[str, Any]) -> list[Raw]:
    _, gone = _compared(_by_id(base), _by_id(made))
    return [{"action": "remove-snapshots", "snapshot-ids": gone}] if gone else []


def fence(base: Mapping[str, Any], updates: Iterable[Mapping[str, Any]]) -> list[Raw]:
    """Return two updates that change no table, and that a server refuses after any other commit of a snapshot.

    None are needed if the commit's own updates add a snapshot with a parent.

    The protocol has no requirement for keys. But a snapshot's sequence number must be greater than the table's last,
    so a snapshot that is added and removed again shows the server what its base was. And a commit that has begun
    before is refused after, since the table's last sequence number has grown by one. Only a snapshot with a parent is
    compared: in an empty table its parent is one that does not exist.
    """
    if any("parent-snapshot-id" in one["snapshot"] for one in updates if one["action"] == "add-snapshot"):
        return []
    taken = _by_id(base)
    snapshot_id = next(made for made in iter(lambda: secrets.randbits(62) + 1, 0) if made not in taken)
    newest = max(taken.values(), key=lambda one: one.get("sequence-number") or 0, default={"snapshot-id": 1})
    snapshot = {
        "sequence-number": (base.get("last-sequence-number") or 0) + 1,
        "snapshot-id": snapshot_id,
        "parent-snapshot-id": newest["snapshot-id"],
        "timestamp-ms": max(time.time_ns() // 1_000_000, base["last-updated-ms"] + 1),
        "summary": {"operation": "replace"},
        "manifest-list": f"{base['location']}/metadata/fence-{snapshot_id}.avro",  # nobody reads or deletes it
        "schema-id": base["current-schema-id"],
        "first-row-id": base.get("next-row-id") or 0,
        "added-rows": 0,
    }
    return [
        {"action": "add-snapshot", "snapshot": snapshot},
        {"action": "remove-snapshots", "snapshot-ids": [snapshot_id]},
    ]


def lost_keys(raw: Mapping[str, Any], known: Mapping[str, Raw]) -> list[Raw]:
    """Return entries that snapshots in `raw` need, that it does not have, and that are known from before."""
    have = entries(raw)
    lost: dict[str, Raw] = {}
    for snapshot in raw.get("snapshots") or ():
        key_id = snapshot.get("key-id")
        for _ in range(2):  # the list's key, and its KEK
            entry = have.get(key_id) or known.get(key_id)
            if entry is None:
                break
            if key_id not in have:
                lost[key_id] = entry
            key_id = entry.get("encrypted-by-id")
    return list(lost.values())
