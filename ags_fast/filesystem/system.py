"""`AgsFileSystem`: an encrypted dataset as a file system of fsspec."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fsspec.compression import compr
from fsspec.core import get_compression

from ags_fast._text import TextWriter
from ags_fast._types import FileFormat, OrShow, check_choice
from ags_fast.filesystem.changing import ChangedFiles
from ags_fast.filesystem.place import Handle, Place, chained_url, check_no_others
from ags_fast.filesystem.writing import AgsTransaction, CompressedFile, NewFile, refuse_mode
from ags_fast.fs import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ags_fast.dataset.transaction import Transaction as Changes

__all__ = ["AgsFileSystem"]

TEXT_OPTIONS = ("encoding", "errors", "newline")


class AgsFileSystem(ChangedFiles):
    """The files of an encrypted dataset, as a file system of fsspec (docs/filesystem.md).

    It stays at the version that was the newest when it was first used, until `invalidate_cache`, a change of its own,
    or the end of that version by an expiry; with `version` for good, and then it is read-only. Each file that is
    written, and each call of put, pipe, cp, mv or rm, makes one version of the dataset; ``with fs.transaction:`` makes
    one of all of them. A Parquet file that is encrypted as such is shown as a plaintext Parquet file.

    Instances hold no key. What fsspec keeps and pickles of them are these arguments.

    Args:
        dataset: The folder of the dataset: a path, or a URL of fsspec.
        kms: The properties of a KMS, or a client that was made from properties.
        wrapping_key_id: The master key of files that are written; None is the one in use. With it, the first file that
            is written makes a dataset that does not exist.
        version: The version to stay at; None is the newest.
        min_version: The least number that the newest version may have.
        pin: The newest version must descend from the version that this pin names.
        format: How new files are encrypted: "auto" those with names that end in ``.parquet`` as "parquet" (Parquet
            Modular Encryption), and others as "ags1" (a stream of the same bytes).
        key_store: The path or URL of the folder with the dataset's keys, if they are not in the dataset.
        storage_options: Options for fsspec, of the dataset's URL.
        missing: What becomes of Parquet columns whose master key the KMS refuses: "error", "hide", or "null".
        write_options: Arguments of `Dataset.transaction`, such as ``{"column_keys": {"card": "finance"}}``.
        threads: How many threads may work on one read; None as for AgsCodec.
        fo: From a chained URL, as are the next two: the path of the dataset.
        target_protocol: The protocol of that path.
        target_options: The options of that protocol.
        others: Those that fsspec takes for every file system.

    Raises:
        TypeError: `dataset` or `kms` is missing, or of another type.
        ValueError: An argument is impossible.
    """

    def __init__(  # noqa: PLR0913 (the contract's)
        self,
        dataset: str | None = None,
        kms: Mapping[str, str] | None = None,
        *,
        wrapping_key_id: str | None = None,
        version: int | None = None,
        min_version: int | None = None,
        pin: str | None = None,
        format: FileFormat = "auto",
        key_store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        missing: OrShow = "error",
        write_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if self._cached:
            return
        check_no_others(others, ["dataset", "kms", *(AgsFileSystem.__init__.__kwdefaults__ or ())])
        super().__init__(**others)
        if dataset is not None and fo is not None:
            raise ValueError("dataset is given, and the chained URL names one, too: give one of them")
        if fo is not None:
            dataset, storage_options = chained_url(fo, target_protocol), target_options or storage_options
        for name, value in (("dataset", dataset), ("kms", kms)):
            if not value:
                raise TypeError(
                    f"the protocol 'ags' needs the argument {name!r}: fsspec.filesystem('ags', dataset=<path or URL>, "
                    "kms=<properties>), or storage_options={'dataset': ..., 'kms': ...}"
                )
        check_choice("format", format, FileFormat)
        check_choice("missing", missing, OrShow)
        assert dataset is not None and kms is not None
        options = {
            "version": version,
            "min_version": min_version,
            "pin": pin,
            "key_store": key_store,
            "storage_options": storage_options,
        }
        self._handle = Handle(Place(dataset, kms, options, wrapping_key_id))
        self._missing = missing
        self._threads = threads
        self._format = format
        self._write_options = {"threads": threads, **(write_options or {}), "wrapping_key_id": wrapping_key_id}
        self._local = threading.local()  # .changes: of a call that makes one version of several files

    def __repr__(self) -> str:
        return f"<AgsFileSystem of {Store(self._handle.place.url)!r}>"

    # ---- versions

    @property
    def transaction(self) -> AgsTransaction:
        """What a ``with`` block makes one version of: see `AgsTransaction`."""
        return AgsTransaction(self)

    def begin_changes(self) -> None:
        """Begin the transaction of `transaction`."""
        self._handle.begin(**self._write_options)

    def finish_changes(self, commit: bool) -> None:
        """Commit the transaction of `transaction`, or drop all of it."""
        self._handle.finish(commit)

    def start_transaction(self) -> AgsTransaction:
        """Begin a transaction without a ``with`` block; `end_transaction` commits it."""
        transaction = self.transaction
        transaction.start()
        return transaction

    @property
    def _running(self) -> Changes | None:
        """The transaction that a change in this thread belongs to."""
        return self._handle.running or getattr(self._local, "changes", None)

    @contextmanager
    def _one_version(self) -> Iterator[Changes]:
        """Make one version of all changes in the block, unless a transaction is running already."""
        running = self._running
        if running is not None:
            yield running
            return
        changes = self._handle.changes(**self._write_options)
        changes.__enter__()
        self._local.changes = changes
        try:
            yield changes
        except BaseException:
            self._handle.end(changes, False)
            raise
        finally:
            self._local.changes = None
        self._handle.end(changes, True)

    # ---- files

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Mapping[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file.

        Args:
            path: The path in the dataset.
            mode: "r" reads; "w" writes a file, which takes the place of one that is there; "x" writes a new file. With
                "b" bytes, else text.
            block_size: Ignored, as is `cache_options`: the file is read in its blocks.
            cache_options: Ignored.
            compression: A name that fsspec knows, or "infer".
            kwargs: For text `encoding`, `errors` and `newline`. For files that are written `format`, as the file
                system has it.

        Raises:
            FileNotFoundError: There is no such file to read.
            FileExistsError: Mode "x", and there is such a file.
            io.UnsupportedOperation: Another mode: files are written as a whole.
        """
        plain = mode.replace("t", "").replace("b", "")
        if plain == "r":
            return super().open(path, mode, compression=compression, **kwargs)
        path = self._strip_protocol(path)
        if plain not in ("w", "x"):
            refuse_mode(path, mode)
        text = {name: kwargs.pop(name) for name in TEXT_OPTIONS if name in kwargs}
        file: Any = self._create(path, plain == "w", kwargs.get("format"), kwargs.get("autocommit", True))
        try:
            if (codec := get_compression(path, compression)) is not None:
                file = CompressedFile(file, compr[codec])
            return file if "b" in mode else TextWriter(file, file.discard, **text)
        except BaseException:
            file.discard()
            raise

    def _create(self, path: str, replace: bool, format: Any, autocommit: bool = True) -> NewFile:
        format = format or self._format
        running = self._running
        if running is not None:
            return NewFile(path, running.create(path, format, replace=replace), None)
        changes = self._handle.changes(**self._write_options)
        changes.__enter__()
        try:
            file = changes.create(path, format, replace=replace)
            return NewFile(path, file, partial(self._handle.end, changes), autocommit)
        except BaseException:
            self._handle.end(changes, False)
            raise

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, under a new data key. It keeps its format, and is protected by the same master keys."""
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(path1):
            return
        self._find(path1)
        with self._one_version() as changes:
            changes.copy(path1, path2, replace=True)
