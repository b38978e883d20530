"""An encrypted dataset: its versions, and the manifests that say which files a version has and how to open them.

The layout and every byte of it are in docs/dataset-format.md. Nothing is ever changed in place: a new version is a new
numbered object, created exclusively, and that creation is the commit.
"""

from __future__ import annotations

import base64
import difflib
import fnmatch
import hashlib
import json
import os
import re
import struct
import time
import uuid
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, MAX_BLOCK_SIZE, AgsCodec, encrypted_length
from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS, NotAFileError, Store
from ags_fast.jobs.policy import Policy
from ags_fast.keys.chain import Chain, ChainObjects, Pin, sha256
from ags_fast.keys.envelope import (
    DOCUMENT_NBYTES,
    LATEST_MS,
    REMOVED,
    Document,
    Envelope,
    KeyEntry,
    UnknownKeyError,
    binding,
    check_wrap,
    document_nbytes,
    new_kek,
    seal_document,
    taken,
)
from ags_fast.keys.resolver import COLUMNS, DatasetKeyStore, Entries, for_columns, open_key_store
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.resolver import KeyResolver

__all__ = ["Dataset", "FileEntry", "TableRef", "Version"]

HIDDEN = "_ags/"
VERSIONS = "_ags/versions/"
MANIFESTS = "_ags/manifests/"
PLANS = "_ags/plans/"
CHAIN = "_ags/chain/"
MANIFEST_ENTRIES = 10_000  # at most, in one manifest or one part of a plan
MANIFEST_NBYTES = 8 << 20  # of encoded entries: key metadata may be large
TABLE_NBYTES = 32 << 20  # of a table, sealed or not: a bound for what a lie can allocate
COLUMN_KEYS = 1 << 18  # in one table
ENTRY_NBYTES = 200  # of an entry, without its names and wrapped keys
NAME_NBYTES = 255  # the longest name that file systems take
TABLE_DEK_NBYTES = 16
MAX_FILES = 1 << 40  # that a job could number
GRACE_MS = 7 * 86_400_000  # a writer that takes longer is a mistake
NUMBERS = {  # in a table, and the largest that each can be
    "plain_length": (1 << 63) - 1,
    "file_length": (1 << 63) - 1,
    "block_size": MAX_BLOCK_SIZE,
    "part": MAX_FILES,
    "parts": MAX_FILES,
    "mode": 0o777,
}
NO_NAMES = frozenset(("", ".", ".."))
PARENTS = 4  # of the last versions, that a writer compares with what is there
SLACK_USES = 64  # of a key, for the documents and tables of a job
NEAR_NAMES = 10_000  # files, whose names are compared with one that is not there
NAMED_KEYS = 16  # that the reference to a table tells of; if it has more, whoever asks has to open it

# Properties of KEKs.
SCOPE = "scope"  # the files that it is for; without it, it may seal documents and tables, too
SUCCESSOR = "successor"  # of a retired one: the key that took its place
MOVED_FROM = "moved-from"  # JSON: the master keys that it, and what it took the place of, were under before
RETIRES_MS = "retires-ms"  # of a retired one: until then, a writer may come that knows no other


class FileEntry(NamedTuple):
    """One file of a dataset, as a manifest keeps it, or as a plan does before it exists."""

    path: str  # what it is called in the dataset, as in the tree it came from
    file: str  # the object that holds it
    format: str  # "ags1" or "parquet"
    plain_length: int  # bytes; what the source had
    file_length: int  # bytes of the object: the trusted length; of Parquet 0 in a plan, for nobody knows it yet
    block_size: int  # bytes; of Parquet 0
    key_id: str  # the key that wraps the DEK
    wrapped_dek: bytes  # of Parquet the footer key
    column_keys: tuple[dict[str, Any], ...] | None  # Parquet: {column, key_id, wrapped_dek} of each column of its own
    aad_prefix: bytes
    job_id: str  # the job that wrote it
    set_id: str | None  # the job that numbered it, with others, by an aad_prefix template
    part: int | None  # its number there
    parts: int | None  # how many that job numbered
    source: str  # the path it was made from, in the source or (rekey) in the dataset
    stamp: str  # which content of the source that was: modification time or etag
    mode: int | None = None  # permission bits of the source, of 0o777; None where it had none, as in an object store
    mtime_ns: int | None = None  # when the source was last changed, ns since the epoch; None if nobody knows

    def key_ids(self) -> set[str]:
        """The keys that wrap its DEKs."""
        return {self.key_id, *(key["key_id"] for key in self.column_keys or ())}

    def wraps(self, dataset_id: str) -> list[tuple[str, bytes, bytes]]:
        """Key id, wrapped DEK and binding: of the file first, then of each of its columns."""
        columns = [(k["key_id"], k["wrapped_dek"], _column_use(k["column"])) for k in self.column_keys or ()]
        return [
            (key_id, wrapped, binding(dataset_id, use, self.file))
            for key_id, wrapped, use in ((self.key_id, self.wrapped_dek, "dek"), *columns)
        ]

    def with_wraps(self, wraps: Sequence[tuple[str, bytes]]) -> FileEntry:
        """The same with these key ids and wrapped DEKs, in the order of `wraps`."""
        columns = self.column_keys
        if columns:
            columns = tuple(
                {**key, "key_id": key_id, "wrapped_dek": wrapped}
                for key, (key_id, wrapped) in zip(columns, wraps[1:], strict=True)
            )
        return self._replace(key_id=wraps[0][0], wrapped_dek=wraps[0][1], column_keys=columns)


def _column_use(column: str) -> str:
    """What a column's DEK is for, as its binding has it."""
    return f"column:{column}"


def column_binding(dataset_id: str, column: str, file: bytes) -> bytes:
    """Of a column's DEK, with the file's name as tables have it."""
    return binding(dataset_id, _column_use(column), file.decode("utf-8", "surrogateescape"))


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


class KeysAt(NamedTuple):
    """A version of the key store, as a version of the dataset names it."""

    version: int
    sha256: str | None  # hex; None: the store has no digests, so that only the number can be compared

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KeysAt:
        digest = value["sha256"]
        return cls(whole(value["version"]), None if digest is None else str(digest))


class Version(NamedTuple):
    """What ``_ags/versions/00000001.json`` says."""

    number: int
    parent: int | None
    operation: str
    job_id: str
    time_ms: int
    files: int
    plain_length: int  # bytes of all its files, decrypted
    manifests: tuple[TableRef, ...]
    policy: Policy = Policy()
    key_id: str = ""  # that its document is sealed with
    chain: Chain = Chain(1)  # the digests of the versions before it
    keys: KeysAt = KeysAt(0, None)  # the version of the key store that it was made on
    sha256: str = ""  # hex, of its document as it is stored

    @property
    def pin(self) -> str:
        """What to keep of it outside of the storage: see `ags_fast.jobs.JobResult.pin`."""
        return str(Pin(self.number, self.sha256))


class Want(NamedTuple):
    """A kind of key."""

    wrapping_key_id: str  # the master key that it is under
    double_wrap: bool = True
    columns: bool = False  # it wraps data keys of Parquet columns, and nothing else
    scope: str | None = None  # the files that it is for; None: the dataset's own, which may seal documents and tables

    @classmethod
    def of(cls, entry: KeyEntry) -> Want:
        """The kind that a key is of."""
        return cls(entry.wrapping_key_id, entry.double_wrap, for_columns(entry), entry.properties.get(SCOPE))

    def new_kek(self, kms: KmsClient) -> KeyEntry:
        """A key of this kind, which the KMS was seen to unwrap: two calls of the KMS, in single wrap none."""
        properties = (COLUMNS if self.columns else {}) | ({} if self.scope is None else {SCOPE: self.scope})
        made = new_kek(kms, self.wrapping_key_id, double_wrap=self.double_wrap, properties=properties)
        if made.double_wrap:
            check_wrap(kms, made)
        return made


class Uses(NamedTuple):
    """How often a job may use a key."""

    data_keys: int = 0  # to wrap them
    spare: int = 0  # for documents and tables, and data keys that are wrapped again


def wrapped_by(entries: Iterable[FileEntry]) -> Counter[str]:
    """How many DEKs of these files each key wraps."""
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.key_id] += 1
        counts.update(key["key_id"] for key in entry.column_keys or ())
    return counts


def named_keys(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...] | None:
    """What the reference to a table says of them."""
    return tuple(sorted(counts.items())) if len(counts) <= NAMED_KEYS else None


def numbered(number: int) -> str:
    return f"{number:08d}.json"


def object_name(path: str, *marks: object, format: str = "ags1") -> str:
    """The object that holds `path`: named as it is, and by the marks. What no file system would take is shortened.

    An AGS1 stream is named ``x.avro.mark.ags``. A Parquet file keeps its name and its suffix: ``x.mark.parquet``.
    """
    folder, slash, name = path.rpartition("/")
    suffix = ".ags"
    if format == "parquet":
        stem, dot, last = name.rpartition(".")
        name, suffix = (stem, dot + last) if stem and len(last) < 16 else (name, "")
    tail = "".join(f".{mark}" for mark in marks) + suffix
    raw = name.encode("utf-8", "surrogateescape")
    more = len(tail.encode("utf-8", "surrogateescape"))
    if len(raw) + more > NAME_NBYTES:
        digest = hashlib.sha256(raw).hexdigest()[:16]
        name = f"{raw[: NAME_NBYTES - more - len(digest) - 1].decode(errors='ignore')}.{digest}"
    return folder + slash + name + tail


def manifest_name(job_id: str) -> str:
    """The path of a new manifest, which says whose it is: what a job leaves that dies is told by that."""
    return f"{MANIFESTS}{job_id}-{uuid.uuid4()}.arrow.ags"


def check_path(path: str) -> str:
    """A file's name in a dataset: relative, and nowhere else. What a manifest says is checked before it is followed."""
    if "\0" in path or not NO_NAMES.isdisjoint(path.split("/")):
        raise PolicyError(f"{path!r} is no path inside a dataset")
    return path


# ----------------------------------------------------------------------------------------------------- entries, tables


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


def check_lengths(entries: Iterable[FileEntry]) -> None:
    """IntegrityError if a file cannot have the length and what is said to be in it."""
    for entry in entries:
        if entry.format == "ags1" and entry.file_length != _stream_length(entry):
            raise IntegrityError(
                f"{entry.file} is said to have {entry.file_length} bytes, and to hold {entry.plain_length} in blocks "
                f"of {entry.block_size}: that cannot be"
            )


def _stream_length(entry: FileEntry) -> int | None:
    """The bytes of the AGS1 stream that an entry tells of; None if there can be none."""
    try:
        return encrypted_length(entry.plain_length, entry.block_size)
    except ValueError:
        return None


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


def left_masters(entry: KeyEntry) -> list[str]:
    """The master keys that it, and those that it took the place of, were under."""
    try:
        return [str(key_id) for key_id in json.loads(entry.properties.get(MOVED_FROM, "[]"))]
    except (TypeError, ValueError):
        raise FormatError(f"the key {entry.key_id!r} has an impossible {MOVED_FROM}") from None


def moved(entry: KeyEntry, old: KeyEntry) -> KeyEntry:
    """A key that takes the place of `old`, and says which master keys were left on the way."""
    left = {*left_masters(entry), *left_masters(old), old.wrapping_key_id} - {entry.wrapping_key_id}
    properties = {name: text for name, text in entry.properties.items() if name != MOVED_FROM}
    return entry.replace(properties=properties | ({MOVED_FROM: json.dumps(sorted(left))} if left else {}))


def _master_now(wrapping_key_id: str, active: Iterable[KeyEntry]) -> str:
    """The master key itself, or if no active key is under it any more, the one to which a dataset has left it."""
    active = list(active)
    if any(entry.wrapping_key_id == wrapping_key_id for entry in active):
        return wrapping_key_id
    moved_to = (entry.wrapping_key_id for entry in active if wrapping_key_id in left_masters(entry))
    return next(moved_to, wrapping_key_id)


def retires_ms(entry: KeyEntry) -> int:
    """Until when a retired key stays, in milliseconds since the epoch."""
    text = entry.properties.get(RETIRES_MS, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise FormatError(f"the key {entry.key_id!r} has an impossible {RETIRES_MS}")
    return int(text)


def retired(entry: KeyEntry, successor: str | None, grace_ms: int) -> KeyEntry:
    """A key that opens, and no longer wraps. Until the grace is over, writers may come that know no other."""
    properties = {**entry.properties, RETIRES_MS: str(time.time_ns() // 1_000_000 + grace_ms)}
    if successor is not None:
        properties[SUCCESSOR] = successor
    return entry.replace(state="retired", properties=properties)


def chosen_files(entries: Sequence[FileEntry], paths: str | Sequence[str]) -> list[FileEntry]:
    """Those whose path matches one of the patterns. FileNotFoundError if a pattern matches none: it may be a typo."""
    patterns = [paths] if isinstance(paths, str) else list(paths)
    chosen: dict[str, FileEntry] = {}
    for pattern in patterns:
        found = [entry for entry in entries if fnmatch.fnmatchcase(entry.path, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, [entry.path for entry in entries[:NEAR_NAMES]], 1, 0.5)
            if any(entry.path.startswith(pattern.rstrip("/") + "/") for entry in entries):
                near = [pattern.rstrip("/") + "/*"]
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise FileNotFoundError(f"no file of the dataset matches {pattern!r}{hint}")
        chosen |= {entry.path: entry for entry in found}
    if not patterns:
        raise ValueError("paths is an empty list, which matches no file: None takes all of them")
    return [entry for entry in entries if entry.path in chosen]


# ------------------------------------------------------------------------------------------------------------- dataset


class Dataset:
    """An encrypted dataset, opened with the caller's KMS. Holds no key: those stay in the process-wide cache.

    The newest version that was read is remembered: each version that is read after it must descend from it, or be an
    ancestor of it, and the first one from the caller's pin. A version that is made names the digest of exactly the
    version that was checked. So nobody can exchange the history between a check and a commit.
    """

    def __init__(
        self, store: Store, kms: KmsClient, keys: KeyResolver, pin: str | None = None, min_version: int | None = None
    ) -> None:
        self.store = store
        self._kms = kms
        self.keys = keys
        self._pin = None if pin is None else Pin.parse(pin)
        self._min_version = min_version or 0
        self._head: Version | None = None  # the newest that was read
        self._fits = ""  # the digest of a version whose last ancestors were seen to be there as it names them
        self._chain_objects = ChainObjects(store, CHAIN)
        self.proven: set[str] = set()  # keys in single wrap, as `Envelope` has it

    @classmethod
    def open(
        cls,
        url: Any,
        kms: KmsClient,
        storage_options: Mapping[str, Any] | None = None,
        key_store: Any = None,
        *,
        pin: str | None = None,
        min_version: int | None = None,
    ) -> Dataset:
        """FileNotFoundError if there is no dataset at `url`. key_store: where its keys are, if not in the dataset.

        pin: the newest version must be the pinned one or descend from it, now (IntegrityError), and whenever it is
        read again. min_version: its number must be at least this (PolicyError).
        """
        store = url if isinstance(url, Store) else Store(url, storage_options)
        keys = open_key_store(key_store, kms, store=store, storage_options=storage_options)
        opened = cls(store, kms, keys, pin, min_version)
        if not opened._has_keys():
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no {HIDDEN}keys")
        if pin is not None or min_version:
            opened.current()
        return opened

    @classmethod
    def open_or_create(cls, store: Store, kms: KmsClient, wrapping_key_id: str, key_store: Any = None) -> Dataset:
        while True:
            opened = cls(store, kms, open_key_store(key_store, kms, store=store))
            if opened._has_keys():
                if key_store is not None and opened._is_new() and any(key.uses for key in opened.keys.list()):
                    raise PolicyError(
                        f"{opened.keys!r} has keys of the dataset {opened.id} already, and {store.url} has none: two "
                        "datasets must not share keys. Name another key store, or the folder of that dataset"
                    )
                return opened
            entry = Want(wrapping_key_id).new_kek(opened.kms)
            try:
                opened.keys.compare_and_swap({entry.key_id: entry}, 0)
            except ConcurrentChangeError:
                continue  # somebody else has just created it
            return opened

    def _is_new(self) -> bool:
        """Whether neither a version nor a plan is there."""
        return not self.version_numbers() and not any(self.store.list(PLANS))

    def _has_keys(self) -> bool:
        if self.keys.version == 0 and self.version_numbers() and self.keys.refresh() == 0:
            raise IntegrityError(
                f"{self.store.url} has versions, but {self.keys!r} has no {HIDDEN}keys: name the key_store that it was "
                "written with, if they are elsewhere; otherwise somebody took them away"
            )
        return self.keys.version > 0

    def use_kms(self, kms: KmsClient) -> None:
        """From now on, this client wraps and unwraps keys."""
        self._kms = kms
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.use_kms(kms)

    @property
    def kms(self) -> KmsClient:
        return self._kms.for_dataset(self.id) if self._kms.binds_dataset else self._kms

    @property
    def id(self) -> str:
        return self.keys.dataset_id

    @property
    def envelope(self) -> Envelope:
        return Envelope(self.kms, Entries(self.keys), self.proven)

    # ---- keys

    def reserve(self, wants: Mapping[Want, Uses], policy: Policy | None = None) -> dict[Want, KeyEntry]:
        """For each kind, reserve these uses on the newest active key, or on a new one.

        One whose uses or lifetime are over, as `policy` has it, retires in favour of the new one. All of it is one
        change of the key store; calls of the KMS come before it.
        """
        policy = policy or Policy()
        made: dict[Want, KeyEntry] = {}
        while True:
            version = self.keys.version
            newest: dict[Want, KeyEntry] = {}
            for entry in sorted(self.keys.list("active"), key=lambda entry: (entry.created_ms, entry.key_id)):
                newest[Want.of(entry)] = entry
            chosen: dict[Want, KeyEntry] = {}
            changes: dict[str, KeyEntry | None] = {}
            for want, uses in wants.items():
                held = newest.get(want)
                if held is not None and not want.double_wrap:
                    chosen[want] = held  # the KMS counts its own
                    continue
                if held is None or policy.outlived(held.created_ms) or not policy.has_room(held.uses, *uses):
                    if not policy.has_room(0, *uses):
                        raise PolicyError(
                            f"one KEK would wrap {uses.data_keys} data keys, and the dataset's policy allows "
                            f"{policy.kek_uses}: share it among fewer files by the policy's kek_scope"
                        )
                    if want not in made:
                        self._check_not_left(want.wrapping_key_id, newest.values())
                        made[want] = want.new_kek(self.kms)
                        if held is not None:
                            made[want] = moved(made[want], held)
                    if held is not None:
                        changes[held.key_id] = retired(held, made[want].key_id, GRACE_MS)
                    held = made[want]
                chosen[want] = held.replace(uses=policy.reserved(held.uses, *uses)) if want.double_wrap else held
                changes[held.key_id] = chosen[want]
            try:
                if changes:
                    self.keys.compare_and_swap(changes, version)
            except ConcurrentChangeError:
                self.keys.refresh()
                continue
            return chosen

    def _check_not_left(self, wrapping_key_id: str, active: Iterable[KeyEntry]) -> None:
        """PolicyError if the dataset has left this master key: there may be a reason, of which not every job knows."""
        now = _master_now(wrapping_key_id, active)
        if now != wrapping_key_id:
            raise PolicyError(
                f"the keys of {self.store.url} were rotated from the master key {wrapping_key_id!r} to {now!r}: "
                f"pass wrapping_key_id={now!r}, or rotate them back"
            )

    def main_key(self) -> KeyEntry:
        """The newest key that may seal documents; where there is none, that wraps data keys. PolicyError without."""
        active = [entry for entry in self.keys.list("active") if not for_columns(entry)]
        ours = [entry for entry in active if SCOPE not in entry.properties]
        documents = [entry for entry in ours if entry.double_wrap]
        if not active:
            raise PolicyError("the dataset has no active key: name a wrapping_key_id")
        return max(documents or ours or active, key=lambda entry: (entry.created_ms, entry.key_id))

    def document_key(self) -> str:
        """The key that seals documents and tables now. Who wraps DEKs reserves SLACK_USES of it for them, too."""
        entry = self.main_key()
        if not entry.double_wrap:  # of a dataset in single wrap, made by an ags_fast that had none for documents
            want = Want(entry.wrapping_key_id)
            entry = self.reserve({want: Uses(spare=SLACK_USES)})[want]
        return entry.key_id

    def active(self, key_id: str) -> str:
        """The key itself, or if it is retired the one that took its place."""
        entry = self.keys.get(key_id)
        want = Want.of(entry)
        try:
            while entry.state != "active" and SUCCESSOR in entry.properties:
                entry = self.keys.get(entry.properties[SUCCESSOR])
        except KeyAccessError:  # a successor that was retired, too, and is gone
            pass
        if entry.state == "active":
            return entry.key_id
        want = want._replace(wrapping_key_id=_master_now(want.wrapping_key_id, self.keys.list("active")))
        return self.reserve({want: Uses()})[want].key_id

    def rewrap(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """The same files, with DEKs that retired keys wrap wrapped by those that took their places."""
        counts = wrapped_by(entries)
        moves = {key_id: new for key_id in counts if (new := self.active(key_id)) != key_id}
        if not moves:
            return list(entries)
        self.add_uses({new: counts[old] for old, new in moves.items()})
        envelope = self.envelope
        wraps = [entry.wraps(self.id) for entry in entries]
        todo: dict[str, list[tuple[bytes, bytes]]] = {key_id: [] for key_id in moves}
        for key_id, wrapped, bound in chain.from_iterable(wraps):
            if key_id in moves:
                todo[key_id].append((wrapped, bound))
        done = {old: iter(envelope.rewrap_many(old, moves[old], items)) for old, items in todo.items()}
        return [
            entry.with_wraps([(moves[k], next(done[k])) if k in moves else (k, wrapped) for k, wrapped, _ in those])
            for entry, those in zip(entries, wraps, strict=True)
        ]

    def add_uses(self, uses: Mapping[str, int]) -> None:
        """Count that these keys wrap so many more."""

        def changes() -> dict[str, KeyEntry | None]:
            entries = [self.keys.get(key_id) for key_id in uses]
            return {e.key_id: e.replace(uses=e.uses + uses[e.key_id]) for e in entries if e.double_wrap}

        self.change_keys(changes, "change")

    def change_keys(self, changes: Callable[[], Mapping[str, KeyEntry | None]], operation: str) -> None:
        """Change the key store as `changes` says; it is asked again if somebody else was first."""
        while True:
            version = self.keys.refresh()
            try:
                if made := changes():
                    self.keys.compare_and_swap(made, version, operation=operation)
                return
            except ConcurrentChangeError:
                continue

    # ---- sealed objects

    def seal_table(self, path: str, entries: Sequence[FileEntry], key_id: str, envelope: Envelope) -> TableRef:
        dek = os.urandom(TABLE_DEK_NBYTES)
        data = seal_table(encode_entries(entries), dek, self.id, path)
        wrapped = envelope.wrap(key_id, dek, binding(self.id, "dek", path))
        self.store.create(path, data)
        return TableRef(path, len(data), len(entries), key_id, wrapped, named_keys(wrapped_by(entries)))

    def open_table(self, ref: TableRef, envelope: Envelope, only: str | None = None) -> list[FileEntry]:
        """What it holds; only: of this path, if it is there."""
        entries = decode_entries(open_table(self.store, self.id, ref, envelope), ref.path, only)
        for entry in entries:
            check_path(entry.path)
            check_path(entry.file)
        return entries

    def seal_body(self, path: str, body: dict[str, Any], key_id: str, envelope: Envelope) -> str:
        """Create an authenticated document; its SHA-256. FileExistsError if somebody was first."""
        data = taken(seal_document(envelope, key_id, self.id, path, body), body["format"], path)
        self.store.create(path, data)
        return sha256(data)

    def open_body(self, path: str, kind: str, envelope: Envelope) -> tuple[dict[str, Any], str]:
        """What a document says, if it is authentic and of this kind; and the key that it is sealed with."""
        return self._opened(path, kind, envelope)[:2]

    def _opened(self, path: str, kind: str, envelope: Envelope) -> tuple[dict[str, Any], str, str]:
        """`open_body`, and the SHA-256 of the document."""
        data = self.store.read(path, document_nbytes(kind))
        if data == REMOVED:
            raise FileNotFoundError(path)
        document = Document(data, path)
        body = document.authentic(envelope, self.id)
        if body.get("format") != kind:
            raise FormatError(f"{path} is a {body.get('format')!r}, not a {kind!r}")
        return body, document.key_id, sha256(data)

    # ---- versions

    def version_numbers(self) -> list[int]:
        return version_numbers(self.store)

    def remove_version(self, number: int, digest: str) -> bool:
        """Whether it was there. IntegrityError if what is there is not the document with this SHA-256.

        Something stays in its place for a day: who is late with a commit must find the number taken, or would commit to
        the past. What is older goes, too.
        """
        path = VERSIONS + numbered(number)
        try:
            data = self.store.read(path, document_nbytes("ags-version"))
        except FileNotFoundError:
            data = REMOVED
        removes = data != REMOVED
        if removes:
            if sha256(data) != digest or self.version_numbers()[-1] == number:
                raise IntegrityError(
                    f"{path} is not the version {number} that an expiry was to remove: it was exchanged, or the plan "
                    f"is of another history. Compare with your pin; remove the folder in {PLANS} if that is wrong"
                )
            self.store.put(path, REMOVED, fsync=True)
        for entry in list(self.store.list(VERSIONS)):
            if entry.size == len(REMOVED) and time.time() - entry.modified > NO_LOCK_SECONDS:
                self.store.delete(entry.path)
        return removes

    def current(
        self, *, version: int | None = None, min_version: int | None = None, writes: bool = False
    ) -> Version | None:
        """The highest version, or the one asked for. None if nothing was committed yet.

        IntegrityError if the highest one descends neither from the caller's pin nor from one that was read before.
        writes: the caller is about to change the dataset, so the documents of the last ancestors must be those that
        the highest version names.
        """
        while True:
            known = self._head  # before they are listed: another thread may read newer ones
            numbers = self.version_numbers()
            self.keys.refresh()  # now: a version comes after the keys that it needs
            newest = numbers[-1] if numbers else 0
            self._check_number(newest, known, min_version or 0)
            if version is not None and version not in numbers:
                raise FileNotFoundError(f"the dataset has no version {version}; it has {_ranges(numbers)}")
            if not newest:
                if writes and self.lost_versions() and self.version_numbers() == numbers:
                    self.committed(None)
                return None
            try:
                # Without a pin, an old version can be read even if a newer one was damaged.
                if version in (None, newest) or self._pin is not None:
                    head = self.version(newest)
                    if self._head is None or head.number >= self._head.number:
                        self._head = head
                    if writes:
                        self._check_parents(head, numbers)
                    if version in (None, newest):
                        return head
                return self.version(version or newest)
            except (IntegrityError, UnknownKeyError) as error:
                if self.version_numbers() != numbers:
                    continue  # it may have been expired
                if isinstance(error, UnknownKeyError):  # a version comes after its key: older keys were put back
                    raise IntegrityError(str(error)) from None
                raise

    def committed(self, version: Version | None) -> Version:
        """The version. IntegrityError if there is none: a job on no file must not look like one that has succeeded."""
        if version is not None:
            return version
        open_jobs = sorted({entry.path.split("/")[2] for entry in self.store.list(PLANS)})
        if self.lost_versions():
            why = f"but there are manifests: somebody took {VERSIONS} away. Restore it before anything else is done"
        elif open_jobs:
            jobs = f"job {open_jobs[-1]} is" if len(open_jobs) == 1 else f"the jobs {', '.join(open_jobs)} are"
            why = f"{jobs} open: run encrypt again with resume, or sweep to give up what has died"
        else:
            why = "run encrypt"
        raise IntegrityError(f"no version of {self.store.url} has been committed; {why}")

    def lost_versions(self) -> bool:
        """Where no version is there: whether there was one. Else manifests are of jobs that were planned on none."""
        if not any(self.store.list(MANIFESTS)):
            return False
        plans = [entry.path for entry in self.store.list(PLANS)]
        for path in plans:
            try:
                if path.endswith(".json") and Document(self.store.read(path, DOCUMENT_NBYTES), path).claimed()["base"]:
                    return True
            except (FileNotFoundError, FormatError, KeyError):
                pass  # it ends just now, or is no plan that says so
        return not plans

    def version(self, number: int) -> Version:
        """What the version's document says, if it has its place in the history as far as that is known."""
        path = VERSIONS + numbered(number)
        try:
            body, key_id, digest = self._opened(path, "ags-version", self.envelope)
        except FileNotFoundError:
            raise IntegrityError(f"{path} is missing: it was removed after it was listed") from None
        try:
            if whole(body["version"]) != number:
                raise IntegrityError(f"{path} holds the version {body['version']!r}")
            version = Version(
                number,
                None if body["parent"] is None else whole(body["parent"], number - 1, 1),
                str(body["operation"]),
                str(body["job_id"]),
                whole(body["time_ms"], LATEST_MS),
                whole(body["files"]),
                whole(body["plain_length"]),
                tuple(TableRef.from_json(ref) for ref in body["manifests"]),
                Policy.from_json(body.get("policy", {})),
                key_id,
                Chain.from_json(body, number, path),
                KeysAt.from_json(body["key_store"]),
                digest,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path} lacks or garbles {error}") from None
        if version.files != (listed := sum(ref.entries for ref in version.manifests)):
            raise FormatError(f"{path} says that it has {version.files} files, and names manifests with {listed}")
        self._check_place(version)
        self._check_keys(version)
        return version

    # ---- the history

    def _check_number(self, newest: int, head: Version | None, min_version: int) -> None:
        """Whether the newest version can follow the pin, and `head`, which was read before."""
        known = max(self._pin.number if self._pin else 0, head.number if head else 0)
        if newest < known:
            was = f"the pin is of version {known}" if head is None else f"version {known} was there before"
            raise IntegrityError(
                f"the newest version of {self.store.url} is {newest or 'gone'}, and {was}: somebody took newer ones "
                "away, or put an older copy in their place"
            )
        min_version = max(min_version, self._min_version)
        if newest < min_version:
            raise PolicyError(
                f"the dataset's newest version is {newest}, older than min_version={min_version}: "
                "somebody took newer ones away"
            )

    def _check_place(self, version: Version) -> None:
        """Whether a version and the newest one that was read, or the pin, are of one history."""
        known = Pin(self._head.number, self._head.sha256) if self._head else self._pin
        if known is None:
            return
        if version.number >= known.number:
            digest = self.digest(version, known.number)
            if digest == known.sha256:
                return
            what = f"version {version.number} of {self.store.url}"
            if digest is None:
                raise IntegrityError(
                    f"{what} remembers the versions from {version.chain.first} on, and the pin is of version "
                    f"{known.number}, which is no longer there: whether it descends from the pin cannot be told any "
                    "more. Compare the dataset with what you know of it, and take a newer pin"
                )
            raise IntegrityError(
                f"{what} does not descend from version {known.number} as "
                f"{'it was before' if self._head else 'the pin has it'}: another history was put in the place of the "
                "dataset's. Nothing was written or deleted. `ags-fast inspect` shows the digests of its versions: "
                "restore what was there from the storage's own versions, or from a copy"
            )
        if self._head is not None:
            self._check_ancestor(self._head, version.number, version.sha256)

    def _check_ancestor(self, head: Version, number: int, found: str) -> None:
        """Whether the document that is there of an older version is the one that `head` descends from."""
        digest = self.digest(head, number)
        if digest == found or (digest is None and self._pin is None):
            return
        path = VERSIONS + numbered(number)
        if digest is None:
            raise IntegrityError(
                f"{path} is older than what version {head.number} remembers, from version {head.chain.first} on: "
                "whether it belongs to the history that is pinned cannot be told"
            )
        raise IntegrityError(
            f"{path} is not the version {number} that version {head.number} descends from: one of the two was "
            "exchanged, as if somebody had put an older history back. Nothing was written or deleted. `ags-fast "
            "inspect` shows their digests: put back the document that is right, from the storage's own versions or "
            "from a copy, and take away those that do not descend from it; then try again"
        )

    def _check_parents(self, head: Version, numbers: Sequence[int]) -> None:
        """IntegrityError if what is there of the last ancestors is not what `head` descends from."""
        if head.sha256 == self._fits:
            return
        for number in numbers:
            if head.number - PARENTS <= number < head.number:
                try:
                    data = self.store.read(VERSIONS + numbered(number), document_nbytes("ags-version"))
                except FileNotFoundError:
                    continue  # expired meanwhile
                if data != REMOVED:
                    self._check_ancestor(head, number, sha256(data))
        self._fits = head.sha256

    def check_history(self) -> None:
        """IntegrityError if a document that is there, of a version or of the keys, is not of the newest one's history:
        for who is about to delete something."""
        self.current(writes=True)
        for _ in self.versions():  # each is compared when it is read
            pass
        if isinstance(self.keys, DatasetKeyStore):
            self.keys.check_history()

    def chain_orphans(self) -> list[str]:
        """The objects with digests that no version names any more, a day old."""
        objects = self._chain_objects
        old = time.time() - NO_LOCK_SECONDS
        listed = objects.in_folder(entry.path for entry in self.store.list(CHAIN) if entry.modified < old)
        if not listed:
            return []
        # Read after they were listed: of what a dead writer left, it names all or is about to name the next.
        head = self.current()
        named = objects.paths(head.chain.needed(head.sha256)) if head else set()
        for version in self.versions():
            named |= objects.paths(version.chain.blocks)
        return [path for path in listed if path not in named]

    def digest(self, version: Version, number: int) -> str | None:
        """The SHA-256 of the document that an ancestor of a version has, or had; or of its own. None if that is older
        than what it remembers, and than what those remember that are still there."""
        if number == version.number:
            return version.sha256
        found = self._chain_objects.digest(version.chain, number)
        oldest = version.chain.first
        while found is None and number < oldest:
            path = VERSIONS + numbered(oldest)
            try:
                body, _, digest = self._opened(path, "ags-version", self.envelope)
            except FileNotFoundError:
                return None
            if digest != self._chain_objects.digest(version.chain, oldest):
                return None
            chain = Chain.from_json(body, oldest, path)
            found = self._chain_objects.digest(chain, number)
            version, oldest = version._replace(chain=chain), chain.first
        return found

    def _check_keys(self, version: Version) -> None:
        """Whether the keys that are there are those that the version was made on, or come after them."""
        named = version.keys
        for last in (False, True):
            if self.keys.version >= named.version:
                digest = _key_digest(self.keys, named.version)
                if digest is None or named.sha256 in (None, digest):
                    return
            if not last:
                self.keys.refresh()
        raise IntegrityError(
            f"{VERSIONS}{numbered(version.number)} was made on version {named.version} of the keys, and {self.keys!r} "
            f"is at version {self.keys.version}, which does not descend from that: somebody put older keys back, or "
            "those of another history. Restore the newer ones from the storage's own versions, or from a copy"
        )

    def versions(self, after: int = 0) -> Iterator[Version]:
        """All versions, or those with higher numbers; the newest first. One that is expired meanwhile is left out."""
        for number in reversed(self.version_numbers()):
            if number <= after:
                return
            try:
                version = self.version(number)
            except IntegrityError:
                if number in self.version_numbers():
                    raise
                continue
            yield version

    def entries(self, version: Version | None) -> Iterator[FileEntry]:
        """Every file of a version, manifest by manifest. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            yield from self._of_version(version, ref, envelope)

    def find(self, version: Version | None, path: str) -> FileEntry | None:
        """The file that a version has at `path`. ConcurrentChangeError if it is expired meanwhile."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            for entry in self._of_version(version, ref, envelope, path):
                check_lengths([entry])
                return entry
        return None

    def _of_version(
        self, version: Version | None, ref: TableRef, envelope: Envelope, only: str | None = None
    ) -> list[FileEntry]:
        try:
            return self.open_table(ref, envelope, only)
        except (IntegrityError, UnknownKeyError):
            if version is None or version.number in self.version_numbers():
                raise
            raise ConcurrentChangeError(f"version {version.number} was expired while it was read") from None

    def load(
        self, version: int | None = None, min_version: int | None = None, *, writes: bool = False
    ) -> tuple[Version | None, list[FileEntry]]:
        """A version, as `current` has it, and all of its files."""
        while True:
            head = self.current(version=version, min_version=min_version, writes=writes)
            try:
                entries = list(self.entries(head))
                check_lengths(entries)
                return head, entries
            except ConcurrentChangeError:
                if version is not None:
                    raise

    def commit(
        self,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        *,
        base: Version | None,
        replaced: Mapping[str, str] | None = None,
        policy: Policy | None = None,
    ) -> tuple[Version | None, list[FileEntry]]:
        """Make a version with the files of `add`; returns it, and those that could not be added.

        DEKs whose key was retired since they were planned are wrapped anew. policy: None leaves what the dataset has.

        base: the version that `add` was planned on. replaced: path -> file of entries to take out, as they were there.
        A path that came, went or changed since then is another job's, and stays as that job has it: ours is returned.
        KMS calls and manifests come before the commit, so that whatever fails leaves the version before.
        """
        replaced = dict(replaced or {})
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current(writes=True)
            try:
                version, refused = self._commit_on(head, operation, job_id, add, base, replaced, policy, written)
            except FileExistsError:
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self._remove(ref for ref in written.values() if version is None or ref not in version.manifests)
            return version, [entry for entry in add if entry.path in refused]

    def is_newest(self, version: Version | None) -> bool:
        """Whether nobody has made a version since."""
        return self.version_numbers()[-1:] == ([version.number] if version else [])

    def _commit_on(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        base: Version | None,
        replaced: Mapping[str, str],
        policy: Policy | None,
        written: dict[tuple[Any, ...], TableRef],
    ) -> tuple[Version | None, set[str]]:
        """`commit`, if `head` is still the newest version. FileExistsError, or IntegrityError, if it is not."""
        add = self.rewrap(add)
        key_id, envelope = self.document_key(), self.envelope
        refused, there = self._conflicts(add, base, head, replaced, envelope)
        added = [entry for entry in add if entry.path not in refused and entry.path not in there]
        if not added:
            return head, refused
        names = {entry.path for entry in added}
        taken = {path: file for path, file in replaced.items() if path in names}
        refs, gone = self._without(head, taken, key_id, envelope, written, job_id) if head else ([], [])
        refs += [self._manifest(chunk, key_id, envelope, written, job_id) for chunk in chunks(added)]
        return self._succeed(head, operation, job_id, refs, added, gone, policy), refused

    def _succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        added: Sequence[FileEntry],
        gone: Sequence[FileEntry],
        policy: Policy | None = None,
    ) -> Version:
        nbytes = sum(entry.plain_length for entry in added) - sum(entry.plain_length for entry in gone)
        return self.succeed(head, operation, job_id, refs, len(added) - len(gone), nbytes, policy)

    def _without(
        self,
        head: Version,
        taken: Mapping[str, str],
        key_id: str,
        envelope: Envelope,
        written: dict[tuple[Any, ...], TableRef],
        job_id: str,
        sets: Container[str | None] = (),
    ) -> tuple[list[TableRef], list[FileEntry]]:
        """The manifests of a version without the entries of `taken`, path -> file, and these entries. What is left of
        numbered sets in `sets` is no set any more."""
        if not taken:
            return list(head.manifests), []
        refs: list[TableRef] = []
        gone: list[FileEntry] = []
        for ref in head.manifests:
            entries = self.open_table(ref, envelope)
            kept = [
                entry if entry.set_id not in sets else entry._replace(set_id=None, part=None, parts=None)
                for entry in entries
                if taken.get(entry.path) != entry.file
            ]
            gone += [entry for entry in entries if taken.get(entry.path) == entry.file]
            if kept == entries:
                refs.append(ref)
            elif kept:
                refs.append(self._manifest(kept, key_id, envelope, written, job_id))
        return refs, gone

    def commit_removal(self, job_id: str, remove: Sequence[FileEntry]) -> tuple[Version, list[FileEntry]]:
        """Make a version without the files of `remove`; returns it, and those of them that stay, since another job has
        put another file in their place meanwhile. What another job has removed, too, needs no version."""
        files = {entry.path: entry.file for entry in remove}
        sets = {entry.set_id for entry in remove} - {None}
        written: dict[tuple[Any, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.committed(self.current(writes=True))
            try:
                key_id, envelope = self.document_key(), self.envelope
                refs, gone = self._without(head, files, key_id, envelope, written, job_id, sets)
                made = self._succeed(head, "remove", job_id, refs, (), gone) if gone else head
                now = {entry.path for entry in self.entries(made)} if len(gone) < len(remove) else set()
            except (FileExistsError, ConcurrentChangeError):
                continue
            except IntegrityError:
                if self.is_newest(head):
                    raise
                continue  # what it has was expired meanwhile
            self._remove(ref for ref in written.values() if ref not in made.manifests)
            return made, [entry for entry in remove if entry.path in now]

    def succeed(
        self,
        head: Version | None,
        operation: str,
        job_id: str,
        refs: Sequence[TableRef],
        files: int = 0,
        plain_length: int = 0,
        policy: Policy | None = None,
    ) -> Version:
        """Create the version after `head`, which this is the commit of. FileExistsError if somebody was first.

        files, plain_length: what it has more than `head`.
        """
        chain, made = head.chain.next(head.sha256) if head else (Chain(1), {})
        head = head or Version(0, None, "", "", 0, 0, 0, ())
        key_id = self.document_key()
        at = self.keys.version
        version = Version(
            head.number + 1,
            head.number or None,
            operation,
            job_id,
            time.time_ns() // 1_000_000,
            head.files + files,
            head.plain_length + plain_length,
            tuple(refs),
            head.policy if policy is None else policy,
            key_id,
            chain,
            KeysAt(at, _key_digest(self.keys, at)),
        )
        body = {
            "format": "ags-version",
            "dataset_id": self.id,
            "version": version.number,
            **{name: getattr(version, name) for name in ("parent", "operation", "job_id", "time_ms")},
            "files": version.files,
            "plain_length": version.plain_length,
            "manifests": [ref.to_json() for ref in refs],
            "policy": version.policy.to_json(),
            **chain.to_json(),
            "key_store": version.keys._asdict(),
        }
        self._chain_objects.write(made)
        digest = self.seal_body(VERSIONS + numbered(version.number), body, key_id, self.envelope)
        self._head = version._replace(sha256=digest)
        return self._head

    def _conflicts(
        self,
        add: Sequence[FileEntry],
        base: Version | None,
        head: Version | None,
        replaced: Mapping[str, str],
        envelope: Envelope,
    ) -> tuple[set[str], set[str]]:
        """The paths of `add` that are another job's by now, and those that somebody has committed for us."""
        known = set(base.manifests) if base else set()
        now = set(head.manifests) if head else set()
        if known == now:
            return set(), set()
        ours = {entry.path for entry in add}
        present: dict[str, str] = {}
        for ref in head.manifests if head else ():
            if replaced or ref not in known:
                present.update((e.path, e.file) for e in self.open_table(ref, envelope) if e.path in ours)
        there = {entry.path for entry in add if present.get(entry.path) == entry.file}
        return {path for path in ours - there if present.get(path) != replaced.get(path)}, there

    def _manifest(
        self,
        entries: Sequence[FileEntry],
        key_id: str,
        envelope: Envelope,
        written: dict[tuple[Any, ...], TableRef],
        job_id: str,
    ) -> TableRef:
        name = key_id, tuple((entry.file, entry.key_id, entry.set_id) for entry in entries)
        if name not in written:
            written[name] = self.seal_table(manifest_name(job_id), entries, key_id, envelope)
        return written[name]

    def _remove(self, refs: Iterable[TableRef]) -> None:
        for ref in refs:
            self.store.delete(ref.path)


def _key_digest(keys: KeyResolver, version: int) -> str | None:
    """The SHA-256 of a version of the key store; None if it does not tell."""
    tell: Callable[[int], str | None] | None = getattr(keys, "digest", None)
    return None if tell is None else tell(version)


def version_numbers(store: Store) -> list[int]:
    """Of the versions that are there, the lowest first."""
    sizes = {
        int(match[1]): entry.size
        for entry in store.list(VERSIONS)
        if (match := re.fullmatch(r"(\d{8,})\.json", entry.path.removeprefix(VERSIONS)))
    }
    newest = max(sizes, default=0)  # which is never one that was removed
    return sorted(number for number, size in sizes.items() if size != len(REMOVED) or number == newest)


def _ranges(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
