"""Tables of entries, as sealed objects: encoding, sealing, opening, and references to them.

A table is an index and pages of some hundred rows. So a lookup in a large table reads and decodes one page.
"""

from __future__ import annotations

import base64
import json
import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.ags1 import MAX_BLOCK_SIZE, AgsCodec
from ags_fast.arrays import arrow_array, empty_batch, ends
from ags_fast.dataset.entries import MAX_FILES, FileEntry
from ags_fast.dataset.names import check_path
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.fs import NotAFileError, Store
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


MANIFEST_ENTRIES = 10_000  # at most, in one manifest or one part of a plan
MANIFEST_NBYTES = 8 << 20  # target for encoded entries: key metadata may be large
TABLE_NBYTES = 32 << 20  # limit of a table, sealed or not: bounds what a false length can allocate
COLUMN_KEYS = 1 << 18  # limit for one table
ENTRY_NBYTES = 200  # estimate for an entry, without its names and wrapped keys
Read = Callable[[int, int], bytes]  # reads (offset, size) of a table's plaintext
TABLE_DEK_NBYTES = 16
BLOCK_NBYTES = 64 << 10  # block size of the AGS1 stream that holds a table
WHOLE_NBYTES = 2 * BLOCK_NBYTES  # a table of at most this length is read whole, whatever is looked up
PAGE_ENTRIES = 512  # rows in a page
INDEX_NBYTES = 1 << 20  # limit of the index: more than 10,000 rows need
BOUND_NBYTES = 255  # length at which paths are cut in the bounds of tables and pages
NUMBERS = {  # numeric columns, and the largest value of each
    "plain_length": (1 << 63) - 1,
    "file_length": (1 << 63) - 1,
    "block_size": MAX_BLOCK_SIZE,
    "part": MAX_FILES,
    "parts": MAX_FILES,
    "mode": 0o777,
}
KEY_MATERIAL = "key_material"  # the column that only tables with such files have
NAMED_KEYS = 16  # most keys that a reference names; a table with more keys must be opened to count them
NAMES = [FileEntry._fields.index(field) for field in ("path", "file", "source")]  # UTF-8, unless the name is not text


class TableRef(NamedTuple):
    """A reference to a table of entries: an AGS1 stream, under a key of its own."""

    path: str
    length: int  # bytes
    entries: int
    key_id: str
    wrapped_key: bytes
    keys: tuple[tuple[str, int], ...] | None = None  # (key, DEKs it wraps) of the entries; None: open the table
    first: bytes = b""  # no path in the table sorts before this bound (see `bound`)
    last: bytes = b"\xff" * BOUND_NBYTES  # no path in the table sorts after this bound
    run: str = ""  # the run of several tables that it belongs to; "": a run of its own. Not in its JSON
    key_material: bool = False  # whether a file in the table has key material

    def to_json(self) -> dict[str, Any]:
        """Return the reference as a JSON object."""
        value: dict[str, Any] = {
            "path": self.path,
            "length": self.length,
            "entries": self.entries,
            "key_id": self.key_id,
            "wrapped_key": base64.b64encode(self.wrapped_key).decode(),
            "first": base64.b64encode(self.first).decode(),
            "last": base64.b64encode(self.last).decode(),
        }
        if self.key_material:
            value["key_material"] = True
        return value if self.keys is None else {**value, "keys": dict(self.keys)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], run: str = "") -> TableRef:
        """Read a reference from a JSON object. Raises FormatError if malformed."""
        try:
            return cls(
                str(value["path"]),
                whole(value["length"], TABLE_NBYTES),
                whole(value["entries"], MANIFEST_ENTRIES),
                str(value["key_id"]),
                base64.b64decode(value["wrapped_key"], validate=True),
                tuple((str(k), whole(n)) for k, n in value["keys"].items()) if "keys" in value else None,
                base64.b64decode(value["first"], validate=True),
                base64.b64decode(value["last"], validate=True),
                run,
                value.get("key_material") is True,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a reference to a table lacks or garbles {error}") from None


def whole(value: Any, most: int = (1 << 63) - 1, least: int = 0) -> int:
    """Return a number from JSON. Raises ValueError unless it is an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]}, which is not a whole number from {least} to {most}")
    return value


def named_keys(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...] | None:
    """Return the key counts for a reference; None if there are too many keys."""
    return tuple(sorted(counts.items())) if len(counts) <= NAMED_KEYS else None


@cache
def entry_schema() -> Any:
    """Return the Arrow schema of a table of entries."""
    import pyarrow as pa

    column_key = pa.struct([("column", pa.string()), ("key_id", pa.string()), ("wrapped_dek", pa.binary())])
    texts = ("column", "wrapping_key_id", "master_version")
    material = pa.struct([*((name, pa.string()) for name in texts), ("wrapped_dek", pa.binary())])
    return pa.schema(
        [
            pa.field("path", pa.binary(), nullable=False),  # binary: a name may not be text
            pa.field("file", pa.binary(), nullable=False),
            pa.field("format", pa.string(), nullable=False),
            pa.field("plain_length", pa.int64(), nullable=False),
            pa.field("file_length", pa.int64(), nullable=False),
            pa.field("block_size", pa.int64(), nullable=False),
            pa.field("key_id", pa.string(), nullable=False),
            pa.field("wrapped_dek", pa.binary(), nullable=False),
            pa.field("column_keys", pa.list_(column_key)),
            pa.field("aad_prefix", pa.binary(), nullable=False),
            pa.field("job_id", pa.string(), nullable=False),
            pa.field("set_id", pa.string()),
            pa.field("part", pa.int64()),
            pa.field("parts", pa.int64()),
            pa.field("source", pa.binary(), nullable=False),
            pa.field("stamp", pa.string(), nullable=False),
            pa.field("mode", pa.int64()),
            pa.field("mtime_ns", pa.int64()),
            pa.field(KEY_MATERIAL, pa.list_(material)),
        ]
    )


@cache
def _no_rows() -> Any:
    return entry_schema().empty_table()


def encode_entries(entries: Sequence[FileEntry]) -> bytes:
    """Encode entries as a table, ready to be sealed."""
    import pyarrow as pa

    schema = entry_schema()
    columns = list(zip(*entries, strict=True)) or [()] * len(schema)
    for i in NAMES:
        columns[i] = tuple(map(name_bytes, columns[i]))
    arrays = [arrow_array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return encode_table(pa.table(arrays, schema=schema))


def name_bytes(name: str) -> bytes:
    """Return a name as tables store it: UTF-8; bytes that are not text are kept."""
    return name.encode("utf-8", "surrogateescape")


def bound(path: bytes) -> bytes:
    """Cut a path to the length of a bound, for comparison with bounds."""
    return path[:BOUND_NBYTES]


class Page(NamedTuple):
    """A page of a table, as the index of the table describes it."""

    rows: int
    packed: int  # bytes in the table
    plain: int  # bytes after decompression
    first: bytes  # the path of its first row, cut by `bound`


def encode_table(table: Any) -> bytes:
    """Encode an Arrow table: the length of the index (8 bytes), the index (JSON), and the pages.

    A page is an IPC stream of one record batch, compressed with Zstandard. Arrow's format takes no more memory than it
    has bytes. In Parquet, anyone with a KEK could seal a file of 12 KiB that decodes to gigabytes.
    """
    table = table.combine_chunks()
    if KEY_MATERIAL in table.column_names and table.column(KEY_MATERIAL).null_count == table.num_rows:
        table = table.drop_columns(KEY_MATERIAL)
    pages, parts = [], []
    for begin in range(0, max(1, table.num_rows), PAGE_ENTRIES):
        page = table.slice(begin, PAGE_ENTRIES)
        plain = _stream(page)
        parts.append(_packed(plain))
        first = bound(page.column("path")[0].as_py()) if page.num_rows else b""
        pages.append([page.num_rows, len(parts[-1]), plain.size, base64.b64encode(first).decode()])
    index = json.dumps({"pages": pages}, separators=(",", ":")).encode()
    return b"".join((len(index).to_bytes(8, "little"), index, *parts))


def _stream(page: Any) -> Any:
    """Return an IPC stream of one record batch, as an Arrow buffer."""
    import pyarrow as pa

    (batch,) = page.combine_chunks().to_batches() or [empty_batch(page.schema)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, page.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def _packed(plain: Any) -> bytes:
    import pyarrow as pa

    packed: bytes = pa.Codec("zstd").compress(plain, asbytes=True)
    return packed


def decode_table(data: bytes, where: str, count: int) -> Any:
    """Decode the output of `encode_table` to an Arrow table of `entry_schema`, and check that it has `count` rows."""
    view = memoryview(data)
    ref = TableRef(where, len(data), count, "", b"")
    return Pages(lambda at, size: bytes(view[at : at + size]), len(data), ref).table()


def _bounded(table: Any, where: str) -> Any:
    """Return the table. Raises FormatError if it has keys of too many columns."""
    for name in ("column_keys", KEY_MATERIAL):
        ends = [(chunk.offsets[0].as_py(), chunk.offsets[-1].as_py()) for chunk in table.column(name).chunks]
        if sum(end - begin for begin, end in ends) <= COLUMN_KEYS:
            continue
        raise FormatError(f"{where} is not a table of entries: it has keys of more than {COLUMN_KEYS} columns")
    return table


def _index(read: Read, length: int, where: str, count: int) -> tuple[list[Page], int]:
    """Return the pages of a table of `length` bytes, and the offset of the first page. Every number is checked."""
    try:
        nbytes = int.from_bytes(read(0, 8), "little")
        if not 0 < nbytes <= min(INDEX_NBYTES, length - 8):
            raise ValueError(f"its index would have {nbytes} bytes")
        pages = [
            Page(whole(rows), whole(packed), whole(plain), base64.b64decode(first, validate=True))
            for rows, packed, plain, first in json.loads(read(8, nbytes))["pages"]
        ]
        if not pages:
            raise ValueError("it has no page")
        if (plain := sum(page.plain for page in pages)) > TABLE_NBYTES:
            raise ValueError(f"it would have {plain} bytes, and the limit is {TABLE_NBYTES}")
        if sum(page.packed for page in pages) != length - 8 - nbytes:
            raise ValueError("its pages have other lengths than its index says")
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise FormatError(f"{where} is not a table of entries: {error}") from None
    if (rows := sum(page.rows for page in pages)) != count:
        raise IntegrityError(f"{where} has {rows} entries, not {count} as its reference says")
    return pages, 8 + nbytes


def _decode_page(data: Any, page: Page, where: str) -> Any:
    """Decode a page to an Arrow table, and check all values."""
    return _page_table(_page_batch(data, page, where), where)


def _page_batch(data: Any, page: Page, where: str) -> Any:
    """Decode a page to an Arrow record batch with the columns of a table, and check the paths only."""
    import pyarrow as pa

    schema = entry_schema()
    try:
        plain = pa.Codec("zstd").decompress(pa.py_buffer(data), decompressed_size=page.plain)
        messages = pa.ipc.MessageReader.open_stream(plain)
        first, second = messages.read_next_message(), messages.read_next_message()
        if (first.type, second.type) != ("schema", "record batch") or _has_compression(second.metadata.to_pybytes()):
            raise ValueError("it is not a plain record batch")
        found = pa.ipc.read_schema(first)
        if any(
            found.field(field.name).type != field.type
            for field in schema
            if field.name != KEY_MATERIAL or KEY_MATERIAL in found.names
        ):
            raise ValueError("its columns have other types")
        batch = pa.ipc.read_record_batch(second, found)
        if batch.num_rows == page.rows:
            batch.column("path").validate(full=True)
            return batch
    except (pa.ArrowException, KeyError, OSError, StopIteration, ValueError, struct.error) as error:
        raise FormatError(f"{where} is not a table of entries: {error}") from None
    raise IntegrityError(f"{where} has a page of {batch.num_rows} entries, not {page.rows} as its index says")


def _page_table(batch: Any, where: str) -> Any:
    import pyarrow as pa

    schema = entry_schema()
    try:
        table = pa.Table.from_batches([batch])
        if KEY_MATERIAL not in table.column_names:
            field = schema.field(KEY_MATERIAL)
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        table = table.select(schema.names)
        table.validate(full=True)
        if empty := [field.name for field in schema if not field.nullable and table.column(field.name).null_count]:
            raise ValueError(f"its column {empty[0]!r} lacks values")
        return _checked(pa.Table.from_arrays(table.columns, schema=schema))
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise FormatError(f"{where} is not a table of entries: {error}") from None


def _has_compression(metadata: bytes) -> bool:
    """Return whether the metadata of a record batch (a flatbuffer) declares compressed buffers.

    Arrow would allocate whatever size such buffers declare.
    """

    def field(table: int, number: int) -> int:
        """Return the offset of a field of the table; 0 without the field."""
        vtable = table - int(struct.unpack_from("<i", metadata, table)[0])
        at = 4 + 2 * number
        size, offset = struct.unpack_from("<H", metadata, vtable)[0], 0
        if at < size:
            offset = struct.unpack_from("<H", metadata, vtable + at)[0]
        return table + offset if offset else 0

    def table_at(at: int) -> int:
        return at + int(struct.unpack_from("<I", metadata, at)[0])

    batch = field(table_at(0), 2)  # Message.header
    return batch == 0 or field(table_at(batch), 3) != 0  # RecordBatch.compression


def _checked(table: Any) -> Any:
    """Return the table. Raises ValueError if a number is out of its bounds."""
    for name, most in NUMBERS.items():
        numbers = [number for chunk in table.column(name).chunks for number in ends(chunk)]
        if numbers and not 0 <= min(numbers) <= max(numbers) <= most:
            raise ValueError(f"a {name} is from 0 to {most}, not from {min(numbers)} to {max(numbers)}")
    return table


def decode_entries(table: Any, where: str) -> list[FileEntry]:
    """Return the entries of a decoded table."""
    import pyarrow as pa

    if not table.num_rows:
        return []
    known: dict[Any, Any] = {}  # shares equal texts: most columns repeat one value
    columns = [
        [known.setdefault(v, v) for v in c.to_pylist()] if c.type == pa.string() else c.to_pylist()
        for c in table.columns
    ]
    try:
        for i in NAMES:
            names = [name.decode("utf-8", "surrogateescape") for name in columns[i]]
            columns[i] = [known.setdefault(name, name) for name in names]
    except AttributeError:
        raise FormatError(f"{where} has an entry without a name") from None
    for name in ("column_keys", KEY_MATERIAL):
        i = FileEntry._fields.index(name)
        columns[i] = [None if value is None else tuple(value) for value in columns[i]]
    return [FileEntry(*row) for row in zip(*columns, strict=True)]


def chunks(entries: Iterable[FileEntry]) -> Iterator[list[FileEntry]]:
    """Split entries into parts of one manifest each. Raises PolicyError for an entry that is too large."""
    chunk: list[FileEntry] = []
    nbytes = 0
    for entry in entries:
        size = ENTRY_NBYTES + len(entry.path) + len(entry.file) + len(entry.source) + len(entry.wrapped_dek)
        if entry.column_keys:
            size += sum(len(key["column"]) + len(key["wrapped_dek"]) for key in entry.column_keys)
        for one in entry.key_material or ():
            size += len(one["column"]) + len(one["wrapping_key_id"]) + len(one["wrapped_dek"])
        if size > TABLE_NBYTES // 2:
            raise PolicyError(f"the keys of {entry.path!r} have {size} bytes: group its columns under fewer keys")
        if chunk and (len(chunk) == MANIFEST_ENTRIES or nbytes + size > MANIFEST_NBYTES):
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(entry)
        nbytes += size
    if chunk:
        yield chunk


def seal_table(data: bytes, dek: bytes, dataset_id: str, path: str) -> bytes:
    """Encrypt a table to an AGS1 stream that is bound to its dataset and path."""
    return AgsCodec(dek, aad_prefix=binding(dataset_id, "table", path), block_size=BLOCK_NBYTES, threads=1).encrypt(
        data
    )


def open_pages(store: Store, dataset_id: str, ref: TableRef, envelope: Envelope) -> Pages:
    """Read a table whole. Its pages are decoded when lookups need them."""
    plain = memoryview(_read_whole(store, dataset_id, ref, envelope))
    return Pages(lambda at, size: bytes(plain[at : at + size]), len(plain), ref)


def open_table(store: Store, dataset_id: str, ref: TableRef, envelope: Envelope) -> Any:
    """Read a table as an Arrow table. Raises IntegrityError if it is missing or changed."""
    return decode_table(_read_whole(store, dataset_id, ref, envelope), ref.path, ref.entries)


def find_rows(
    store: Store,
    dataset_id: str,
    ref: TableRef,
    envelope: Envelope,
    paths: Collection[bytes],
    folders: Collection[bytes] = (),
) -> Any:
    """Find rows of a manifest, as an Arrow table: those with given paths, and the first row in each given folder.

    Of a large table, only the index and the pages that may hold the rows are read.

    Args:
        store: The folder of the dataset.
        dataset_id: The id of the dataset.
        ref: The reference to the manifest.
        envelope: The keys that open it.
        paths: Paths, as tables store them.
        folders: Paths of folders, with a "/" at the end.

    Raises:
        IntegrityError: The manifest is missing or changed.
    """
    import pyarrow as pa

    if ref.length <= WHOLE_NBYTES:
        return open_pages(store, dataset_id, ref, envelope).take(paths, folders)
    dek = _dek(dataset_id, ref, envelope)
    source: Any = None
    try:
        source = store.open_seekable(ref.path)
        with AgsReader(
            source,
            dek,
            length=ref.length,
            aad_prefix=binding(dataset_id, "table", ref.path),
            block_size=BLOCK_NBYTES,
            threads=1,
        ) as reader:
            return Pages(reader.read_at, reader.length, ref).take(paths, folders)
    except FileNotFoundError:
        raise IntegrityError(f"{ref.path} is missing, but a version or plan of the dataset names it") from None
    except NotAFileError:
        raise IntegrityError(
            f"{ref.path} is not a regular file, but a version or plan of the dataset names it"
        ) from None
    except (IntegrityError, FormatError, pa.ArrowException) as error:
        raise IntegrityError(f"{ref.path} is not what was written: {error}") from None
    finally:
        if hasattr(source, "close"):
            source.close()


class Pages:
    """The pages of a table, decoded as a lookup needs them."""

    def __init__(self, read: Read, length: int, ref: TableRef) -> None:
        self._read = read
        self._where = ref.path
        self._pages, at = _index(read, length, ref.path, ref.entries)
        self._offsets = list(accumulate((page.packed for page in self._pages), initial=at))
        self._firsts = [page.first for page in self._pages]
        self._batches: dict[int, tuple[Any, list[bytes]]] = {}
        self._tables: dict[int, Any] = {}  # pages with checked values, in the buffers of the batches
        self.nbytes = sum(page.plain for page in self._pages)  # after decoding of all pages

    def _names(self, i: int) -> list[bytes]:
        """Return the paths of a page."""
        if i not in self._batches:
            page = self._pages[i]
            batch = _page_batch(self._read(self._offsets[i], page.packed), page, self._where)
            self._batches[i] = batch, batch.column("path").to_pylist()
        return self._batches[i][1]

    def find(self, name: bytes) -> tuple[int, int] | None:
        """The page and the row of the first path that is not before `name`; None if all are before it."""
        # Pages that begin with one long prefix look alike: the search begins before them.
        for i in range(max(0, bisect_left(self._firsts, bound(name)) - 1), len(self._pages)):
            names = self._names(i)
            if (row := bisect_left(names, name)) < len(names):
                return i, row
        return None

    def table(self) -> Any:
        """Return all rows as an Arrow table."""
        import pyarrow as pa

        pages = enumerate(self._pages)
        decoded = [_decode_page(self._read(self._offsets[i], page.packed), page, self._where) for i, page in pages]
        return _bounded(pa.concat_tables(decoded).combine_chunks(), self._where)

    def take(self, paths: Collection[bytes], folders: Collection[bytes]) -> Any:
        """Return the rows with these paths, and the first row in each of these folders."""
        found: dict[int, set[int]] = {}
        for wanted, matches in ((sorted(paths), bytes.__eq__), (sorted(folders), bytes.startswith)):
            for name in wanted:
                if (place := self.find(name)) and matches(self._names(place[0])[place[1]], name):
                    found.setdefault(place[0], set()).add(place[1])
        return self._rows({i: sorted(rows) for i, rows in found.items()})

    def in_folder(self, folder: bytes, deep: bool) -> tuple[set[bytes], Any]:
        """Return the names of the folders in a folder, and the rows of the files in the folder.

        Args:
            folder: The path of the folder, with a "/" at the end; empty: the whole table.
            deep: Return the rows of all files below the folder, and no names of folders.
        """
        inner: set[bytes] = set()
        found: dict[int, list[int]] = {}
        name = folder
        while place := self.find(name):
            i, row = place
            path = self._names(i)[row]
            if not path.startswith(folder):
                break
            end = -1 if deep else path.find(b"/", len(folder))
            if end >= 0:
                inner.add(path[len(folder) : end])
                name = path[:end] + b"0"  # the byte after "/": behind all that is in the inner folder
                continue
            rows = self._run(i, row, folder, deep)
            found.setdefault(i, []).extend(rows)
            name = self._names(i)[rows[-1]] + b"\0"
        return inner, self._rows(found)

    def _run(self, i: int, row: int, folder: bytes, deep: bool) -> range:
        """Return the rows of a page, from `row` on, that are files of a folder."""
        names, skip = self._names(i), len(folder)
        for end in range(row, len(names)):
            if not names[end].startswith(folder) or not (deep or names[end].find(b"/", skip) < 0):
                return range(row, end)
        return range(row, len(names))

    def _rows(self, found: Mapping[int, Sequence[int]]) -> Any:
        """Return some rows, by page and in ascending order, as an Arrow table."""
        import pyarrow as pa

        if not found:
            return _no_rows()
        parts = []
        for i, rows in found.items():
            page = self._checked_page(i)
            run = rows[-1] - rows[0] + 1 == len(rows)
            parts.append(page.slice(rows[0], len(rows)) if run else page.take(arrow_array(rows, pa.int64())))
        return _bounded(pa.concat_tables(parts) if len(parts) > 1 else parts[0], self._where)

    def _checked_page(self, i: int) -> Any:
        """Return a page as an Arrow table. Its values are checked once."""
        if i not in self._tables:
            self._names(i)
            self._tables[i] = _page_table(self._batches[i][0], self._where)
        return self._tables[i]


def _dek(dataset_id: str, ref: TableRef, envelope: Envelope) -> bytes:
    check_path(ref.path)
    if ref.length > TABLE_NBYTES:
        raise FormatError(f"{ref.path} would have {ref.length} bytes, and the limit of a table is {TABLE_NBYTES}")
    return envelope.unwrap(ref.key_id, ref.wrapped_key, binding(dataset_id, "dek", ref.path))


def _read_whole(store: Store, dataset_id: str, ref: TableRef, envelope: Envelope) -> bytes:
    """Return the plaintext of a table."""
    dek = _dek(dataset_id, ref, envelope)
    try:
        data = store.read_small(ref.path, ref.length)
    except FileNotFoundError:
        raise IntegrityError(f"{ref.path} is missing, but a version or plan of the dataset names it") from None
    except NotAFileError:
        raise IntegrityError(
            f"{ref.path} is not a regular file, but a version or plan of the dataset names it"
        ) from None
    except FormatError as error:  # the object is longer
        raise IntegrityError(str(error)) from None
    if len(data) != ref.length:
        raise IntegrityError(f"{ref.path} has {len(data)} bytes, its version says {ref.length}")
    prefix = binding(dataset_id, "table", ref.path)
    try:
        with AgsReader(data, dek, length=ref.length, aad_prefix=prefix, block_size=BLOCK_NBYTES, threads=1) as reader:
            return reader.read()
    except (IntegrityError, FormatError) as error:
        raise IntegrityError(f"{ref.path} is not what was written: {error}") from None
