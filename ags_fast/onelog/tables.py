"""Sealed tables: rows of files by path, or rows of another kind by another name, in columns. A table never changes.

A table is an AGS1 stream. Its plaintext is pages of at most `PAGE_ROWS` rows, sorted by name, then the counts of its
KEKs if they are many, and then the directory, which has the first name, the offset and the length of each page. A page
is columns in msgpack; those that are not random are compressed by zlib, and so are the counts. The entry of the log
that names a table has its length and its wrapped data key.
"""

from __future__ import annotations

import secrets
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from ags_fast.ags1 import AgsCodec, encrypted_length
from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.keys.envelope import binding
from ags_fast.onelog.columns import (
    Count,
    Names,
    Rewrap,
    check_rows,
    columns_of,
    decoded,
    encoded,
    inflated,
    path_bytes,
    text_of,
    with_wraps,
)
from ags_fast.onelog.names import table_path
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ags_fast.fs import Store
    from ags_fast.keys.envelope import Envelope

PAGE_ROWS = 512
TABLE_ROWS = 1 << 16  # a table with more is written as several
BLOCK_NBYTES = 1 << 16
CACHED = 256  # pages and directories in memory
COUNTS = 8  # KEKs whose counts are in the reference of a table; those of more are in the table
RATIO = 2  # a commit merges tables that have fewer rows than this many times what is written anyway

Row = TypeVar("Row")
Part = TypeVar("Part")
Directory = list[tuple[bytes, Count, Count]]  # of each page the first name, the offset and the length in bytes


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference to a table.

    Attributes:
        path: Its object.
        length: Bytes of the plaintext.
        directory: Where the directory begins, in bytes of the plaintext.
        rows: How many rows it has.
        first: The name of the first row, in bytes: a path.
        last: The name of the last row.
        nbytes: Bytes of plaintext of the files.
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
        self._parts: OrderedDict[tuple[str, int], Any] = (
            OrderedDict()
        )  # at -1 the directory, at -2 all rows, at -3 counts
        self._lock = Lock()

    def name(self, row: Row) -> bytes:
        """Return the name of a row, by which rows are sorted."""
        raise NotImplementedError

    def encoded(self, rows: Sequence[Row]) -> bytes:
        """Return rows in columns."""
        raise NotImplementedError

    def decoded(self, data: bytes) -> list[Row]:
        """Return the rows that `encoded` has put in columns. ValueError, IndexError: there are none."""
        raise NotImplementedError

    def about(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return more fields of `Table` for a table with these rows."""
        return {}

    def rows(self, table: Table, envelope: Envelope) -> list[Row]:
        """Return all rows of a table. FileNotFoundError: its object is missing."""
        if (rows := self._held((table.path, -2))) is None:
            data = self._read(table, envelope, 0, table.length)
            rows = [row for _, page in self._split(table, data) for row in page]
            if table.rows <= PAGE_ROWS:
                self._keep((table.path, -2), rows)
        return rows  # type: ignore[no-any-return]

    def write(self, rows: Iterable[Row], job_id: str, key_id: str, envelope: Envelope) -> list[Table]:
        """Store rows as new tables of a job, and return the references."""
        ordered = sorted(rows, key=self.name)
        return [
            self._write(ordered[at : at + TABLE_ROWS], job_id, key_id, envelope)
            for at in range(0, len(ordered), TABLE_ROWS)
        ]

    # ---- one table

    def _write(self, rows: Sequence[Row], job_id: str, key_id: str, envelope: Envelope) -> Table:
        starts = range(0, len(rows), PAGE_ROWS)
        pages = [(self.name(rows[at]), self.encoded(rows[at : at + PAGE_ROWS])) for at in starts]
        about = self.about(rows)
        ends = {"first": pages[0][0], "last": self.name(rows[-1])}
        table = self._store_pages(pages, about.pop("keys", {}), job_id, key_id, envelope)
        if len(rows) <= PAGE_ROWS:
            self._keep((table.path, -2), list(rows))  # the next commit may merge them
        return msgspec.structs.replace(table, rows=len(rows), **ends, **about)

    def _store_pages(
        self, pages: Sequence[tuple[bytes, bytes]], keys: dict[str, int], job_id: str, key_id: str, envelope: Envelope
    ) -> Table:
        """Store a table of pages, each with its first name, and of counts. The caller says more of its rows."""
        data, directory = bytearray(), []
        for first, page in pages:
            directory.append((first, len(data), len(page)))
            data += page
        many = len(keys) > COUNTS
        data += zlib.compress(msgspec.msgpack.encode(keys), 1) if many else b""
        begin = len(data)
        data += msgspec.msgpack.encode(directory)
        path, key = table_path(job_id), secrets.token_bytes(32)
        wrapped = envelope.wrap(key_id, key, binding(self._dataset_id, "table", path))
        self._store.create_exclusive(path, AgsCodec(key, block_size=BLOCK_NBYTES).encrypt(data))
        return Table(path, len(data), begin, 1, b"", b"", 0, key_id, wrapped, None if many else keys)

    def _read(self, table: Table, envelope: Envelope, begin: int, size: int) -> bytes:
        key = envelope.unwrap(table.key_id, table.wrapped, binding(self._dataset_id, "table", table.path))
        length = encrypted_length(table.length, BLOCK_NBYTES)
        source = self._store.open_seekable(table.path)
        with AgsReader(source, key, length=length, block_size=BLOCK_NBYTES) as reader:
            return reader.read_at(begin, size)

    def _rows_at(self, table: Table, names: Sequence[bytes], envelope: Envelope) -> Iterator[Row]:
        directory = self._directory(table, envelope)
        wanted: dict[int, set[bytes]] = {}
        for name in names:
            wanted.setdefault(_page_of(directory, name), set()).add(name)
        for at, some in wanted.items():
            page = self._page(table, envelope, directory, at)
            for name in some:
                place = bisect_left(page, name, key=self.name)
                if place < len(page) and self.name(page[place]) == name:
                    yield page[place]

    def at_or_after(self, table: Table, name: bytes, envelope: Envelope) -> Row | None:
        """Return the first row whose name is not before this one."""
        directory = self._directory(table, envelope)
        at = _page_of(directory, name)
        for number in range(at, min(at + 2, len(directory))):
            page = self._page(table, envelope, directory, number)
            if (row := bisect_left(page, name, key=self.name)) < len(page):
                return page[row]
        return None

    def _directory(self, table: Table, envelope: Envelope) -> Directory:
        held = self._held((table.path, -1))
        if held is None:
            whole = table.length <= BLOCK_NBYTES  # one block, which is read as a whole
            begin = 0 if whole else table.directory
            data = self._read(table, envelope, begin, table.length - begin)
            held = _directory(table, data[table.directory - begin :])
            self._keep((table.path, -1), held)
            for at, page in self._split(table, data) if whole else ():
                self._keep((table.path, at), page)
        return held  # type: ignore[no-any-return]

    def _page(self, table: Table, envelope: Envelope, directory: Directory, at: int) -> list[Row]:
        begin = directory[at][1]
        held = self._held((table.path, begin))
        if held is None:
            held = self._unpacked(self._read(table, envelope, begin, directory[at][2]), table.path)
            self._keep((table.path, begin), held)
        return held  # type: ignore[no-any-return]

    def _split(self, table: Table, data: bytes) -> Iterator[tuple[int, list[Row]]]:
        """Yield the offset and the rows of each page of a whole table."""
        for _, begin, length in _directory(table, data[table.directory :]):
            yield begin, self._unpacked(data[begin : begin + length], table.path)

    def _unpacked(self, data: bytes, path: str) -> list[Row]:
        """Return the rows of a page. FormatError: it is none."""
        return _parsed(self.decoded, data, path)

    def _held(self, name: tuple[str, int]) -> Any:
        with self._lock:
            if name in self._parts:
                self._parts.move_to_end(name)
            return self._parts.get(name)

    def _keep(self, name: tuple[str, int], value: Any) -> None:
        with self._lock:
            self._parts[name] = value
            while len(self._parts) > CACHED:
                self._parts.popitem(last=False)


class Tables(SortedTables[FileEntry]):
    """The tables of the files of one dataset, by path."""

    def name(self, row: FileEntry) -> bytes:
        """See `SortedTables.name`."""
        return path_bytes(row.path)

    def encoded(self, rows: Sequence[FileEntry]) -> bytes:
        """See `SortedTables.encoded`."""
        check_rows(rows)
        return encoded(rows)

    def decoded(self, data: bytes) -> list[FileEntry]:
        """See `SortedTables.decoded`."""
        return decoded(data)

    def about(self, rows: Sequence[FileEntry]) -> dict[str, Any]:
        """See `SortedTables.about`."""
        return {
            "nbytes": sum(row.plain_length for row in rows),
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
        if (held := self._held((table.path, -3))) is None:
            _, last, length = self._directory(table, envelope)[-1]
            data = self._read(table, envelope, last + length, table.directory - last - length)
            held = _parsed(lambda data: msgspec.msgpack.decode(inflated(data), type=dict[str, Count]), data, table.path)
            self._keep((table.path, -3), held)
        return held  # type: ignore[no-any-return]

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
            for row in page[bisect_left(page, skip, key=self.name) :]:
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
        progress: Callable[[int], object] = lambda rows: None,
    ) -> Table:
        """Store a copy of a table with the data keys of some KEKs wrapped by others. No row is made of its columns.

        Args:
            table: The table.
            moves: {KEK: the KEK that takes its place}.
            rewrap: Wraps data keys again.
            job_id: The job that writes the copy.
            key_id: The KEK that wraps the copy's data key.
            envelope: Has that KEK, and that of the table.
            progress: Gets how many rows were done since the call before.
        """
        data = self._read(table, envelope, 0, table.length)
        pages = []
        for first, begin, length in _directory(table, data[table.directory :]):
            page, names = _parsed(lambda data: columns_of(data, Names), data[begin : begin + length], table.path)
            pages.append((first, with_wraps(page, names, moves, rewrap, self._dataset_id)))
            progress(len(names.file))
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
        touched = {table.path for table in gone.values()}
        count = len(add) + sum(table.rows for table in tables if table.path in touched)
        for table in sorted(tables, key=lambda table: table.rows):
            if table.path not in touched and add and table.rows < RATIO * count and table.rows < TABLE_ROWS // 2:
                touched.add(table.path)
                count += table.rows
        rows = [row for table in tables if table.path in touched for row in self.rows(table, envelope)]
        kept = [row for row in rows if row.path not in gone]
        left = [table for table in tables if table.path not in touched]
        return (*left, *self.write([*kept, *add], job_id, key_id, envelope))


def _parsed(parse: Callable[[bytes], Part], data: bytes, path: str) -> Part:
    """Parse a part of a table. FormatError: it is malformed."""
    try:
        return parse(data)
    except (zlib.error, msgspec.DecodeError, ValueError, IndexError) as error:
        raise FormatError(f"the table {path} is malformed: {error}") from None


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
