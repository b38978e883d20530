"""Sealed tables: rows of files, sorted by path, in columns. A table never changes.

A table is an AGS1 stream. Its plaintext is pages of at most `PAGE_ROWS` rows, and then the directory, which has the
first path, the offset and the length of each page. A page is a struct of columns in msgpack, compressed by zlib. The
entry of the log that names a table has its length and its wrapped data key.
"""

from __future__ import annotations

import secrets
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ags_fast.ags1 import AgsCodec, encrypted_length
from ags_fast.dataset.entries import FileEntry, check_lengths, wrapped_by
from ags_fast.dataset.names import check_path
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.keys.envelope import binding
from ags_fast.onelog.names import table_path
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ags_fast.fs import Store
    from ags_fast.keys.envelope import Envelope

PAGE_ROWS = 512
PAGE_NBYTES = 64 << 20  # of a page, decompressed: more than 512 rows have
TABLE_ROWS = 1 << 16  # a table with more is written as several
BLOCK_NBYTES = 1 << 16
CACHED = 256  # pages and directories in memory
RATIO = 2  # a commit merges tables that have fewer rows than this many times what is written anyway

Count = Annotated[int, Meta(ge=0)]
Directory = list[tuple[bytes, Count, Count]]  # of each page the first path, the offset and the length in bytes


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference to a table.

    Attributes:
        path: Its object.
        length: Bytes of the plaintext.
        directory: Where the directory begins, in bytes of the plaintext.
        rows: How many rows it has.
        first: The first path, in bytes.
        last: The last path.
        nbytes: Bytes of plaintext of the files.
        key_id: The KEK that wraps the table's data key.
        wrapped: The table's data key, wrapped.
        keys: How many data keys of files each KEK wraps in it.
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
    keys: dict[str, Count]

    def key_ids(self) -> set[str]:
        """Return the ids of the KEKs that are needed to read the table and its files."""
        return {self.key_id, *self.keys}


class _Page(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Rows in columns: see `FileEntry`. Names that repeat stand once in `names`."""

    names: list[str]
    path: list[bytes]
    file: list[bytes]
    format: list[int]
    plain_length: list[Count]
    file_length: list[Count]
    block_size: list[Count]
    key_id: list[int]
    wrapped_dek: list[bytes]
    column_keys: list[list[tuple[str, int, bytes]] | None]
    aad_prefix: list[bytes]
    job_id: list[int]
    set_id: list[int | None]
    part: list[int | None]
    parts: list[int | None]
    source: list[bytes]
    stamp: list[str]
    mode: list[int | None]
    mtime_ns: list[int | None]
    key_material: list[list[tuple[str, str, str | None, bytes]] | None]


MATERIAL = ("column", "wrapping_key_id", "master_version", "wrapped_dek")


def path_bytes(path: str) -> bytes:
    """Return a path in bytes, by which tables are sorted."""
    return path.encode("utf-8", "surrogateescape")


def _sorts_as(row: FileEntry) -> bytes:
    return path_bytes(row.path)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _packed(rows: Sequence[FileEntry]) -> bytes:
    """Return a page with these rows."""
    names: dict[str, int] = {}

    def name(text: str) -> int:
        return names.setdefault(text, len(names))

    page = _Page(
        [],
        [path_bytes(row.path) for row in rows],
        [path_bytes(row.file) for row in rows],
        [name(row.format) for row in rows],
        [row.plain_length for row in rows],
        [row.file_length for row in rows],
        [row.block_size for row in rows],
        [name(row.key_id) for row in rows],
        [row.wrapped_dek for row in rows],
        [
            None
            if row.column_keys is None
            else [(key["column"], name(key["key_id"]), key["wrapped_dek"]) for key in row.column_keys]
            for row in rows
        ],
        [row.aad_prefix for row in rows],
        [name(row.job_id) for row in rows],
        [None if row.set_id is None else name(row.set_id) for row in rows],
        [row.part for row in rows],
        [row.parts for row in rows],
        [path_bytes(row.source) for row in rows],
        [row.stamp for row in rows],
        [row.mode for row in rows],
        [row.mtime_ns for row in rows],
        [
            None if row.key_material is None else [tuple(key[name] for name in MATERIAL) for key in row.key_material]
            for row in rows
        ],
    )
    page.names.extend(names)
    return zlib.compress(msgspec.msgpack.encode(page), 1)


def _unpacked(data: bytes, path: str) -> list[FileEntry]:
    """Return the rows of a page. FormatError: it is none."""
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data, PAGE_NBYTES)
        page = msgspec.msgpack.decode(plain, type=_Page)
        if inflate.unconsumed_tail or not inflate.eof or inflate.unused_data:
            raise ValueError("it is too long, or cut")
        if len({len(column) for column in msgspec.structs.astuple(page)[1:]}) > 1:
            raise ValueError("its columns differ in length")
        rows = _rows(page)
    except (zlib.error, msgspec.DecodeError, ValueError, IndexError) as error:
        raise FormatError(f"the table {path} is malformed: {error}") from None
    check_rows(rows)
    return rows


def check_rows(rows: Sequence[FileEntry]) -> None:
    """Raise PolicyError for a path that leads out of the dataset, IntegrityError for lengths that cannot be.

    Who writes a table and who reads it check its rows alike, so that nobody writes what nobody can read.
    """
    for row in rows:
        check_path(row.path)
        check_path(row.file)
    check_lengths(rows)


def _rows(page: _Page) -> list[FileEntry]:
    """Return the rows of a page whose columns are all of one length."""
    names = page.names
    columns = [
        None if keys is None else tuple({"column": c, "key_id": names[k], "wrapped_dek": w} for c, k, w in keys)
        for keys in page.column_keys
    ]
    materials = [
        None if material is None else tuple(dict(zip(MATERIAL, key, strict=True)) for key in material)
        for material in page.key_material
    ]
    return list(
        map(
            FileEntry,
            [_text(path) for path in page.path],
            [_text(file) for file in page.file],
            [names[i] for i in page.format],
            page.plain_length,
            page.file_length,
            page.block_size,
            [names[i] for i in page.key_id],
            page.wrapped_dek,
            columns,
            page.aad_prefix,
            [names[i] for i in page.job_id],
            [None if i is None else names[i] for i in page.set_id],
            page.part,
            page.parts,
            [_text(source) for source in page.source],
            page.stamp,
            page.mode,
            page.mtime_ns,
            materials,
        )
    )


class Tables:
    """The tables of one dataset. Threads may share it.

    Args:
        store: The folder of the dataset.
        dataset_id: The id of the dataset.
    """

    def __init__(self, store: Store, dataset_id: str) -> None:
        self._store = store
        self._dataset_id = dataset_id
        self._parts: OrderedDict[tuple[str, int], Any] = OrderedDict()  # the directory is at -1, all rows are at -2
        self._lock = Lock()

    def rows(self, table: Table, envelope: Envelope) -> list[FileEntry]:
        """Return all rows of a table. FileNotFoundError: its object is missing."""
        if (rows := self._held((table.path, -2))) is None:
            rows = [row for _, page in _split(table, self._read(table, envelope, 0, table.length)) for row in page]
            if table.rows <= PAGE_ROWS:
                self._keep((table.path, -2), rows)
        return rows  # type: ignore[no-any-return]

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
                    row = self._at_or_after(table, begin, envelope)
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
        return {_text(name) for name in folders}, found

    def _list_folder(
        self, table: Table, begin: bytes, deep: bool, envelope: Envelope, folders: set[bytes], found: list[FileEntry]
    ) -> None:
        directory = self._directory(table, envelope)
        at, skip = _page_of(directory, begin), begin
        while at < len(directory):
            page = self._page(table, envelope, directory, at)
            for row in page[bisect_left(page, skip, key=_sorts_as) :]:
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

    def write(self, rows: Iterable[FileEntry], job_id: str, key_id: str, envelope: Envelope) -> list[Table]:
        """Store rows as new tables of a job, and return the references."""
        ordered = sorted(rows, key=lambda row: path_bytes(row.path))
        return [
            self._write(ordered[at : at + TABLE_ROWS], job_id, key_id, envelope)
            for at in range(0, len(ordered), TABLE_ROWS)
        ]

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

    # ---- one table

    def _write(self, rows: Sequence[FileEntry], job_id: str, key_id: str, envelope: Envelope) -> Table:
        check_rows(rows)
        data, directory = bytearray(), []
        for at in range(0, len(rows), PAGE_ROWS):
            page = _packed(rows[at : at + PAGE_ROWS])
            directory.append((path_bytes(rows[at].path), len(data), len(page)))
            data += page
        begin = len(data)
        data += msgspec.msgpack.encode(directory)
        path, key = table_path(job_id), secrets.token_bytes(32)
        wrapped = envelope.wrap(key_id, key, binding(self._dataset_id, "table", path))
        self._store.create_exclusive(path, AgsCodec(key, block_size=BLOCK_NBYTES).encrypt(bytes(data)))
        if len(rows) <= PAGE_ROWS:
            self._keep((path, -2), list(rows))  # the next commit may merge them
        nbytes = sum(row.plain_length for row in rows)
        ends = path_bytes(rows[0].path), path_bytes(rows[-1].path)
        return Table(path, len(data), begin, len(rows), *ends, nbytes, key_id, wrapped, dict(wrapped_by(rows)))

    def _read(self, table: Table, envelope: Envelope, begin: int, size: int) -> bytes:
        key = envelope.unwrap(table.key_id, table.wrapped, binding(self._dataset_id, "table", table.path))
        length = encrypted_length(table.length, BLOCK_NBYTES)
        source = self._store.open_seekable(table.path)
        with AgsReader(source, key, length=length, block_size=BLOCK_NBYTES) as reader:
            return reader.read_at(begin, size)

    def _rows_at(self, table: Table, names: Sequence[bytes], envelope: Envelope) -> Iterator[FileEntry]:
        directory = self._directory(table, envelope)
        wanted: dict[int, set[bytes]] = {}
        for name in names:
            wanted.setdefault(_page_of(directory, name), set()).add(name)
        for at, some in wanted.items():
            page = self._page(table, envelope, directory, at)
            for name in some:
                place = bisect_left(page, name, key=_sorts_as)
                if place < len(page) and _sorts_as(page[place]) == name:
                    yield page[place]

    def _at_or_after(self, table: Table, name: bytes, envelope: Envelope) -> FileEntry | None:
        """Return the first row whose path is not before a name."""
        directory = self._directory(table, envelope)
        at = _page_of(directory, name)
        for number in range(at, min(at + 2, len(directory))):
            page = self._page(table, envelope, directory, number)
            if (place := bisect_left(page, name, key=_sorts_as)) < len(page):
                return page[place]
        return None

    def _directory(self, table: Table, envelope: Envelope) -> Directory:
        held = self._held((table.path, -1))
        if held is None:
            whole = table.length <= BLOCK_NBYTES  # one block, which is read as a whole
            begin = 0 if whole else table.directory
            data = self._read(table, envelope, begin, table.length - begin)
            held = _directory(table, data[table.directory - begin :])
            self._keep((table.path, -1), held)
            for at, page in _split(table, data) if whole else ():
                self._keep((table.path, at), page)
        return held  # type: ignore[no-any-return]

    def _page(self, table: Table, envelope: Envelope, directory: Directory, at: int) -> list[FileEntry]:
        begin = directory[at][1]
        held = self._held((table.path, begin))
        if held is None:
            held = _unpacked(self._read(table, envelope, begin, directory[at][2]), table.path)
            self._keep((table.path, begin), held)
        return held  # type: ignore[no-any-return]

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


def _directory(table: Table, data: bytes) -> Directory:
    """Parse the directory of a table."""
    try:
        pages = msgspec.msgpack.decode(data, type=Directory)
    except msgspec.DecodeError as error:
        raise FormatError(f"the table {table.path} is malformed: {error}") from None
    ends = [0, *(begin + length for _, begin, length in pages)]
    if ends[:-1] != [begin for _, begin, _ in pages] or ends[-1] != table.directory or not pages:
        raise FormatError(f"the table {table.path} is malformed: its pages do not follow each other")
    return pages


def _split(table: Table, data: bytes) -> Iterator[tuple[int, list[FileEntry]]]:
    """Yield the offset and the rows of each page of a whole table."""
    for _, begin, length in _directory(table, data[table.directory :]):
        yield begin, _unpacked(data[begin : begin + length], table.path)


def _page_of(directory: Directory, name: bytes) -> int:
    """Return the number of the page that has a path, if any has."""
    return max(0, bisect_right([first for first, _, _ in directory], name) - 1)


def rewrapped(table: Table, key_id: str, envelope: Envelope, dataset_id: str) -> Table:
    """Return the reference of a table with its data key under another KEK. The table itself stays."""
    bound = binding(dataset_id, "table", table.path)
    wrapped = envelope.wrap(key_id, envelope.unwrap(table.key_id, table.wrapped, bound), bound)
    return msgspec.structs.replace(table, key_id=key_id, wrapped=wrapped)


def counted(tables: Iterable[Table]) -> Counter[str]:
    """Count the data keys that each KEK wraps in these tables."""
    counts: Counter[str] = Counter()
    for table in tables:
        counts.update(table.keys)
    return counts


def check_unique(tables: Sequence[Table]) -> None:
    """Raise IntegrityError if a table is named twice."""
    if len({table.path for table in tables}) != len(tables):
        raise IntegrityError("an entry of the log names a table twice")
