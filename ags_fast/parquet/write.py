"""write_table: a table becomes an encrypted Parquet file, and its plaintext is nowhere but in memory.

pyarrow encodes each row group as a small Parquet file of its own, in memory, or small ones of a table together. A Mover
then seals the parts of these files, as encrypt_file does. The new footer gets the row groups of all of them. All other
fields come from a file without row groups. That one is made first: so a wrong key path or option is refused before
anything is written.
"""

from __future__ import annotations

import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ags_fast._threads import thread_count
from ags_fast._types import Algorithm, ColumnsLeft, Layout, WritableTarget, check_choice
from ags_fast.parquet.reading import Encryption
from ags_fast.parquet.table_writer import CHUNK_NBYTES, Encoder, TableWriter, check_number

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from ags_fast.parquet.keys import Keys
    from ags_fast.parquet.report import Report

__all__ = ["write_table"]

# pyarrow's default and maximum.
ROW_GROUP_ROWS, MAX_ROW_GROUP_ROWS = 1 << 20, 64 << 20
AHEAD = 2  # encoded files in memory at once
TOGETHER_NBYTES = 16 << 20  # of row groups that become one file: files of their own cost a wide table a quarter more
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
    algorithm: Algorithm = "AES_GCM_V1",
    plaintext_footer: bool = False,
    other_columns: ColumnsLeft = "footer",
    aad_prefix: bytes | None = None,
    store_aad_prefix: bool = True,
    v2_layout: Layout = "arrow",
    row_group_size: int | None = None,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Write a table as an encrypted Parquet file. Its plaintext never reaches storage, not even for a moment.

    Values, statistics, pages and schema are those that pyarrow.parquet.write_table writes. Two row groups are in memory
    at once, both as Arrow has them and encoded; with ``threads=1`` only one. Small row groups of a table that is in
    memory count together as one, up to 16 MiB. With more threads, pyarrow encodes two side by side.

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
    check_choice("v2_layout", v2_layout, Layout)
    how = Encryption(algorithm, plaintext_footer, other_columns, aad_prefix, store_aad_prefix, v2_layout)
    for name, instead in REFUSED.items():
        if options.pop(name, None) is not None:
            raise TypeError(f"write_table takes no {name}: {instead}")
    rows = ROW_GROUP_ROWS if row_group_size is None else min(row_group_size, MAX_ROW_GROUP_ROWS)
    if rows < 1:
        raise ValueError(f"row_group_size must be at least 1 row, not {row_group_size}")
    n = thread_count(threads)
    schema, tables = _row_groups(table, rows)
    encoder = Encoder(schema, options)
    with (
        TableWriter(encoder, dst, keys, how, threads=n, fsync=fsync, storage_options=storage_options) as writer,
        closing(_encoded(encoder, tables, rows, n)) as files,
    ):
        for file in files:
            writer.add(file)
        report = writer.finish()
        report.buffer_nbytes += writer.largest * min(n, AHEAD)
        return report


# ---------------------------------------------------------------------------------------------------------- tables


def _row_groups(table: Any, rows: int) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return a table's schema, and tables of whole row groups, of which the last one may have fewer rows."""
    whole = _as_table(table)
    if whole is not None:
        check_number(-(-whole.num_rows // rows))
        nbytes = whole.nbytes * rows / max(1, whole.num_rows) + CHUNK_NBYTES * whole.num_columns  # of a row group
        step = rows * max(1, int(TOGETHER_NBYTES / max(1, nbytes)))
        starts = range(0, max(1, whole.num_rows), step)  # an empty table has one row group, as pyarrow writes it
        # A slice of a table without columns would have as many rows as it is asked for.
        return whole.schema, (whole.slice(start, min(step, whole.num_rows - start)) for start in starts)
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


def _encoded(encoder: Encoder, tables: Iterator[pa.Table], rows: int, threads: int) -> Generator[pa.Buffer, None, None]:
    """Yield tables as files in memory, in order. With threads, the next is encoded while one is in use."""
    if threads == 1:
        for table in tables:
            file = encoder.encode(table, rows)
            yield file
            encoder.done(file)
        return
    running: deque[Future[pa.Buffer]] = deque()
    with ThreadPoolExecutor(AHEAD, "ags-fast-encode") as pool:
        try:
            while True:
                while len(running) < AHEAD and (table := next(tables, None)) is not None:
                    running.append(pool.submit(encoder.encode, table, rows))
                del table
                if not running:
                    return
                file = running.popleft().result()
                yield file
                encoder.done(file)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
