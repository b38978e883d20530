"""The FileIO that shows PyIceberg a plaintext table: files are opened as they are read, and sealed as they are closed.

Reading streams: a Parquet file is a view that opens pages as they are read. Writing holds a file in memory until it is
closed; its plaintext reaches no storage.
"""

from __future__ import annotations

import io
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from pyiceberg.io import FileIO as PyIcebergIO
from pyiceberg.io import InputFile, InputStream, OutputFile, OutputStream, load_file_io

from ags_fast import opening
from ags_fast.errors import PolicyError
from ags_fast.iceberg import manifests, metadata, policy
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.locations import local_path
from ags_fast.iceberg.manifests import Known
from ags_fast.iceberg.reading import LIST, Node, check_length, show_metadata, show_node
from ags_fast.iceberg.session import KMS_PREFIXES, OF_TABLE, SESSION, committing, received, seen_again, session_of
from ags_fast.iceberg.walk import find
from ags_fast.iceberg.writing import new_key, seal_manifest, sealed_metadata
from ags_fast.keys.metadata import StandardKeyMetadata
from ags_fast.parquet import Keys, encrypt_file, open_plain

if TYPE_CHECKING:
    from types import TracebackType

    from ags_fast.iceberg.session import Session, TableState

__all__ = ["FileIO", "LookedUpError", "looking_up"]

PARQUET_MAGIC, AVRO_MAGIC = b"PAR1", b"Obj\x01"
NOT_METADATA = (PARQUET_MAGIC, AVRO_MAGIC, b"PARE", b"AGS1", b"PFA1")
METADATA_SUFFIXES = (".metadata.json", ".metadata.json.gz")
# What a catalog connects with, and no file is opened with, but for `SIGNING` if a server signs requests of the storage.
OF_CATALOG = ("auth", "credential", "dynamodb.", "glue.", "header.", "hive.", "oauth2-", "rest.", "token", "uri")
SIGNING = ("header.", "token", "uri")

looking_up = ContextVar("looking_up", default=False)  # whether this thread only asks a catalog where metadata are


class LookedUpError(Exception):
    """A catalog has named this metadata file, which is not read."""


class FileIO(PyIcebergIO):
    """A FileIO for encrypted tables, and for all others.

    A catalog of `ags_fast.iceberg` makes it, and it then reads and writes. Named by ``py-io-impl`` alone it only reads
    encrypted tables: a catalog that does not know of encryption would lose their keys.

    It pickles without a key, for tasks that read: with the properties of the KMS, settings and credentials of the
    storage, and wrapped keys. Where it arrives, and as a copy, it reads the table's files with the same checks, asks
    the KMS itself, and writes nothing. TypeError if the KMS client was not made from properties.

    Args:
        properties: The catalog's and the table's. The KMS is taken from the catalog's alone.

    Attributes:
        session: What the catalog knows.
        encrypted: Whether it is of an encrypted table.
        key_length: Bytes of a new key of the table.
    """

    def __init__(self, properties: dict[str, str] = {}) -> None:  # noqa: B006 (PyIceberg's signature)
        super().__init__(properties)
        self.session: Session = session_of(properties)
        ours = (SESSION, OF_TABLE, "py-io-impl", *KMS_PREFIXES)  # which the inner FileIO must not obey
        self._settings = {name: value for name, value in properties.items() if not name.startswith(ours)}
        if self.session.io_impl is not None:
            self._settings["py-io-impl"] = self.session.io_impl
        self.encrypted = policy.KEY_ID in properties
        self.key_length = int(properties.get(policy.KEY_LENGTH, "16"))
        self._inner: dict[str, PyIcebergIO] = {}
        uuid, _, location = properties.get(OF_TABLE, "").partition(" ")
        self._table = self.session.table(uuid, location) if uuid else None

    def __repr__(self) -> str:
        return f"<FileIO of {'an encrypted table' if self.encrypted else 'a catalog'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        own = tuple(name for name in OF_CATALOG if "s3.signer" not in self._settings or name not in SIGNING)
        settings = {name: value for name, value in self._settings.items() if not name.startswith(own)}
        return _Sent, (settings, *self.table.sent())

    @property
    def table(self) -> TableState:
        """What the catalog knows of the table. PolicyError if it is of no table, as those are that catalogs make."""
        if self._table is None:
            raise PolicyError("this FileIO is of no table: use that of a table which was loaded by ags_fast.iceberg")
        return self._table

    def belongs(self, uuid: Any, location: str) -> None:
        """Let the FileIO be that of a table."""
        self._table = self.session.table(uuid, location)

    @property
    def settings(self) -> dict[str, str]:
        """What PyIceberg's own FileIO is told. It names no KMS, and may have credentials of the storage."""
        return {name: str(value) for name, value in self._settings.items()}

    def inner(self, location: str) -> PyIcebergIO:
        """Return PyIceberg's own FileIO for a location, which opens files as they are stored."""
        scheme = urlsplit(location).scheme
        if scheme not in self._inner:
            self._inner[scheme] = load_file_io(self._settings, location)
        return self._inner[scheme]

    def new_input(self, location: str) -> InputFile:
        """Return a file to read."""
        return _File(self, location)

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write."""
        return _File(self, location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file."""
        path = location if isinstance(location, str) else location.location
        if self._table is None or not self._table.forget(path):
            self.inner(path).delete(path)

    # ----------------------------------------------------------------------------------------------------- reading

    def open_input(self, location: str) -> Any:
        """Return the facade of a file, as a seekable binary file."""
        if looking_up.get():
            raise LookedUpError(location)
        session, inner = self.session, self.inner(location)
        if location.endswith(METADATA_SUFFIXES):
            seen = committing.get() and seen_again.get() == location
            data = (seen and session.stored(location)) or metadata.read(inner.new_input(location))
            return io.BytesIO(show_metadata(session, data, location))
        if self._table is None and not self.encrypted:  # of a catalog, which reads metadata only, by whatever name
            return self._open_unnamed(inner.new_input(location), location)
        table = self.table
        if (held := table.held_list(location)) is not None and table.known(location) is None:
            return io.BytesIO(held)
        if not self.encrypted:
            return inner.new_input(location).open()
        if table.names_list(location):
            listed = Node(Known(location, 0, table.list_key(location)), kind=LIST)
            return io.BytesIO(show_node(table, listed, inner))
        known = find(table, location, inner)
        if known is None:
            if held is not None:
                return io.BytesIO(held)
            raise PolicyError(f"{location} is named by no snapshot of the encrypted table, so it has no key")
        if known.format is None:
            return io.BytesIO(show_node(table, Node(known), inner))
        return self.open_known(known)

    def _open_unnamed(self, there: InputFile, location: str) -> Any:
        """Open a file that is not named as metadata are: as metadata, if PyIceberg could read them from it."""
        file: Any = there.open()
        head = bytes(file.read(4))
        file.seek(0)
        if head in NOT_METADATA or head.startswith(b"ORC"):
            return file
        file.close()
        data = metadata.read(there)
        is_metadata = data.lstrip().startswith(b"{") or data.startswith(metadata.GZIP_MAGIC)
        return io.BytesIO(show_metadata(self.session, data, location) if is_metadata else data)

    def open_known(self, known: Known) -> Any:
        """Return the plaintext of a data or delete file, as a seekable binary file."""
        key, inner = known.key_metadata, self.inner(known.path)
        if key is None:
            self.session.check_plaintext(known.path)
            return inner.new_input(known.path).open()
        check_length(known)
        if known.format not in ("PARQUET", "PUFFIN", "AVRO"):
            raise PolicyError(f"{known.path} has the format {known.format}, which has no encryption that Iceberg uses")
        source: Any = local_path(known.path) or _unbuffered(inner.new_input(known.path).open())
        if known.format == "PARQUET":
            return open_plain(source, key_metadata=key, length=known.length)
        return opening.open(source, key_metadata=key, length=known.length)

    # ----------------------------------------------------------------------------------------------------- writing

    def write_output(self, location: str, data: memoryview) -> int:
        """Write a file, sealed if the table is encrypted. Returns its bytes on storage."""
        session, inner = self.session, self.inner(location)
        head = bytes(data[:4])
        if location.endswith(METADATA_SUFFIXES):
            return _put(inner, location, sealed_metadata(session, bytes(data), location, inner))
        if not self.encrypted:
            session.check_plaintext_table(location)
            return _put(inner, location, data)
        session.check_writes()
        if head == AVRO_MAGIC:
            container = read_container(data)
            if manifests.is_list(container):
                self.table.hold_list(location, bytes(data))
                return len(data)
            return seal_manifest(self.table, location, container, self.key_length, inner).length
        if head == PARQUET_MAGIC:
            return self._write_parquet(location, data, inner)
        raise PolicyError(f"{location} has a format that PyIceberg does not write encrypted: write Parquet")

    def _write_parquet(self, location: str, data: memoryview, inner: PyIcebergIO) -> int:
        key = new_key(self.key_length)
        out = bytearray()
        keys = Keys(footer=key.encryption_key)
        report = encrypt_file(data, out, keys, aad_prefix=key.aad_prefix, store_aad_prefix=False)
        length = _put(inner, location, out)
        key = StandardKeyMetadata(key.encryption_key, key.aad_prefix, length)
        self.table.note(Known(location, length, key, format="PARQUET", split_offsets=report.row_group_offsets))
        return length


class _Sent(FileIO):
    """A FileIO that was pickled: see `FileIO.__reduce__`. It reads data files, delete files and manifests."""

    def __init__(self, settings: dict[str, str], *sent: Any) -> None:
        state = received(*sent)
        super().__init__({**settings, SESSION: state.session.token})
        self.session, self._table = state.session, state

    def open_input(self, location: str) -> Any:
        if location.endswith(METADATA_SUFFIXES):
            raise self._refused(f"opens no metadata, such as {location}")
        return super().open_input(location)

    def new_output(self, location: str, data: object = None) -> NoReturn:
        raise self._refused(f"does not write {location}")

    write_output = new_output

    def delete(self, location: str | InputFile | OutputFile) -> NoReturn:
        raise self._refused(f"does not delete {location if isinstance(location, str) else location.location}")

    def _refused(self, what: str) -> PolicyError:
        do = "load the table from a catalog of ags_fast.iceberg in the process that writes it"
        return PolicyError(f"a FileIO that was pickled or copied only reads, and {what}: {do}")


def _put(inner: PyIcebergIO, location: str, data: bytes | bytearray | memoryview) -> int:
    with inner.new_output(location).create(overwrite=True) as file:
        file.write(data)  # type: ignore[arg-type]
    return len(data)


def _unbuffered(file: Any) -> Any:
    """Return a file of fsspec without reading ahead: what reads it asks for what it needs, in large pieces."""
    cache: Any = getattr(file, "cache", None)
    if hasattr(cache, "fetcher"):
        from fsspec.caching import BaseCache

        file.cache = BaseCache(cache.blocksize, cache.fetcher, cache.size)
    return file


class _File(InputFile, OutputFile):
    """A file to read, and to write."""

    def __init__(self, owner: FileIO, location: str) -> None:
        super().__init__(location)
        self._owner = owner
        self.nbytes: int | None = None  # that were written

    def __len__(self) -> int:
        return len(self._stored()) if self.nbytes is None else self.nbytes

    def exists(self) -> bool:
        return self._stored().exists()

    def open(self, seekable: bool = True) -> InputStream:
        """Return the facade of the file."""
        return self._owner.open_input(self.location)  # type: ignore[no-any-return]

    def to_input_file(self) -> InputFile:
        return self

    def create(self, overwrite: bool = False) -> OutputStream:
        """Return a stream that writes the file when it is closed."""
        if not overwrite and self.exists():
            raise FileExistsError(f"{self.location} exists")
        return _Stream(self._owner, self)

    def _stored(self) -> InputFile:
        return self._owner.inner(self.location).new_input(self.location)


class _Stream(io.BytesIO):
    """Takes a file's plaintext, and seals it when it is closed. Left by an exception it writes nothing."""

    def __init__(self, owner: FileIO, output: _File) -> None:
        super().__init__()
        self._owner: FileIO | None = owner
        self._output = output

    def close(self) -> None:
        owner, self._owner = self._owner, None
        try:
            if owner is not None:
                with self.getbuffer() as view:
                    self._output.nbytes = owner.write_output(self._output.location, view)
        finally:
            super().close()

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._owner = None
        self.close()

    def __del__(self, source: object = None) -> None:
        self._owner = None

    _dealloc_warn = __del__  # see `Unfinished`
