"""The files of a dataset's version, as a handle lists them."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.entries import check_lengths
from ags_fast.dataset.key_material import KEYTOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.at import At
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Store

__all__ = ["DatasetFile", "Listed"]


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

    @classmethod
    def of(cls, entry: FileEntry, store: Store) -> DatasetFile:
        """Return the file of an entry. `store` is the dataset. Raises IntegrityError if its lengths cannot be."""
        check_lengths((entry,))
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
        )


class Listed:
    """The part of `Dataset` that lists files. A subclass opens the dataset."""

    def _opened(self) -> At:
        raise NotImplementedError

    def files(self, pattern: str | None = None) -> Iterator[DatasetFile]:
        """Iterate over the files of this version, in no order. No file is read, only manifests.

        Args:
            pattern: Only files whose path matches, as in `fnmatch`: ``*`` also matches "/". None takes all.

        Raises:
            ConcurrentChangeError: The version was expired meanwhile: `refresh`.
        """
        at = self._opened()
        for entry in at.ledger.entries(at.head):
            if pattern is None or fnmatch.fnmatchcase(entry.path, pattern):
                yield DatasetFile.of(entry, at.ledger.store)

    def find(self, path: str) -> DatasetFile | None:
        """Return the file that this version has at `path`, or None. The errors are those of `files`."""
        at = self._opened()
        entry = at.ledger.find(at.head, path)
        return None if entry is None else DatasetFile.of(entry, at.ledger.store)

    def has_folder(self, path: str) -> bool:
        """Return whether this version has a file below `path`. The errors are those of `files`."""
        at = self._opened()
        return any(name.startswith(f"{path}/") for name in at.ledger.find_where(at.head, (), (path,)))

    def list_folder(self, path: str = "", *, deep: bool = False) -> tuple[list[str], list[DatasetFile]]:
        """List one folder of this version. A folder is there if it has files. The errors are those of `files`.

        Args:
            path: The folder; "": the dataset itself.
            deep: List the files of all folders below, too, and no names of folders.

        Returns:
            The names of the folders in it, and its files, both sorted by path.
        """
        at = self._opened()
        folders, entries = at.ledger.list_folder(at.head, path, deep)
        return sorted(folders), sorted(DatasetFile.of(entry, at.ledger.store) for entry in entries)
