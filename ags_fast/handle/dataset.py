"""`Dataset`: the handle of an encrypted dataset. What it reads once serves every later call."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.dataset.files.contents import format_of
from ags_fast.errors import IntegrityError
from ags_fast.handle.access import Access
from ags_fast.handle.listing import Change, DatasetFile, DatasetVersion, Listed, shown_in_notebook
from ags_fast.handle.sealed_file import SealedFile, sealed_files
from ags_fast.onelog.snapshot import Snapshot

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable, Iterator, Mapping

    from ags_fast._types import WritableFile
    from ags_fast.dataset.policy import Policy
    from ags_fast.handle.access import Folder, KeyPlace
    from ags_fast.handle.transaction import Transaction
    from ags_fast.keys.kms import KmsClient
    from ags_fast.onelog.entry import Entry

__all__ = ["Change", "Dataset", "DatasetFile", "DatasetVersion", "SealedFile"]

ADDS = ("encrypt", "write")  # operations that bring content; versions of others have what was there before


class Dataset(Listed):
    """An encrypted dataset, opened once. Its version, manifests and keys serve every call.

    A handle is a snapshot. It stays at its version until `refresh`, or until a transaction of this handle commits;
    opened with ``version=``, it stays there for good. Threads may share a handle. It pickles as its URL, its version
    and the properties of the KMS, without a key; the copy opens the dataset again when it is first used.

    In double wrap the KMS is asked once for each KEK of the files that are opened, by default once for a dataset. Each
    manifest is read at most once while the decoded manifests fit into 128 MiB. `open` and `create` make handles.
    """

    def __init__(self, access: Access, left_at: tuple[int, str] | None = None) -> None:
        self._access = access
        self._left_at = left_at  # the version that a pickled handle was at, and its pin
        self._snapshot: Snapshot | None = None
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        url: Folder,
        *,
        kms: KmsClient | Mapping[str, str],
        version: int | None = None,
        min_version: int | None = None,
        pin: str | None = None,
        key_store: KeyPlace = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Open a dataset.

        Args:
            url: Its folder: a path, or a URL of fsspec.
            kms: The properties of a KMS, or a client.
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
        kms: KmsClient | Mapping[str, str],
        wrapping_key_id: str,
        policy: Policy | None = None,
        key_store: KeyPlace = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Create a dataset without files: its first key, and version 1.

        Args:
            url: Its folder: a path, or a URL of fsspec.
            kms: The properties of a KMS, or a client.
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
        return f"<Dataset {self._access.store!r}{'' if self._snapshot is None else f', version {self.version}'}>"

    def _repr_html_(self) -> str:
        return shown_in_notebook(self.url, self._snapshot)

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self._access, (self.version, self.pin))

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

    def open_file(self, path: str, *, missing: str = "error", threads: int | None = None) -> io.RawIOBase:
        """Open one file of this version as a seekable binary file of its plaintext.

        If the file's manifest was read before, the storage gets requests for the file itself, and no others. A Parquet
        file opens as a plaintext Parquet file, decrypted as far as it is read: see `ags_fast.parquet.open_plain`.

        Args:
            path: The file's path in the dataset.
            missing: What becomes of Parquet columns whose master key the KMS refuses: "error", or "hide" them.
            threads: How many threads may work on one read; None as for AgsCodec.

        Raises:
            FileNotFoundError: This version has no such file.
            IntegrityError: The file is missing or is not what was written. What is read later is checked then.
            ExpiredError: The version was expired meanwhile: `refresh`.
            KeyAccessError: The KMS refuses.
        """
        if missing not in ("error", "hide"):
            raise ValueError(f"missing must be 'error' or 'hide', not {missing!r}")
        snapshot = self.snapshot()
        row = snapshot.file(path)
        with snapshot.unless_expired():
            return format_of(row).view(snapshot.contents(row, threads, hide=missing == "hide"), row)

    def sealed_files(
        self,
        pattern: str | None = None,
        *,
        columns: Iterable[str] | None = None,
        missing: str = "error",
        added: bool = False,
    ) -> Iterator[SealedFile]:
        """Iterate over the files of this version, in no order, as values that tasks can open by themselves.

        A `SealedFile` pickles with its wrapped keys. Opening one reads neither a version nor a manifest.

        Args:
            pattern: As for `files`.
            columns: The columns of Parquet files that will be read, by names of the schema's top level; None is all.
                No key of another column is asked for, and a column whose key only other columns need is hidden.
            missing: What becomes of those columns if the KMS refuses their master key: "error" when the file is
                opened, or "hide" them. The KMS is asked here, once for each key.
            added: Whether to take only files whose content came with this version: those that its job wrote, if the
                job encrypts files or is a transaction. Rekeyed and restored files were there before.

        Raises:
            ExpiredError: The version was expired meanwhile: `refresh`.
        """
        if missing not in ("error", "hide"):
            raise ValueError(f"missing must be 'error' or 'hide', not {missing!r}")
        snapshot = self.snapshot()
        if not added or snapshot.entry.operation in ADDS:
            yield from sealed_files(snapshot, snapshot.files(pattern, added=added), columns, missing == "hide")

    def copy_file(self, path: str, target: WritableFile, *, threads: int | None = None) -> None:
        """Decrypt one file of this version to a file open for writing, which need not seek.

        What is written has passed its tag. The arguments and errors are those of `open_file`.

        Args:
            path: The file's path in the dataset.
            target: A binary file, open for writing.
            threads: How many threads may work on the file; None as for AgsCodec.
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
        block_size: int = DEFAULT_BLOCK_SIZE,
        column_keys: Mapping[str, str] | None = None,
        fsync: bool = True,
        threads: int | None = None,
        key_material: str | None = None,
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
        from ags_fast.handle.transaction import Settings, Transaction  # readers need none of it

        how = wrapping_key_id, double_wrap, dek_length, block_size, column_keys, fsync, threads, key_material
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
        from ags_fast.handle.transaction import Settings, Transaction

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
        snapshot = self._snapshot
        if snapshot is None:
            with self._lock:
                snapshot = self._snapshot
                if snapshot is None:
                    snapshot = self._snapshot = self._open()
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
