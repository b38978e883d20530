"""New files of a dataset: written by a transaction or by its tasks, each under a data key of its own."""

from __future__ import annotations

import io
import os
import secrets
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from ags_fast.dataset.files.contents import MODULES, format_of
from ags_fast.dataset.key_material import with_key_material
from ags_fast.dataset.names import ATTEMPT, HIDDEN, check_path, written_name
from ags_fast.errors import AgsError, ConcurrentChangeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast._types import Buffer
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents, FormatWriter
    from ags_fast.dataset.files.tables import TablesWriter
    from ags_fast.parquet.table_writer import Encoder

__all__ = ["Attempt", "NewDatasetFile", "NewTables", "Receipt", "Ticket"]

RENEW_SECONDS = 600.0  # between two signs of life of an attempt


@dataclass(frozen=True)
class Receipt:
    """What a task returns for a file that it has written, for `Transaction.add`. Pickles; holds no key.

    Attributes:
        path: The file's path in the dataset.
    """

    path: str
    entry: FileEntry = field(repr=False)  # with the data key, wrapped
    attempt: str = ""  # the id of the attempt that has written the file, if it has one


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
        self.check_runs()
        return self.begin(path, format, self.check_runs, None)

    def attempt(self) -> Attempt:
        """Return an attempt of a task at its files, for a ``with`` block: see `Attempt`."""
        return Attempt(self)

    def show_life(self, attempt: str) -> None:
        """Show that an attempt lives, and so its transaction. ConcurrentChangeError if the transaction is over."""
        self.check_runs()
        folder = self.plan.rpartition("/")[0]
        self.contents.store.write_small(f"{folder}/{ATTEMPT}{attempt}", b"alive\n", tag=self.template.job_id)

    def begin(
        self,
        path: str,
        format: str,
        before: Callable[[], None] | None,
        done: Callable[[NewDatasetFile], None] | None,
        encoder: Encoder | None = None,
    ) -> NewDatasetFile:
        """Begin a file.

        Args:
            path: The file's path in the dataset.
            format: "ags1" or "parquet".
            before: Is called before the file is published; None: nothing.
            done: Is called when the file is published or discarded; None: nothing.
            encoder: For a Parquet file that is made of tables, what encodes them; None: the file takes bytes.
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
            key_material=template.key_material if format == "parquet" else None,
            aad_prefix=os.urandom(16),
            source=path,
            mtime_ns=time.time_ns(),
        )
        envelope = self.contents.envelope
        planned = entry.wraps(dataset_id)
        deks = [os.urandom(self.dek_length) for _ in planned]
        wraps = [
            (key_id, envelope.wrap(key_id, dek, bound)) for (key_id, _, bound), dek in zip(planned, deks, strict=True)
        ]
        (entry,) = with_key_material(envelope, [entry.with_wraps(wraps)], deks)
        new = self.contents.store.begin(entry.file, tag=template.job_id, fsync=self.fsync)
        try:
            if encoder is not None:
                from ags_fast.dataset.files.tables import TablesWriter

                return NewTables(entry, TablesWriter(self.contents, entry, new, encoder), before, done)
            writer = format_of(entry).write(self.contents, entry, new)
        except BaseException:
            new.discard()
            raise
        return NewDatasetFile(entry, writer, before, done)

    def check_runs(self) -> None:
        """Raise ConcurrentChangeError if the transaction is over."""
        if self.contents.store.stat(self.plan) is None:
            raise ConcurrentChangeError(f"the transaction {self.template.job_id} is over: it was committed or dropped")


class Attempt:
    """One attempt of a task at the files that it is to write: all of them, or none.

    In a ``with`` block, `create` makes files. An exception in the block discards the files that are open and removes
    those that are complete. When the block has ended, `receipts` are for `Transaction.add`.

    The transaction learns of each attempt that has begun a file. If an attempt has no receipt at the commit, because it
    was killed or another attempt was faster, the commit looks for its files and removes them. A transaction that was
    left (`Transaction.leave`) counts as alive for a day after its last attempt has shown itself, as `create` and
    `renew` do from time to time.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._id = secrets.token_hex(8)
        self._shown: float | None = None
        self._open: dict[int, NewDatasetFile] = {}
        self._made: list[Receipt] = []
        self._failed = False
        self._owner = os.getpid()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is not None:
            self.drop()
        elif self._open:
            name = min(file.name for file in self._open.values())
            self.drop()
            raise ValueError(f"{name!r} is still open: close each file before the attempt ends")

    def __reduce__(self) -> str:
        raise TypeError("an attempt is never pickled: send its ticket, and return its receipts")

    def create(self, path: str, format: str = "ags1") -> NewDatasetFile:
        """Create a file: see `Ticket.create`."""
        check_new_path(path)
        self.renew()
        file = self._ticket.begin(path, format, self._ticket.check_runs, self._finished)
        self._open[id(file)] = file
        return file

    def create_tables(self, path: str, encoder: Encoder) -> NewTables:
        """Create a Parquet file that takes tables: see `Ticket.create`.

        Args:
            path: The file's path in the dataset.
            encoder: What encodes its tables. Files that are open at the same time may share one.
        """
        check_new_path(path)
        self.renew()
        file = self._ticket.begin(path, "parquet", self._ticket.check_runs, self._finished, encoder)
        assert isinstance(file, NewTables)
        self._open[id(file)] = file
        return file

    def renew(self) -> None:
        """Show that the attempt lives. Most calls only look at the clock.

        Raises:
            ConcurrentChangeError: The transaction is over.
            ValueError: The attempt belongs to another process.
        """
        if self._owner != os.getpid():
            raise ValueError("the attempt belongs to the process that began it: begin another one of its ticket")
        now = time.monotonic()
        if self._shown is None or now - self._shown >= RENEW_SECONDS:
            self._ticket.show_life(self._id)
            self._shown = now

    def receipts(self) -> list[Receipt]:
        """Return the receipts of all files. Raises ValueError if one is open, or if the attempt was dropped."""
        if self._open or self._failed:
            raise ValueError("an attempt has receipts when all of its files are closed, and none was lost")
        return list(self._made)

    def drop(self) -> None:
        """Discard the files that are open, and remove those that are complete. What cannot be removed is left.

        In a fork's child, do nothing.
        """
        self._failed = True
        if self._owner != os.getpid():
            return
        for file in list(self._open.values()):
            with suppress(AgsError, OSError, ValueError):
                file.abort()
        store, self._made, made = self._ticket.contents.store, [], self._made
        for receipt in made:
            with suppress(AgsError, OSError):
                store.delete(receipt.entry.file)

    def _finished(self, file: NewDatasetFile) -> None:
        """Take up a file that was closed, or let go of one that was discarded."""
        self._open.pop(id(file), None)
        try:
            self._made.append(replace(file.receipt(), attempt=self._id))
        except ValueError:
            self._ticket.contents.store.delete(file.object_name)  # as `Transaction` does


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
        if self._owner != os.getpid():  # nor does the child discard it: the parent may have completed the file by now
            super().close()
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


class NewTables(NewDatasetFile):
    """A Parquet file of a transaction in the making that takes tables. Each becomes a row group and is sealed."""

    def write_table(self, table: Any) -> None:
        """Write a table of pyarrow, of the encoder's schema, as one row group."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        cast("TablesWriter", self._writer).write_table(table)
