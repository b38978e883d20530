"""New snapshots in the raw metadata of an encrypted table."""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from ags_fast.errors import ConcurrentChangeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.session import TableState

__all__ = ["begin_snapshot", "check_texts", "head_of", "line_of", "snapshot_of", "told", "with_snapshot"]

TOTALS = {
    "total-data-files": ("added-data-files", "deleted-data-files"),
    "total-delete-files": ("added-delete-files", "removed-delete-files"),
    "total-records": ("added-records", "deleted-records"),
    "total-files-size": ("added-files-size", "removed-files-size"),
    "total-position-deletes": ("added-position-deletes", "removed-position-deletes"),
    "total-equality-deletes": ("added-equality-deletes", "removed-equality-deletes"),
}

# Entries of a summary that only the operation makes. Later commits, and other engines, count on them.
OWN = re.compile(
    "operation|(total|added|removed|deleted)-"
    "(data-files|delete-files|records|files-size|dvs|(position|equality)-delete(s|-files))"
)


def check_texts(properties: Mapping[Any, Any]) -> None:
    """Refuse entries of a summary that are not text: Java does not load a table that has one. TypeError."""
    for name, value in properties.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"snapshot_properties are text, names and values: {name!r} is {type(value).__name__}")


def told(summary: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return a summary with more entries. Those that an operation makes are the operation's."""
    return {**{name: value for name, value in more.items() if not OWN.fullmatch(name)}, **summary}


def snapshot_of(raw: Mapping[str, Any], snapshot_id: int | None) -> Raw | None:
    """Return a snapshot by its id, or None."""
    return next((one for one in raw.get("snapshots") or () if one["snapshot-id"] == snapshot_id), None)


def head_of(raw: Mapping[str, Any], branch: str = "main") -> Raw | None:
    """Return the newest snapshot of a branch, or None."""
    ref = (raw.get("refs") or {}).get(branch)
    if ref is not None:
        return snapshot_of(raw, ref["snapshot-id"])
    return snapshot_of(raw, raw.get("current-snapshot-id")) if branch == "main" else None


def line_of(raw: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids of the main branch's newest snapshot and of those before it, up to the first that is gone."""
    by_id, one = {one["snapshot-id"]: one for one in raw.get("snapshots") or ()}, head_of(raw)
    while one is not None:
        by_id.pop(one["snapshot-id"], None)  # so that a circle ends
        yield one["snapshot-id"]
        if (parent := one.get("parent-snapshot-id")) is None:
            return
        one = by_id.get(parent)


def begin_snapshot(raw: Mapping[str, Any], operation: str, summary: Mapping[str, Any], *, branch: str = "main") -> Raw:
    """Return a new snapshot on a branch, without its manifest list and what follows from that.

    `summary` says what changed, by the names of Iceberg's summary. Totals are those of the parent, changed by that.
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
    raw: Raw, snapshot: Raw, written: Known, added_rows: int, state: TableState, *, branch: str = "main"
) -> Raw:
    """Return metadata with one more snapshot, which becomes the newest of its branch.

    `snapshot` is from `begin_snapshot`, `written` its manifest list, and `added_rows` counts the row ids that the list
    has taken. ConcurrentChangeError if the branch has moved since the snapshot was begun.
    """
    parent = head_of(raw, branch)
    if (parent or {}).get("snapshot-id") != snapshot.get("parent-snapshot-id"):
        raise ConcurrentChangeError(f"another commit came first on the branch {branch}: try again")
    assert written.key_metadata is not None
    raw, key_id = state.wrap_list_key(raw, written.key_metadata)
    whole = {**snapshot, "manifest-list": written.path, "added-rows": added_rows, "key-id": key_id}
    refs = raw.get("refs") or {}
    ref = {**refs.get(branch, {}), "snapshot-id": snapshot["snapshot-id"], "type": "branch"}
    new = {
        **raw,
        "snapshots": [*(raw.get("snapshots") or ()), whole],
        "refs": {**refs, branch: ref},
        "last-sequence-number": snapshot["sequence-number"],
        "next-row-id": snapshot["first-row-id"] + added_rows,
    }
    if branch == "main":
        new["current-snapshot-id"] = snapshot["snapshot-id"]
        entry = {"timestamp-ms": snapshot["timestamp-ms"], "snapshot-id": snapshot["snapshot-id"]}
        new["snapshot-log"] = [*(raw.get("snapshot-log") or ()), entry]
    return new
