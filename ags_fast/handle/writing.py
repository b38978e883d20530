"""New files of a dataset: written by a transaction or by its tasks, each under a data key of its own."""

from __future__ import annotations

import io
import os
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ags_fast.dataset.files.contents import MODULES, format_of
from ags_fast.dataset.names import HIDDEN, check_path, new_job_id, written_name
from ags_fast.errors import AgsError
from ags_fast.keys.entry import KeyEntry
from ags_fast.onelog.deks import key_ids, with_new_keys
from ags_fast.onelog.errors import JobEndedError, UnknownOutcomeError
from ags_fast.onelog.names import ALIVE, beside_plan
from ags_fast.onelog.plan import MORE_USES, RENEW_SECONDS, TRIES, Plan, store_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast._types import Buffer
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents, FormatWriter
    from ags_fast.dataset.files.tables import TablesWriter
    from ags_fast.parquet.table_writer import Encoder

__all__ = ["Attempt", "NewDatasetFile", "NewTables", "Receipt", "Ticket"]


@dataclass(frozen=True)
class Receipt:
    """What a task returns for a file that it has written, for `Transaction.add`. Pickles; holds no key.

    Attributes:
        path: The file's path in the dataset.
    """

    path: str
    entry: FileEntry = field(repr=False)  # with the data key, wrapped
    attempts: tuple[str, ...] = ()  # the further plans of the attempt that has written the file, if it has any


@dataclass(frozen=True)
class FileSettings:
    """How files of a transaction are written. Pickles; holds no key, and the KMS as properties.

    Attributes:
        contents: The dataset, and the KEKs.
        template: A file without a path: its job and the KEKs of its data keys.
        dek_length: Bytes of a data key.
        fsync: Whether a file is on the disk before it counts as written.
    """

    contents: Contents = field(repr=False)
    template: FileEntry = field(repr=False)
    dek_length: int
    fsync: bool

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
        check_format(format)
        template, parquet = self.template, format == "parquet"
        row = template._replace(
            path=path,
            file=written_name(path, template.job_id, format),
            format=format,
            block_size=0 if parquet else template.block_size,
            column_keys=template.column_keys if parquet else None,
            key_material=template.key_material if parquet else None,
            aad_prefix=os.urandom(16),
            source=path,
            mtime_ns=time.time_ns(),
        )
        (row,) = with_new_keys([row], self.dek_length, self.contents.envelope, self.contents.dataset_id)
        new = self.contents.store.begin(row.file, tag=template.job_id, fsync=self.fsync)
        try:
            if encoder is not None:
                from ags_fast.dataset.files.tables import TablesWriter

                return NewTables(row, TablesWriter(self.contents, row, new, encoder), before, done)
            writer = format_of(row).write(self.contents, row, new)
        except BaseException:
            new.discard()
            raise
        return NewDatasetFile(row, writer, before, done)


@dataclass(frozen=True)
class Ticket:
    """What a task needs to write files of a transaction. Pickles; holds no key, and the KMS as properties.

    A task may create any number of files, and return their receipts. An attempt that fails or is repeated leaves
    nothing in the dataset: each attempt writes an object of its own, and only a receipt brings the object into a
    version.
    """

    settings: FileSettings = field(repr=False)
    plan: str  # the object that exists as long as the transaction runs
    sealer: KeyEntry = field(repr=False)  # the KEK that seals plans

    def create(self, path: str, format: str = "ags1") -> NewDatasetFile:
        """Create a file. The file joins the dataset when its receipt was added and the transaction commits.

        Args:
            path: The file's path in the dataset.
            format: "ags1", or "parquet" for the bytes of a plaintext Parquet file: see `Transaction.create`.

        Raises:
            JobEndedError: The transaction is over. `close` of the file raises this too.
            KeyAccessError: The KMS refuses.
            PolicyError: `path` does not stay inside the dataset.
            ValueError: `path` is reserved, or `format` is unknown.
        """
        return self.attempt().create(path, format)

    def attempt(self) -> Attempt:
        """Return an attempt of a task at its files, for a ``with`` block: see `Attempt`."""
        return Attempt(self)

    def check_runs(self) -> None:
        """Raise JobEndedError if the transaction is over."""
        job_id = self.settings.template.job_id
        if self.settings.contents.store.stat(self.plan) is None:
            raise JobEndedError(f"the transaction {job_id} is over: it was committed or dropped")


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
        self._plans: list[str] = []  # further plans of the transaction: what the attempt may wrap (rule 9)
        self._room = 0  # files whose data keys it may wrap
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
        return self._create(path, format, None)

    def create_tables(self, path: str, encoder: Encoder) -> NewTables:
        """Create a Parquet file that takes tables: see `Ticket.create`.

        Args:
            path: The file's path in the dataset.
            encoder: What encodes its tables. Files that are open at the same time may share one.
        """
        return cast("NewTables", self._create(path, "parquet", encoder))

    def _create(self, path: str, format: str, encoder: Encoder | None) -> NewDatasetFile:
        check_new_path(path)
        check_format(format)
        self.renew()
        if self._room == 0:
            self._reserve()
        self._room -= 1
        file = self._ticket.settings.begin(path, format, self._ticket.check_runs, self._finished, encoder)
        file.attempts = tuple(self._plans)
        self._open[id(file)] = file
        return file

    def _reserve(self) -> None:
        """Store a further plan of the transaction, before the attempt wraps anything (rule 9)."""
        settings = self._ticket.settings
        contents, template = settings.contents, settings.template
        files = MORE_USES << len(self._plans)
        uses = Counter(key_ids(template))
        wraps = {key_id: files * count for key_id, count in uses.items()}
        for _ in range(TRIES):
            plan = Plan.further("write", new_job_id(), template.job_id, wraps)
            if store_plan(contents.store, contents.envelope, self._ticket.sealer, contents.dataset_id, plan):
                self._plans.append(plan.job_id)
                self._room += files
                return
        raise UnknownOutcomeError(f"{contents.store.url} does not say whether it has stored a plan: try again")

    def renew(self) -> None:
        """Show that the attempt lives. Most calls only look at the clock.

        Raises:
            JobEndedError: The transaction is over.
            ValueError: The attempt belongs to another process.
        """
        if self._owner != os.getpid():
            raise ValueError("the attempt belongs to the process that began it: begin another one of its ticket")
        now = time.monotonic()
        if self._shown is None or now - self._shown >= RENEW_SECONDS:
            self._ticket.check_runs()
            if self._plans:
                store, job_id = self._ticket.settings.contents.store, self._ticket.settings.template.job_id
                store.write_small(beside_plan(job_id, ALIVE), b"alive\n", tag=job_id)
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
        store, self._made, made = self._ticket.settings.contents.store, [], self._made
        for receipt in made:
            with suppress(AgsError, OSError):
                store.delete(receipt.entry.file)

    def _finished(self, file: NewDatasetFile) -> None:
        """Take up a file that was closed, or let go of one that was discarded."""
        self._open.pop(id(file), None)
        try:
            self._made.append(file.receipt())
        except ValueError:
            self._ticket.settings.contents.store.delete(file.object_name)  # as `Transaction` does


def check_format(format: str) -> None:
    """Raise ValueError for a format that there is not."""
    if format not in MODULES:
        raise ValueError(f"format must be {' or '.join(map(repr, MODULES))}, not {format!r}")


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
        self.attempts: tuple[str, ...] = ()  # see `Receipt`

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
            row = self._entry._replace(plain_length=plain_length, file_length=file_length)
            self._receipt = Receipt(self.name, row, self.attempts)
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
