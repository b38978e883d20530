"""Which key wraps: the newest active key of a kind, or what took the place of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.dataset.keks import Want, master_now
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import (
    SUCCESSOR,
    KeyEntry,
    seals_documents,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def active(keys: Iterable[KeyEntry]) -> list[KeyEntry]:
    """Return the keys that may wrap, the oldest first."""
    return sorted((key for key in keys if key.state == "active"), key=lambda key: (key.created_ms, key.key_id))


def main_key(keys: Iterable[KeyEntry]) -> KeyEntry:
    """Return the newest key that may seal documents. Raises PolicyError without such a key."""
    if not (there := [key for key in active(keys) if seals_documents(key)]):
        raise PolicyError("the dataset has no active key that seals documents: name a wrapping_key_id")
    return there[-1]


def line(keys: Mapping[str, KeyEntry], entry: KeyEntry) -> Iterator[KeyEntry]:
    """Yield a key, and the keys that took its place, one after the other. Ends also if they go in a circle."""
    last: KeyEntry | None = entry
    seen: set[str] = set()
    while last is not None and last.key_id not in seen:
        yield last
        seen.add(last.key_id)
        last = keys.get(last.properties.get(SUCCESSOR, ""))


def heir(keys: Mapping[str, KeyEntry], entry: KeyEntry) -> KeyEntry | Want:
    """Return the active key that wraps in the place of a key: itself or a successor. If none is left: its kind."""
    for last in line(keys, entry):
        if last.state == "active":
            return last
    want = Want.of(entry)
    return want._replace(wrapping_key_id=master_now(want.wrapping_key_id, active(keys.values())))


def provisional(want: Want, number: int, now_ms: int) -> KeyEntry:
    """Return the entry of a KEK that is still to be made. number: unique among those of one decision."""
    name = f"new KEK {now_ms}-{number}"
    return KeyEntry(
        name, want.wrapping_key_id, name.encode() if want.double_wrap else None, "active", now_ms, 0, want.properties()
    )
