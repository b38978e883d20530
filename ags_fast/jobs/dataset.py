"""An encrypted dataset: its versions, and the manifests that say which files a version has and how to open them.

The layout and every byte of it are in docs/dataset-format.md. Nothing is ever changed in place: a new version is a new
numbered object, created exclusively, and that creation is the commit.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE, AgsCodec
from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, PolicyError
from ags_fast.fs import Store
from ags_fast.keys.envelope import Envelope, KeyEntry, binding, new_kek, open_document, seal_document
from ags_fast.keys.resolver import COLUMNS, DatasetKeyStore, for_columns
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ags_fast.keys.kms import KmsClient

__all__ = ["Dataset", "FileEntry", "TableRef", "Version"]

HIDDEN = "_ags/"
VERSIONS = "_ags/versions/"
MANIFESTS = "_ags/manifests/"
PLANS = "_ags/plans/"
MANIFEST_ENTRIES = 10_000  # at most, in one manifest or one part of a plan
MANIFEST_NBYTES = 8 << 20  # of encoded entries: key metadata may be large
NAME_NBYTES = 255  # the longest name that file systems take
NO_NAMES = frozenset(("", ".", ".."))
DOCUMENT_NBYTES = 256 << 20  # the largest version that is believed: some 10**9 files


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

    def with_wrapped(self, wrapped: Sequence[bytes]) -> FileEntry:
        """The same with these wrapped DEKs, in the order of `wraps`."""
        columns = self.column_keys
        if columns:
            columns = tuple({**key, "wrapped_dek": w} for key, w in zip(columns, wrapped[1:], strict=True))
        return self._replace(wrapped_dek=wrapped[0], column_keys=columns)


def _column_use(column: str) -> str:
    """What a column's DEK is for, as its binding has it."""
    return f"column:{column}"


NAMES = [FileEntry._fields.index(field) for field in ("path", "file", "source")]  # UTF-8, unless they are no text


class TableRef(NamedTuple):
    """Where entries are: a Parquet table in an AGS1 stream, under a key of its own."""

    path: str
    length: int  # bytes
    entries: int
    key_id: str
    wrapped_key: bytes

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "wrapped_key": base64.b64encode(self.wrapped_key).decode()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableRef:
        try:
            return cls(
                str(value["path"]),
                int(value["length"]),
                int(value["entries"]),
                str(value["key_id"]),
                base64.b64decode(value["wrapped_key"], validate=True),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a reference to a table lacks or garbles {error}") from None


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
        ]
    )


def encode_entries(entries: Sequence[FileEntry]) -> bytes:
    """A Parquet file of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = entry_schema()
    columns = list(zip(*entries, strict=True)) or [()] * len(schema)
    for i in NAMES:
        columns[i] = tuple(name.encode("utf-8", "surrogateescape") for name in columns[i])
    sink = io.BytesIO()
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    pq.write_table(pa.table(arrays, schema=schema), sink, compression="zstd")
    return sink.getvalue()


def decode_entries(data: bytes, where: str, count: int, only: str | None = None) -> list[FileEntry]:
    """The entries of a table that has `count` of them; or the one of the path `only`, if it is there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # No threads: Arrow's may abort the interpreter when it ends, and for so few rows they gain nothing.
        file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        table = file.read(columns=entry_schema().names, use_threads=False).cast(entry_schema())
    except (pa.ArrowException, KeyError, OSError) as error:
        raise FormatError(f"{where} is no table of entries: {error}") from None
    if table.num_rows != count:
        raise IntegrityError(f"{where} has {table.num_rows} entries, not the {count} that there should be")
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
        size = 200 + len(entry.path) + len(entry.file) + len(entry.source) + len(entry.wrapped_dek)
        if entry.column_keys:
            size += sum(len(key["wrapped_dek"]) for key in entry.column_keys)
        if chunk and (len(chunk) == MANIFEST_ENTRIES or nbytes + size > MANIFEST_NBYTES):
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(entry)
        nbytes += size
    if chunk:
        yield chunk


# ------------------------------------------------------------------------------------------------------------- dataset


class Dataset:
    """An encrypted dataset, opened with the caller's KMS. Holds no key: those stay in the process-wide cache."""

    def __init__(self, store: Store, kms: KmsClient, keys: DatasetKeyStore) -> None:
        self.store = store
        self.kms = kms
        self.keys = keys

    @classmethod
    def open(cls, url: Any, kms: KmsClient, storage_options: Mapping[str, Any] | None = None) -> Dataset:
        """FileNotFoundError if there is no dataset at `url`."""
        store = url if isinstance(url, Store) else Store(url, storage_options)
        opened = cls(store, kms, DatasetKeyStore(store, kms))
        if not opened._has_keys():
            raise FileNotFoundError(f"there is no encrypted dataset at {store.url}: it has no {HIDDEN}keys")
        return opened

    @classmethod
    def open_or_create(cls, store: Store, kms: KmsClient, wrapping_key_id: str, double_wrap: bool) -> Dataset:
        while True:
            opened = cls(store, kms, DatasetKeyStore(store, kms))
            if opened._has_keys():
                return opened
            entry = new_kek(kms, wrapping_key_id, double_wrap=double_wrap)
            try:
                opened.keys.compare_and_swap({entry.key_id: entry}, 0)
            except ConcurrentChangeError:
                continue  # somebody else has just created it
            return opened

    def _has_keys(self) -> bool:
        if self.keys.version == 0 and self.version_numbers() and self.keys.refresh() == 0:
            raise IntegrityError(f"{self.store.url} has versions, but no {HIDDEN}keys: somebody took them away")
        return self.keys.version > 0

    @property
    def id(self) -> str:
        return self.keys.dataset_id

    @property
    def envelope(self) -> Envelope:
        return Envelope(self.kms, {entry.key_id: entry for entry in self.keys.list()})

    def reserve(self, wrapping_key_id: str | None, double_wrap: bool, uses: int, *, columns: bool = False) -> KeyEntry:
        """The key to wrap `uses` more keys with: the newest active one of this kind, or a new one.

        wrapping_key_id: the master key it must be under; None takes the one that the newest key is under. columns: it
        is to wrap keys of columns, and a new one nothing else.
        """
        properties = COLUMNS if columns else None
        while True:
            version = self.keys.version
            active = sorted(self.keys.list("active"), key=lambda entry: (entry.created_ms, entry.key_id))
            if not columns:
                active = [entry for entry in active if not for_columns(entry)]
            if wrapping_key_id is None:
                if not active:
                    raise PolicyError("the dataset has no active key: name a wrapping_key_id")
                wrapping_key_id = active[-1].wrapping_key_id
            fitting = [
                entry
                for entry in active
                if entry.wrapping_key_id == wrapping_key_id and (entry.wrapped is not None) == double_wrap
            ]
            if fitting and not double_wrap:
                return fitting[-1]  # the KMS counts its own
            entry = fitting[-1] if fitting else None
            if entry is None or entry.uses + uses >= 1 << 32:
                entry = new_kek(self.kms, wrapping_key_id, double_wrap=double_wrap, properties=properties)
            entry = entry.replace(uses=entry.uses + uses) if double_wrap else entry
            try:
                self.keys.compare_and_swap({entry.key_id: entry}, version)
            except ConcurrentChangeError:
                self.keys.refresh()
                continue
            return entry

    # ---- sealed objects

    def seal_table(self, path: str, entries: Sequence[FileEntry], key_id: str, envelope: Envelope) -> TableRef:
        dek = os.urandom(16)
        codec = AgsCodec(dek, aad_prefix=binding(self.id, "table", path), threads=1)
        data = codec.encrypt(encode_entries(entries))
        wrapped = envelope.wrap(key_id, dek, binding(self.id, "dek", path))
        self.store.create(path, data)
        return TableRef(path, len(data), len(entries), key_id, wrapped)

    def open_table(self, ref: TableRef, envelope: Envelope, only: str | None = None) -> list[FileEntry]:
        """What it holds; only: of this path, if it is there."""
        check_path(ref.path)
        dek = envelope.unwrap(ref.key_id, ref.wrapped_key, binding(self.id, "dek", ref.path))
        try:
            data = self.store.read(ref.path, ref.length)
        except FileNotFoundError:
            raise IntegrityError(f"{ref.path} is missing, but a version or plan of the dataset names it") from None
        if len(data) != ref.length:
            raise IntegrityError(f"{ref.path} has {len(data)} bytes, its version says {ref.length}")
        prefix = binding(self.id, "table", ref.path)
        try:
            with AgsReader(
                data, dek, length=ref.length, aad_prefix=prefix, block_size=DEFAULT_BLOCK_SIZE, threads=1
            ) as reader:
                plain = reader.read()
        except (IntegrityError, FormatError) as error:
            raise IntegrityError(f"{ref.path} is not what was written: {error}") from None
        entries = decode_entries(plain, ref.path, ref.entries, only)
        for entry in entries:
            check_path(entry.path)
            check_path(entry.file)
        return entries

    def seal_body(self, path: str, body: dict[str, Any], key_id: str, envelope: Envelope) -> None:
        """Create an authenticated document. FileExistsError if somebody was first."""
        self.store.create(path, seal_document(envelope, key_id, self.id, path, body))

    def open_body(self, path: str, kind: str, envelope: Envelope) -> dict[str, Any]:
        body = open_document(self.store.read(path, DOCUMENT_NBYTES), self.id, path, envelope)
        if body.get("format") != kind:
            raise FormatError(f"{path} is a {body.get('format')!r}, not a {kind!r}")
        return body

    # ---- versions

    def version_numbers(self) -> list[int]:
        names = (entry.path.removeprefix(VERSIONS) for entry in self.store.list(VERSIONS))
        return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{8,}\.json", name))

    def current(self, *, version: int | None = None, min_version: int | None = None) -> Version | None:
        """The highest version, or the one asked for. None if nothing was committed yet."""
        numbers = self.version_numbers()
        self.keys.refresh()  # now: a version comes after the keys that it needs
        newest = numbers[-1] if numbers else 0
        if min_version is not None and newest < min_version:
            raise PolicyError(
                f"the dataset's newest version is {newest}, older than min_version={min_version}: "
                "somebody took newer ones away"
            )
        if version is not None:
            if version not in numbers:
                raise FileNotFoundError(f"the dataset has no version {version}; it has {_ranges(numbers)}")
            newest = version
        return self.version(newest) if newest else None

    def version(self, number: int) -> Version:
        path = VERSIONS + numbered(number)
        try:
            body = self.open_body(path, "ags-version", self.envelope)
        except FileNotFoundError:
            raise IntegrityError(f"{path} is missing: it was removed after it was listed") from None
        try:
            return Version(
                int(body["version"]),
                None if body["parent"] is None else int(body["parent"]),
                str(body["operation"]),
                str(body["job_id"]),
                int(body["time_ms"]),
                int(body["files"]),
                int(body["plain_length"]),
                tuple(TableRef.from_json(ref) for ref in body["manifests"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path} lacks or garbles {error}") from None

    def entries(self, version: Version | None) -> Iterator[FileEntry]:
        """Every file of a version, manifest by manifest."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            yield from self.open_table(ref, envelope)

    def find(self, version: Version | None, path: str) -> FileEntry | None:
        """The file that a version has at `path`."""
        envelope = self.envelope
        for ref in version.manifests if version else ():
            for entry in self.open_table(ref, envelope, only=path):
                return entry
        return None

    def commit(
        self,
        operation: str,
        job_id: str,
        add: Sequence[FileEntry],
        *,
        base: Version | None,
        replaced: Mapping[str, str] | None = None,
        key_id: str,
    ) -> tuple[Version | None, list[FileEntry]]:
        """Make a version with the files of `add`; returns it, and those that could not be added.

        base: the version that `add` was planned on. replaced: path -> file of entries to take out, as they were there.
        A path that came, went or changed since then is another job's, and stays as that job has it: ours is returned.
        KMS calls and manifests come before the commit, so that whatever fails leaves the version before.
        """
        replaced = dict(replaced or {})
        written: dict[tuple[str, ...], TableRef] = {}  # manifests made for an attempt that lost, for the next one
        while True:
            head = self.current()
            envelope = self.envelope
            refused, there = self._conflicts(add, base, head, replaced, envelope)
            added = [entry for entry in add if entry.path not in refused and entry.path not in there]
            if not added:
                self._remove(written.values())
                return head, [entry for entry in add if entry.path in refused]
            names = {entry.path for entry in added}
            taken = {path: file for path, file in replaced.items() if path in names}
            refs: list[TableRef] = []
            files, plain_length = len(added), sum(entry.plain_length for entry in added)
            for ref in head.manifests if head else ():
                if not taken:
                    refs.append(ref)
                    continue
                entries = self.open_table(ref, envelope)
                kept = [entry for entry in entries if taken.get(entry.path) != entry.file]
                files -= len(entries) - len(kept)
                plain_length -= sum(entry.plain_length for entry in entries if taken.get(entry.path) == entry.file)
                if len(kept) == len(entries):
                    refs.append(ref)
                elif kept:
                    refs.append(self._manifest(kept, key_id, envelope, written))
            refs += [self._manifest(chunk, key_id, envelope, written) for chunk in chunks(added)]
            number = head.number + 1 if head else 1
            version = Version(
                number,
                head.number if head else None,
                operation,
                job_id,
                time.time_ns() // 1_000_000,
                files + (head.files if head else 0),
                plain_length + (head.plain_length if head else 0),
                tuple(refs),
            )
            body = {
                "format": "ags-version",
                "dataset_id": self.id,
                "version": number,
                **{name: getattr(version, name) for name in ("parent", "operation", "job_id", "time_ms")},
                "files": version.files,
                "plain_length": version.plain_length,
                "manifests": [ref.to_json() for ref in refs],
            }
            try:
                self.seal_body(VERSIONS + numbered(number), body, key_id, envelope)
            except FileExistsError:
                continue
            self._remove(ref for ref in written.values() if ref not in refs)
            return version, [entry for entry in add if entry.path in refused]

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
        written: dict[tuple[str, ...], TableRef],
    ) -> TableRef:
        name = tuple(entry.file for entry in entries)
        if name not in written:
            written[name] = self.seal_table(f"{MANIFESTS}{uuid.uuid4()}.parquet.ags", entries, key_id, envelope)
        return written[name]

    def _remove(self, refs: Iterable[TableRef]) -> None:
        for ref in refs:
            self.store.delete(ref.path)


def _ranges(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
