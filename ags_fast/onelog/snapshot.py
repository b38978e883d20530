"""The files of one version."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.onelog.errors import ExpiredError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import Envelope
    from ags_fast.onelog.log import Entry, Log
    from ags_fast.onelog.tables import Table


class Snapshot(NamedTuple):
    """One version of a dataset, as a process has read it. It never changes.

    Attributes:
        log: Where the version is.
        entry: The version.
    """

    log: Log
    entry: Entry

    @property
    def envelope(self) -> Envelope:
        """What opens its files: the KEKs of the newest head that was read open every kept version."""
        return self.log.envelope(self.log.known(self.entry))

    def find(self, paths: Collection[str]) -> dict[str, tuple[Table, FileEntry]]:
        """Return the rows at these paths, and the table that has each. A path without a file is left out."""
        with self.unless_expired():
            return self.log.tables.find(self.entry.files, paths, self.envelope)

    def files(self) -> Iterator[FileEntry]:
        """Yield the rows of all files, in no order."""
        for table in self.entry.files:
            with self.unless_expired():
                rows = self.log.tables.rows(table, self.envelope)
            yield from rows

    @contextmanager
    def unless_expired(self) -> Iterator[None]:
        """Raise ExpiredError in place of an error about something missing, if the version was expired (rule 12)."""
        try:
            yield
        except ExpiredError:
            raise
        except (FileNotFoundError, IntegrityError, KeyAccessError) as error:
            if self.log.head().first > self.entry.number:
                raise ExpiredError(
                    errno.ENOENT,
                    f"version {self.entry.number} was expired while it was read: read the dataset again",
                    self.log.store.url,
                ) from None
            if isinstance(error, FileNotFoundError):
                raise IntegrityError(f"{error.filename} is missing, but the dataset names it") from None
            raise
