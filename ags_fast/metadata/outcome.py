"""What became of a commit that failed: the newest metadata tell, and not the error.

Clients send a request again if no answer came. If the first one was carried out, the second is refused because of it.
So the same error is raised whether a commit was made or not, and whoever then deletes the commit's files may delete
those of the newest snapshot.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.seals.seal import was_made as sealed_was_made
from ags_fast.seals.state import PROPERTY

if TYPE_CHECKING:
    from ags_fast.metadata.javajson import Raw

__all__ = ["Attempt", "attempted", "was_made"]


class Attempt(NamedTuple):
    """A commit that a catalog may have got.

    Attributes:
        base: The raw metadata that it changes; None for a new table.
        made: What it makes of them.
        location: Where it has written these; None if a server writes them.
    """

    base: Raw | None
    made: Raw
    location: str | None = None


attempted: ContextVar[Attempt | None] = ContextVar("attempted", default=None)  # by this thread's commit


def was_made(attempt: Attempt, raw: Raw, location: str) -> bool | None:
    """Tell whether the newest metadata `raw` are those of a commit, or follow them; None if they do not tell."""
    if attempt.location in (location, *(one["metadata-file"] for one in raw.get("metadata-log") or ())):
        return True
    old, new, now = map(_snapshots, (attempt.base or {}, attempt.made, raw))
    added = new.keys() - old.keys()
    if added and added <= now.keys():
        return True
    if _seal(attempt.made) != _seal(attempt.base or {}):
        return sealed_was_made(raw, attempt.made, attempt.base or {})
    if not added:
        return attempt.location is None and _shows(raw, attempt)
    # Later commits may have expired it, and still use its files. Then the parent of one of them is missing.
    known = {None, *old, *now}
    return None if any(now[one].get("parent-snapshot-id") not in known for one in now.keys() - old.keys()) else False


def _snapshots(raw: Raw) -> dict[int, Raw]:
    return {one["snapshot-id"]: one for one in raw.get("snapshots") or ()}


def _seal(raw: Raw) -> Any:
    return (raw.get("properties") or {}).get(PROPERTY)


def _shows(raw: Raw, attempt: Attempt) -> bool:
    """Tell whether metadata have what a commit has added, and lack what it has taken away."""
    old, new, now = map(_parts, (attempt.base or {}, attempt.made, raw))
    changed = [part for part in old.keys() | new.keys() if old.get(part) != new.get(part)]
    return bool(changed) and all(now.get(part) == new.get(part) for part in changed)


def _parts(raw: Raw) -> dict[tuple[str, Any], Any]:
    return {
        **{("key", one["key-id"]): one for one in raw.get("encryption-keys") or ()},
        **{("snapshot", snapshot_id): snapshot_id for snapshot_id in _snapshots(raw)},
        **{("property", name): value for name, value in (raw.get("properties") or {}).items()},
        **{("ref", name): ref.get("snapshot-id") for name, ref in (raw.get("refs") or {}).items()},
    }
