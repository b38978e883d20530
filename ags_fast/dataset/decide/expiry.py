"""Remove old versions, and keys that nothing needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.dataset.decide.change import Change
from ags_fast.dataset.decide.keys import line
from ags_fast.dataset.keks import GRACE_MS, is_idle
from ags_fast.dataset.policy import DAY_MS
from ags_fast.dataset.snapshot import of_jobs
from ags_fast.keys.entry import (
    REWRAPPED_MS,
    SCOPE,
    SUCCESSOR,
    KeyEntry,
    retired,
    retires_ms,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from ags_fast.dataset.snapshot import Snapshot


def expire_versions(snapshot: Snapshot, keep: int, keep_ms: float | None, now_ms: int) -> Change:
    """Remove the versions beyond the newest `keep`, and the manifests that only they have.

    Args:
        snapshot: What there is.
        keep: How many versions stay, at least 1.
        keep_ms: Keep versions that are younger than this, too, in milliseconds.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        The versions and manifests to remove.
    """
    gone = tuple(
        version for version in snapshot.versions[:-keep] if keep_ms is None or version.time_ms < now_ms - keep_ms
    )
    kept = {ref.path for version in snapshot.versions if version not in gone for ref in version.manifests}
    refs = {ref.path: ref for version in gone for ref in version.manifests if ref.path not in kept}
    return Change(versions=gone, manifests=tuple(refs.values()))


def _needed(snapshot: Snapshot) -> tuple[dict[str, str], set[str | None]]:
    """Return the keys that versions and open jobs need, with the reasons; and the scopes of the keys of open jobs.

    When a job commits, DEKs that retired keys wrap are wrapped by their successors, or by KEKs of the same scope.
    """
    needed = snapshot.needed()
    scopes: set[str | None] = set()
    for key_id, why in of_jobs(snapshot.jobs).items():
        for last in line(snapshot.keys, snapshot.keys[key_id]) if key_id in snapshot.keys else ():
            scopes.add(last.properties.get(SCOPE))
            needed.setdefault(last.key_id, why)
    return needed, scopes


def expire_keys(snapshot: Snapshot, force: bool, now_ms: int, unsure: Collection[str] = ()) -> Change:
    """Remove retired keys that no version and no open job needs, and whose grace is over.

    KEKs with a scope none of whose files is left retire; a later expiry removes them.

    Args:
        snapshot: What there is.
        force: Do not wait for the grace, and remove such KEKs at once.
        now_ms: The time, in milliseconds since the epoch.
        unsure: KEKs of which the caller could not see that their newest wraps open: they keep their marks.

    Returns:
        The keys to change and to take out; which retired keys stay, and why (`stay`); and the KEKs whose newest wraps
        the caller must see to open (`checks`).
    """
    needed, scopes = _needed(snapshot)
    keys: dict[str, KeyEntry | None] = {}
    stay: dict[str, str] = {}
    for entry in snapshot.keys.values():
        if entry.state == "active" and is_idle(entry, needed) and entry.properties[SCOPE] not in scopes:
            if force:
                keys[entry.key_id] = None
            elif now_ms - entry.created_ms > GRACE_MS:
                keys[entry.key_id] = retired(entry, None, GRACE_MS, now_ms)
        if entry.state == "retired":
            why = needed.get(entry.key_id)
            if why is None and not force and now_ms < retires_ms(entry):
                why = f"its grace is over in {(retires_ms(entry) - now_ms) / DAY_MS:.1f} days"
            if why is None:
                keys[entry.key_id] = None
            else:
                stay[entry.key_id] = why
    gone = {key_id: snapshot.keys[key_id] for key_id, entry in keys.items() if entry is None}
    left = [keys.get(key_id) or entry for key_id, entry in snapshot.keys.items() if key_id not in gone]
    for entry in left:
        properties = dict(entry.properties)
        if entry.key_id not in unsure:
            properties.pop(REWRAPPED_MS, None)
        if properties.get(SUCCESSOR) in gone:  # so that the way to the newest key goes on
            rest = (last.key_id for last in line(snapshot.keys, entry) if last.key_id not in {*gone, entry.key_id})
            properties[SUCCESSOR] = next(rest, "")
        if properties != entry.properties:
            keys[entry.key_id] = entry.replace(properties=properties)
    checks = tuple(entry.key_id for entry in left if REWRAPPED_MS in entry.properties)
    return Change(keys, stay=stay, checks=checks)
