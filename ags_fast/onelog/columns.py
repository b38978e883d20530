"""Pages of tables of files: rows in columns, in msgpack. What is random is beside what zlib compresses."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from ags_fast.dataset.entries import FileEntry, check_lengths, column_binding
from ags_fast.dataset.names import check_path
from ags_fast.keys.envelope import binding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PAGE_NBYTES = 64 << 20  # of what is compressed in a page: more than 512 rows have

Count = Annotated[int, Meta(ge=0)]
# Takes two KEKs, the begin of what binds, the rest of that for each data key, and wrapped data keys; wraps them again.
Rewrap = Callable[[str, str, bytes, "list[bytes]", "list[bytes]"], "list[bytes]"]


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


Kind = TypeVar("Kind", bound=Names)
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

    def name(text: str) -> int:
        return names.setdefault(text, len(names))

    columns = [
        None
        if row.column_keys is None
        else [(key["column"], name(key["key_id"]), key["wrapped_dek"]) for key in row.column_keys]
        for row in rows
    ]
    rest = Rest(
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
    return msgspec.msgpack.encode(Page([*names], wrapped, columns, prefixes, packed))


def decoded(data: bytes) -> list[FileEntry]:
    """Return the rows that `encoded` has put in columns."""
    page, rest = columns_of(data, Rest)
    names = page.names
    columns = [
        None if keys is None else tuple({"column": c, "key_id": names[k], "wrapped_dek": w} for c, k, w in keys)
        for keys in page.column_keys
    ]
    materials = [
        None if material is None else tuple(dict(zip(MATERIAL, key, strict=True)) for key in material)
        for material in rest.key_material
    ]
    rows = list(
        map(
            FileEntry,
            [text_of(path) for path in rest.path],
            [text_of(file) for file in rest.file],
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
            [text_of(source) for source in rest.source],
            rest.stamp,
            rest.mode,
            rest.mtime_ns,
            materials,
        )
    )
    check_rows(rows)
    return rows


def columns_of(data: bytes, kind: type[Kind]) -> tuple[Page, Kind]:
    """Return the columns of a page. kind: which of the rest."""
    page = msgspec.msgpack.decode(data, type=Page)
    rest = msgspec.msgpack.decode(inflated(page.rest), type=kind)
    check_columns((page.wrapped_dek, page.column_keys, page.aad_prefix, *msgspec.structs.astuple(rest)))
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
    """Raise PolicyError for a path that leads out of the dataset, IntegrityError for lengths that cannot be.

    Who writes a table and who reads it check its rows alike, so that nobody writes what nobody can read.
    """
    for row in rows:
        check_path(row.path)
        check_path(row.file)
    check_lengths(rows)


def check_columns(columns: Iterable[Sequence[object]]) -> None:
    """Raise ValueError if the columns of a page differ in length."""
    if len({len(column) for column in columns}) > 1:
        raise ValueError("its columns differ in length")


def inflated(data: bytes) -> bytes:
    """Return what was compressed by zlib. ValueError, zlib.error: that is damaged, or too long."""
    inflate = zlib.decompressobj()
    plain = inflate.decompress(data, PAGE_NBYTES)
    if inflate.unconsumed_tail or not inflate.eof or inflate.unused_data:
        raise ValueError("it is too long, or cut")
    return plain
