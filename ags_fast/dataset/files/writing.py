"""New files of a dataset: written by a transaction or by its tasks, each under a data key of its own."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ags_fast._cursor import Unfinished
from ags_fast._types import Buffer, FileFormat, KeyMaterial, check_choice
from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.dataset.deks import with_new_keys
from ags_fast.dataset.entries import FileEntry, with_lengths
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.files.contents import format_of, settled
from ags_fast.dataset.key_material import check_key_material
from ags_fast.dataset.keys import check_not_left, kinds_of_files
from ags_fast.dataset.names import ALIVE, HIDDEN, beside_plan, check_path, plan_path, written_name
from ags_fast.dataset.plan import MORE_USES, RENEW_SECONDS, Place, store_further
from ags_fast.errors import AgsError, JobEndedError
from ags_fast.keys.entry import KeyEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.files.contents import Contents, FormatWriter
    from ags_fast.dataset.files.parquet import TablesWriter
    from ags_fast.dataset.kinds import Want
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
class Settings:
    """How a transaction writes files: the arguments of `Dataset.transaction`."""

    wrapping_key_id: str | None = None
    double_wrap: bool = True
    dek_length: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE
    column_keys: Mapping[str, str] | None = None
    fsync: bool = True
    threads: int | None = None
    key_material: KeyMaterial | None = None

    def __post_init__(self) -> None:
        check_key_material(self.key_material, self.dek_length)

    def kinds(self, head: Entry) -> list[Want]:
        """Return the kinds of the KEKs of a new file: of its data key, and of those of its columns."""
        if self.wrapping_key_id is not None:
            check_not_left(head.keys, self.wrapping_key_id)
        main = self.wrapping_key_id or main_key(head.keys).wrapping_key_id
        return kinds_of_files([None], [self.column_keys or {}], main, self.double_wrap)[0]


@dataclass(frozen=True)
class Ticket:
    """What a task needs to write files of a transaction. Pickles; holds no key, and the KMS as properties.

    A task may create any number of files, and return their receipts. An attempt that fails or is repeated leaves
    nothing in the dataset: each attempt writes an object of its own, and only a receipt brings the object into a
    version.
    """

    contents: Contents = field(repr=False)
    job_id: str
    key_ids: tuple[str, ...]  # the KEK of a file's own data key, and then those of its columns
    how: Settings
    sealer: KeyEntry = field(repr=False)  # the KEK that seals plans

    def create(self, path: str, format: FileFormat = "ags1") -> NewDatasetFile:
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
        if self.contents.store.stat(plan_path(self.job_id)) is None:
            raise JobEndedError(f"the transaction {self.job_id} is over: it was committed or dropped")


def begin_file(
    ticket: Ticket,
    path: str,
    format: str,
    before: Callable[[], None],
    done: Callable[[NewDatasetFile, Receipt | None], None],
    encoder: Encoder | None = None,
) -> NewDatasetFile:
    """Begin a file. `before` is called before it is published, and `done` after that, or when it is discarded.

    With an encoder it is a Parquet file that is made of tables; else it takes bytes.
    """
    check_choice("format", format, FileFormat)
    format = settled(format, path)
    how, contents, parquet = ticket.how, ticket.contents, format == "parquet"
    columns = zip(how.column_keys or (), ticket.key_ids[1:], strict=True) if parquet else ()
    column_keys = tuple({"column": column, "key_id": key_id, "wrapped_dek": b""} for column, key_id in columns)
    row = FileEntry(
        path=path,
        file=written_name(path, ticket.job_id, format),
        format=format,
        plain_length=0,
        file_length=0,
        block_size=0 if parquet else how.block_size,
        key_id=ticket.key_ids[0],
        wrapped_dek=b"",
        column_keys=column_keys or None,
        aad_prefix=os.urandom(16),
        job_id=ticket.job_id,
        set_id=None,
        part=None,
        parts=None,
        source=path,
        stamp="",
        mtime_ns=time.time_ns(),
        key_material=() if parquet and how.key_material is not None else None,
    )
    (row,) = with_new_keys([row], how.dek_length, contents.envelope, contents.dataset_id)
    new = contents.store.begin(row.file, tag=ticket.job_id, fsync=how.fsync)
    try:
        if encoder is not None:
            from ags_fast.dataset.files.parquet import TablesWriter

            return NewTables(row, TablesWriter(contents, row, new, encoder), before, done)
        writer = format_of(row).write(contents, row, new)
    except BaseException:
        new.discard()
        raise
    return NewDatasetFile(row, writer, before, done)


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

    def create(self, path: str, format: FileFormat = "ags1") -> NewDatasetFile:
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
        check_choice("format", format, FileFormat)
        self.renew()
        if self._room == 0:
            self._reserve()
        self._room -= 1
        file = begin_file(self._ticket, path, format, self._ticket.check_runs, self._finished, encoder)
        file.attempts = tuple(self._plans)
        self._open[id(file)] = file
        return file

    def _reserve(self) -> None:
        """Store a further plan of the transaction, before the attempt wraps anything (rule 9)."""
        ticket, contents = self._ticket, self._ticket.contents
        files = MORE_USES << len(self._plans)
        uses = {key_id: files * count for key_id, count in Counter(ticket.key_ids).items()}
        place = Place(contents.store, contents.envelope, ticket.sealer, contents.dataset_id)
        self._plans.append(store_further(place, "write", ticket.job_id, uses).job_id)
        self._room += files

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
                job_id = self._ticket.job_id
                self._ticket.contents.store.write_small(beside_plan(job_id, ALIVE), b"alive\n", tag=job_id)
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
        for receipt in self._made:
            with suppress(AgsError, OSError):
                self._ticket.contents.store.delete(receipt.entry.file)
        self._made.clear()

    def _finished(self, file: NewDatasetFile, receipt: Receipt | None) -> None:
        """Take up a file that was closed, or let go of one that was discarded."""
        self._open.pop(id(file), None)
        if receipt is not None:
            self._made.append(receipt)
        else:
            self._ticket.contents.store.delete(file.object_name)  # as `Transaction` does


def check_new_path(path: str) -> None:
    """Raise PolicyError if a path does not stay inside a dataset, ValueError if the path is reserved."""
    check_path(path)
    if path.startswith(HIDDEN):
        raise ValueError(f"{path!r} is reserved: a dataset keeps its own files in {HIDDEN}")


class NewDatasetFile(Unfinished):
    """A file of a transaction in the making: a binary file open for writing. `write` takes everything.

    `close` completes the file. `abort`, and an exception that leaves a ``with`` block, discard the file: a discarded
    file never becomes part of the dataset. A file that is collected without `close` is discarded too, with a
    ResourceWarning.
    """

    def __init__(
        self,
        entry: FileEntry,
        writer: FormatWriter,
        before: Callable[[], None],
        done: Callable[[NewDatasetFile, Receipt | None], None],
    ) -> None:
        self._entry, self._writer = entry, writer
        self._before, self._done = before, done
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
        if self._is_over():
            return
        try:
            self._before()
            plain_length, file_length, source_length = self._writer.finish()
            row = with_lengths(self._entry, file_length, plain_length)._replace(source_length=source_length)
            self._receipt = Receipt(self.name, row, self.attempts)
        except BaseException:
            self._writer.abort()
            raise
        finally:
            self._end()

    def abort(self) -> None:
        """Discard the file. After `close`, do nothing."""
        if self._is_over():
            return
        try:
            self._writer.abort()
        finally:
            self._end()

    def _is_over(self) -> bool:
        """Whether nothing is left to do. A fork's child neither completes nor discards its parent's file."""
        if not self.closed and self._owner != os.getpid():
            super().close()
        return self.closed

    def _end(self) -> None:
        super().close()
        self._done(self, self._receipt)


class NewTables(NewDatasetFile):
    """A Parquet file of a transaction in the making that takes tables. Each becomes a row group and is sealed."""

    def write_table(self, table: Any) -> None:
        """Write a table of pyarrow, of the encoder's schema, as one row group."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        cast("TablesWriter", self._writer).write_table(table)
