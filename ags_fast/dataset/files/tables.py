"""New Parquet files of a dataset that are made of tables: each table is sealed as it is encoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from ags_fast._threads import thread_count
from ags_fast.dataset.files.parquet import parquet_keys, plain_length
from ags_fast.parquet.reading import Encryption
from ags_fast.parquet.table_writer import TableWriter

if TYPE_CHECKING:
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.files.contents import Contents
    from ags_fast.fs import NewFile, NewObject
    from ags_fast.parquet.table_writer import Encoder


class TablesWriter:
    """A Parquet file in the making. Plaintext is in memory only, and not more than a row group of it."""

    def __init__(self, contents: Contents, entry: FileEntry, new: NewFile | NewObject, encoder: Encoder) -> None:
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

    def finish(self) -> tuple[int, int]:
        """Publish the file. Returns the length of its plaintext view and its file length, in bytes."""
        with self._writer:
            report = self._writer.finish()
        if report.plain_length is not None:
            return report.plain_length, report.file_length
        return plain_length(self._contents, self._entry, self._keys), report.file_length

    def abort(self) -> None:
        """Discard the file. After `finish`, do nothing."""
        self._writer.abort()
        self._new.discard()
