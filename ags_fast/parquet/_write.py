"""write_table: a table becomes an encrypted Parquet file, and its plaintext is nowhere but in memory.

pyarrow encodes each row group as a small Parquet file of its own, in memory, whose parts then go the way that the parts
of any file go when they are encrypted. The footer takes the row groups of all of them, and the rest from one without
any, which is made first: so a wrong key path or option is refused before there is anything at the target.
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
from ags_fast.parquet import _thrift as thrift
from ags_fast.parquet._file import ALGORITHMS, COLUMN_INDEX, Chunk, Crypto, Keys, Opened
from ags_fast.parquet._transcode import (
    V2_LAYOUTS,
    ColumnReport,
    Mover,
    Report,
    Sealer,
    check_choice,
    count_columns,
    level_warnings,
    new_crypto,
    put_footer,
    row_group,
    signing,
    v2_warnings,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from ags_fast.parquet._file import _Edits

__all__ = ["write_table"]

# What pyarrow does if it is not told, and the most that it does.
ROW_GROUP_ROWS, MAX_ROW_GROUP_ROWS = 1 << 20, 64 << 20
ENCODED_BEYOND_NBYTES = 1 << 20  # by how much a row group may be larger than in memory, before it is encoded twice
AHEAD = 2  # row groups in memory at once, of the table and encoded
REFUSED = {
    "encryption_properties": "keys say how it is encrypted",
    "filesystem": "open the target there, and pass the file",
    "metadata_collector": "pyarrow's metadata would be of files in memory; the Report tells what was written",
    "where": "dst is where it is written",
}


def write_table(
    table: Any,
    dst: Any,
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

    table: of pyarrow, pandas (its index is kept as pyarrow keeps it) or polars, a RecordBatchReader, whatever exports
    an Arrow stream, or an iterable of such tables and of record batches, which may be larger than memory. dst, keys,
    fsync, storage_options and how it is encrypted: as for encrypt_file. options: of pyarrow.parquet.write_table, such
    as compression.

    row_group_size: rows, at most 64 Mi; default 1 Mi. Batches are put together, or cut, to row groups of that size.
    Two of them are in memory at once, as Arrow has them and encoded, or one with threads=1; with more threads, pyarrow
    encodes two side by side.

    Values, statistics, pages and schema are those that pyarrow.parquet.write_table would write. Raises TypeError for
    options that cannot be, ValueError for a column that the table has not, FormatError for more row groups, columns or
    pages of a column chunk than can be numbered. On an error nothing is at the path `dst`.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("other_columns", other_columns, ("footer", "plain"))
    check_choice("v2_layout", v2_layout, ("arrow", "parquet-java"))
    for name, instead in REFUSED.items():
        if options.pop(name, None) is not None:
            raise TypeError(f"write_table takes no {name}: {instead}")
    rows = ROW_GROUP_ROWS if row_group_size is None else min(row_group_size, MAX_ROW_GROUP_ROWS)
    if rows < 1:
        raise ValueError(f"row_group_size must be at least 1 row, not {row_group_size}")
    n = thread_count(threads)
    schema, tables = _row_groups(table, rows)
    encoder = _Encoder(schema, options)
    with Opened(encoder.frame(), None) as frame, closing(_encoded(encoder, tables, n)) as files:
        crypto, aad = new_crypto(algorithm, bytes(aad_prefix or b""), store_aad_prefix, keys)
        sealer = Sealer(frame, keys, crypto, aad, other_columns)
        with Target(dst, private=False, fsync=fsync, threads=n, storage_options=storage_options) as target:
            target.put(b"PAR1" if plaintext_footer else b"PARE")
            writer = _Writer(frame, target, sealer, n, V2_LAYOUTS[v2_layout], plaintext_footer)
            for file in files:
                writer.add(file)
            writer.put_indexes()
            footer = writer.footer(crypto if plaintext_footer else None)
            put_footer(target, footer, crypto, sealer.footer(), plaintext_footer)
            report = writer.report(crypto)
            report.buffer_nbytes += writer.largest * min(n, AHEAD)
            report.footer = "signed" if plaintext_footer else "encrypted"
            report.file_length = target.position
            report.warnings += target.warnings
            return report


# ---------------------------------------------------------------------------------------------------------- tables


def _row_groups(table: Any, rows: int) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """A table's schema, and the tables that become its row groups."""
    whole = _as_table(table)
    if whole is not None:
        _check_number(-(-whole.num_rows // rows))
        starts = range(0, max(1, whole.num_rows), rows)  # one of an empty table, as pyarrow writes it
        return whole.schema, (whole.slice(start, rows) for start in starts)
    if hasattr(table, "__arrow_c_stream__"):
        reader = _reader(table)
        return reader.schema, _cut(reader.schema, reader, rows)
    if hasattr(table, "__iter__") and not isinstance(table, (str, bytes, dict)):
        batches = (batch for piece in table for batch in _batches(piece))
        first = next(batches, None)
        if first is None:
            raise ValueError("nothing came, so there is no schema: pass a RecordBatchReader, which has one")
        return first.schema, _cut(first.schema, _chain(first, batches), rows)
    collect = ": collect() it first" if hasattr(table, "collect") else ""
    raise TypeError(
        "a table of pyarrow, pandas or polars is required, an Arrow stream, or an iterable of these, not "
        f"{type(table).__name__!r}{collect}"
    )


def _as_table(table: Any) -> pa.Table | None:
    """A table that is in memory as pyarrow's; None for what must be read to know."""
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")  # never imported for this
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
    """The record batches of a piece of an iterable; of an empty table, one without rows, as it has the schema."""
    table = _as_table(piece)
    if table is not None:
        yield from table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    elif hasattr(piece, "__arrow_c_stream__"):
        yield from _reader(piece)
    else:
        raise TypeError(f"the iterable gave {type(piece).__name__!r}, which is neither a table nor a record batch")


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _cut(schema: pa.Schema, batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Batches put together, and cut, to tables of that many rows; what is left is the last."""
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
    """Makes tables Parquet files in memory, each of them with one row group.

    Buffers are kept from one to the next: where a stream in memory grows, its copies and the pages of memory that are
    touched for the first time cost a third as much as the encoding.
    """

    def __init__(self, schema: pa.Schema, options: Mapping[str, Any]) -> None:
        self._schema = schema
        self._options = options
        self._kept: deque[pa.Buffer] = deque()

    def frame(self) -> pa.Buffer:
        """A file without a row group."""
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, self._schema, **self._options):
            pass
        return sink.getvalue()

    def encode(self, table: pa.Table) -> pa.Buffer:
        """Give the file back with `done`."""
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
        except (pa.ArrowInvalid, OSError):  # larger than the table in memory: then, or for whatever it was, once more
            sink = pa.BufferOutputStream()
            self._write(sink, table)
            return sink.getvalue()

    def _write(self, sink: Any, table: pa.Table) -> None:
        with pq.ParquetWriter(sink, self._schema, **self._options) as writer:
            writer.write_table(table, row_group_size=max(1, table.num_rows))

    def done(self, file: pa.Buffer) -> None:
        if file.parent is not None:
            self._kept.append(file.parent)


def _encoded(encoder: _Encoder, tables: Iterator[pa.Table], threads: int) -> Generator[pa.Buffer, None, None]:
    """The tables, in order, each as a file in memory. With threads, the next is encoded while one is in use."""
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
    """Row groups of files in memory, moved to a target one after the other."""

    def __init__(
        self, frame: Opened, target: Target, sealer: Sealer, threads: int, v2_layout: int, plaintext_footer: bool
    ) -> None:
        self.largest = 0  # bytes of an encoded row group
        self._frame = frame
        self._target = target
        self._sealer = sealer
        self._plaintext_footer = plaintext_footer
        self._indexes: list[tuple[Chunk, int, bytes]] = []
        self._mover = Mover(frame, target, sealer, threads, v2_layout=v2_layout, held=self._indexes)
        self._groups: list[bytes] = []
        self._columns: dict[int, ColumnReport] = {}
        self._rows = 0
        self._nbytes = 0

    def add(self, file: pa.Buffer) -> None:
        """Move a file's row group, all but its indexes."""
        number = len(self._groups)
        _check_number(number + 1)
        mover, sealer = self._mover, self._sealer
        with Opened(file, None) as opened:
            chunks = list(opened.chunks())
            for chunk in chunks:
                chunk.row_group = chunk.ordinal = number
            mover.opened = opened
            if not self._target.discardable:
                mover.check_ordinals(chunks)
            mover.move(chunks)
            begin, end, _, _ = opened.groups[0]
            data = opened.data[begin:end]
            self._groups.append(row_group(data, number, chunks, mover.moved, sealer, self._plaintext_footer, []))
            count_columns(self._columns, chunks, sealer, mover.moved, self._plaintext_footer)
            self._rows += thrift.Struct(opened.data).integer(3) or 0
        self.largest = max(self.largest, len(file))
        self._nbytes += len(file)
        mover.moved.clear()
        sealer.forget()

    def put_indexes(self) -> None:
        """Put the indexes of all row groups where readers look for them: together, near the footer."""
        places: dict[int, dict[int, _Edits]] = {}
        for chunk, module, framed in sorted(self._indexes, key=lambda one: (one[1], one[0].row_group, one[0].column)):
            field = 6 if module == COLUMN_INDEX else 4
            edits = places.setdefault(chunk.row_group, {}).setdefault(chunk.column, [])
            edits.insert(0, (field, thrift.I64, thrift.integer(self._target.position)))
            self._target.put(framed)
        for number, columns in places.items():
            group = self._groups[number]
            spans = thrift.Struct(group).elements(1) or []
            placed = [thrift_splice(group[begin:end], 0, columns.get(i, [])) for i, (begin, end) in enumerate(spans)]
            self._groups[number] = thrift_splice(group, 0, [(1, thrift.LIST, thrift.list_of(thrift.STRUCT, placed))])

    def footer(self, crypto: Crypto | None) -> bytes:
        """The FileMetaData of all row groups; crypto: of a signed one in plain text."""
        edits: _Edits = [
            (3, thrift.I64, thrift.integer(self._rows)),
            (4, thrift.LIST, thrift.list_of(thrift.STRUCT, self._groups)),
            *signing(crypto),
        ]
        return thrift_splice(self._frame.data[: self._frame.footer.end], 0, edits)

    def report(self, crypto: Crypto) -> Report:
        report = Report("write", crypto.algorithm, "", len(self._groups), self._nbytes)
        report.columns = [self._columns[number] for number in sorted(self._columns)]
        report.buffer_nbytes = self._mover.buffer_nbytes
        report.unauthenticated_levels = self._mover.unauthenticated_levels
        report.warnings = [*v2_warnings(self._mover), *level_warnings(report.unauthenticated_levels)]
        return report
