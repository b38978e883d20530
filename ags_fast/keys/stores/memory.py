"""KEKs in the memory of a process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from ags_fast.keys.stores.base import (
    HISTORY,
    Change,
    Entries,
    changed,
    check_changes,
    conflict,
    listed,
    mend_after_fork,
    now_ms,
    summary,
    unknown,
)

if TYPE_CHECKING:
    import builtins
    from collections.abc import Mapping

    from ags_fast.keys.entry import KeyEntry

__all__ = ["MemoryKeyStore"]


class MemoryKeyStore:
    """A key store that ends with its process. Threads may share it.

    Args:
        dataset_id: The dataset; None makes up an id.
        entries: The entries to begin with.
        version: The version to begin with.
    """

    def __init__(
        self, dataset_id: str | None = None, entries: Mapping[str, KeyEntry] | None = None, version: int = 0
    ) -> None:
        self.dataset_id = dataset_id or os.urandom(16).hex()
        self._entries: dict[str, KeyEntry] = dict(entries or {})
        self._history: builtins.list[Change] = []
        self._version = version
        self.after_fork()
        mend_after_fork(self)

    def after_fork(self) -> None:
        """Make a new lock."""
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """As `KeyResolver` has it."""
        return self._version

    def refresh(self) -> int:
        """As `KeyResolver` has it."""
        return self._version

    @property
    def entries(self) -> Entries:
        """The entries as an `Envelope` takes them."""
        return Entries(self)

    def get(self, key_id: str) -> KeyEntry:
        """As `KeyResolver` has it."""
        entry = self._entries.get(key_id)
        if entry is None:
            raise unknown(key_id, "the key store")
        return entry

    def list(self, state: str | None = None) -> builtins.list[KeyEntry]:
        """As `KeyResolver` has it."""
        return listed(self._entries.values(), state)

    def compare_and_swap(
        self, changes: Mapping[str, KeyEntry | None], expected_version: int, *, operation: str = "change"
    ) -> int:
        """As `KeyResolver` has it."""
        check_changes(changes)
        with self._lock:
            if expected_version != self._version:
                raise conflict("the key store", expected_version, self._version)
            entries = changed(self._entries, changes)
            what = summary(changes, self._entries, entries)
            self._entries = entries
            self._version += 1
            self._history = [*self._history, Change(self._version, now_ms(), what)][-HISTORY:]
            return self._version

    def history(self) -> builtins.list[Change]:
        """As `KeyResolver` has it."""
        return list(self._history)

    def __repr__(self) -> str:
        return f"<MemoryKeyStore version={self.version} keys={len(self._entries)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a key store in memory stays in its process: send the entries that are needed, in an Envelope")
