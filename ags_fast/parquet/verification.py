"""verify, which uses no field that it has not checked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ags_fast._core import CHECK, DONE, MORE_OUTPUT, PageRun, run_pages
from ags_fast._threads import thread_count
from ags_fast._types import OrSkip, ReadableSource, Retriever, check_choice
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.files.source import Window, with_room
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.pieces import pieces
from ags_fast.parquet.reading import Reading, opening
from ags_fast.parquet.report import ColumnReport, Report, footer_warnings, level_warnings
from ags_fast.parquet.spec import BLOOM_BITSET, BLOOM_HEADER, COLUMN_INDEX, MAGIC_NBYTES, OFFSET_INDEX, PAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from ags_fast._core import Chunk, Piece
    from ags_fast.files.source import Source
    from ags_fast.parquet.keys import Keys
    from ags_fast.parquet.reading import Opening

__all__ = ["verify"]

WINDOW_NBYTES = 1 << 20  # of the file, at a time and thread: a smaller one costs more in calls than it gains in cache


@opening
def verify(
    src: ReadableSource,
    keys: Keys | Retriever,
    *,
    missing: OrSkip = "error",
    progress: Callable[[int], object] | None = None,
    **how: Unpack[Opening],
) -> Report:
    """Check every module of an encrypted Parquet file.

    Checked are the tag or signature of the footer; by their tags, which bind their ordinals, each column's metadata,
    pages, page headers, dictionary, indexes and bloom filters; CRCs of pages that have one; that the parts lie inside
    the file and do not overlap; and that indexes and metadata name the pages, values and sizes that are there.

    Args:
        src: A path, a URL, a bytes-like object or a seekable binary file.
        keys: As for decrypt_file.
        missing: What becomes of columns whose keys are not held: "error", or "skip" them. Their `key` is "missing".
        progress: Called with the bytes that were checked since its last call.
        **how: How the file is opened, and the errors if it is not: see `Opening`.

    Returns:
        A report with a row for each column. A row's `tags` tells which parts of the column have a tag; `authenticated`
        is True if all have. Plain columns have no tags, pages under AES_GCM_CTR_V1 have none, and levels of V2 pages
        in parquet-java's layout have none: `unauthenticated_levels` lists these levels.
    """
    check_choice("missing", missing, OrSkip)
    reading = Reading(keys, **how)
    n = thread_count(reading.threads)
    with Opened(src, reading) as opened:
        if opened.source.is_remote:
            opened.check_beginning()
            n = 1  # its requests run ahead of one reader
        chunks = list(opened.chunks())
        absent = opened.lost(chunks, missing == "error")
        held = [chunk for chunk in chunks if not chunk.missing]
        waiting = pieces(opened, held)
        checks = {chunk.number: _ChunkCheck(opened, chunk) for chunk in held}
        _check_all_pages(opened, [piece for piece in waiting if piece.module == PAGES], checks, n, progress)
        for piece in waiting:
            if piece.module != PAGES:
                checks[piece.chunk.number].part(piece)
        report = _report(opened, chunks, checks)
        rows = _check_footer(opened, chunks)
        report.buffer_nbytes = n * 2 * WINDOW_NBYTES + opened.source.read_ahead
        report.warnings = _warnings(opened, waiting, report, bool(absent))
        claimed = Struct(opened.data).integer(3)
        if claimed != rows:  # some writers do that, in plaintext files
            report.warnings.append(f"the footer counts {claimed} rows, its row groups have {rows}")
        return report


def _report(opened: Opened, chunks: list[Chunk], checks: dict[int, _ChunkCheck]) -> Report:
    assert opened.crypto is not None
    size, footer = opened.source.size, "encrypted" if opened.encrypted_footer else "signed"
    report = Report("verify", opened.crypto.algorithm, footer, len(opened.groups), size, size)
    report.footer_verified = opened.footer_verified
    columns: dict[int, ColumnReport] = {}
    for chunk in chunks:
        kind = "missing" if chunk.missing else chunk.kind
        row = columns.setdefault(chunk.column, ColumnReport(chunk.name, kind, key_metadata=chunk.key_metadata))
        row.authenticated = False
        if not chunk.missing:
            outside = checks[chunk.number].run.outside_levels > 0
            row.note_tags(chunk.modules, outside)
            checks[chunk.number].report(row)
            if outside:
                report.unauthenticated_levels.append((chunk.name, chunk.row_group))
    report.columns = [columns[number] for number in sorted(columns)]
    return report


def _check_footer(opened: Opened, chunks: list[Chunk]) -> int:
    """Check that row groups have the numbers and sizes that the footer claims. Returns the number of their rows."""

    def wrong(group: int, what: str) -> IntegrityError:
        return IntegrityError(f"the footer {what}", module="footer", row_group=group)

    sizes: list[int | None] = [0] * len(opened.groups)
    for chunk in chunks:
        size = sizes[chunk.row_group]
        known = size is not None and chunk.modules is not None and chunk.modules.aad is not None
        sizes[chunk.row_group] = size + chunk.numbers().compressed_nbytes if size is not None and known else None
    rows = 0
    for number, (begin, _, _, _) in enumerate(opened.groups):
        group = Struct(opened.data, begin)
        rows += group.integer(3) or 0
        if group.integer(7) not in (None, number):
            raise wrong(number, f"claims that row group {number} is number {group.integer(7)}")
        if sizes[number] is not None and group.integer(6) not in (None, sizes[number]):
            raise wrong(number, f"has {group.integer(6)} bytes in row group {number}, its columns {sizes[number]}")
    return rows


def _warnings(opened: Opened, waiting: list[Piece], report: Report, absent: bool) -> list[str]:
    warnings = []
    if report.algorithm == "AES_GCM_CTR_V1":
        warnings.append(
            "AES_GCM_CTR_V1: pages carry no tag, so a change in them goes unseen; a CRC does not protect them"
        )
    warnings += [*footer_warnings(report), *level_warnings(report.unauthenticated_levels)]
    missing = [row.path for row in report.columns if row.key == "missing"]
    if missing:
        warnings.append(f"not checked, because their keys are not held: {', '.join(missing)}")
    plain = [row.path for row in report.columns if row.key == "plain"]
    if plain:
        warnings.append(f"not encrypted, and not authenticated: {', '.join(plain)}")
    if not absent:
        between = opened.footer_offset - MAGIC_NBYTES - sum(piece.end - piece.begin for piece in waiting)
        if between:
            warnings.append(f"{between} bytes of the file belong to no module")
    return warnings


def _groups(pages: list[Piece]) -> list[list[Piece]]:
    """Group consecutive small chunks, as many as a window holds; a large chunk is alone."""
    groups: list[list[Piece]] = []
    for piece in pages:
        fits = groups and piece.end - groups[-1][0].begin <= WINDOW_NBYTES
        if fits:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


class _Room:
    """A thread's buffers: for the file, and for opened pages, which are not read."""

    def __init__(self, source: Source) -> None:
        self.window = Window(source)
        self.scratch = with_room(memoryview(b""), WINDOW_NBYTES)


def _check_all_pages(
    opened: Opened,
    pages: list[Piece],
    checks: dict[int, _ChunkCheck],
    threads: int,
    progress: Callable[[int], object] | None,
) -> None:
    rooms = threading.local()

    def run(group: list[Piece]) -> None:
        if not hasattr(rooms, "mine"):
            rooms.mine = _Room(opened.source)
        _check_pages(group, checks, rooms.mine)
        if progress is not None:
            progress(sum(piece.end - piece.begin for piece in group))

    if threads == 1:
        for group in _groups(pages):
            run(group)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run, group) for group in _groups(pages)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _check_pages(group: list[Piece], checks: dict[int, _ChunkCheck], room: _Room) -> None:
    begin, end = group[0].begin, group[-1].end
    if len(group) > 1:
        window = room.window.read(begin, end, WINDOW_NBYTES)
        runs = []
        for piece in group:
            run = checks[piece.chunk.number].run
            run.feed(window[piece.begin - begin : piece.end - begin], True, room.scratch)
            runs.append(run)
        run_pages(runs, 1)  # one after the other: they share the scratch
        return
    check = checks[group[0].chunk.number]
    at, wanted = begin, 0
    while check.run.stop != DONE:
        last = min(end, at + max(WINDOW_NBYTES, wanted))
        check.run.feed(room.window.read(at, last, WINDOW_NBYTES), last == end, room.scratch)
        run_pages([check.run], 1)
        at += check.run.consumed
        if check.run.stop == MORE_OUTPUT:
            room.scratch = with_room(room.scratch, check.run.wanted)
        elif check.run.stop != DONE:
            if last == end:
                raise FormatError(f"column {check.chunk.name!r} ends inside a page: the file is damaged or was cut")
            wanted = check.run.wanted


class _ChunkCheck:
    """Checks a column chunk: its pages, and the metadata and indexes that name them."""

    def __init__(self, opened: Opened, chunk: Chunk) -> None:
        self.opened = opened
        self.chunk = chunk
        self.parts = 0
        metadata = chunk.numbers()
        self.run = PageRun(
            chunk.modules,
            None,
            CHECK,
            max(0, metadata.compressed_nbytes),
            max(0, metadata.num_values),
            short_sizes=chunk.modules is not None and chunk.modules.aad is None,
            keep_checksum=not opened.reading.check_crc,
            refuse_levels=not opened.reading.allow_unauthenticated_levels,
            table=True,
            dictionary=metadata.dictionary_page > 0,
            label=chunk.name,
            row_group=chunk.row_group,
        )

    def _wrong(self, module: str, what: str) -> IntegrityError:
        chunk = self.chunk
        return IntegrityError(
            f"the {module} of column {chunk.name!r}, row group {chunk.row_group} {what}",
            module=module,
            row_group=chunk.row_group,
            column=chunk.name,
        )

    def part(self, piece: Piece) -> None:
        """Check an index or a bloom filter."""
        modules = self.chunk.modules
        data = self.opened.source.read(piece.begin, piece.end)
        self.parts += 2 if piece.module == BLOOM_HEADER else 1
        if modules is None:
            plain = bytes(data)
        else:
            plain, frame = modules.open(piece.module, data)
            if piece.module == BLOOM_HEADER:
                bits, second = modules.open(BLOOM_BITSET, data[frame:])
                frame += second
                if Struct(plain).integer(1) != len(bits):
                    raise self._wrong("bloom filter header", f"claims another size than its {len(bits)} bytes")
            if frame != len(data):
                raise FormatError(f"a module of column {self.chunk.name!r} has {len(data) - frame} bytes too many")
        if piece.module == OFFSET_INDEX:
            self._check_locations(plain)
        elif piece.module == COLUMN_INDEX:
            index = Struct(plain)
            if any(len(index.elements(number) or []) != self.run.pages for number in (1, 2, 3)):
                raise self._wrong("column index", f"does not list the {self.run.pages} pages that are there")

    def _check_locations(self, plain: bytes) -> None:
        begin = self.chunk.begin()
        pages = [(begin + offset, nbytes) for offset, nbytes, _, _ in self.run.table()]
        listed, rows = [], [0]
        for at, _ in Struct(plain).elements(1) or []:
            location = Struct(plain, at)
            listed.append((location.integer(1), location.integer(2)))
            rows.append(location.integer(3) or 0)
        if listed != pages:
            raise self._wrong("offset index", "does not list the pages that are there")
        rows.append(Struct(self.opened.data, self.opened.groups[self.chunk.row_group][0]).integer(3) or 0)
        if rows != sorted(rows) or rows[1] != 0:
            raise self._wrong("offset index", "has its rows in another order than its pages")

    def report(self, row: ColumnReport) -> None:
        """Compare the pages with the metadata, and add them to the column's report."""
        metadata, run = self.chunk.numbers(), self.run
        dictionaries = run.dictionary_pages
        if metadata.compressed_nbytes > 0 and self.chunk.modules is not None:
            if metadata.num_values >= 0 and run.values != metadata.num_values:
                raise self._wrong(
                    "column metadata", f"claims {metadata.num_values} values, its pages have {run.values}"
                )
            first = run.table()[0][0] + self.chunk.begin() if run.pages else None
            if first is not None and metadata.data_page != first:
                raise self._wrong(
                    "column metadata", f"has its first data page at {metadata.data_page}, it is at {first}"
                )
            if metadata.dictionary_page > 0 and (not dictionaries or metadata.dictionary_page != self.chunk.begin()):
                raise self._wrong(
                    "column metadata", f"has a dictionary page at {metadata.dictionary_page}, where there is none"
                )
        row.data_pages += run.pages
        row.dictionary_pages += dictionaries
        row.nbytes += run.in_total
        if self.chunk.modules is not None:
            sealed = self.chunk.raw.sealed_metadata > 0
            row.modules += 2 * (run.pages + dictionaries) + self.parts + sealed
