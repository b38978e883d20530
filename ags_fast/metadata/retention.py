"""Which snapshots, branches and tags of a table stay when it expires others: the rules of Iceberg Java."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ags_fast.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ags_fast.metadata.javajson import Raw

__all__ = ["MAX_SNAPSHOT_AGE", "number", "retained"]

MIN_SNAPSHOTS = "history.expire.min-snapshots-to-keep"
MAX_SNAPSHOT_AGE = "history.expire.max-snapshot-age-ms"
MAX_REF_AGE = "history.expire.max-ref-age-ms"
FOREVER = 1 << 63


def retained(
    raw: Mapping[str, Any], *, keep: int = 1, older_than_ms: int | None = None, now_ms: int | None = None
) -> tuple[set[int], set[str]]:
    """Return the ids of the snapshots that stay, and the names of the branches and tags that stay.

    The rules are those of Iceberg Java. Of each branch, its newest snapshots stay, and those that are young enough; a
    branch's own ``min-snapshots-to-keep`` and ``max-snapshot-age-ms`` win over `keep` and `older_than_ms`. Tags stay,
    with their snapshots, and so do branches, unless they are older than their ``max-ref-age-ms``. ``main`` always
    stays. A snapshot outside of all branches stays while it is young.

    At least `keep` snapshots of each branch stay; the property ``history.expire.min-snapshots-to-keep`` may ask for
    more. From the age `older_than_ms` on snapshots go. None: from ``history.expire.max-snapshot-age-ms`` on; without
    that property at any age, but a snapshot that is staged for publication (``wap.id``) stays. `now_ms` counts from
    the epoch.
    """
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    properties = raw.get("properties") or {}
    age = older_than_ms if older_than_ms is not None else number(properties, MAX_SNAPSHOT_AGE)
    cutoff = FOREVER if age is None else now - age
    least = max(keep, number(properties, MIN_SNAPSHOTS) or 1)
    named = {one["snapshot-id"]: one for one in raw.get("snapshots") or ()}
    refs = _refs(raw, named, now, number(properties, MAX_REF_AGE))
    ids, reached = set(), set()
    for ref in refs.values():
        ids.add(ref["snapshot-id"])
        if ref.get("type") == "tag":
            reached.add(ref["snapshot-id"])
            continue
        own_age, own_least = ref.get("max-snapshot-age-ms"), ref.get("min-snapshots-to-keep")
        line = list(_ancestors(named, ref["snapshot-id"]))
        reached.update(line)
        ids.update(_newest(named, line, own_least or least, cutoff if own_age is None else now - own_age))
    published = {(one.get("summary") or {}).get("published-wap-id") for one in named.values()}
    for snapshot_id, one in named.items():
        staged = (one.get("summary") or {}).get("wap.id")
        young = one["timestamp-ms"] >= cutoff or (age is None and staged is not None and staged not in published)
        if snapshot_id not in reached and young:
            ids.add(snapshot_id)
    return ids & named.keys(), set(refs)


def _newest(named: Mapping[int, Raw], line: list[int], least: int, cutoff: int) -> Iterator[int]:
    """Yield the snapshots of a branch that stay, up to the first that goes."""
    for place, snapshot_id in enumerate(line):
        if place >= least and named[snapshot_id]["timestamp-ms"] < cutoff:
            return
        yield snapshot_id


def _refs(raw: Mapping[str, Any], named: Mapping[int, Raw], now: int, oldest: int | None) -> dict[str, Raw]:
    """Return the branches and tags that stay."""
    refs = dict(raw.get("refs") or {})
    current = raw.get("current-snapshot-id")
    if "main" not in refs and current in named:
        refs["main"] = {"snapshot-id": current, "type": "branch"}
    found = {}
    for name, ref in refs.items():
        snapshot, most = named.get(ref["snapshot-id"]), ref.get("max-ref-age-ms", oldest)
        if name == "main" or (snapshot is not None and (most is None or now - snapshot["timestamp-ms"] <= most)):
            found[name] = ref
    return found


def _ancestors(named: Mapping[int, Raw], snapshot_id: int | None) -> Iterator[int]:
    """Yield a snapshot and those before it, as far as they are there."""
    seen: set[int] = set()
    while snapshot_id is not None and snapshot_id in named and snapshot_id not in seen:
        seen.add(snapshot_id)
        yield snapshot_id
        snapshot_id = named[snapshot_id].get("parent-snapshot-id")


def number(properties: Mapping[str, str], name: str) -> int | None:
    """Return a property that is a whole number; None if there is none. PolicyError if it is something else."""
    text = properties.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise PolicyError(
            f"the table's property {name} is {text!r}, and not a whole number: set it right, or remove it"
        )
    return int(text)
