"""Tables of entries, as sealed objects: encoding, sealing, opening, and references to them."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, MAX_BLOCK_SIZE, AgsCodec
from ags_fast.dataset.entries import MAX_FILES, FileEntry
from ags_fast.dataset.names import check_path
from ags_fast.errors import FormatError, IntegrityError, PolicyError
from ags_fast.fs import NotAFileError, Store
from ags_fast.keys.envelope import Envelope, binding
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


MANIFEST_ENTRIES = 10_000  # at most, in one manifest or one part of a plan
MANIFEST_NBYTES = 8 << 20  # of encoded entries: key metadata may be large
TABLE_NBYTES = 32 << 20  # of a table, sealed or not: a bound for what a lie can allocate
COLUMN_KEYS = 1 << 18  # in one table
ENTRY_NBYTES = 200  # of an entry, without its names and wrapped keys
TABLE_DEK_NBYTES = 16
NUMBERS = {  # in a table, and the largest that each can be
    "plain_length": (1 << 63) - 1,
    "file_length": (1 << 63) - 1,
    "block_size": MAX_BLOCK_SIZE,
    "part": MAX_FILES,
    "parts": MAX_FILES,
    "mode": 0o777,
}
NAMED_KEYS = 16  # that the reference to a table tells of; if it has more, whoever asks has to open it
NAMES = [FileEntry._fields.index(field) for field in ("path", "file", "source")]  # UTF-8, unless they are no text


class TableRef(NamedTuple):
    """Where entries are: a table in an AGS1 stream, under a key of its own."""

    path: str
    length: int  # bytes
    entries: int
    key_id: str
    wrapped_key: bytes
    keys: tuple[tuple[str, int], ...] | None = None  # the keys that wrap the entries' DEKs, and how many; None: open it

    def to_json(self) -> dict[str, Any]:
        value = {**self._asdict(), "wrapped_key": base64.b64encode(self.wrapped_key).decode()}
        return {name: field for name, field in value.items() if field is not None} | (
            {} if self.keys is None else {"keys": dict(self.keys)}
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableRef:
        try:
            return cls(
                str(value["path"]),
                whole(value["length"], TABLE_NBYTES),
                whole(value["entries"], MANIFEST_ENTRIES),
                str(value["key_id"]),
                base64.b64decode(value["wrapped_key"], validate=True),
                tuple((str(k), whole(n)) for k, n in value["keys"].items()) if "keys" in value else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a reference to a table lacks or garbles {error}") from None


def whole(value: Any, most: int = (1 << 63) - 1, least: int = 0) -> int:
    """A number from JSON, if it is a whole one in these bounds. ValueError otherwise."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]}, which is no whole number from {least} to {most}")
    return value


def named_keys(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...] | None:
    """What the reference to a table says of them."""
    return tuple(sorted(counts.items())) if len(counts) <= NAMED_KEYS else None


def entry_schema() -> Any:
    import pyarrow as pa

    column_key = pa.struct([("column", pa.string()), ("key_id", pa.string()), ("wrapped_dek", pa.binary())])
    return pa.schema(
        [
            pa.field("path", pa.binary(), nullable=False),  # a name need not be text
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
        ]
    )


def encode_entries(entries: Sequence[FileEntry]) -> bytes:
    """A table of them, as it is sealed."""
    import pyarrow as pa

    schema = entry_schema()
    columns = list(zip(*entries, strict=True)) or [()] * len(schema)
    for i in NAMES:
        columns[i] = tuple(name.encode("utf-8", "surrogateescape") for name in columns[i])
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return encode_table(pa.table(arrays, schema=schema))


def encode_table(table: Any) -> bytes:
    """An Arrow table as it is sealed: how long its IPC stream of one record batch is (8 bytes), and that in Zstandard.

    Arrow's format, and not Parquet, for nothing in it takes more memory than it has bytes: who has a KEK could seal a
    Parquet file of 12 KiB that decodes to gigabytes.
    """
    import pyarrow as pa

    (batch,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_batch(batch)
    plain = sink.getvalue()
    nbytes: int = plain.size
    packed: bytes = pa.Codec("zstd").compress(plain, asbytes=True)
    return nbytes.to_bytes(8, "little") + packed


def decode_table(data: bytes, where: str, count: int) -> Any:
    """What `encode_table` returned, as an Arrow table of `entry_schema`, which has `count` rows."""
    import pyarrow as pa

    schema = entry_schema()
    try:
        nbytes = int.from_bytes(data[:8], "little")
        if nbytes > TABLE_NBYTES:
            raise ValueError(f"it would have {nbytes} bytes, and {TABLE_NBYTES} are the most")
        plain = pa.Codec("zstd").decompress(pa.py_buffer(data)[8:], decompressed_size=nbytes)
        messages = pa.ipc.MessageReader.open_stream(plain)
        first, second = messages.read_next_message(), messages.read_next_message()
        if (first.type, second.type) != ("schema", "record batch") or _has_compression(second.metadata.to_pybytes()):
            raise ValueError("it is no plain record batch")
        found = pa.ipc.read_schema(first)
        if any(found.field(field.name).type != field.type for field in schema):
            raise ValueError("its columns have other types")
        batch = pa.ipc.read_record_batch(second, found)
        if batch.num_rows == count:
            table = pa.Table.from_batches([batch]).select(schema.names)
            table.validate(full=True)
            return _checked(table.cast(schema))
    except (pa.ArrowException, KeyError, OSError, StopIteration, ValueError, struct.error) as error:
        raise FormatError(f"{where} is no table of entries: {error}") from None
    raise IntegrityError(f"{where} has {batch.num_rows} entries, not the {count} that there should be")


def _has_compression(metadata: bytes) -> bool:
    """Whether the metadata of a record batch (a flatbuffer) says that its buffers are compressed: what is in them would
    have to be made room for as they say."""

    def field(table: int, number: int) -> int:
        """Where the table has this field; 0: it has none."""
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
    """The table, if its numbers are some that files can have. ValueError otherwise."""
    import pyarrow.compute as pc

    for name, most in NUMBERS.items():
        span = pc.min_max(table.column(name)).as_py()
        if span["min"] is not None and not 0 <= span["min"] <= span["max"] <= most:
            raise ValueError(f"a {name} is from 0 to {most}, not from {span['min']} to {span['max']}")
    column_keys = table.column("column_keys")
    if sum(len(chunk.flatten()) for chunk in column_keys.chunks) > COLUMN_KEYS:
        raise ValueError(f"it has keys of more than {COLUMN_KEYS} columns")
    return table


def decode_entries(table: Any, where: str, only: str | None = None) -> list[FileEntry]:
    """The entries of a table; or the one of the path `only`, if it is there."""
    import pyarrow as pa

    if only is not None:
        names = table.column("path").to_pylist()
        name = only.encode("utf-8", "surrogateescape")
        table = table.slice(names.index(name), 1) if name in names else table.slice(0, 0)
    known: dict[Any, Any] = {}  # to have equal texts once: most columns say the same in every row
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
    keys = FileEntry._fields.index("column_keys")
    columns[keys] = [None if value is None else tuple(value) for value in columns[keys]]
    return [FileEntry(*row) for row in zip(*columns, strict=True)]


def chunks(entries: Iterable[FileEntry]) -> Iterator[list[FileEntry]]:
    """Cut into what one manifest holds."""
    chunk: list[FileEntry] = []
    nbytes = 0
    for entry in entries:
        size = ENTRY_NBYTES + len(entry.path) + len(entry.file) + len(entry.source) + len(entry.wrapped_dek)
        if entry.column_keys:
            size += sum(len(key["column"]) + len(key["wrapped_dek"]) for key in entry.column_keys)
        if size > TABLE_NBYTES // 2:
            raise PolicyError(f"the keys of {entry.path!r} have {size} bytes: group its columns under fewer of them")
        if chunk and (len(chunk) == MANIFEST_ENTRIES or nbytes + size > MANIFEST_NBYTES):
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(entry)
        nbytes += size
    if chunk:
        yield chunk


def seal_table(data: bytes, dek: bytes, dataset_id: str, path: str) -> bytes:
    """A table as it is stored: an AGS1 stream that is bound to its dataset and path."""
    return AgsCodec(dek, aad_prefix=binding(dataset_id, "table", path), threads=1).encrypt(data)


def open_table(store: Store, dataset_id: str, ref: TableRef, envelope: Envelope) -> Any:
    """What a table holds, as an Arrow table. IntegrityError if it is missing, or not what was written."""
    check_path(ref.path)
    if ref.length > TABLE_NBYTES:
        raise FormatError(f"{ref.path} would have {ref.length} bytes, and {TABLE_NBYTES} are the most of a table")
    dek = envelope.unwrap(ref.key_id, ref.wrapped_key, binding(dataset_id, "dek", ref.path))
    try:
        data = store.read(ref.path, ref.length)
    except FileNotFoundError:
        raise IntegrityError(f"{ref.path} is missing, but a version or plan of the dataset names it") from None
    except NotAFileError:
        raise IntegrityError(f"{ref.path} is no regular file, but a version or plan of the dataset names it") from None
    except FormatError as error:  # it is longer
        raise IntegrityError(str(error)) from None
    if len(data) != ref.length:
        raise IntegrityError(f"{ref.path} has {len(data)} bytes, its version says {ref.length}")
    prefix = binding(dataset_id, "table", ref.path)
    try:
        with AgsReader(
            data, dek, length=ref.length, aad_prefix=prefix, block_size=DEFAULT_BLOCK_SIZE, threads=1
        ) as reader:
            plain = reader.read()
    except (IntegrityError, FormatError) as error:
        raise IntegrityError(f"{ref.path} is not what was written: {error}") from None
    return decode_table(plain, ref.path, ref.entries)
