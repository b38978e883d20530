"""New files of a dataset: written by a transaction or by its tasks, each under a data key of its own."""

from __future__ import annotations

import io
import os
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ags_fast.dataset.files.contents import MODULES, format_of
from ags_fast.dataset.names import HIDDEN, check_path, written_name
from ags_fast.errors import ConcurrentChangeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast._types import Buffer
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents, FormatWriter

__all__ = ["NewDatasetFile", "Receipt", "Ticket"]


@dataclass(frozen=True)
class Receipt:
    """What a task returns for a file that it has written, for `Transaction.add`. Pickles; holds no key.

    Attributes:
        path: The file's path in the dataset.
    """

    path: str
    entry: FileEntry = field(repr=False)  # with the data key, wrapped


@dataclass(frozen=True)
class Ticket:
    """What a task needs to write files of a transaction. Pickles; holds no key, and the KMS as properties.

    A task may create any number of files, and return their receipts. An attempt that fails or is repeated leaves
    nothing in the dataset: each attempt writes an object of its own, and only a receipt brings the object into a
    version.
    """

    contents: Contents = field(repr=False)
    template: FileEntry = field(repr=False)  # a file without a path: its job and the KEKs of its data keys
    dek_length: int
    fsync: bool
    plan: str  # the object that exists as long as the transaction runs

    def create(self, path: str, format: str = "ags1") -> NewDatasetFile:
        """Create a file. The file joins the dataset when its receipt was added and the transaction commits.

        Args:
            path: The file's path in the dataset.
            format: "ags1", or "parquet" for the bytes of a plaintext Parquet file: see `Transaction.create`.

        Raises:
            ConcurrentChangeError: The transaction is over. `close` of the file raises this too.
            KeyAccessError: The KMS refuses.
            PolicyError: `path` does not stay inside the dataset.
            ValueError: `path` is reserved, or `format` is unknown.
        """
        check_new_path(path)
        self._check_runs()
        return self.begin(path, format, self._check_runs, None)

    def begin(
        self,
        path: str,
        format: str,
        before: Callable[[], None] | None,
        done: Callable[[NewDatasetFile], None] | None,
    ) -> NewDatasetFile:
        """Begin a file.

        Args:
            path: The file's path in the dataset.
            format: "ags1" or "parquet".
            before: Is called before the file is published; None: nothing.
            done: Is called when the file is published or discarded; None: nothing.
        """
        if format not in MODULES:
            raise ValueError(f"format must be {' or '.join(map(repr, MODULES))}, not {format!r}")
        template, dataset_id = self.template, self.contents.dataset_id
        entry = template._replace(
            path=path,
            file=written_name(path, template.job_id, format),
            format=format,
            block_size=template.block_size if format == "ags1" else 0,
            column_keys=template.column_keys if format == "parquet" else None,
            aad_prefix=os.urandom(16),
            source=path,
            mtime_ns=time.time_ns(),
        )
        envelope = self.contents.envelope
        wraps = [
            (key_id, envelope.wrap(key_id, os.urandom(self.dek_length), bound))
            for key_id, _, bound in entry.wraps(dataset_id)
        ]
        entry = entry.with_wraps(wraps)
        new = self.contents.store.begin(entry.file, tag=template.job_id, fsync=self.fsync)
        try:
            writer = format_of(entry).write(self.contents, entry, new)
        except BaseException:
            new.discard()
            raise
        return NewDatasetFile(entry, writer, before, done)

    def _check_runs(self) -> None:
        if self.contents.store.stat(self.plan) is None:
            raise ConcurrentChangeError(f"the transaction {self.template.job_id} is over: it was committed or dropped")


def check_new_path(path: str) -> None:
    """Raise PolicyError if a path does not stay inside a dataset, ValueError if the path is reserved."""
    check_path(path)
    if path.startswith(HIDDEN):
        raise ValueError(f"{path!r} is reserved: a dataset keeps its own files in {HIDDEN}")


class NewDatasetFile(io.RawIOBase):
    """A file of a transaction in the making: a binary file open for writing. `write` takes everything.

    `close` completes the file. `abort`, and an exception that leaves a ``with`` block, discard the file: a discarded
    file never becomes part of the dataset. A file that is collected without `close` is discarded too, with a
    ResourceWarning.
    """

    mode = "wb"

    def __init__(
        self,
        entry: FileEntry,
        writer: FormatWriter,
        before: Callable[[], None] | None,
        done: Callable[[NewDatasetFile], None] | None,
    ) -> None:
        self._entry = entry
        self._writer = writer
        self._before = before
        self._done = done
        self._receipt: Receipt | None = None
        self._owner = os.getpid()

    @property
    def object_name(self) -> str:
        """The name of the object that holds the file."""
        return self._entry.file

    @property
    def name(self) -> str:
        """The file's path in the dataset."""
        return self._entry.path

    def __repr__(self) -> str:
        return f"<NewDatasetFile {self.name!r}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a file in the making is never pickled: send a Ticket, and create the file where it is written")

    def receipt(self) -> Receipt:
        """Return the receipt for `Transaction.add`. Raises ValueError before `close`, and for a discarded file."""
        if self._receipt is None:
            raise ValueError(f"{self.name!r} has no receipt: the file is not complete")
        return self._receipt

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the bytes of plaintext written so far."""
        return self._writer.tell()

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object. Returns its size in bytes."""
        return self._writer.write(data)

    def close(self) -> None:
        """Complete the file. May be called again.

        Raises:
            FormatError: A "parquet" file is not a Parquet file. The file is discarded, as after any other error.
        """
        if self.closed:
            return
        if self._owner != os.getpid():  # a fork's child does not complete its parent's file
            super().close()
            return
        try:
            if self._before is not None:
                self._before()
            plain_length, file_length = self._writer.finish()
            self._receipt = Receipt(self.name, self._entry._replace(plain_length=plain_length, file_length=file_length))
        except BaseException:
            self._writer.abort()
            raise
        finally:
            self._end()

    def abort(self) -> None:
        """Discard the file. After `close`, do nothing."""
        if self.closed:
            return
        try:
            self._writer.abort()
        finally:
            self._end()

    def _end(self) -> None:
        super().close()
        if self._done is not None:
            self._done(self)

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        # Without this, io.IOBase would close, and so complete, a file that was never closed.
        if hasattr(self, "_owner") and not self.closed:
            if self._owner == os.getpid():
                warnings.warn(f"{self!r} was neither closed nor aborted", ResourceWarning, source=self, stacklevel=2)
                self.abort()
            else:
                super().close()
