"""Sealed tables: rows of files by path, or rows of another kind by another name, in columns. A table never changes.

A table is an AGS1 stream. Its plaintext is pages of at most `PAGE_ROWS` rows, sorted by name, then the counts of its
KEKs if they are many, and then the directory, which has the first name, the offset and the length of each page. A page
is columns in msgpack; those that are not random are compressed by zlib, and so are the counts. The entry of the log
that names a table has its length and its wrapped data key.
"""

from __future__ import annotations

import os
import secrets
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from ags_fast.ags1 import AgsCodec, KeyBytes, encrypted_length
from ags_fast.dataset.columns import (
    Count,
    LongPageError,
    Names,
    Rewrap,
    Rows,
    check_rows,
    columns_of,
    decoded,
    encoded,
    inflated,
    path_bytes,
    text_of,
    with_wraps,
)
from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.names import table_path
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.fs import NotAFileError
from ags_fast.keys.envelope import binding
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ags_fast.fs import Store
    from ags_fast.keys.envelope import Envelope

PAGE_ROWS = 512
TABLE_ROWS = 1 << 16  # a table with more is written as several
BLOCK_NBYTES = 1 << 14  # a lookup reads whole blocks
CACHED = 256 * PAGE_ROWS  # rows in memory
WHOLE_ROWS = 2 * PAGE_ROWS  # a table with no more is read as a whole
COUNTS = 8  # KEKs whose counts are in the reference of a table; those of more are in the table
RATIO = 2  # a commit merges tables that have fewer rows than this many times what is written anyway

Row = TypeVar("Row")
Part = TypeVar("Part")
Directory = list[tuple[bytes, Count, Count]]  # of each page the first name, the offset and the length in bytes


class _Parts:
    """Parts of tables in memory. The longest unused go first.

    Threads that want one part wait for the one that reads it. A fork's child begins with none.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        # {name: (held by the thread that reads the part, the part if it has been read, its rows)}
        self._parts: OrderedDict[tuple[str, int], tuple[Lock, list[Any], int]] = OrderedDict()
        self._rows = 0

    def get(self, name: tuple[str, int], rows: int, read: Callable[[], Part]) -> Part:
        """Return a part, which `read` reads if it is not there. rows: how much room it takes."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if name not in self._parts:
                self._parts[name] = Lock(), [], rows
                self._rows += rows
            self._parts.move_to_end(name)
            reading, parts, _ = self._parts[name]
        with reading:
            if not parts:
                try:
                    parts.append(read())
                except BaseException:
                    with self._lock:
                        self._drop(name)
                    raise
        with self._lock:
            while self._rows > CACHED:
                self._drop(next(iter(self._parts)))
        return parts[0]  # type: ignore[no-any-return]

    def _drop(self, name: tuple[str, int]) -> None:
        if name in self._parts:
            self._rows -= self._parts.pop(name)[2]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference to a table.

    Attributes:
        path: Its object.
        length: Bytes of the plaintext.
        directory: Where the directory begins, in bytes of the plaintext.
        rows: How many rows it has.
        first: The name of the first row, in bytes: a path.
        last: The name of the last row.
        nbytes: Bytes of the sources of the files.
        key_id: The KEK that wraps the table's data key.
        wrapped: The table's data key, wrapped.
        keys: How many data keys of files each KEK wraps in it; None: the table says it, see `Tables.counted`.
        material: Whether files of it have key material, which the KMS itself has wrapped.
    """

    path: str
    length: Count
    directory: Count
    rows: Annotated[int, Meta(ge=1)]
    first: bytes
    last: bytes
    nbytes: Count
    key_id: str
    wrapped: bytes
    keys: dict[str, Count] | None
    material: bool = False


class SortedTables(Generic[Row]):
    """The tables of one dataset that have one kind of rows: a subclass says which. Threads may share it.

    Args:
        store: The folder of the dataset.
        dataset_id: The id of the dataset.
    """

    def __init__(self, store: Store, dataset_id: str) -> None:
        self._store = store
        self._dataset_id = dataset_id
        self._parts = _Parts()  # pages by where they begin; at -1 the directory, at -2 the whole table, at -3 counts

    def name(self, row: Row) -> bytes:
        """Return the name of a row, by which rows are sorted."""
        raise NotImplementedError

    def place(self, page: Sequence[Row], name: bytes) -> int:
        """Return where the first row of a page is whose name is not before this one."""
        return bisect_left(page, name, key=self.name)

    def encoded(self, rows: Sequence[Row]) -> bytes:
        """Return rows in columns."""
        raise NotImplementedError

    def decoded(self, data: bytes) -> Sequence[Row]:
        """Return the rows that `encoded` has put in columns. ValueError, IndexError: there are none."""
        raise NotImplementedError

    def about(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return more fields of `Table` for a table with these rows."""
        return {}

    def rows(self, table: Table, envelope: Envelope) -> list[Row]:
        """Return all rows of a table. FileNotFoundError: its object is missing."""
        _, pages = (self._whole if table.rows <= WHOLE_ROWS else self._read_whole)(table, envelope)
        return [row for page in pages for row in page]

    def write(self, rows: Iterable[Row], job_id: str, key_id: str, envelope: Envelope) -> list[Table]:
        """Store rows as new tables of a job, and return the references."""
        ordered = sorted(rows, key=self.name)
        return [
            self._write(ordered[at : at + TABLE_ROWS], job_id, key_id, envelope)
            for at in range(0, len(ordered), TABLE_ROWS)
        ]

    # ---- one table

    def _write(self, rows: Sequence[Row], job_id: str, key_id: str, envelope: Envelope) -> Table:
        cut = [page for at in range(0, len(rows), PAGE_ROWS) for page in self._pages(rows[at : at + PAGE_ROWS])]
        pages = [(self.name(page[0]), data) for page, data in cut]
        about = self.about(rows)
        ends = {"first": pages[0][0], "last": self.name(rows[-1])}
        table = self._store_pages(pages, about.pop("keys", {}), job_id, key_id, envelope)
        table = msgspec.structs.replace(table, rows=len(rows), **ends, **about)
        if len(rows) <= WHOLE_ROWS:  # the next commit may merge them
            whole = _directory_of(pages), [page for page, _ in cut]
            self._parts.get((table.path, -2), len(rows), lambda: whole)
        return table

    def _pages(self, rows: Sequence[Row]) -> list[tuple[Sequence[Row], bytes]]:
        """Return rows as one page, or as several if one would be too long: each with what is written."""
        try:
            return [(rows, self.encoded(rows))]
        except LongPageError:
            half = len(rows) // 2
            return self._pages(rows[:half]) + self._pages(rows[half:])

    def _store_pages(
        self, pages: Sequence[tuple[bytes, bytes]], keys: dict[str, int], job_id: str, key_id: str, envelope: Envelope
    ) -> Table:
        """Store a table of pages, each with its first name, and of counts. The caller says more of its rows."""
        data = bytearray().join(page for _, page in pages)
        many = len(keys) > COUNTS
        data += zlib.compress(msgspec.msgpack.encode(keys), 1) if many else b""
        begin = len(data)
        data += msgspec.msgpack.encode(_directory_of(pages))
        path, key = table_path(job_id), KeyBytes(secrets.token_bytes(32))
        wrapped = envelope.wrap(key_id, key, binding(self._dataset_id, "table", path))
        self._store.create_exclusive(path, AgsCodec(key, block_size=BLOCK_NBYTES).encrypt(data))
        return Table(path, len(data), begin, 1, b"", b"", 0, key_id, wrapped, None if many else keys)

    def _read(self, table: Table, envelope: Envelope, begin: int, size: int) -> bytes:
        key = envelope.unwrap(table.key_id, table.wrapped, binding(self._dataset_id, "table", table.path))
        length = encrypted_length(table.length, BLOCK_NBYTES)
        source = self._store.open_seekable(table.path)
        try:
            with AgsReader(source, key, length=length, block_size=BLOCK_NBYTES) as reader:
                return reader.read_at(begin, size)
        except NotAFileError:
            raise IntegrityError(f"{table.path} is not a regular file, but the dataset names it") from None
        except (FormatError, IntegrityError) as error:
            raise IntegrityError(f"the table {table.path} is not what was written: {error}") from None

    def _rows_at(self, table: Table, names: Sequence[bytes], envelope: Envelope) -> Iterator[Row]:
        directory = self._directory(table, envelope)
        wanted: dict[int, set[bytes]] = {}
        for name in names:
            wanted.setdefault(_page_of(directory, name), set()).add(name)
        for at, some in wanted.items():
            page = self._page(table, envelope, directory, at)
            for name in some:
                place = self.place(page, name)
                if place < len(page) and self.name(page[place]) == name:
                    yield page[place]

    def at_or_after(self, table: Table, name: bytes, envelope: Envelope) -> Row | None:
        """Return the first row whose name is not before this one."""
        directory = self._directory(table, envelope)
        at = _page_of(directory, name)
        for number in range(at, min(at + 2, len(directory))):
            page = self._page(table, envelope, directory, number)
            if (row := self.place(page, name)) < len(page):
                return page[row]
        return None

    def _directory(self, table: Table, envelope: Envelope) -> Directory:
        def read() -> Directory:
            return _directory(table, self._read(table, envelope, table.directory, table.length - table.directory))

        if table.rows <= WHOLE_ROWS:
            return self._whole(table, envelope)[0]
        return self._parts.get((table.path, -1), 1, read)

    def _page(self, table: Table, envelope: Envelope, directory: Directory, at: int) -> Sequence[Row]:
        def read() -> Sequence[Row]:
            return self._unpacked(self._read(table, envelope, begin, length), table.path)

        if table.rows <= WHOLE_ROWS:
            return self._whole(table, envelope)[1][at]
        _, begin, length = directory[at]
        return self._parts.get((table.path, begin), PAGE_ROWS, read)

    def _whole(self, table: Table, envelope: Envelope) -> tuple[Directory, list[Sequence[Row]]]:
        return self._parts.get((table.path, -2), table.rows, lambda: self._read_whole(table, envelope))

    def _read_whole(self, table: Table, envelope: Envelope) -> tuple[Directory, list[Sequence[Row]]]:
        """Return the directory of a table, and the rows of each page."""
        data = self._read(table, envelope, 0, table.length)
        directory = _directory(table, data[table.directory :])
        pages = [self._unpacked(data[at : at + length], table.path) for _, at, length in directory]
        if (rows := sum(map(len, pages))) != table.rows:
            raise FormatError(f"the table {table.path} has {rows} rows, not {table.rows}")
        return directory, pages

    def _unpacked(self, data: bytes, path: str) -> Sequence[Row]:
        """Return the rows of a page. FormatError: it is none."""
        return _parsed(self.decoded, data, path)


class Tables(SortedTables[FileEntry]):
    """The tables of the files of one dataset, by path."""

    def name(self, row: FileEntry) -> bytes:
        """See `SortedTables.name`."""
        return path_bytes(row.path)

    def place(self, page: Sequence[FileEntry], name: bytes) -> int:
        """See `SortedTables.place`."""
        return bisect_left(page.paths, name) if isinstance(page, Rows) else super().place(page, name)

    def encoded(self, rows: Sequence[FileEntry]) -> bytes:
        """See `SortedTables.encoded`."""
        check_rows(rows)
        return encoded(rows)

    def decoded(self, data: bytes) -> Sequence[FileEntry]:
        """See `SortedTables.decoded`."""
        return decoded(data)

    def about(self, rows: Sequence[FileEntry]) -> dict[str, Any]:
        """See `SortedTables.about`."""
        return {
            "nbytes": sum(row.nbytes for row in rows),
            "keys": dict(wrapped_by(rows)),
            "material": any(row.key_material is not None for row in rows),
        }

    def counted(self, tables: Iterable[Table], envelope: Envelope) -> Counter[str]:
        """Count the data keys of files that each KEK wraps in these tables. FileNotFoundError: one is missing."""
        counts: Counter[str] = Counter()
        for table in tables:
            counts.update(self._counts(table, envelope) if table.keys is None else table.keys)
        return counts

    def _counts(self, table: Table, envelope: Envelope) -> dict[str, int]:
        def read() -> dict[str, int]:
            _, last, length = self._directory(table, envelope)[-1]
            data = self._read(table, envelope, last + length, table.directory - last - length)
            return _parsed(lambda data: msgspec.msgpack.decode(inflated(data), type=dict[str, Count]), data, table.path)

        return self._parts.get((table.path, -3), 1, read)

    def find(
        self, tables: Iterable[Table], paths: Collection[str], envelope: Envelope
    ) -> dict[str, tuple[Table, FileEntry]]:
        """Return the rows at these paths, and the table that has each. A path without a row is left out."""
        found: dict[str, tuple[Table, FileEntry]] = {}
        names = sorted(map(path_bytes, paths))
        for table in tables:
            if inside := [name for name in names if table.first <= name <= table.last]:
                found |= {row.path: (table, row) for row in self._rows_at(table, inside, envelope)}
        return found

    def below(
        self, tables: Iterable[Table], folders: Collection[str], envelope: Envelope
    ) -> dict[str, tuple[Table, FileEntry]]:
        """Return one row below each of these folders that has one, by the row's path."""
        found: dict[str, tuple[Table, FileEntry]] = {}
        for table in tables:
            for begin in sorted(path_bytes(f"{folder}/") for folder in folders):
                if begin <= table.last and table.first[: len(begin)] <= begin:
                    row = self.at_or_after(table, begin, envelope)
                    if row is not None and path_bytes(row.path).startswith(begin):
                        found[row.path] = table, row
        return found

    def list_folder(
        self, tables: Iterable[Table], folder: str, deep: bool, envelope: Envelope
    ) -> tuple[set[str], list[FileEntry]]:
        """Return the names of the folders in a folder, and the rows of the files in the folder.

        Args:
            tables: The tables.
            folder: The path of the folder; "": all.
            deep: Return the rows of all files below the folder, and no names of folders.
            envelope: The KEKs.
        """
        begin = path_bytes(f"{folder}/") if folder else b""
        folders: set[bytes] = set()
        found: list[FileEntry] = []
        for table in tables:
            if begin <= table.last and table.first[: len(begin)] <= begin:
                self._list_folder(table, begin, deep, envelope, folders, found)
        return {text_of(name) for name in folders}, found

    def _list_folder(
        self, table: Table, begin: bytes, deep: bool, envelope: Envelope, folders: set[bytes], found: list[FileEntry]
    ) -> None:
        directory = self._directory(table, envelope)
        at, skip = _page_of(directory, begin), begin
        while at < len(directory):
            page = self._page(table, envelope, directory, at)
            for row in [*page][self.place(page, skip) :]:
                path = path_bytes(row.path)
                if not path.startswith(begin):
                    return
                end = -1 if deep else path.find(b"/", len(begin))
                if end < 0:
                    found.append(row)
                elif path >= skip:
                    folders.add(path[len(begin) : end])
                    skip = path[:end] + b"0"  # the byte after "/": behind all that is in the inner folder
            at = max(at + 1, _page_of(directory, skip))

    def with_wraps(
        self,
        table: Table,
        moves: Mapping[str, str],
        rewrap: Rewrap,
        job_id: str,
        key_id: str,
        envelope: Envelope,
    ) -> Table:
        """Store a copy of a table with the data keys of some KEKs wrapped by others. No row is made of its columns.

        Args:
            table: The table.
            moves: {KEK: the KEK that takes its place}.
            rewrap: Wraps data keys again.
            job_id: The job that writes the copy.
            key_id: The KEK that wraps the copy's data key.
            envelope: Has that KEK, and that of the table.
        """
        data = self._read(table, envelope, 0, table.length)
        pages = []
        for first, begin, length in _directory(table, data[table.directory :]):
            page, names = _parsed(lambda data: columns_of(data, Names), data[begin : begin + length], table.path)
            pages.append((first, with_wraps(page, names, moves, rewrap, self._dataset_id)))
        counts: Counter[str] = Counter()
        for old, count in self.counted([table], envelope).items():
            counts[moves.get(old, old)] += count
        made = self._store_pages(pages, dict(counts), job_id, key_id, envelope)
        return msgspec.structs.replace(
            table,
            **{name: getattr(made, name) for name in ("path", "length", "directory", "key_id", "wrapped", "keys")},
        )

    def replaced(
        self,
        tables: Sequence[Table],
        gone: Mapping[str, Table],
        add: Sequence[FileEntry],
        job_id: str,
        key_id: str,
        envelope: Envelope,
    ) -> tuple[Table, ...]:
        """Return tables without some rows and with others. What need not be written again stays.

        Args:
            tables: The tables before.
            gone: The paths to take out, and the table that has each.
            add: New rows.
            job_id: The job that writes new tables.
            key_id: The KEK that wraps their data keys.
            envelope: Has that KEK, and those of the tables.
        """
        touched = written_again(tables, {table.path for table in gone.values()}, len(add))
        rows = [row for table in tables if table.path in touched for row in self.rows(table, envelope)]
        kept = [row for row in rows if row.path not in gone]
        left = [table for table in tables if table.path not in touched]
        return (*left, *self.write([*kept, *add], job_id, key_id, envelope))


def written_again(tables: Sequence[Table], touched: Collection[str], count: int) -> set[str]:
    """Return the paths of the tables whose rows a change writes again: those that it touches, and small ones.

    Args:
        tables: The tables before.
        touched: The paths of the tables that lose rows.
        count: How many rows are new.
    """
    again, adds = set(touched), count > 0
    count += sum(table.rows for table in tables if table.path in again)
    for table in sorted(tables, key=lambda table: table.rows):
        if table.path not in again and adds and table.rows < RATIO * count and table.rows < TABLE_ROWS // 2:
            again.add(table.path)
            count += table.rows
    return again


def _parsed(parse: Callable[[bytes], Part], data: bytes, path: str) -> Part:
    """Parse a part of a table. FormatError: it is malformed."""
    try:
        return parse(data)
    except (zlib.error, msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
        raise FormatError(f"the table {path} is malformed: {error}") from None


def _directory_of(pages: Iterable[tuple[bytes, bytes]]) -> Directory:
    """Return the directory of pages, each with its first name."""
    directory, begin = [], 0
    for first, page in pages:
        directory.append((first, begin, len(page)))
        begin += len(page)
    return directory


def _directory(table: Table, data: bytes) -> Directory:
    """Parse the directory of a table."""
    try:
        pages = msgspec.msgpack.decode(data, type=Directory)
    except msgspec.DecodeError as error:
        raise FormatError(f"the table {table.path} is malformed: {error}") from None
    ends = [0, *(begin + length for _, begin, length in pages)]
    counts = table.directory - ends[-1]
    if ends[:-1] != [begin for _, begin, _ in pages] or (counts > 0) != (table.keys is None) or counts < 0 or not pages:
        raise FormatError(f"the table {table.path} is malformed: its pages do not follow each other")
    return pages


def _page_of(directory: Directory, name: bytes) -> int:
    """Return the number of the page that has a path, if any has."""
    return max(0, bisect_right([first for first, _, _ in directory], name) - 1)


def rewrapped(table: Table, key_id: str, envelope: Envelope, dataset_id: str) -> Table:
    """Return the reference of a table with its data key under another KEK. The table itself stays."""
    bound = binding(dataset_id, "table", table.path)
    wrapped = envelope.wrap(key_id, envelope.unwrap(table.key_id, table.wrapped, bound), bound)
    return msgspec.structs.replace(table, key_id=key_id, wrapped=wrapped)


def check_unique(tables: Sequence[Table]) -> None:
    """Raise IntegrityError if a table is named twice."""
    if len({table.path for table in tables}) != len(tables):
        raise IntegrityError("an entry of the log names a table twice")
