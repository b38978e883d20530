"""New snapshots in the raw metadata of an encrypted table."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from ags_fast.errors import ConcurrentChangeError
from ags_fast.iceberg import policy
from ags_fast.keys.iceberg import add_manifest_list_key, read_encryption_keys, write_encryption_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.keys.kms import KmsClient

__all__ = ["begin_snapshot", "head_of", "snapshot_of", "with_snapshot"]

TOTALS = {
    "total-data-files": ("added-data-files", "deleted-data-files"),
    "total-delete-files": ("added-delete-files", "removed-delete-files"),
    "total-records": ("added-records", "deleted-records"),
    "total-files-size": ("added-files-size", "removed-files-size"),
    "total-position-deletes": ("added-position-deletes", "removed-position-deletes"),
    "total-equality-deletes": ("added-equality-deletes", "removed-equality-deletes"),
}


def snapshot_of(raw: Mapping[str, Any], snapshot_id: int | None) -> Raw | None:
    """Return a snapshot by its id, or None."""
    return next((one for one in raw.get("snapshots") or () if one["snapshot-id"] == snapshot_id), None)


def head_of(raw: Mapping[str, Any], branch: str = "main") -> Raw | None:
    """Return the newest snapshot of a branch, or None."""
    ref = (raw.get("refs") or {}).get(branch)
    if ref is not None:
        return snapshot_of(raw, ref["snapshot-id"])
    return snapshot_of(raw, raw.get("current-snapshot-id")) if branch == "main" else None


def begin_snapshot(raw: Mapping[str, Any], operation: str, summary: Mapping[str, Any], *, branch: str = "main") -> Raw:
    """Return a new snapshot on a branch, without its manifest list and what follows from that.

    Args:
        raw: The newest metadata.
        operation: ``delete``, ``replace`` or ``overwrite``.
        summary: What changed, by the names of Iceberg's summary. Totals are those of the parent, changed by that.
        branch: The branch.
    """
    parent = head_of(raw, branch)
    before = (parent or {}).get("summary") or {}
    told = {name: str(value) for name, value in summary.items() if value}
    for total, (more, less) in TOTALS.items():
        if total in before or parent is None:
            told[total] = str(int(before.get(total, 0)) + summary.get(more, 0) - summary.get(less, 0))
    taken = {one["snapshot-id"] for one in raw.get("snapshots") or ()}
    snapshot_id = next(made for made in iter(lambda: secrets.randbits(62) + 1, 0) if made not in taken)
    snapshot: Raw = {"sequence-number": (raw.get("last-sequence-number") or 0) + 1, "snapshot-id": snapshot_id}
    if parent is not None:
        snapshot["parent-snapshot-id"] = parent["snapshot-id"]
    snapshot["timestamp-ms"] = max(time.time_ns() // 1_000_000, int(raw.get("last-updated-ms") or 0))
    snapshot["summary"] = {"operation": operation, **told}
    snapshot["schema-id"] = raw["current-schema-id"]
    snapshot["first-row-id"] = raw.get("next-row-id") or 0
    return snapshot


def with_snapshot(
    raw: Raw, snapshot: Raw, written: Known, added_rows: int, kms: KmsClient, *, branch: str = "main"
) -> Raw:
    """Return metadata with one more snapshot, which becomes the newest of its branch.

    Args:
        raw: The newest metadata.
        snapshot: What `begin_snapshot` returned for them.
        written: The manifest list.
        added_rows: How many row ids the list has taken.
        kms: Wraps the key of the list, if it needs a new KEK.
        branch: The branch.

    Raises:
        ConcurrentChangeError: The branch has moved since the snapshot was begun.
    """
    parent = head_of(raw, branch)
    if (parent or {}).get("snapshot-id") != snapshot.get("parent-snapshot-id"):
        raise ConcurrentChangeError(f"another commit came first on the branch {branch}: try again")
    assert written.key_metadata is not None
    properties = raw["properties"]
    keys, key_id = add_manifest_list_key(
        read_encryption_keys(raw.get("encryption-keys") or ()),
        written.key_metadata,
        kms,
        properties[policy.KEY_ID],
        length=int(properties.get(policy.KEY_LENGTH, "16")),
    )
    whole = {**snapshot, "manifest-list": written.path, "added-rows": added_rows, "key-id": key_id}
    refs = raw.get("refs") or {}
    ref = {**refs.get(branch, {}), "snapshot-id": snapshot["snapshot-id"], "type": "branch"}
    new = {
        **raw,
        "snapshots": [*(raw.get("snapshots") or ()), whole],
        "refs": {**refs, branch: ref},
        "last-sequence-number": snapshot["sequence-number"],
        "next-row-id": snapshot["first-row-id"] + added_rows,
        "encryption-keys": write_encryption_keys(keys),
    }
    if branch == "main":
        new["current-snapshot-id"] = snapshot["snapshot-id"]
        entry = {"timestamp-ms": snapshot["timestamp-ms"], "snapshot-id": snapshot["snapshot-id"]}
        new["snapshot-log"] = [*(raw.get("snapshot-log") or ()), entry]
    return new
