"""Where KEKs live: the mutable medium beside the data that never changes. Entries are wrapped: it keeps no secret."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ags_fast.errors import ConcurrentChangeError, KeyAccessError
from ags_fast.keys.envelope import KeyEntry

if TYPE_CHECKING:
    import builtins
    from collections.abc import Mapping

__all__ = ["Change", "KeyResolver", "MemoryKeyStore"]


class Change(NamedTuple):
    """What made a version of a key store."""

    version: int
    time_ms: int  # since the epoch
    changes: dict[str, list[str]]  # "added", "changed", "removed": key ids


@runtime_checkable
class KeyResolver(Protocol):
    """Finds KEKs by id, and changes them for whoever saw the newest version."""

    @property
    def version(self) -> int:
        """Counts the changes; 0 is empty."""

    def get(self, key_id: str) -> KeyEntry:
        """The entry. KeyAccessError if there is none."""

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """All entries, or those in one state, oldest first."""

    def compare_and_swap(self, changes: Mapping[str, KeyEntry | None], expected_version: int) -> int:
        """Put in the entries of `changes`, take out those that are None, and return the new version.

        Raises ConcurrentChangeError, and changes nothing, if `version` is not `expected_version` any more.
        """

    def history(self) -> builtins.list[Change]:
        """What is known of how it came about, oldest first."""


def changed(entries: Mapping[str, KeyEntry], changes: Mapping[str, KeyEntry | None]) -> dict[str, KeyEntry]:
    """`entries` after `changes`, in the order in which they were made."""
    result = dict(entries)
    for key_id, entry in changes.items():
        if entry is None:
            result.pop(key_id, None)
        elif entry.key_id != key_id:
            raise ValueError(f"the entry under {key_id!r} is that of {entry.key_id!r}")
        else:
            result[key_id] = entry
    return result


def summary(before: Mapping[str, KeyEntry], after: Mapping[str, KeyEntry]) -> dict[str, list[str]]:
    """The ids of what is new, what is another, and what is gone."""
    return {
        "added": [key_id for key_id in after if key_id not in before],
        "changed": [key_id for key_id in after if key_id in before and before[key_id] != after[key_id]],
        "removed": [key_id for key_id in before if key_id not in after],
    }


def unknown(key_id: str, where: str) -> KeyAccessError:
    return KeyAccessError(f"{where} has no key {key_id!r}: it was removed, or never was there")


class MemoryKeyStore:
    """A key store that ends with its process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, KeyEntry] = {}
        self._history: builtins.list[Change] = []

    @property
    def version(self) -> int:
        return len(self._history)

    def get(self, key_id: str) -> KeyEntry:
        entry = self._entries.get(key_id)
        if entry is None:
            raise unknown(key_id, "the key store")
        return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        return [entry for entry in self._entries.values() if state in (None, entry.state)]

    def compare_and_swap(self, changes: Mapping[str, KeyEntry | None], expected_version: int) -> int:
        with self._lock:
            if expected_version != self.version:
                raise conflict("the key store", expected_version, self.version)
            entries = changed(self._entries, changes)
            made = Change(self.version + 1, time.time_ns() // 1_000_000, summary(self._entries, entries))
            self._entries = entries
            self._history.append(made)
            return made.version

    def history(self) -> builtins.list[Change]:
        return list(self._history)

    def __repr__(self) -> str:
        return f"<MemoryKeyStore version={self.version} keys={len(self._entries)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a key store in memory stays in its process: send the entries that are needed, in an Envelope")


def conflict(where: str, expected: int, version: int) -> ConcurrentChangeError:
    return ConcurrentChangeError(
        f"{where} is at version {version}, not at {expected} any more: somebody else has changed it"
    )
