"""Files of a dataset that are Parquet: their keys, where they are, and how one is read and written.

Each stays a Parquet file under its own name, encrypted module by module. The footer key is the file's DEK; columns may
have DEKs of their own. The manifest has the AAD prefix, and the file does not, so a file does not open in another
file's place.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ags_fast._threads import thread_count
from ags_fast.dataset.files.contents import closing
from ags_fast.dataset.key_material import FOOTER
from ags_fast.dataset.names import check_path
from ags_fast.errors import IntegrityError, KeyAccessError, PolicyError
from ags_fast.parquet import Keys, decrypt_file, encrypt_file, open_plain
from ags_fast.parquet.keytools.material import key_metadata
from ags_fast.stream import AgsReader, AgsWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents
    from ags_fast.fs import NewFile, NewObject
    from ags_fast.parquet import Report
    from ags_fast.parquet.table_writer import Encoder
    from ags_fast.parquet.view import PlainView

# What this package writes has a tag for everything that is encrypted: a file with less is not what was written.
STRICT: dict[str, Any] = {"allow_ctr": False, "allow_unauthenticated_levels": False}
KEY_MATERIAL = "AGS-DATASET"  # of key_metadata by which nobody finds a key: the dataset's manifests have them

SPOOL_NBYTES = 16 << 20  # of a file in the making that are held in memory


def parquet_keys(contents: Contents, entry: FileEntry) -> Keys:
    """Return the keys of a file, without those of columns that `contents` does without."""
    file, *wraps = entry.wraps(contents.dataset_id)
    columns = {}
    for wrap, column in zip(wraps, entry.column_keys or (), strict=True):
        if wrap[0] in contents.without:
            continue
        try:
            columns[column["column"]] = contents.envelope.unwrap(*wrap)
        except KeyAccessError as error:
            raise KeyAccessError(f"column {column['column']!r}: {error}") from None
    if entry.key_material is None:
        note = {"keyMaterialType": KEY_MATERIAL, "datasetID": contents.dataset_id}
        metadata = {FOOTER: json.dumps(note).encode()}
    else:
        metadata = {
            one["column"]: key_metadata(
                one["wrapping_key_id"],
                one["wrapped_dek"],
                footer=one["column"] == FOOTER,
                datasetID=contents.dataset_id,
            )
            for one in entry.key_material
        }
    return Keys(
        contents.envelope.unwrap(*file),
        columns,
        footer_metadata=metadata.pop(FOOTER, None),
        column_metadata={column: text for column, text in metadata.items() if column in columns},
    )


def _source(contents: Contents, entry: FileEntry, file: str | None = None) -> Any:
    """Return the encrypted file of `entry`, or `file` in its place, after a look at its name and size."""
    name, store = check_path(file or entry.file), contents.store
    try:
        source = store.open_seekable(name, tail=True)
        there = store.stat(name) if store.local else source
    except FileNotFoundError:
        there = None
    if there is None:
        raise IntegrityError(f"{name} is missing, but the dataset names it")
    if entry.file_length and there.size != entry.file_length:
        raise IntegrityError(f"{name} has {there.size} bytes, its manifest says {entry.file_length}")
    return source


@contextmanager
def _as_planned(name: str) -> Iterator[None]:
    """The manifest says how a file is protected. A file with less protection is another file."""
    try:
        yield
    except PolicyError as error:
        raise IntegrityError(f"{name} is not what was written: {error}") from None


@contextmanager
def sealed(contents: Contents, entry: FileEntry, file: str | None = None) -> Iterator[Any]:
    """Use the encrypted file of `entry`, or `file` in its place. IntegrityError if it is not what was written."""
    with closing(_source(contents, entry, file)) as source, _as_planned(file or entry.file):
        yield source


def view(contents: Contents, entry: FileEntry, keys: Keys | None = None) -> PlainView:
    """Open a file as a plaintext Parquet file, decrypted as far as it is read. keys: those of the file, if at hand."""
    with _as_planned(entry.file):
        return open_plain(
            _source(contents, entry),
            parquet_keys(contents, entry) if keys is None else keys,
            aad_prefix=entry.aad_prefix,
            missing=("null" if contents.nulls else "hide") if contents.without else "error",
            threads=contents.threads,
            **STRICT,
        )


def decrypt_to(contents: Contents, entry: FileEntry, source: Any, target: Any) -> None:
    """Decrypt `source`, without the columns that `contents` does without."""
    decrypt_file(
        source,
        target,
        parquet_keys(contents, entry),
        aad_prefix=entry.aad_prefix,
        missing="drop" if contents.without else "error",
        threads=contents.threads,
        **STRICT,
    )


def copy(contents: Contents, entry: FileEntry, target: Any) -> None:
    """Decrypt a file to anything that takes bytes. Every page has passed its tag before it is written."""
    with sealed(contents, entry) as source:
        decrypt_to(contents, entry, source, target)


class ParquetWriter:
    """A plaintext Parquet file, taken from any writer, that is encrypted when it is complete.

    Until then its bytes are sealed as an AGS1 stream under a key that only this object has: up to 16 MiB in memory,
    more in a temporary file. So no plaintext comes to a disk.
    """

    def __init__(self, contents: Contents, entry: FileEntry, new: NewFile | NewObject) -> None:
        self._contents, self._entry, self._new = contents, entry, new
        self._key = os.urandom(16)
        self._spool = tempfile.SpooledTemporaryFile(SPOOL_NBYTES)  # noqa: SIM115
        self._writer = AgsWriter(self._spool, self._key, threads=contents.threads)
        self.write = self._writer.write
        self.tell = self._writer.tell

    def finish(self) -> tuple[int, int, int]:
        """See `FormatWriter`. The plaintext length is that of the view."""
        contents, entry = self._contents, self._entry
        keys = parquet_keys(contents, entry)
        self._writer.close()
        with self._spool, AgsReader(self._spool, self._key, length=self._writer.file_length) as plain:
            report = encrypt_file(
                plain,
                self._new,
                keys,
                aad_prefix=entry.aad_prefix,
                store_aad_prefix=entry.key_material is not None,
                threads=contents.threads,
            )
        return _lengths(contents, entry, keys, report)

    def abort(self) -> None:
        """Discard the file. After `finish`, do nothing."""
        self._writer.abort()
        self._spool.close()
        self._new.discard()


write = ParquetWriter


class TablesWriter:
    """A Parquet file in the making that takes tables. Plaintext is in memory only, a row group of it at most."""

    def __init__(self, contents: Contents, entry: FileEntry, new: NewFile | NewObject, encoder: Encoder) -> None:
        from ags_fast.parquet.reading import Encryption
        from ags_fast.parquet.table_writer import TableWriter  # which imports pyarrow

        how = Encryption(aad_prefix=entry.aad_prefix, store_aad_prefix=False)
        self._contents, self._entry, self._new = contents, entry, new
        self._keys = parquet_keys(contents, entry)
        self._writer = TableWriter(encoder, new, self._keys, how, threads=thread_count(contents.threads))
        self.write_table = self._writer.write

    def tell(self) -> int:
        """Return the bytes of the encrypted file that were written so far."""
        return self._writer.position

    def write(self, data: object, /) -> int:
        """Refuse bytes."""
        raise io.UnsupportedOperation("this file is made of tables: use write_table")

    def finish(self) -> tuple[int, int, int]:
        """See `FormatWriter`. The length of the source is that of the tables, encoded."""
        with self._writer:
            report = self._writer.finish()
        return _lengths(self._contents, self._entry, self._keys, report)

    def abort(self) -> None:
        """Discard the file. After `finish`, do nothing."""
        self._writer.abort()
        self._new.discard()


def _lengths(contents: Contents, entry: FileEntry, keys: Keys, report: Report) -> tuple[int, int, int]:
    length = plain_length(contents, entry, keys) if report.plain_length is None else report.plain_length
    return length, report.file_length, report.source_length


def plain_length(contents: Contents, entry: FileEntry, keys: Keys) -> int:
    """Return the bytes of a file's plaintext view: reads the footer."""
    with view(contents, entry, keys) as opened:
        return opened.seek(0, os.SEEK_END)
