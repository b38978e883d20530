"""Encrypted Parquet files that are written a row group at a time: pyarrow encodes in memory, and a Mover seals."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ags_fast._core import ORDINAL_MAX, thrift_splice
from ags_fast.columnar import thrift
from ags_fast.errors import FormatError
from ags_fast.files.sink import Target
from ags_fast.parquet.footer import NewFooter, put_footer
from ags_fast.parquet.mover import Mover
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import V2_LAYOUTS, Encryption
from ags_fast.parquet.report import ColumnReports, Report, level_warnings, v2_warnings
from ags_fast.parquet.sealer import Sealer, new_crypto
from ags_fast.parquet.spec import COLUMN_INDEX, ENCRYPTED_MAGIC, PLAIN_MAGIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast._core import Chunk
    from ags_fast._types import WritableTarget
    from ags_fast.columnar.thrift import Edits
    from ags_fast.parquet.keys import Keys
    from ags_fast.parquet.opened import Crypto

__all__ = ["CHUNK_NBYTES", "Encoder", "TableWriter", "check_number"]

# That a file may take more than its table in memory without being encoded twice: all of it, and for each chunk.
ENCODED_BEYOND_NBYTES, CHUNK_NBYTES = 1 << 20, 512


class Encoder:
    """Encodes tables as Parquet files in memory.

    Buffers are used again. In a stream that grows in memory, copies and first touches of memory pages would cost a
    third as much as the encoding.

    Args:
        schema: The schema of all tables.
        options: Of pyarrow.parquet.write_table.
        metadata: Key-value metadata of the files, beside what pyarrow makes of the schema's own; None: none.
    """

    def __init__(
        self, schema: pa.Schema, options: Mapping[str, Any], metadata: Mapping[str, str] | None = None
    ) -> None:
        self._schema = schema
        self._metadata = metadata
        self._options = options
        self._kept: deque[pa.Buffer] = deque()

    def frame(self) -> pa.Buffer:
        """Return a file without a row group."""
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, self._schema, **self._options) as writer:
            if self._metadata:
                writer.add_key_value_metadata(self._metadata)
        return sink.getvalue()

    def encode(self, table: pa.Table, rows: int | None = None) -> pa.Buffer:
        """Return a table as a file, with row groups of `rows` rows; None: with one row group.

        Pass the file to `done` when it is no longer used.
        """
        rows = max(1, table.num_rows if rows is None else rows)
        chunks = table.num_columns * -(-table.num_rows // rows)
        wanted = table.nbytes + ENCODED_BEYOND_NBYTES + CHUNK_NBYTES * chunks
        try:
            buffer = self._kept.pop()
        except IndexError:
            buffer = None
        if buffer is None or buffer.size < wanted:
            buffer = pa.allocate_buffer(wanted)
        sink: Any = pa.FixedSizeBufferWriter(buffer)
        try:
            self._write(sink, table, rows)
            return buffer.slice(0, sink.tell())
        except (pa.ArrowInvalid, OSError):  # the buffer was too small, or another error, which comes again
            sink = pa.BufferOutputStream()
            self._write(sink, table, rows)
            return sink.getvalue()

    def _write(self, sink: Any, table: pa.Table, rows: int) -> None:
        with pq.ParquetWriter(sink, self._schema, **self._options) as writer:
            writer.write_table(table, row_group_size=rows)

    def done(self, file: pa.Buffer) -> None:
        """Use a file's buffer again."""
        if file.parent is not None:
            self._kept.append(file.parent)


def check_number(row_groups: int) -> None:
    """Raise FormatError for more row groups than can be numbered."""
    if row_groups > ORDINAL_MAX + 1:
        raise FormatError(
            f"{row_groups:,} row groups are more than the {ORDINAL_MAX + 1:,} that Parquet encryption can number: "
            "pass a larger row_group_size"
        )


class TableWriter:
    """Writes an encrypted Parquet file, a row group at a time. Use it in a ``with`` block, or call `abort` at the end.

    Args:
        encoder: What encodes the tables. Files that are written side by side may share one.
        dst: As for encrypt_file. On an error nothing appears at a path.
        keys: As for encrypt_file.
        how: How the file is encrypted.
        threads: How many threads work.
        fsync: As for encrypt_file.
        storage_options: As for encrypt_file.
    """

    def __init__(
        self,
        encoder: Encoder,
        dst: WritableTarget | bytearray,
        keys: Keys,
        how: Encryption,
        *,
        threads: int = 1,
        fsync: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._encoder = encoder
        with ExitStack() as stack:
            frame = stack.enter_context(Opened(encoder.frame()))
            sealer = Sealer(frame, keys, *new_crypto(how, keys), other_columns=how.other_columns)
            target = Target(dst, private=False, fsync=fsync, threads=threads, storage_options=storage_options)
            stack.push(target.__exit__)
            target.put(PLAIN_MAGIC if how.plaintext_footer else ENCRYPTED_MAGIC)
            self._prepare(frame, target, sealer, threads, how)
            self._stack = stack.pop_all()

    def _prepare(self, frame: Opened, target: Target, sealer: Sealer, threads: int, how: Encryption) -> None:
        self.largest = 0  # bytes of an encoded row group
        self._frame = frame
        self._target = target
        self._sealer = sealer
        self._plaintext_footer = how.plaintext_footer
        self._indexes: list[tuple[Chunk, int, bytes]] = []
        layout = V2_LAYOUTS[how.v2_layout]
        self._mover = Mover(frame, target, sealer, threads, v2_layout=layout, held=self._indexes)
        self._footer = NewFooter(sealer.crypto, how.plaintext_footer)
        self._columns = ColumnReports(how.plaintext_footer)
        self._rows = 0
        self._nbytes = 0

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def position(self) -> int:
        """The bytes that were written so far."""
        return self._target.position

    def write(self, table: pa.Table) -> None:
        """Write a table as one row group."""
        file = self._encoder.encode(table)
        self.add(file)
        self._encoder.done(file)

    def add(self, file: pa.Buffer) -> None:
        """Move the row groups of a file that the encoder has made, except their indexes."""
        first = len(self._footer.groups)
        mover = self._mover
        with Opened(file) as opened:
            check_number(first + len(opened.groups))
            chunks = list(opened.chunks())
            for chunk in chunks:
                chunk.row_group = chunk.ordinal = first + chunk.row_group
            mover.opened = opened
            if not self._target.discardable:
                mover.check_ordinals(chunks)
            mover.move(chunks)
            for begin, end, number, count in opened.groups:
                self._footer.add(opened.data[begin:end], chunks[number : number + count])
            self._columns.add(chunks)
            self._rows += opened.footer.rows
        self._target.flush()  # what was made reaches the target before more is made
        self.largest = max(self.largest, len(file))
        self._nbytes += len(file)

    def abort(self) -> None:
        """Discard the file. After `finish`, release what is held."""
        self._stack.close()

    def finish(self) -> Report:
        """Write the indexes and the footer, and publish the file."""
        self._put_indexes()
        target, sealer = self._target, self._sealer
        footer = self._footer.encode(self._frame, [(3, thrift.I64, thrift.integer(self._rows))])
        plain_length = self._footer.plain_length(target.position, footer)
        put_footer(target, footer, sealer.crypto, sealer.footer(), self._plaintext_footer)
        report = self._report(sealer.crypto)
        report.plain_length = plain_length
        report.warnings += target.warnings
        return report

    def _put_indexes(self) -> None:
        """Write the indexes of all row groups together, near the footer, where readers look for them."""
        groups = self._footer.groups
        places: dict[int, dict[int, Edits]] = {}
        for chunk, module, framed in sorted(self._indexes, key=lambda one: (one[1], one[0].row_group, one[0].column)):
            field = 6 if module == COLUMN_INDEX else 4
            edits = places.setdefault(chunk.row_group, {}).setdefault(chunk.column, [])
            edits.insert(0, (field, thrift.I64, thrift.integer(self._target.position)))
            self._target.put(framed)
        for number, columns in places.items():
            group = groups[number]
            spans = thrift.Struct(group).elements(1) or []
            placed = [thrift_splice(group[begin:end], 0, columns.get(i, [])) for i, (begin, end) in enumerate(spans)]
            groups[number] = thrift_splice(group, 0, [(1, thrift.LIST, thrift.list_of(thrift.STRUCT, placed))])

    def _report(self, crypto: Crypto) -> Report:
        footer = "signed" if self._plaintext_footer else "encrypted"
        groups, length = len(self._footer.groups), self._target.position
        report = Report("write", crypto.algorithm, footer, groups, self._nbytes, length)
        report.columns = self._columns.rows()
        report.buffer_nbytes = self._mover.buffer_nbytes
        report.unauthenticated_levels = self._mover.pages.unauthenticated_levels
        report.warnings = [*v2_warnings(self._mover), *level_warnings(report.unauthenticated_levels)]
        return report
