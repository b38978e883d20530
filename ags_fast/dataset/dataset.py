"""`Dataset`: the handle of an encrypted dataset. What it reads once serves every later call."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast._types import KeyMaterial, OrShow, WritableFile, check_choice
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, check_block_size
from ags_fast.dataset.access import Access
from ags_fast.dataset.files.contents import format_of
from ags_fast.dataset.key_material import KEYTOOLS
from ags_fast.dataset.snapshot import SealedFile, Snapshot
from ags_fast.errors import IntegrityError
from ags_fast.fs import without_password

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ags_fast._cursor import Cursor
    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.transaction import Transaction
    from ags_fast.fs import Store
    from ags_fast.keys.kms import Kms

__all__ = ["Change", "Dataset", "DatasetFile", "DatasetVersion", "SealedFile"]

ADDS = ("encrypt", "write")  # operations that bring content; versions of others have what was there before


class DatasetFile(NamedTuple):
    """One file of a dataset's version.

    Attributes:
        path: Its path in the dataset.
        format: "ags1" or "parquet".
        plain_length: Bytes that reading the file gives. Of a Parquet file: of its plaintext view, which is longer.
        file_length: Bytes of the encrypted file.
        key_id: The id of the key that wraps the file's data key.
        mtime_ns: When its content was last changed, in ns since the epoch; None if not known.
        stamp: Another content has another stamp, and so has a file that was encrypted again.
        columns: Dotted paths of the columns, of a Parquet file, that have data keys of their own.
        url: The path or URL of the encrypted file.
        key_material: "keytools" if Parquet's own key tools open the encrypted file; else None.
        mode: Permission bits of the source; None if not known.
        job_id: The job that encrypted the file.
        source_length: Bytes of the file that was encrypted.
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
    source_length: int = 0

    @classmethod
    def of(cls, entry: FileEntry, store: Store) -> DatasetFile:
        """Return the file of a row. `store` is the dataset."""
        kept = entry.path, entry.format, entry.plain_length, entry.file_length, entry.key_id, entry.mtime_ns
        stamp = f"{entry.job_id} {entry.file}"  # a job makes an object once for a version
        columns = tuple(key["column"] for key in entry.column_keys or ())
        material = None if entry.key_material is None else KEYTOOLS
        url = store.full_path(entry.file)
        return cls(*kept, stamp, columns, url, material, entry.mode, entry.job_id, entry.nbytes)


class DatasetVersion(NamedTuple):
    """One version of a dataset.

    Attributes:
        number: Its number, from 1.
        parent: The number of the version that it replaced; None for the first.
        operation: What made it, such as "encrypt", "write", "remove", "rekey" or "rotate".
        job_id: The job or transaction that made it.
        time_ms: When it was committed, in ms since the epoch.
        files: Its files.
        source_length: Bytes of the sources of all its files.
        pin: The text to keep outside of the storage: see `Dataset.pin`.
    """

    number: int
    parent: int | None
    operation: str
    job_id: str
    time_ms: int
    files: int
    source_length: int
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


class Dataset:
    """An encrypted dataset, opened once. Its version, manifests and keys serve every call.

    A handle is a snapshot. It stays at its version until `refresh`, or until a transaction of this handle commits;
    opened with ``version=``, it stays there for good. Threads may share a handle. It pickles as its URL, its version
    and the properties of the KMS, without a key; the copy opens the dataset again when it is first used.

    In double wrap the KMS is asked once for each KEK of the files that are opened, by default once for a dataset. Each
    part of a manifest is read at most once while the parts that were read have less than 131,072 files. `open` and
    `create` make handles.
    """

    def __init__(self, access: Access, left_at: tuple[int, str] | None = None) -> None:
        self._access = access
        self._left_at = left_at  # the version that a pickled handle was at, and its pin
        self._snapshot: Snapshot | None = None
        self._lock = threading.RLock()
        if not isinstance(access, Access):
            raise TypeError("open a dataset by Dataset.open(url, kms=...), and make one by Dataset.create")

    @classmethod
    def open(
        cls,
        url: Folder,
        *,
        kms: Kms | None = None,
        version: int | None = None,
        min_version: int | None = None,
        pin: str | None = None,
        key_store: KeyPlace = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Open a dataset.

        Args:
            url: Its folder: a path, or a URL of fsspec.
            kms: The properties of a KMS, or a client; None: as the default profile says.
            version: The version to stay at; None is the newest, until `refresh`.
            min_version: The least number that the newest version may have.
            pin: What `Dataset.pin` or `JobResult.pin` said before: the newest version must descend from that version.
            key_store: Where the dataset's keys are, if not in the dataset.
            storage_options: Options for fsspec.

        Raises:
            FileNotFoundError: There is no dataset at `url`, or it has no such version.
            IntegrityError: The dataset was changed by a stranger, or does not descend from `pin`.
            PolicyError: The newest version is older than `min_version`.
            KeyAccessError: The KMS refuses.
            ValueError: `pin` is malformed.
        """
        handle = cls(Access.of(url, kms, key_store, storage_options, version, min_version, pin))
        handle.snapshot()
        return handle

    @classmethod
    def create(
        cls,
        url: Folder,
        *,
        kms: Kms | None = None,
        wrapping_key_id: str,
        policy: Policy | None = None,
        key_store: KeyPlace = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Create a dataset without files: its first key, and version 1.

        Args:
            url: Its folder: a path, or a URL of fsspec.
            kms: The properties of a KMS, or a client; None: as the default profile says.
            wrapping_key_id: The master key in the KMS that wraps the dataset's first KEK.
            policy: How KEKs are shared and what is kept of old versions; None is ``Policy()``.
            key_store: Where the dataset's keys are to be, if not in the dataset.
            storage_options: Options for fsspec.

        Raises:
            FileExistsError: There is a dataset at `url`.
            PolicyError: The storage overwrites objects that were to be created only if absent.
            KeyAccessError: The KMS refuses.
        """
        handle = cls(Access.of(url, kms, key_store, storage_options))
        try:
            handle._snapshot = handle._access.create(wrapping_key_id, policy)
        except FileExistsError:
            raise FileExistsError(f"there is a dataset at {handle.url}: open it with Dataset.open") from None
        return handle

    # ---- what it is

    @property
    def url(self) -> str:
        """The dataset's folder, as a path or a URL."""
        return self._access.store.url

    @property
    def id(self) -> str:
        """The id of the dataset, to which its keys are bound."""
        return self.snapshot().entry.dataset_id

    @property
    def version(self) -> int:
        """The number of the version that this handle shows."""
        return self.snapshot().entry.number

    @property
    def pin(self) -> str:
        """The version and its SHA-256, to keep outside of the storage."""
        return self.snapshot().entry.pin

    def __repr__(self) -> str:
        shown = "" if self._snapshot is None else f", version {self.version}"
        return f"<Dataset {getattr(self._access, 'store', None)!r}{shown}>"

    def _repr_html_(self) -> str:
        """Show in a notebook what was read already."""
        from ags_fast.markup import nbytes, sheet

        facts: list[tuple[str, object]] = [("dataset", without_password(self.url))]
        if self._snapshot is None:
            return sheet("Dataset", [*facts, ("version", "not opened yet")])
        entry = self._snapshot.entry
        made = datetime.fromtimestamp(entry.time_ms / 1000, UTC)
        facts += [
            ("version", f"{entry.number}, by {entry.operation} at {made:%Y-%m-%d %H:%M:%S} UTC"),
            ("files", f"{entry.count:,}"),
            ("plaintext", nbytes(entry.nbytes)),
            ("pin", entry.pin),
        ]
        return sheet("Dataset", facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self._access, (self.version, self.pin))

    # ---- listing

    def files(self, pattern: str | None = None) -> Iterator[DatasetFile]:
        """Iterate over the files of this version, in no order. No file is read, only manifests.

        Args:
            pattern: Only files whose path matches, as in `fnmatch`: ``*`` also matches "/". None takes all.

        Raises:
            ExpiredError: The version was expired meanwhile: `refresh`.
        """
        for row in self.snapshot().files(pattern):
            yield DatasetFile.of(row, self._access.store)

    def find(self, path: str) -> DatasetFile | None:
        """Return the file that this version has at `path`, or None. The errors are those of `files`."""
        row = self.snapshot().get(path)
        return None if row is None else DatasetFile.of(row, self._access.store)

    def versions(self) -> Iterator[DatasetVersion]:
        """Iterate over the versions that were not expired, the newest first. Each is one read of a small object.

        Raises:
            IntegrityError: A version was changed, or is of another history.
        """
        log = self.snapshot().log
        yield from map(DatasetVersion.of, log.look(log.kept))

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
        before, after = ({row.path: row for row in snapshot.without(shared).files()} for snapshot in (old, new))
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
        folders, rows = self.snapshot().list_folder(path, deep=deep)
        return sorted(folders), sorted(DatasetFile.of(row, self._access.store) for row in rows)

    # ---- reading

    def refresh(self) -> bool:
        """Go to the newest version, unless the handle was opened with ``version=``.

        Returns:
            Whether the handle now shows another version than before.

        Raises:
            IntegrityError: The newest version does not descend from the one that this handle shows.
        """
        with self._lock:
            before = self.snapshot()
            if self._access.version is None:
                self._snapshot = before._replace(entry=before.log.head())
            return self.version != before.entry.number

    def open_file(self, path: str, *, missing: OrShow = "error", threads: int | None = None) -> Cursor:
        """Open one file of this version as a seekable binary file of its plaintext.

        If the file's manifest was read before, the storage gets requests for the file itself, and no others. A Parquet
        file opens as a plaintext Parquet file, decrypted as far as it is read: see `ags_fast.parquet.open_plain`.

        Args:
            path: The file's path in the dataset.
            missing: What becomes of Parquet columns whose master key the KMS refuses: "error", "hide", or "null".
            threads: How many threads may work on one read; None as for AgsCodec.

        Raises:
            FileNotFoundError: This version has no such file.
            IntegrityError: The file is missing or is not what was written. What is read later is checked then.
            ExpiredError: The version was expired meanwhile: `refresh`.
            KeyAccessError: The KMS refuses.
        """
        check_choice("missing", missing, OrShow)
        snapshot = self.snapshot()
        row = snapshot.file(path)
        with snapshot.unless_expired():
            return format_of(row).view(snapshot.contents(row, threads, missing), row)

    def sealed_files(
        self,
        pattern: str | None = None,
        *,
        columns: Iterable[str] | None = None,
        missing: OrShow = "error",
        added: bool = False,
    ) -> Iterator[SealedFile]:
        """Iterate over the files of this version, in no order, as values that tasks can open by themselves.

        A `SealedFile` pickles with its wrapped keys. Opening one reads neither a version nor a manifest.

        Args:
            pattern: As for `files`.
            columns: The columns of Parquet files that will be read, by names of the schema's top level; None is all.
                No key of another column is asked for, and a column whose key only other columns need is hidden.
            missing: What becomes of those columns if the KMS refuses their master key: "error" when the file is
                opened, "hide" them, or "null". The KMS is asked here, once for each key.
            added: Whether to take only files whose content came with this version: those that its job wrote, if the
                job encrypts files or is a transaction. Rekeyed and restored files were there before.

        Raises:
            ExpiredError: The version was expired meanwhile: `refresh`.
        """
        check_choice("missing", missing, OrShow)
        snapshot = self.snapshot()
        if not added or snapshot.entry.operation in ADDS:
            yield from snapshot.sealed(snapshot.files(pattern, added=added), columns, missing)

    def copy_file(self, path: str, target: WritableFile, *, threads: int | None = None) -> None:
        """Decrypt one file of this version to a file open for writing, which need not seek.

        What is written has passed its tag. The other arguments and the errors are those of `open_file`.
        """
        snapshot = self.snapshot()
        row = snapshot.file(path)
        contents = snapshot.contents(row, threads)
        with snapshot.unless_expired():
            format_of(row).copy(contents, row, target)

    # ---- writing

    def transaction(
        self,
        *,
        wrapping_key_id: str | None = None,
        double_wrap: bool = True,
        dek_length: int = 16,
        block_size: int | str = DEFAULT_BLOCK_SIZE,
        column_keys: Mapping[str, str] | None = None,
        fsync: bool = True,
        threads: int | None = None,
        key_material: KeyMaterial | None = None,
    ) -> Transaction:
        """Make a transaction on this version, to be used in a ``with`` block: see `Transaction`.

        Args:
            wrapping_key_id: The master key of the new files; None is the one in use.
            double_wrap: Whether a KEK of the dataset wraps data keys; if not, the KMS wraps each of them.
            dek_length: Bytes of a data key: 16, 24 or 32.
            block_size: Bytes of plaintext in a block of an AGS1 file.
            column_keys: Of Parquet files, the master keys of columns that get data keys of their own, by dotted path.
            fsync: Whether files are on the disk before the version is committed.
            threads: How many threads may work on one file; None as for AgsCodec.
            key_material: "keytools": Parquet files can be opened by Parquet's own key tools, too: see `encrypt_files`.

        Raises:
            ValueError: The handle was opened with ``version=``, or an argument is impossible.
        """
        self._check_writes()
        from ags_fast.dataset.transaction import Settings, Transaction  # readers need none of it

        nbytes = check_block_size(block_size)
        how = wrapping_key_id, double_wrap, dek_length, nbytes, column_keys, fsync, threads, key_material
        return Transaction(self.snapshot(), Settings(*how), self._show)

    def resume(self, job_id: str) -> Transaction:
        """Take up a transaction that another process has left, to be used in a ``with`` block: see `Transaction.leave`.

        Its settings, and the version that it began on, are in its plan.

        Args:
            job_id: What `Transaction.leave` has returned.

        Raises:
            ConcurrentChangeError: When the block begins: the transaction is over, was committed, was removed by a
                sweep, or another process has taken it up.
            ValueError: The handle was opened with ``version=``, or `job_id` is not of a transaction that was left.
        """
        self._check_writes()
        from ags_fast.dataset.transaction import Settings, Transaction

        return Transaction(self.snapshot(), Settings(), self._show, left=job_id)

    def _check_writes(self) -> None:
        if self._access.version is not None:
            raise ValueError(f"this handle stays at version {self._access.version}: open the dataset without version=")

    def _show(self, version: Entry) -> None:
        """Go to a version that a transaction of this handle has made."""
        with self._lock:
            snapshot = self.snapshot()
            if version.number > snapshot.entry.number:
                self._snapshot = snapshot._replace(entry=version)

    def snapshot(self) -> Snapshot:
        """Return the version that the handle shows. It is read when it is first needed."""
        if (snapshot := self._snapshot) is None:
            with self._lock:
                snapshot = self._snapshot = self._snapshot or self._open()
        return snapshot

    def _open(self) -> Snapshot:
        if self._left_at is None:
            return self._access.open()
        number, pinned = self._left_at
        snapshot = replace(self._access, version=number).open()
        if snapshot.entry.pin != pinned:
            raise IntegrityError(
                f"version {number} of {self.url} is not the version that the pickled handle was at: it was exchanged"
            )
        return snapshot


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
            is_same = entry.stamp and before.is_of(entry.nbytes, entry.stamp)
            kind = "rekeyed" if is_same else "changed"
        yield Change(
            kind, path, None if before is None else DatasetFile.of(before, store), DatasetFile.of(entry, store)
        )
    for path in gone.values():
        yield Change("removed", path, DatasetFile.of(old[path], store), None)
