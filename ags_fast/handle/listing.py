"""The files of a dataset's version, as a handle lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ags_fast.dataset.key_material import KEYTOOLS
from ags_fast.fs import without_password

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Store
    from ags_fast.onelog.entry import Entry
    from ags_fast.onelog.snapshot import Snapshot

__all__ = ["Change", "DatasetFile", "DatasetVersion", "Listed", "shown_in_notebook"]


class DatasetFile(NamedTuple):
    """One file of a dataset's version.

    Attributes:
        path: Its path in the dataset.
        format: "ags1" or "parquet".
        plain_length: Bytes that reading the file gives. Of a Parquet file: of its plaintext view.
        file_length: Bytes of the encrypted file.
        key_id: The id of the key that wraps the file's data key.
        mtime_ns: When its content was last changed, in ns since the epoch; None if not known.
        stamp: Another content has another stamp, and so has a file that was encrypted again.
        columns: Dotted paths of the columns, of a Parquet file, that have data keys of their own.
        url: The path or URL of the encrypted file.
        key_material: "keytools" if Parquet's own key tools open the encrypted file; else None.
        mode: Permission bits of the source; None if not known.
        job_id: The job that encrypted the file.
    """

    path: str
    format: str
    plain_length: int
    file_length: int
    key_id: str
    mtime_ns: int | None = None
    stamp: str = ""
    columns: tuple[str, ...] = ()
    url: str = ""
    key_material: str | None = None
    mode: int | None = None
    job_id: str = ""

    @classmethod
    def of(cls, entry: FileEntry, store: Store) -> DatasetFile:
        """Return the file of a row. `store` is the dataset."""
        return cls(
            entry.path,
            entry.format,
            entry.plain_length,
            entry.file_length,
            entry.key_id,
            entry.mtime_ns,
            f"{entry.job_id} {entry.file}",  # a job makes an object once for a version
            tuple(key["column"] for key in entry.column_keys or ()),
            store.full_path(entry.file),
            None if entry.key_material is None else KEYTOOLS,
            entry.mode,
            entry.job_id,
        )


class DatasetVersion(NamedTuple):
    """One version of a dataset.

    Attributes:
        number: Its number, from 1.
        parent: The number of the version that it replaced; None for the first.
        operation: What made it, such as "encrypt", "write", "remove", "rekey" or "rotate".
        job_id: The job or transaction that made it.
        time_ms: When it was committed, in ms since the epoch.
        files: Its files.
        plain_length: Bytes of all its files, decrypted.
        pin: The text to keep outside of the storage: see `Dataset.pin`.
    """

    number: int
    parent: int | None
    operation: str
    job_id: str
    time_ms: int
    files: int
    plain_length: int
    pin: str

    @classmethod
    def of(cls, version: Entry) -> DatasetVersion:
        """Return what users see of a version."""
        shown = (version.number, version.number - 1 or None, version.operation, version.job_id, version.time_ms)
        return cls(*shown, version.count, version.nbytes, version.pin)


class Change(NamedTuple):
    """What became of one file between two versions of a dataset.

    Attributes:
        kind: "added"; "removed"; "moved", the same object under another path; "rekeyed", content of the same source
            under a new data key; or "changed", any other object.
        path: The file's path, in the later version if the file is there.
        old: The file in the earlier version; None if it was added.
        new: The file in the later version; None if it was removed.
    """

    kind: str
    path: str
    old: DatasetFile | None
    new: DatasetFile | None


class Listed:
    """The part of `Dataset` that lists files. A subclass opens the dataset."""

    def snapshot(self) -> Snapshot:
        """Return the version that the handle shows."""
        raise NotImplementedError

    def files(self, pattern: str | None = None) -> Iterator[DatasetFile]:
        """Iterate over the files of this version, in no order. No file is read, only manifests.

        Args:
            pattern: Only files whose path matches, as in `fnmatch`: ``*`` also matches "/". None takes all.

        Raises:
            ExpiredError: The version was expired meanwhile: `refresh`.
        """
        snapshot = self.snapshot()
        for row in snapshot.files(pattern):
            yield DatasetFile.of(row, snapshot.log.store)

    def find(self, path: str) -> DatasetFile | None:
        """Return the file that this version has at `path`, or None. The errors are those of `files`."""
        snapshot = self.snapshot()
        row = snapshot.get(path)
        return None if row is None else DatasetFile.of(row, snapshot.log.store)

    def versions(self) -> Iterator[DatasetVersion]:
        """Iterate over the versions that were not expired, the newest first. Each is one read of a small object.

        Raises:
            IntegrityError: A version was changed, or is of another history.
        """
        log = self.snapshot().log
        for version in log.kept(log.head()):
            yield DatasetVersion.of(version)

    def changes(self, since: int) -> list[Change]:
        """Return how the files of this version differ from those of another version, sorted by path.

        Manifests that both versions have are not read. A rotation changes no file.

        Args:
            since: The number of the other version, usually an older one.

        Raises:
            FileNotFoundError: The dataset has no version `since`.
            ExpiredError: One of the versions was expired.
        """
        new = self.snapshot()
        old = new._replace(entry=new.log.entry(since))
        shared = {table.path for table in new.entry.files} & {table.path for table in old.entry.files}
        before, after = ({row.path: row for row in _without(snapshot, shared).files()} for snapshot in (old, new))
        return sorted(_changes(before, after, new.log.store), key=lambda change: change.path)

    def has_folder(self, path: str) -> bool:
        """Return whether this version has a file below `path`. The errors are those of `files`."""
        return bool(self.snapshot().below((path,)))

    def list_folder(self, path: str = "", *, deep: bool = False) -> tuple[list[str], list[DatasetFile]]:
        """List one folder of this version. A folder is there if it has files. The errors are those of `files`.

        Args:
            path: The folder; "": the dataset itself.
            deep: List the files of all folders below, too, and no names of folders.

        Returns:
            The names of the folders in it, and its files, both sorted by path.
        """
        snapshot = self.snapshot()
        folders, rows = snapshot.list_folder(path, deep=deep)
        return sorted(folders), sorted(DatasetFile.of(row, snapshot.log.store) for row in rows)


def _without(snapshot: Snapshot, tables: Collection[str]) -> Snapshot:
    """Return a version with only the tables that have other paths than these."""
    left = tuple(table for table in snapshot.entry.files if table.path not in tables)
    return snapshot._replace(entry=msgspec.structs.replace(snapshot.entry, files=left))


def _changes(old: Mapping[str, FileEntry], new: Mapping[str, FileEntry], store: Store) -> Iterator[Change]:
    """Compare two sets of files, by path."""
    gone = {entry.file: path for path, entry in old.items() if path not in new}
    for path, entry in new.items():
        before = old.get(path)
        if before is None:
            before = old.get(gone.pop(entry.file, path))
            kind = "added" if before is None else "moved"
        elif before.file == entry.file:
            continue
        else:
            is_same = entry.stamp and (before.stamp, before.plain_length) == (entry.stamp, entry.plain_length)
            kind = "rekeyed" if is_same else "changed"
        yield Change(
            kind, path, None if before is None else DatasetFile.of(before, store), DatasetFile.of(entry, store)
        )
    for path in gone.values():
        yield Change("removed", path, DatasetFile.of(old[path], store), None)


def shown_in_notebook(url: str, snapshot: Snapshot | None) -> str:
    """Return a dataset as HTML, from what was read already. snapshot: None if the dataset is not opened yet."""
    from datetime import UTC, datetime

    from ags_fast.markup import nbytes, sheet

    facts: list[tuple[str, object]] = [("dataset", without_password(url))]
    if snapshot is None:
        facts.append(("version", "not opened yet"))
    else:
        entry = snapshot.entry
        made = datetime.fromtimestamp(entry.time_ms / 1000, UTC)
        facts += [
            ("version", f"{entry.number}, by {entry.operation} at {made:%Y-%m-%d %H:%M:%S} UTC"),
            ("files", f"{entry.count:,}"),
            ("plaintext", nbytes(entry.nbytes)),
            ("pin", entry.pin),
        ]
    return sheet("Dataset", facts)
