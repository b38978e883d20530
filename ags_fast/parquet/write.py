"""write_table: a table becomes an encrypted Parquet file, and its plaintext is nowhere but in memory.

pyarrow encodes each row group as a small Parquet file of its own, in memory. A Mover then seals the parts of these
files, as encrypt_file does. The new footer gets the row groups of all of them. All other fields come from a file
without row groups, which is made first: so a wrong key path or option is refused before anything is written.
"""

from __future__ import annotations

import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ags_fast._core import ORDINAL_MAX, thrift_splice
from ags_fast._threads import thread_count
from ags_fast.errors import FormatError
from ags_fast.files.sink import Target
from ags_fast.parquet import thrift
from ags_fast.parquet.footer import NewFooter, put_footer
from ags_fast.parquet.mover import Mover
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import V2_LAYOUTS, Encryption, check_choice
from ags_fast.parquet.report import ColumnReport, Report, count_columns, level_warnings, v2_warnings
from ags_fast.parquet.sealer import Sealer, new_crypto
from ags_fast.parquet.spec import COLUMN_INDEX, ENCRYPTED_MAGIC, PLAIN_MAGIC

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from ags_fast._types import WritableTarget
    from ags_fast.parquet.keys import Keys
    from ags_fast.parquet.opened import Chunk, Crypto
    from ags_fast.parquet.thrift import Edits

__all__ = ["write_table"]

# pyarrow's default and maximum.
ROW_GROUP_ROWS, MAX_ROW_GROUP_ROWS = 1 << 20, 64 << 20
ENCODED_BEYOND_NBYTES = 1 << 20  # that a row group may take more than in memory without being encoded twice
AHEAD = 2  # row groups in memory at once, of the table and encoded
REFUSED = {
    "encryption_properties": "keys tell how it is encrypted",
    "filesystem": "open the target there, and pass the file",
    "metadata_collector": "pyarrow's metadata would describe files in memory; the Report tells what was written",
    "where": "dst is the target",
}


def write_table(  # noqa: PLR0913 (the contract's)
    table: Any,
    dst: WritableTarget | bytearray,
    keys: Keys,
    *,
    algorithm: str = "AES_GCM_V1",
    plaintext_footer: bool = False,
    other_columns: str = "footer",
    aad_prefix: bytes | None = None,
    store_aad_prefix: bool = True,
    v2_layout: str = "arrow",
    row_group_size: int | None = None,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Write a table as an encrypted Parquet file. Its plaintext never reaches storage, not even for a moment.

    Values, statistics, pages and schema are those that pyarrow.parquet.write_table writes. Two row groups are in memory
    at once, both as Arrow has them and encoded; with ``threads=1`` only one. With more threads, pyarrow encodes two
    side by side.

    Args:
        table: A table of pyarrow, pandas (its index is kept as pyarrow keeps it) or polars, a RecordBatchReader, any
            object that exports an Arrow stream, or an iterable of such tables and of record batches. An iterable may be
            larger than memory.
        dst: As for encrypt_file. On an error nothing appears at a path.
        keys: As for encrypt_file.
        algorithm: As for encrypt_file.
        plaintext_footer: As for encrypt_file.
        other_columns: As for encrypt_file.
        aad_prefix: As for encrypt_file.
        store_aad_prefix: As for encrypt_file.
        v2_layout: As for encrypt_file.
        row_group_size: Rows of a row group, at most 64 Mi; None is 1 Mi. Batches are joined, or cut, to this size.
        threads: As for AgsCodec.
        fsync: As for encrypt_file.
        storage_options: As for encrypt_file.
        **options: Of pyarrow.parquet.write_table, such as ``compression``.

    Returns:
        What was written, by column, with its lengths in bytes.

    Raises:
        FormatError: There are more row groups, columns or pages of a column chunk than can be numbered.
        TypeError: The table or an option is impossible.
        ValueError: `keys` name a column that the table does not have, or another argument is impossible.
    """
    check_choice("v2_layout", v2_layout, ("arrow", "parquet-java"))
    how = Encryption(algorithm, plaintext_footer, other_columns, aad_prefix, store_aad_prefix, v2_layout)
    for name, instead in REFUSED.items():
        if options.pop(name, None) is not None:
            raise TypeError(f"write_table takes no {name}: {instead}")
    rows = ROW_GROUP_ROWS if row_group_size is None else min(row_group_size, MAX_ROW_GROUP_ROWS)
    if rows < 1:
        raise ValueError(f"row_group_size must be at least 1 row, not {row_group_size}")
    n = thread_count(threads)
    schema, tables = _row_groups(table, rows)
    encoder = _Encoder(schema, options)
    with Opened(encoder.frame()) as frame, closing(_encoded(encoder, tables, n)) as files:
        sealer = Sealer(frame, keys, *new_crypto(how, keys), other_columns=other_columns)
        with Target(dst, private=False, fsync=fsync, threads=n, storage_options=storage_options) as target:
            target.put(PLAIN_MAGIC if plaintext_footer else ENCRYPTED_MAGIC)
            writer = _Writer(frame, target, sealer, n, how)
            for file in files:
                writer.add(file)
            report = writer.finish()
            report.buffer_nbytes += writer.largest * min(n, AHEAD)
            return report


# ---------------------------------------------------------------------------------------------------------- tables


def _row_groups(table: Any, rows: int) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return a table's schema, and the tables that become its row groups."""
    whole = _as_table(table)
    if whole is not None:
        _check_number(-(-whole.num_rows // rows))
        starts = range(0, max(1, whole.num_rows), rows)  # an empty table has one row group, as pyarrow writes it
        return whole.schema, (whole.slice(start, rows) for start in starts)
    if hasattr(table, "__arrow_c_stream__"):
        reader = _reader(table)
        return reader.schema, _cut(reader.schema, reader, rows)
    if hasattr(table, "__iter__") and not isinstance(table, (str, bytes, dict)):
        batches = (batch for piece in table for batch in _batches(piece))
        first = next(batches, None)
        if first is None:
            raise ValueError("the iterable is empty, so there is no schema: pass a RecordBatchReader, which has one")
        return first.schema, _cut(first.schema, _chain(first, batches), rows)
    collect = ": collect() it first" if hasattr(table, "collect") else ""
    raise TypeError(
        "a table of pyarrow, pandas or polars is required, an Arrow stream, or an iterable of these, not "
        f"{type(table).__name__!r}{collect}"
    )


def _as_table(table: Any) -> pa.Table | None:
    """Return a table that is in memory as pyarrow's; None for streams and iterables."""
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")  # never imported here
    if pandas is not None and isinstance(table, pandas.DataFrame):
        return pa.Table.from_pandas(table)
    if polars is not None and isinstance(table, polars.DataFrame):
        return table.to_arrow()
    return None


def _reader(stream: Any) -> pa.RecordBatchReader:
    if isinstance(stream, pa.RecordBatchReader):  # whose errors keep their types
        return stream
    return pa.RecordBatchReader.from_stream(stream)


def _batches(piece: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an item of an iterable. An empty table has one without rows, for its schema."""
    table = _as_table(piece)
    if table is not None:
        yield from table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    elif hasattr(piece, "__arrow_c_stream__"):
        yield from _reader(piece)
    else:
        raise TypeError(f"the iterable yielded {type(piece).__name__!r}, which is neither a table nor a record batch")


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _cut(schema: pa.Schema, batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Join and cut batches to tables of `rows` rows; the last table may have fewer."""
    held: list[pa.RecordBatch] = []
    missing = rows
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            held.append(batch.slice(start, missing))
            start += held[-1].num_rows
            missing -= held[-1].num_rows
            if not missing:
                yield pa.Table.from_batches(held, schema)
                held, missing = [], rows
    if held:
        yield pa.Table.from_batches(held, schema)


# ---------------------------------------------------------------------------------------------------------- encoding


class _Encoder:
    """Encodes tables as Parquet files in memory, each with one row group.

    Buffers are used again. In a stream that grows in memory, copies and first touches of memory pages would cost a
    third as much as the encoding.
    """

    def __init__(self, schema: pa.Schema, options: Mapping[str, Any]) -> None:
        self._schema = schema
        self._options = options
        self._kept: deque[pa.Buffer] = deque()

    def frame(self) -> pa.Buffer:
        """Return a file without a row group."""
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, self._schema, **self._options):
            pass
        return sink.getvalue()

    def encode(self, table: pa.Table) -> pa.Buffer:
        """Return a table as a file. Pass the file to `done` when it is no longer used."""
        wanted = table.nbytes + ENCODED_BEYOND_NBYTES
        try:
            buffer = self._kept.pop()
        except IndexError:
            buffer = None
        if buffer is None or buffer.size < wanted:
            buffer = pa.allocate_buffer(wanted)
        sink: Any = pa.FixedSizeBufferWriter(buffer)
        try:
            self._write(sink, table)
            return buffer.slice(0, sink.tell())
        except (pa.ArrowInvalid, OSError):  # the buffer was too small, or another error, which comes again
            sink = pa.BufferOutputStream()
            self._write(sink, table)
            return sink.getvalue()

    def _write(self, sink: Any, table: pa.Table) -> None:
        with pq.ParquetWriter(sink, self._schema, **self._options) as writer:
            writer.write_table(table, row_group_size=max(1, table.num_rows))

    def done(self, file: pa.Buffer) -> None:
        """Use a file's buffer again."""
        if file.parent is not None:
            self._kept.append(file.parent)


def _encoded(encoder: _Encoder, tables: Iterator[pa.Table], threads: int) -> Generator[pa.Buffer, None, None]:
    """Yield tables as files in memory, in order. With threads, the next is encoded while one is in use."""
    if threads == 1:
        for table in tables:
            file = encoder.encode(table)
            yield file
            encoder.done(file)
        return
    running: deque[Future[pa.Buffer]] = deque()
    with ThreadPoolExecutor(AHEAD, "ags-fast-encode") as pool:
        try:
            while True:
                while len(running) < AHEAD and (table := next(tables, None)) is not None:
                    running.append(pool.submit(encoder.encode, table))
                del table
                if not running:
                    return
                file = running.popleft().result()
                yield file
                encoder.done(file)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------- writing


def _check_number(row_groups: int) -> None:
    if row_groups > ORDINAL_MAX + 1:
        raise FormatError(
            f"{row_groups:,} row groups are more than the {ORDINAL_MAX + 1:,} that Parquet encryption can number: "
            "pass a larger row_group_size"
        )


class _Writer:
    """Moves the row groups of files in memory to a target, one after the other."""

    def __init__(self, frame: Opened, target: Target, sealer: Sealer, threads: int, how: Encryption) -> None:
        self.largest = 0  # bytes of an encoded row group
        self._frame = frame
        self._target = target
        self._sealer = sealer
        self._plaintext_footer = how.plaintext_footer
        self._indexes: list[tuple[Chunk, int, bytes]] = []
        layout = V2_LAYOUTS[how.v2_layout]
        self._mover = Mover(frame, target, sealer, threads, v2_layout=layout, held=self._indexes)
        self._footer = NewFooter(self._mover.moved, sealer, sealer.crypto, how.plaintext_footer)
        self._columns: dict[int, ColumnReport] = {}
        self._rows = 0
        self._nbytes = 0

    def add(self, file: pa.Buffer) -> None:
        """Move a file's row group, except its indexes."""
        number = len(self._footer.groups)
        _check_number(number + 1)
        mover = self._mover
        with Opened(file) as opened:
            chunks = list(opened.chunks())
            for chunk in chunks:
                chunk.row_group = chunk.ordinal = number
            mover.opened = opened
            if not self._target.discardable:
                mover.check_ordinals(chunks)
            mover.move(chunks)
            begin, end, _, _ = opened.groups[0]
            self._footer.add(opened.data[begin:end], chunks)
            count_columns(self._columns, chunks, mover, self._plaintext_footer)
            self._rows += thrift.Struct(opened.data).integer(3) or 0
        self.largest = max(self.largest, len(file))
        self._nbytes += len(file)
        mover.moved.clear()
        self._sealer.forget()

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
        report.columns = [self._columns[number] for number in sorted(self._columns)]
        report.buffer_nbytes = self._mover.buffer_nbytes
        report.unauthenticated_levels = self._mover.unauthenticated_levels
        report.warnings = [*v2_warnings(self._mover), *level_warnings(report.unauthenticated_levels)]
        return report
