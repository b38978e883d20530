"""Files of a dataset as tasks get them: each opens by itself, without the dataset's versions and manifests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ags_fast.dataset.files.contents import denied_keys, format_of
from ags_fast.errors import IntegrityError
from ags_fast.onelog.log import Log
from ags_fast.onelog.snapshot import expired

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents
    from ags_fast.onelog.snapshot import Snapshot

__all__ = ["SealedFile"]


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of one version, with its wrapped data keys. Pickles; holds no key, and the KMS as properties.

    Files under the same KEKs share `contents`, so many of them in one pickle stay small.
    """

    contents: Contents = field(repr=False)
    entry: FileEntry = field(repr=False)
    version: int

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

    def open(self, *, threads: int | None = None) -> io.RawIOBase:
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
            if Log(contents.store, contents.envelope.kms).head().first <= self.version:
                raise
        raise expired(self.version, contents.store.url)


def sealed_files(
    snapshot: Snapshot,
    entries: Iterable[FileEntry],
    columns: Iterable[str] | None,
    hide: bool,
) -> Iterator[SealedFile]:
    """Make the files of some entries.

    Args:
        snapshot: The version that has them.
        entries: The files.
        columns: The columns that will be read, by the names of the schema's top level; None: all. No other column's
            key is asked for, and a column whose key is only for others is left out.
        hide: Whether columns whose keys the KMS refuses are left out, too.
    """
    contents_of = snapshot.holding
    wanted = None if columns is None else [name.casefold() for name in columns]
    shared: dict[tuple[frozenset[str], frozenset[str]], Contents] = {}
    denied: dict[str, bool] = {}  # by the id of a column's key: whether the KMS refuses it
    for entry in entries:
        ids = frozenset(entry.key_ids())
        read = tuple(key for key in entry.column_keys or () if wanted is None or _is_in(key["column"], wanted))
        needed = {entry.key_id, *(key["key_id"] for key in read)}
        if hide and any(key["key_id"] not in denied for key in read):
            refused = denied_keys(contents_of(ids), [entry._replace(column_keys=read)])
            denied |= {key["key_id"]: key["key_id"] in refused for key in read}
        without = ids - needed
        if hide:
            without |= {key["key_id"] for key in read if denied[key["key_id"]]} - {entry.key_id}
        if (ids, without) not in shared:
            shared[ids, without] = replace(contents_of(ids - without), without=without)
        yield SealedFile(shared[ids, without], _slim(entry), snapshot.entry.number)


def _is_in(column: str, names: Iterable[str]) -> bool:
    """Return whether a column, by its dotted path, is one of the columns `names`, or in one."""
    column = column.casefold()
    return any(column == name or column.startswith(name + ".") for name in names)


def _slim(entry: FileEntry) -> FileEntry:
    """Return an entry without what only writers and jobs need: 100,000 of them are sent to tasks."""
    slim = entry._replace(source="", stamp="", job_id="", set_id=None, part=None, parts=None)
    return slim._replace(mode=None, mtime_ns=None, key_material=None)
