"""scan_polars: an encrypted Parquet file as a polars LazyFrame that decrypts only the pages that a query needs.

polars reads a Python file object to its end before it looks at the columns. So row groups are handed to polars as
small Parquet files in memory, which hold the column chunks of the query and nothing else.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING

from ags_fast._core import ColumnMetadata, new_bytes, thrift_splice
from ags_fast.columnar import thrift
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.spec import MAGIC_NBYTES, PLAIN_MAGIC, TAIL_NBYTES
from ags_fast.parquet.view import PlainView, open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    import polars as pl

    from ags_fast._types import ReadableSource, Retriever
    from ags_fast.columnar.thrift import Edits
    from ags_fast.parquet.keys import Keys

__all__ = ["scan_polars"]

POLARS = 2, 1  # the oldest version
PART_NBYTES = 32 << 20  # of column chunks that are decrypted before polars decodes them; one row group may be larger
INT64 = 2  # of Parquet's physical types
TIMESTAMP, TIMESTAMP_UNITS = 8, {1: "ms", 2: "us", 3: "ns"}  # LogicalType's field, and those of its unit
CONVERTED_UNITS = {9: "ms", 10: "us"}


def scan_polars(
    src: ReadableSource | PlainView | Sequence[ReadableSource | PlainView],
    keys: Keys | Retriever | None = None,
    **options: Any,
) -> pl.LazyFrame:
    """Scan an encrypted Parquet file with polars. Only pages that the query needs are read and decrypted.

    The column chunks of columns that the query does not use are not read. A row group whose statistics exclude the
    query's predicate is not read, nor is one after the last row of `head`. `polars.read_parquet(open_plain(...))`
    decrypts the whole file in comparison. The result has the types that `polars.read_parquet` gives the plain file.

    The footer is read by this call, and again by each `collect`. Up to 32 MiB of column chunks, or one row group, are
    in memory at a time, besides what polars makes of them. Errors of pages come from `collect`, with their own types.

    Args:
        src: As for open_plain. A view that `open_plain` or `Dataset.open_file` has opened is read and left open, and
            takes no other arguments. A list or tuple of sources makes one frame of several files with equal columns.
        keys: As for open_plain.
        **options: The keyword arguments of open_plain. `key_metadata` and `length` are for a single source.

    Raises:
        ImportError: polars is not installed, or is too old.
        ValueError: There are no sources, or they differ in their columns.
        AgsError: As for open_plain, and from `collect` for the pages: an IntegrityError names the place.
    """
    try:
        import polars as pl
        from polars.io.plugins import register_io_source
    except ImportError as error:
        raise ImportError(f"scan_polars needs polars: pip install 'polars>=2.1' ({error})") from error
    if tuple(int(part) for part in pl.__version__.split(".")[:2]) < POLARS:  # older ones count n_rows otherwise
        raise ImportError(f"polars {pl.__version__} is too old for scan_polars: pip install 'polars>=2.1'")

    sources = list(src) if isinstance(src, (list, tuple)) else [src]
    if not sources:
        raise ValueError("at least one source is required")
    for name in ("key_metadata", "length"):
        if len(sources) > 1 and options.get(name) is not None:
            raise ValueError(f"{name} belongs to one file: scan each file, and join the frames by polars.concat")
    if any(isinstance(source, PlainView) for source in sources) and (keys is not None or options):
        raise ValueError("an opened view has its keys and options: give none beside a view")
    scan = _Scan(sources, keys, options)
    schema: pl.Schema | None = None
    for source in sources:
        with scan.open(source) as file:
            found = pl.scan_parquet(file.part([], set())).collect_schema()
        if schema is not None and found != schema:
            raise ValueError("the files differ in their columns: scan each file, and join the frames by polars.concat")
        schema = found
    scan.schema = schema
    assert schema is not None
    return register_io_source(scan, schema=schema)


class _Scan:
    """What polars calls: sources, their keys, and how to read them."""

    schema: Any = None

    def __init__(self, sources: list[Any], keys: Any, options: dict[str, Any]) -> None:
        self._sources = sources
        self._keys = keys
        self._options = options

    def __repr__(self) -> str:
        return f"<ags_fast scan of {len(self._sources)} encrypted Parquet files>"

    def __reduce__(self) -> str:
        raise TypeError("a scan holds keys and is never pickled: make it where it is used")

    def open(self, source: Any) -> _File:
        if isinstance(source, PlainView):
            return _File(source, False)
        return _File(open_plain(source, self._keys, **self._options), True)

    def __call__(
        self, columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of a query."""
        shown = list(self.schema) if columns is None else columns
        used = {*shown, *(() if predicate is None else predicate.meta.root_names())}
        left = n_rows  # counted before the predicate, as polars cuts its own scans
        began = False
        for source in self._sources:
            if left == 0 and began:
                break
            with self.open(source) as file:
                for groups, rows in file.batches(file.candidates(predicate, self.schema, left), used, left):
                    frame = self._decode(file.part(groups, used), shown, predicate, rows)
                    began = True
                    yield from frame.iter_slices(batch_size) if batch_size and frame.height > batch_size else (frame,)
                if not began:  # polars takes the types from a frame
                    yield self._decode(file.part([], used), shown, None, 0)
                    began = True
                left = None if left is None else max(0, left - file.rows)

    def _decode(self, data: bytes, shown: list[str], predicate: pl.Expr | None, rows: int) -> pl.DataFrame:
        import polars as pl

        frame = pl.scan_parquet(data)
        if frame.collect_schema() != self.schema:
            raise FormatError("the file has other columns than when the scan was made: it was replaced; scan it again")
        frame = frame.head(rows)
        if predicate is not None:
            frame = frame.filter(predicate)
        return frame.select(shown).collect(engine="in-memory")


class _File:
    """The footer of an opened view, and parts of the view as Parquet files.

    Args:
        view: The view.
        owned: Whether to close the view at the end.
    """

    def __init__(self, view: PlainView, owned: bool) -> None:
        self._view = view
        self._owned = owned
        try:
            opened = Opened(view)
            self._data, self._footer = opened.data, opened.footer
            self._groups, self._leaves = opened.groups, opened.leaves
            self._rows = [Struct(self._data, begin).integer(3) or 0 for begin, _, _, _ in self._groups]
            self._ends = list(accumulate(self._rows))  # in rows of the file
            self.rows = sum(self._rows)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        if self._owned:
            self._view.close()

    def _number(self, group: int, leaf: int) -> int:
        return group * len(self._leaves) + leaf

    def _metadata(self, group: int, leaf: int) -> ColumnMetadata:
        return ColumnMetadata(self._data, self._footer.chunk(self._number(group, leaf)).metadata)

    def _used(self, columns: set[str]) -> list[int]:
        return [number for number, path in enumerate(self._leaves) if path[0] in columns]

    # ---- parts

    def batches(self, groups: list[int], columns: set[str], limit: int | None) -> Iterator[tuple[list[int], int]]:
        """Yield row groups to decrypt together, and how many of their rows are among the file's first `limit`."""
        leaves = self._used(columns)
        some: list[int] = []
        rows = nbytes = 0
        for group in groups:
            size = sum(self._metadata(group, leaf).compressed_nbytes for leaf in leaves)
            if some and nbytes + size > PART_NBYTES:
                yield some, rows
                some, rows, nbytes = [], 0, 0
            some.append(group)
            nbytes += size
            rows += self._rows[group] - (max(0, self._ends[group] - limit) if limit is not None else 0)
        if some:
            yield some, rows

    def part(self, groups: list[int], columns: set[str]) -> bytes:
        """Return a plain Parquet file of some row groups, with the column chunks of these columns only.

        The other columns stay in its schema; their chunks must not be read.
        """
        leaves = self._used(columns)
        ranges: list[tuple[int, int]] = []
        encoded: list[bytes] = []
        at = MAGIC_NBYTES
        for group in groups:
            moved: dict[int, bytes] = {}
            for leaf in leaves:
                metadata = self._metadata(group, leaf)
                begin, nbytes = metadata.first_page, metadata.compressed_nbytes
                if begin < MAGIC_NBYTES or nbytes < 0 or begin + nbytes > self._view.size:
                    raise FormatError(f"column {self._leaves[leaf][0]!r} has a place outside of the file")
                moved[leaf] = self._moved(group, leaf, at - begin)
                ranges.append((begin, nbytes))
                at += nbytes
            encoded.append(self._group(group, moved))
        rows = sum(self._rows[group] for group in groups)
        footer = thrift_splice(
            self._data,
            0,
            [(3, thrift.I64, thrift.integer(rows)), (4, thrift.LIST, thrift.list_of(thrift.STRUCT, encoded))],
        )
        out, buffer = new_bytes(at + len(footer) + TAIL_NBYTES)
        buffer[:MAGIC_NBYTES] = PLAIN_MAGIC
        self._view.readinto_ranges(ranges, buffer[MAGIC_NBYTES:at])
        buffer[at:] = footer + len(footer).to_bytes(4, "little") + PLAIN_MAGIC
        return out

    def _group(self, group: int, moved: dict[int, bytes]) -> bytes:
        begin, end, _, count = self._groups[group]
        chunks = []
        for leaf in range(count):
            chunk = moved.get(leaf)
            if chunk is None:
                span = self._footer.chunk(self._number(group, leaf))
                chunk = self._data[span.begin : span.end]
            chunks.append(chunk)
        return thrift_splice(self._data[begin:end], 0, [(1, thrift.LIST, thrift.list_of(thrift.STRUCT, chunks))])

    def _moved(self, group: int, leaf: int, by: int) -> bytes:
        """Return a ColumnChunk whose pages begin `by` bytes further on, without indexes and a bloom filter."""
        span = self._footer.chunk(self._number(group, leaf))
        metadata = self._metadata(group, leaf)
        edits: Edits = [(9, thrift.I64, thrift.integer(metadata.data_page + by)), (10, thrift.I64, None)]
        dictionary = metadata.dictionary_page
        edits.append((11, thrift.I64, thrift.integer(dictionary + by) if dictionary > 0 else None))
        edits += [(14, thrift.I64, None), (15, thrift.I32, None)]
        shown = thrift_splice(self._data, span.metadata, edits)
        gone: Edits = [(4, thrift.I64, None), (5, thrift.I32, None), (6, thrift.I64, None), (7, thrift.I32, None)]
        return thrift_splice(self._data[span.begin : span.end], 0, [(3, thrift.STRUCT, shown), *gone])

    # ---- row groups that a predicate excludes

    def candidates(self, predicate: pl.Expr | None, schema: pl.Schema, limit: int | None) -> list[int]:
        """Return the row groups that may have rows for which the predicate is true, among the first `limit`."""
        begins = (end - rows for end, rows in zip(self._ends, self._rows, strict=True))
        every = [i for i, begin in enumerate(begins) if self._rows[i] > 0 and (limit is None or begin < limit)]
        # polars has no public name for this. Statistics of a footer that no tag covers could hide rows.
        make = getattr(predicate, "_skip_batch_predicate", None)
        if predicate is None or make is None or not every or not self._view.footer_verified:
            return every
        import polars as pl

        names = [name for name in predicate.meta.root_names() if name in schema]
        skips = make({name: schema[name] for name in names})
        if skips is None:
            return every
        known: dict[str, Any] = {"len": pl.Series(self._rows, dtype=pl.Int64)}
        for name in names:
            known |= self._statistics(name, schema[name])
        try:
            skipped = pl.DataFrame(known).select(skips.fill_null(False).alias("skipped"))["skipped"]
        except pl.exceptions.PolarsError:  # a predicate that cannot be asked of bounds
            return every
        if len(skipped) != len(self._groups):  # a predicate of literals only
            return every
        return [group for group in every if not skipped[group]]

    def _statistics(self, name: str, dtype: Any) -> dict[str, Any]:
        """Return columns with the bounds and null counts of a column in each row group, null where unknown."""
        import polars as pl

        decode = self._decoder(name, dtype)
        if decode is None:
            unknown = [None] * len(self._groups)
            bounds = pl.Series(unknown, dtype=dtype)
            return {f"{name}_min": bounds, f"{name}_max": bounds, f"{name}_nc": pl.Series(unknown, dtype=pl.Int64)}
        leaf = self._leaves.index((name,))
        groups = range(len(self._groups))
        rows = [_bounds(Struct(self._data, self._metadata(group, leaf).begin), decode) for group in groups]
        raw = dtype if dtype in (pl.Boolean, pl.String, pl.Binary, pl.UInt64) else pl.Int64
        low, high, nulls = zip(*rows, strict=True)
        return {
            f"{name}_min": pl.Series(low, dtype=raw).cast(dtype, strict=False),
            f"{name}_max": pl.Series(high, dtype=raw).cast(dtype, strict=False),
            f"{name}_nc": pl.Series(nulls, dtype=pl.Int64),
        }

    def _decoder(self, name: str, dtype: Any) -> Any:
        """Return what makes a value of a statistic's bytes; None where bounds are of no use, as floats' (NaN)."""
        import polars as pl

        ordered = Struct(self._data).elements(7) is not None  # bounds without column_orders have no defined order
        if not ordered or (name,) not in self._leaves:
            return None
        if isinstance(dtype, pl.Datetime):
            return _signed if self._unit(name) == dtype.time_unit else None
        if dtype in (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.Date):
            return _signed
        if dtype in (pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64):
            return _unsigned
        return {pl.Boolean: _flag, pl.String: _text, pl.Binary: bytes}.get(dtype)

    def _unit(self, name: str) -> str | None:
        """Return the unit of a column of timestamps by its schema."""
        elements = [Struct(self._data, begin) for begin, _ in (Struct(self._data).elements(2) or ())[1:]]
        leaf = [element for element in elements if not element.integer(5)][self._leaves.index((name,))]
        if leaf.integer(1) != INT64:
            return None
        logical = leaf.struct(10)
        stamp = logical.struct(TIMESTAMP) if logical is not None else None
        unit = stamp.struct(2) if stamp is not None else None
        if unit is None:
            return CONVERTED_UNITS.get(leaf.integer(6) or 0)
        return next((TIMESTAMP_UNITS[key] for key in TIMESTAMP_UNITS if key in unit), None)


def _bounds(metadata: Struct, decode: Any) -> tuple[Any, Any, int | None]:
    statistics = metadata.struct(12)
    if statistics is None:
        return None, None, None
    low, high = statistics.binary(6), statistics.binary(5)
    try:
        values = (None, None) if low is None or high is None else (decode(low), decode(high))
    except (ValueError, struct.error):  # bytes of another size, or a text that was cut inside a character
        values = None, None
    return *values, statistics.integer(3)


def _signed(data: bytes) -> int:
    value: int = struct.unpack("<i" if len(data) == 4 else "<q", data)[0]
    return value


def _unsigned(data: bytes) -> int:
    value: int = struct.unpack("<I" if len(data) == 4 else "<Q", data)[0]
    return value


def _flag(data: bytes) -> bool:
    return data != b"\0"


def _text(data: bytes) -> str:
    return data.decode()
