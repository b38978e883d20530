"""The files of one version."""

from __future__ import annotations

import errno
import fnmatch
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.files.contents import Contents, denied_keys
from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.onelog.errors import ExpiredError
from ags_fast.onelog.names import job_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import Envelope
    from ags_fast.onelog.entry import Entry
    from ags_fast.onelog.log import Log
    from ags_fast.onelog.tables import Table


class Snapshot(NamedTuple):
    """One version of a dataset, as a process has read it. It never changes.

    Every method raises ExpiredError if the version was expired meanwhile, IntegrityError if an object of it is missing
    or was changed, and KeyAccessError if the KMS refuses.

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

    def get(self, path: str) -> FileEntry | None:
        """Return the file at a path, or None."""
        found = self.find((path,)).get(path)
        return None if found is None else found[1]

    def file(self, path: str) -> FileEntry:
        """Return the file at a path. FileNotFoundError: there is none."""
        row = self.get(path)
        if row is None:
            raise FileNotFoundError(f"the dataset's version {self.entry.number} has no {path!r}")
        return row

    def below(self, folders: Collection[str]) -> dict[str, FileEntry]:
        """Return one file below each of these folders that has one, by the file's path."""
        with self.unless_expired():
            found = self.log.tables.below(self.entry.files, folders, self.envelope)
        return {path: row for path, (_, row) in found.items()}

    def list_folder(self, folder: str, *, deep: bool = False) -> tuple[set[str], list[FileEntry]]:
        """Return the names of the folders in a folder, and the files in the folder.

        Args:
            folder: The path of the folder; "": the dataset itself.
            deep: Return all files below the folder, and no folders.
        """
        with self.unless_expired():
            return self.log.tables.list_folder(self.entry.files, folder, deep, self.envelope)

    def files(self, pattern: str | None = None, *, added: bool = False) -> Iterator[FileEntry]:
        """Yield files, in no order.

        Args:
            pattern: Only those whose path matches, as in `fnmatch`; None: all.
            added: Only those that the version's own job has written.
        """
        job_id = self.entry.job_id
        for table in self.entry.files:
            if added and job_of(table.path) != job_id:
                continue
            with self.unless_expired():
                rows = self.log.tables.rows(table, self.envelope)
            for row in rows:
                if (pattern is None or fnmatch.fnmatchcase(row.path, pattern)) and not (added and row.job_id != job_id):
                    yield row

    def contents(self, row: FileEntry, threads: int | None = None, *, hide: bool = False) -> Contents:
        """Return what opens one file. hide: leave out columns whose key the KMS refuses."""
        contents = self.holding(row.key_ids(), threads)
        return replace(contents, without=denied_keys(contents, [row])) if hide else contents

    def holding(self, key_ids: Iterable[str], threads: int | None = None) -> Contents:
        """Return what opens files under the KEKs with these ids. A key store is asked once for all of them."""
        if self.log.kek_rows.elsewhere:
            key_ids, keys = [*key_ids], self.log.known(self.entry).keys
            self.log.kek_rows.fetch(self.entry.dataset_id, [keys[key_id] for key_id in key_ids if key_id in keys])
        return Contents(self.entry.dataset_id, self.log.store, self.envelope.subset(key_ids), threads)

    @contextmanager
    def unless_expired(self) -> Iterator[None]:
        """Raise ExpiredError in place of an error about something missing, if the version was expired (rule 12)."""
        try:
            yield
        except ExpiredError:
            raise
        except (FileNotFoundError, IntegrityError, KeyAccessError) as error:
            if self.log.head().first > self.entry.number:
                raise expired(self.entry.number, self.log.store.url) from None
            if isinstance(error, FileNotFoundError):
                raise IntegrityError(f"{error.filename} is missing, but the dataset names it") from None
            raise


def expired(number: int, url: str) -> ExpiredError:
    """Return the error for a version that was expired while a process was at it."""
    return ExpiredError(errno.ENOENT, f"version {number} was expired while it was read: read the dataset again", url)
