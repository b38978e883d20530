"""A dataset at one version, and what opens its files."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ags_fast.dataset.files.contents import Contents, denied_keys
from ags_fast.errors import ConcurrentChangeError, IntegrityError
from ags_fast.keys.entry import UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version

__all__ = ["At", "unless_expired"]


@dataclass(frozen=True)
class At:
    """A dataset at one version."""

    ledger: Ledger
    head: Version | None

    def find(self, path: str) -> FileEntry:
        """Return the file at a path. Raises FileNotFoundError."""
        head = self.ledger.committed(self.head)
        entry = self.ledger.find(head, path)
        if entry is None:
            raise FileNotFoundError(f"the dataset's version {head.number} has no {path!r}")
        return entry

    def contents(self, entry: FileEntry, threads: int | None, hide: bool = False) -> Contents:
        """Return what opens one file. hide: leave out columns whose key the KMS refuses."""
        contents = self.holding(entry.key_ids(), threads)
        return replace(contents, without=denied_keys(contents, [entry])) if hide else contents

    def holding(self, key_ids: Iterable[str], threads: int | None = None) -> Contents:
        """Return what opens files under the keys with these ids."""
        ledger = self.ledger
        return Contents(ledger.id, ledger.store, ledger.envelope.subset(key_ids), threads)


@contextmanager
def unless_expired(at: At) -> Iterator[None]:
    """Raise ConcurrentChangeError for an object that is missing because the version was expired."""
    try:
        yield
    except (IntegrityError, UnknownKeyError):
        if at.head is None or at.ledger.has_version(at.head.number):
            raise
        raise ConcurrentChangeError(
            f"version {at.head.number} was expired while this handle was at it: call refresh()"
        ) from None
