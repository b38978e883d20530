"""The files of one version."""

from __future__ import annotations

import errno
import fnmatch
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ags_fast.dataset.entries import exact_first
from ags_fast.dataset.files.contents import Contents, denied_keys, format_of
from ags_fast.dataset.log import Log
from ags_fast.dataset.names import job_of
from ags_fast.errors import ExpiredError, IntegrityError, KeyAccessError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ags_fast._cursor import Cursor
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.tables import Table
    from ags_fast.keys.envelope import Envelope
    from ags_fast.keys.stores import KeyResolver


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of one version, with its wrapped data keys. Pickles; holds no key, and the KMS as properties.

    Files under the same KEKs share `contents`, so many of them in one pickle stay small.
    """

    contents: Contents = field(repr=False)
    entry: FileEntry = field(repr=False)
    version: int
    key_store: KeyResolver | None = field(repr=False, default=None)

    @property
    def path(self) -> str:
        """Its path in the dataset."""
        return self.entry.path

    @property
    def object(self) -> str:
        """The name of the object that holds the file. No other file ever has this name."""
        return self.entry.file

    @property
    def format(self) -> str:
        """Its format: "ags1" or "parquet"."""
        return self.entry.format

    @property
    def plain_length(self) -> int:
        """Bytes that reading the file gives."""
        return self.entry.plain_length

    @property
    def file_length(self) -> int:
        """Bytes of the encrypted file."""
        return self.entry.file_length

    @property
    def key_id(self) -> str:
        """The id of the key that wraps the file's data key."""
        return self.entry.key_id

    def open(self, *, threads: int | None = None) -> Cursor:
        """Open the file as a seekable binary file of its plaintext. The storage gets requests for this file only.

        Args:
            threads: How many threads may work on one read; None as for AgsCodec.

        Raises:
            IntegrityError: The file is missing or is not what was written. What is read later is checked then.
            ExpiredError: The version was expired meanwhile.
            KeyAccessError: The KMS refuses.
        """
        contents = self.contents if threads is None else replace(self.contents, threads=threads)
        try:
            return format_of(self.entry).view(contents, self.entry)
        except IntegrityError:
            if Log(contents.store, contents.envelope.kms, key_store=self.key_store).head().first <= self.version:
                raise
        raise expired(self.version, contents.store.url)


class Snapshot(NamedTuple):
    """One version of a dataset, as a process has read it. It never changes.

    Every method raises ExpiredError if the version was expired meanwhile, IntegrityError if an object of it is missing
    or was changed, and KeyAccessError if the KMS refuses.
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
        """Return the names of the folders in a folder, and its files. deep: all files below it, and no folders."""
        with self.unless_expired():
            return self.log.tables.list_folder(self.entry.files, folder, deep, self.envelope)

    def files(self, pattern: str | None = None, *, added: bool = False) -> Iterator[FileEntry]:
        """Yield files, in no order: those that match a pattern of `fnmatch`.

        added: only those that the version's own job has written.
        """
        job_id = self.entry.job_id
        pattern = pattern and exact_first(pattern, self.find([pattern]))
        for table in self.entry.files:
            if added and job_of(table.path) != job_id:
                continue
            with self.unless_expired():
                rows = self.log.tables.rows(table, self.envelope)
            for row in rows:
                if (pattern is None or fnmatch.fnmatchcase(row.path, pattern)) and not (added and row.job_id != job_id):
                    yield row

    def without(self, tables: Collection[str]) -> Snapshot:
        """Return the version as if it had not the tables with these paths."""
        left = tuple(table for table in self.entry.files if table.path not in tables)
        return self._replace(entry=msgspec.structs.replace(self.entry, files=left))

    def contents(self, row: FileEntry, threads: int | None = None, missing: str = "error") -> Contents:
        """Return what opens one file. missing: as for `Dataset.open_file`."""
        held = self.holding(row.key_ids(), threads)
        return replace(held, without=denied_keys(held, [row] if missing != "error" else []), nulls=missing == "null")

    def holding(self, key_ids: Iterable[str], threads: int | None = None) -> Contents:
        """Return what opens files under the KEKs with these ids. A key store is asked once for all of them."""
        with self.unless_expired():
            if self.log.kek_rows.elsewhere:
                key_ids, keys = [*key_ids], self.log.known(self.entry).keys
                self.log.kek_rows.fetch(self.entry.dataset_id, [keys[key_id] for key_id in key_ids if key_id in keys])
            return Contents(self.entry.dataset_id, self.log.store, self.envelope.subset(key_ids), threads)

    def sealed(self, rows: Iterable[FileEntry], columns: Iterable[str] | None, missing: str) -> Iterator[SealedFile]:
        """Yield files that open by themselves, to read these columns, by the names of the schema's top level, or all.

        No other column's key is asked for. Columns under other keys, or under refused ones, become what `missing` says.
        """
        wanted = None if columns is None else [name.casefold() for name in columns]
        shared: dict[tuple[frozenset[str], frozenset[str]], Contents] = {}
        asked, denied = set[str](), set[str]()  # keys of columns that the KMS was asked for, and those that it refuses
        for row in rows:
            ids = frozenset(row.key_ids())
            read = tuple(key for key in row.column_keys or () if wanted is None or _is_in(key["column"], wanted))
            read_ids = {key["key_id"] for key in read}
            if missing != "error" and not read_ids <= asked:
                denied |= denied_keys(self.holding(ids), [row._replace(column_keys=read)])
                asked |= read_ids
            without = ids - (read_ids - denied) - {row.key_id}
            if (ids, without) not in shared:
                shared[ids, without] = replace(self.holding(ids - without), without=without, nulls=missing == "null")
            yield SealedFile(shared[ids, without], _slim(row), self.entry.number, self.log.kek_rows.resolver)

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


def _is_in(column: str, names: Iterable[str]) -> bool:
    """Return whether a column, by its dotted path, is one of the columns `names`, or in one."""
    column = column.casefold()
    return any(column == name or column.startswith(name + ".") for name in names)


def _slim(entry: FileEntry) -> FileEntry:
    """Return an entry without what only writers and jobs need: 100,000 of them are sent to tasks."""
    slim = entry._replace(source="", stamp="", job_id="", set_id=None, part=None, parts=None)
    return slim._replace(mode=None, mtime_ns=None, key_material=None)
