"""Pages of tables of files: rows in columns, in msgpack. What is random is beside what zlib compresses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ags_fast.dataset.entries import FileEntry, check_lengths, column_binding
from ags_fast.dataset.names import check_path
from ags_fast.errors import FormatError, PolicyError
from ags_fast.keys.envelope import binding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PAGE_NBYTES = 64 << 20  # of what is compressed in a page, at most
LONG_NBYTES = 4 << 20  # a page with more is divided, unless it is one row

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Takes two KEKs, the begin of what binds, the rest of that for each data key, and wrapped data keys; wraps them again.
Rewrap = Callable[[str, str, bytes, "list[bytes]", "list[bytes]"], "list[bytes]"]


class LongPageError(ValueError):
    """Rows do not fit into one page of a table."""


class Page(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Rows in columns: see `FileEntry`. Names that repeat stand once in `names`.

    What is random, and so cannot be compressed, is beside `rest`, which is.
    """

    names: list[str]
    wrapped_dek: list[bytes]
    column_keys: list[list[tuple[str, int, bytes]] | None]
    aad_prefix: list[bytes]
    rest: bytes


class Names(msgspec.Struct, array_like=True, frozen=True):
    """The first columns of the rest: what binds data keys, and which KEKs wrap them."""

    file: list[bytes]
    key_id: list[Count]


class Rest(Names, frozen=True, forbid_unknown_fields=True):
    """All columns that are compressed."""

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
    # Columns that are None have nothing but None.
    source_length: list[Count | None] | None
    ctime_ns: list[int | None] | None
    inode: list[Count | None] | None
    etag: list[str | None] | None
    checksum: list[bytes | None] | None


Kind = TypeVar("Kind", bound=Names)
INDEXED = ("key_id", "format", "job_id", "set_id")  # columns of places in `Page.names`
PATHS = ("file", "path", "source")
LATE = ("source_length", "ctime_ns", "inode", "etag", "checksum")  # columns that need not be there
MATERIAL = ("column", "wrapping_key_id", "master_version", "wrapped_dek")


def path_bytes(path: str) -> bytes:
    """Return a path in bytes, by which tables are sorted."""
    return path.encode("utf-8", "surrogateescape")


def text_of(path: bytes) -> str:
    """Return the path that `path_bytes` has made bytes of."""
    return path.decode("utf-8", "surrogateescape")


def encoded(rows: Sequence[FileEntry]) -> bytes:
    """Return rows in columns."""
    names: dict[str, int] = {}
    fields = dict(zip(FileEntry._fields, zip(*rows, strict=True), strict=True))

    def name(text: str) -> int:
        return names.setdefault(text, len(names))

    def column(field: str) -> Sequence[Any] | None:
        values = fields[field]
        if field in INDEXED:
            return [None if value is None else name(value) for value in values]
        if field in PATHS:
            return [path_bytes(value) for value in values]
        if field == "key_material":
            return [None if keys is None else [[key[name] for name in MATERIAL] for key in keys] for keys in values]
        return None if field in LATE and all(value is None for value in values) else values

    keys_of_columns = [
        None if keys is None else [(key["column"], name(key["key_id"]), key["wrapped_dek"]) for key in keys]
        for keys in fields["column_keys"]
    ]
    rest = deflated([column(field) for field in Rest.__struct_fields__], len(rows))
    return msgspec.msgpack.encode([[*names], fields["wrapped_dek"], keys_of_columns, fields["aad_prefix"], rest])


def decoded(data: bytes) -> Rows:
    """Return the rows that `encoded` has put in columns."""
    return Rows(*columns_of(data, Rest))


class Rows(Sequence[FileEntry]):
    """The rows of a page, each made of the columns when it is asked for, or all when they are iterated over."""

    def __init__(self, page: Page, rest: Rest) -> None:
        self.paths = rest.path
        self._page, self._rest = page, rest
        self._all: list[FileEntry] | None = None
        used = [rest.key_id, rest.format, rest.job_id, [i for i in rest.set_id if i is not None]]
        used.append([key[1] for keys in page.column_keys if keys for key in keys])
        if max(map(max, filter(None, used)), default=-1) >= len(page.names):
            raise ValueError("it names what it does not have")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: Any) -> Any:
        if self._all is not None:
            return self._all[at]
        return self._made(at) if isinstance(at, slice) else self._made(slice(at, at + 1 or None))[0]

    def __iter__(self) -> Iterator[FileEntry]:
        if self._all is None:
            self._all = self._made(slice(None))
        return iter(self._all)

    def _made(self, at: slice) -> list[FileEntry]:
        rows = list(map(FileEntry, *(self._column(field, at) for field in FileEntry._fields)))
        check_rows(rows)
        return rows

    def _column(self, field: str, at: slice) -> Iterable[Any]:
        names = self._page.names
        values = getattr(self._page if field in Page.__struct_fields__ else self._rest, field)
        if values is None:
            return repeat(None)
        if field in INDEXED:
            return [None if i is None else names[i] for i in values[at]]
        if field in PATHS:
            return map(text_of, values[at])
        if field == "column_keys":
            return [
                None if keys is None else tuple({"column": c, "key_id": names[i], "wrapped_dek": w} for c, i, w in keys)
                for keys in values[at]
            ]
        if field == "key_material":
            return [
                None if keys is None else tuple(dict(zip(MATERIAL, key, strict=True)) for key in keys)
                for keys in values[at]
            ]
        return values[at]  # type: ignore[no-any-return]


def columns_of(data: bytes, kind: type[Kind]) -> tuple[Page, Kind]:
    """Return the columns of a page. kind: which of the rest."""
    page = msgspec.msgpack.decode(data, type=Page)
    rest = msgspec.msgpack.decode(inflated(page.rest), type=kind)
    columns = (page.wrapped_dek, page.column_keys, page.aad_prefix, *msgspec.structs.astuple(rest))
    check_columns(column for column in columns if column is not None)
    return page, rest


def with_wraps(page: Page, rest: Names, moves: Mapping[str, str], rewrap: Rewrap, dataset_id: str) -> bytes:
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


def check_rows(rows: Sequence[FileEntry]) -> None:
    """Raise PolicyError for a path that leads out of the dataset, IntegrityError or FormatError for what cannot be.

    Who writes a table and who reads it check its rows alike, so that nobody writes what nobody can read.
    """
    for row in rows:
        check_path(row.path)
        check_path(row.file)
        if len({row.set_id is None, row.part is None, row.parts is None}) > 1:
            raise FormatError(f"{row.file} is said to be one of a set, and not of which, or which of how many")
    check_lengths(rows)


def check_columns(columns: Iterable[Sequence[object]]) -> None:
    """Raise ValueError if the columns of a page differ in length."""
    if len({len(column) for column in columns}) > 1:
        raise ValueError("its columns differ in length")


def deflated(columns: Sequence[Any], rows: int) -> bytes:
    """Return columns of so many rows, packed and compressed.

    LongPageError: they are to be divided into several pages. PolicyError: they are one row, which nobody could read.
    """
    data = msgspec.msgpack.encode(columns)
    if len(data) > LONG_NBYTES and rows > 1:
        raise LongPageError
    if len(data) > PAGE_NBYTES:
        raise PolicyError(f"a row of a table has {len(data)} bytes: {PAGE_NBYTES} are the limit")
    return zlib.compress(data, 1)


def inflated(data: bytes) -> bytes:
    """Return what was compressed by zlib. ValueError, zlib.error: that is damaged, or too long."""
    inflate = zlib.decompressobj()
    plain = inflate.decompress(data, PAGE_NBYTES)
    if inflate.unconsumed_tail or not inflate.eof or inflate.unused_data:
        raise ValueError("it is too long, or cut")
    return plain
