"""The history of a table, by what a seal covers: the ``snapshot-log`` is a server's to write, and has no seal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.metadata.javajson import Raw

__all__ = ["LOG", "line", "with_log"]

LOG = "snapshot-log"


def line(raw: Mapping[str, Any]) -> list[Raw]:
    """Return the snapshots of the branch main, the oldest first, as entries of a ``snapshot-log``."""
    snapshots, found = {one["snapshot-id"]: one for one in raw.get("snapshots") or ()}, list[Any]()
    one = snapshots.pop(raw.get("current-snapshot-id"), None)
    while one is not None:
        found.append({"timestamp-ms": one["timestamp-ms"], "snapshot-id": one["snapshot-id"]})
        one = snapshots.pop(one.get("parent-snapshot-id"), None)
    return found[::-1]


def with_log(raw: Raw, base: Mapping[str, Any]) -> Raw:
    """Return the metadata of a commit with the ``snapshot-log`` of its base, if PyIceberg was shown `line` instead."""
    shown, there = line(base), {one["snapshot-id"] for one in raw["snapshots"]}
    kept = [one for one in base.get(LOG) or () if one["snapshot-id"] in there]
    return {**raw, LOG: [*kept, *(one for one in raw.get(LOG) or () if one not in shown)]}
