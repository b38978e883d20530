"""Sealed tables: rows of files, sorted by path, in columns. A table never changes.

A table is an AGS1 stream. Its plaintext is pages of at most `PAGE_ROWS` rows, and then the directory, which has the
first path, the offset and the length of each page. A page is a struct of columns in msgpack; those that are not random
are compressed by zlib. The entry of the log that names a table has its length and its wrapped data key.
"""

from __future__ import annotations

import secrets
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ags_fast.ags1 import AgsCodec, encrypted_length
from ags_fast.dataset.entries import FileEntry, check_lengths, column_binding, wrapped_by
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
PAGE_NBYTES = 64 << 20  # of what is compressed in a page: more than 512 rows have
TABLE_ROWS = 1 << 16  # a table with more is written as several
BLOCK_NBYTES = 1 << 16
CACHED = 256  # pages and directories in memory
RATIO = 2  # a commit merges tables that have fewer rows than this many times what is written anyway

Count = Annotated[int, Meta(ge=0)]
Directory = list[tuple[bytes, Count, Count]]  # of each page the first path, the offset and the length in bytes
# Takes two KEKs, the begin of what binds, the rest of that for each data key, and wrapped data keys; wraps them again.
Rewrap = Callable[[str, str, bytes, "list[bytes]", "list[bytes]"], "list[bytes]"]


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
    keys: dict[str, Count]
    material: bool = False

    def key_ids(self) -> set[str]:
        """Return the ids of the KEKs that are needed to read the table and its files."""
        return {self.key_id, *self.keys}


class _Page(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Rows in columns: see `FileEntry`. Names that repeat stand once in `names`.

    What is random, and so cannot be compressed, is beside `rest`, which is.
    """

    names: list[str]
    wrapped_dek: list[bytes]
    column_keys: list[list[tuple[str, int, bytes]] | None]
    aad_prefix: list[bytes]
    rest: bytes


class _Names(msgspec.Struct, array_like=True, frozen=True):
    """The first columns of the rest: what binds data keys, and which KEKs wrap them."""

    file: list[bytes]
    key_id: list[Count]


class _Rest(_Names, frozen=True, forbid_unknown_fields=True):
    path: list[bytes]
    format: list[Count]
    plain_length: list[Count]
    file_length: list[Count]
    block_size: list[Count]
    job_id: list[Count]
    set_id: list[Count | None]
    part: list[Count | None]
    parts: list[Count | None]
    source: list[bytes]
    stamp: list[str]
    mode: list[int | None]
    mtime_ns: list[int | None]
    key_material: list[list[tuple[str, str, str | None, bytes]] | None]


Rest = TypeVar("Rest", bound=_Names)
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

    columns = [
        None
        if row.column_keys is None
        else [(key["column"], name(key["key_id"]), key["wrapped_dek"]) for key in row.column_keys]
        for row in rows
    ]
    rest = _Rest(
        [path_bytes(row.file) for row in rows],
        [name(row.key_id) for row in rows],
        [path_bytes(row.path) for row in rows],
        [name(row.format) for row in rows],
        [row.plain_length for row in rows],
        [row.file_length for row in rows],
        [row.block_size for row in rows],
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
    wrapped, prefixes = [row.wrapped_dek for row in rows], [row.aad_prefix for row in rows]
    packed = zlib.compress(msgspec.msgpack.encode(rest), 1)
    return msgspec.msgpack.encode(_Page([*names], wrapped, columns, prefixes, packed))


def _unpacked(data: bytes, path: str) -> list[FileEntry]:
    """Return the rows of a page. FormatError: it is none."""
    page, rest = _page(data, _Rest, path)
    try:
        rows = _rows(page, rest)
    except (ValueError, IndexError) as error:
        raise FormatError(f"the table {path} is malformed: {error}") from None
    check_lengths(rows)
    return rows


def _page(data: bytes, kind: type[Rest], path: str) -> tuple[_Page, Rest]:
    """Return the columns of a page. kind: which of the rest. FormatError: it is none."""
    inflate = zlib.decompressobj()
    try:
        page = msgspec.msgpack.decode(data, type=_Page)
        rest = msgspec.msgpack.decode(inflate.decompress(page.rest, PAGE_NBYTES), type=kind)
        if inflate.unconsumed_tail or not inflate.eof or inflate.unused_data:
            raise ValueError("it is too long, or cut")
        columns = (page.wrapped_dek, page.column_keys, page.aad_prefix, *msgspec.structs.astuple(rest))
        if len({len(column) for column in columns}) > 1:
            raise ValueError("its columns differ in length")
    except (zlib.error, msgspec.DecodeError, ValueError) as error:
        raise FormatError(f"the table {path} is malformed: {error}") from None
    return page, rest


def _with_wraps(page: _Page, rest: _Names, moves: Mapping[str, str], rewrap: Rewrap, dataset_id: str) -> bytes:
    """Return a page, packed, with the data keys of some KEKs wrapped by others."""
    names = page.names
    old = {i for i, name in enumerate(names) if name in moves}
    wrapped, columns = page.wrapped_dek, page.column_keys
    for i in old.intersection(rest.key_id):
        at = [n for n, key in enumerate(rest.key_id) if key == i]
        files = [rest.file[n] for n in at] if len(at) < len(wrapped) else rest.file
        before = [wrapped[n] for n in at] if len(at) < len(wrapped) else wrapped
        after = rewrap(names[i], moves[names[i]], binding(dataset_id, "dek", ""), files, before)
        wrapped = list(wrapped) if len(at) < len(wrapped) else after
        for n, one in zip(at, after, strict=True):
            wrapped[n] = one
    todo: dict[tuple[int, str], list[tuple[int, int]]] = {}  # by KEK and column, so that many are wrapped at once
    for n, keys in enumerate(columns):
        for m, (column, i, _) in enumerate(keys or ()):
            if i in old:
                todo.setdefault((i, column), []).append((n, m))
    columns = [None if keys is None else list(keys) for keys in columns] if todo else columns
    for (i, column), places in todo.items():
        keys_of = [columns[n] or [] for n, _ in places]
        before = [keys[m][2] for keys, (_, m) in zip(keys_of, places, strict=True)]
        files = [rest.file[n] for n, _ in places]
        after = rewrap(names[i], moves[names[i]], column_binding(dataset_id, column, b""), files, before)
        for keys, (_, m), one in zip(keys_of, places, after, strict=True):
            keys[m] = column, i, one
    names = [moves.get(name, name) for name in names]  # the id of a KEK is the name of nothing else
    page = msgspec.structs.replace(page, names=names, wrapped_dek=wrapped, column_keys=columns)
    return msgspec.msgpack.encode(page)


def _rows(page: _Page, rest: _Rest) -> list[FileEntry]:
    """Return the rows of a page whose columns are all of one length."""
    names = page.names
    columns = [
        None if keys is None else tuple({"column": c, "key_id": names[k], "wrapped_dek": w} for c, k, w in keys)
        for keys in page.column_keys
    ]
    materials = [
        None if material is None else tuple(dict(zip(MATERIAL, key, strict=True)) for key in material)
        for material in rest.key_material
    ]
    return list(
        map(
            FileEntry,
            [check_path(_text(path)) for path in rest.path],
            [check_path(_text(file)) for file in rest.file],
            [names[i] for i in rest.format],
            rest.plain_length,
            rest.file_length,
            rest.block_size,
            [names[i] for i in rest.key_id],
            page.wrapped_dek,
            columns,
            page.aad_prefix,
            [names[i] for i in rest.job_id],
            [None if i is None else names[i] for i in rest.set_id],
            rest.part,
            rest.parts,
            [_text(source) for source in rest.source],
            rest.stamp,
            rest.mode,
            rest.mtime_ns,
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
            page, names = _page(data[begin : begin + length], _Names, table.path)
            pages.append((first, _with_wraps(page, names, moves, rewrap, self._dataset_id)))
            progress(len(names.file))
        counts: Counter[str] = Counter()
        for old, count in table.keys.items():
            counts[moves.get(old, old)] += count
        made = self._store_pages(pages, job_id, key_id, envelope)
        return msgspec.structs.replace(
            table,
            keys=dict(counts),
            **{name: getattr(made, name) for name in ("path", "length", "directory", "key_id", "wrapped")},
        )

    def _write(self, rows: Sequence[FileEntry], job_id: str, key_id: str, envelope: Envelope) -> Table:
        starts = range(0, len(rows), PAGE_ROWS)
        pages = [(path_bytes(rows[at].path), _packed(rows[at : at + PAGE_ROWS])) for at in starts]
        made = self._store_pages(pages, job_id, key_id, envelope)
        if len(rows) <= PAGE_ROWS:
            self._keep((made.path, -2), list(rows))  # the next commit may merge them
        return msgspec.structs.replace(
            made,
            rows=len(rows),
            last=path_bytes(rows[-1].path),
            nbytes=sum(row.plain_length for row in rows),
            keys=dict(wrapped_by(rows)),
            material=any(row.key_material is not None for row in rows),
        )

    def _store_pages(self, pages: Sequence[tuple[bytes, bytes]], job_id: str, key_id: str, envelope: Envelope) -> Table:
        """Store a table of pages, each with its first path. What the reference says of rows is left to the caller."""
        data, directory = bytearray(), []
        for first, page in pages:
            directory.append((first, len(data), len(page)))
            data += page
        begin = len(data)
        data += msgspec.msgpack.encode(directory)
        path, key = table_path(job_id), secrets.token_bytes(32)
        wrapped = envelope.wrap(key_id, key, binding(self._dataset_id, "table", path))
        self._store.create_exclusive(path, AgsCodec(key, block_size=BLOCK_NBYTES).encrypt(data))
        return Table(path, len(data), begin, 1, pages[0][0], pages[0][0], 0, key_id, wrapped, {})

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
        for page in range(at, min(at + 2, len(directory))):
            for row in self._page(table, envelope, directory, page):
                if path_bytes(row.path) >= name:
                    return row
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
