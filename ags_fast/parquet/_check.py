"""inspect, which needs no keys, and verify, which believes nothing that it has not checked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ags_fast._core import CHECK, DONE, MORE_OUTPUT, PageRun, run_pages
from ags_fast._threads import thread_count
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.files.source import Source, Window, with_room
from ags_fast.parquet import _thrift as thrift
from ags_fast.parquet._file import (
    BLOOM_BITSET,
    BLOOM_HEADER,
    COLUMN_INDEX,
    MAGIC_NBYTES,
    OFFSET_INDEX,
    Opened,
)
from ags_fast.parquet._transcode import PAGES, ColumnReport, Report, footer_warnings, level_warnings, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ags_fast.parquet._file import Chunk, Keys, _Retriever
    from ags_fast.parquet._transcode import Piece

__all__ = ["inspect", "verify"]

WINDOW_NBYTES = 1 << 20  # of the file, at a time and thread: a smaller one costs more in calls than it gains in cache


# ---------------------------------------------------------------------------------------------------------- inspect


def shown(value: bytes | None) -> Any:
    """Bytes that somebody chose, for people: key material decoded, text as text, else hexadecimal digits."""
    if not value:
        return None
    from ags_fast.parquet.keytools import describe

    material = describe(value)
    if material is not None:
        return material
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"hex": value.hex()}
    return text if text.isprintable() else {"hex": value.hex()}


def inspect(src: Any, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a Parquet file says of its encryption to somebody who has no key. Nothing of it is authenticated.

    src, storage_options: as for encrypt_file. The answer can be written as JSON: "footer" is
    "encrypted", "signed" or "plain"; "aad_prefix" is the stored one, "aad_prefix_required" says that readers must know
    it; key metadata is decoded if it is parquet's key material (PKMT1) or text. Sizes are in bytes. "columns" is None
    where the footer hides them. Raises FormatError if it is no Parquet file.
    """
    with Opened(src, None, storage_options=storage_options) as opened:
        crypto = opened.crypto
        answer: dict[str, Any] = {
            "file_length": opened.source.size,
            "footer": "plain" if crypto is None else "encrypted" if opened.encrypted_footer else "signed",
            "footer_length": opened.source.size - 8 - opened.footer_offset,
            "algorithm": None if crypto is None else crypto.algorithm,
            "aad_prefix": None if crypto is None else shown(crypto.stored),
            "aad_prefix_required": crypto is not None and crypto.supply and crypto.stored is None,
            "aad_file_unique": None if crypto is None or crypto.unique is None else crypto.unique.hex(),
            "footer_key_metadata": None if crypto is None else shown(crypto.key_metadata),
            "row_groups": None,
            "num_rows": None,
            "created_by": None,
            "columns": None,
        }
        if opened.encrypted_footer:
            return answer
        fields = thrift.Struct(opened.data)
        created_by = fields.binary(6)
        answer["row_groups"] = len(opened.groups)
        answer["num_rows"] = fields.integer(3)
        answer["created_by"] = None if created_by is None else created_by.decode("utf-8", "replace")
        columns: dict[int, dict[str, Any]] = {}
        for chunk in opened.chunks():
            column = columns.setdefault(
                chunk.column,
                {"path": chunk.name, "key": chunk.kind, "key_metadata": shown(chunk.key_metadata), "nbytes": 0},
            )
            column["nbytes"] += max(0, chunk.metadata.compressed_nbytes) if chunk.metadata is not None else 0
        answer["columns"] = list(columns.values())
        return answer


# ---------------------------------------------------------------------------------------------------------- verify


def verify(
    src: Any,
    keys: Keys | _Retriever,
    *,
    aad_prefix: bytes | None = None,
    aad_prefix_verifier: Callable[[bytes], object] | None = None,
    missing: str = "error",
    quirks: Iterable[str] = (),
    allow_ctr: bool = False,
    allow_unauthenticated_levels: bool = True,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Check every module of an encrypted Parquet file; returns a row for each column.

    Checked are: the footer's tag or signature; every column's metadata, pages, page headers, dictionary, indexes and
    bloom filters by their tags, which bind their ordinals; CRCs of pages that have one; that the parts lie inside the
    file and do not overlap; that indexes and metadata name the pages that are there, and their values and sizes.

    A row's `tags` says which parts of the column have a tag. `authenticated` is False unless all have: plain columns
    have none, pages under AES_GCM_CTR_V1 have none, nor have levels of V2 pages in parquet-java's layout, which
    `unauthenticated_levels` lists.
    missing: "error", or "skip" columns whose keys are not held; their `key` is "missing". Other arguments as for
    decrypt_file. Raises IntegrityError, which names module, row group, column and page, FormatError, PolicyError.
    """
    if missing not in ("error", "skip"):
        raise ValueError(f"missing is 'error' or 'skip', not {missing!r}")
    n = thread_count(threads)
    with Opened(
        src,
        keys,
        aad_prefix=aad_prefix,
        aad_prefix_verifier=aad_prefix_verifier,
        quirks=quirks,
        allow_ctr=allow_ctr,
        storage_options=storage_options,
    ) as opened:
        assert opened.crypto is not None
        footer = "encrypted" if opened.encrypted_footer else "signed"
        report = Report("verify", opened.crypto.algorithm, footer, len(opened.groups), opened.source.size)
        report.file_length = opened.source.size
        report.footer_verified = opened.footer_verified
        chunks = list(opened.chunks())
        absent = [chunk for chunk in chunks if chunk.missing]
        if absent and missing == "error":
            raise opened.lacks(absent[0])
        held = [chunk for chunk in chunks if not chunk.missing]
        waiting = pieces(opened, held)
        pages = [piece for piece in waiting if piece.module == PAGES]
        groups = _groups(pages)
        checks = {chunk.number: _ChunkCheck(opened, chunk, allow_unauthenticated_levels) for chunk in held}

        rooms = threading.local()

        def run(group: list[Piece]) -> None:
            if not hasattr(rooms, "mine"):
                rooms.mine = _Room(opened.source)
            _check_pages(group, checks, rooms.mine)
            if progress is not None:
                progress(sum(piece.end - piece.begin for piece in group))

        if n == 1:
            for group in groups:
                run(group)
        else:
            with ThreadPoolExecutor(n) as pool:
                futures = [pool.submit(run, group) for group in groups]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        for piece in waiting:
            if piece.module != PAGES:
                checks[piece.chunk.number].part(piece)
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
        rows = _check_footer(opened, chunks)
        report.columns = [columns[number] for number in sorted(columns)]
        report.buffer_nbytes = n * 2 * WINDOW_NBYTES
        report.warnings = _warnings(opened, waiting, report, bool(absent))
        told = thrift.Struct(opened.data).integer(3)
        if told != rows:  # some writers do that, in plaintext files
            report.warnings.append(f"the footer counts {told} rows, its row groups have {rows}")
        return report


def _check_footer(opened: Opened, chunks: list[Chunk]) -> int:
    """Row groups are where they say, and as large: readers go by the one or by the other. Returns their rows."""

    def wrong(group: int, what: str) -> IntegrityError:
        return IntegrityError(f"the footer {what}", module="footer", row_group=group)

    sizes: list[int | None] = [0] * len(opened.groups)
    for chunk in chunks:
        size = sizes[chunk.row_group]
        known = size is not None and chunk.modules is not None and chunk.modules.aad is not None
        sizes[chunk.row_group] = size + chunk.numbers().compressed_nbytes if size is not None and known else None
    rows = 0
    for number, (begin, _, _, _) in enumerate(opened.groups):
        group = thrift.Struct(opened.data, begin)
        rows += group.integer(3) or 0
        if group.integer(7) not in (None, number):
            raise wrong(number, f"says of row group {number} that it is number {group.integer(7)}")
        if sizes[number] is not None and group.integer(6) not in (None, sizes[number]):
            raise wrong(number, f"has {group.integer(6)} bytes in row group {number}, its columns {sizes[number]}")
    return rows


def _warnings(opened: Opened, waiting: list[Piece], report: Report, absent: bool) -> list[str]:
    warnings = []
    if report.algorithm == "AES_GCM_CTR_V1":
        warnings.append("AES_GCM_CTR_V1: pages carry no tag; a change in them goes unseen, and a CRC is no protection")
    warnings += [*footer_warnings(report), *level_warnings(report.unauthenticated_levels)]
    missing = [row.path for row in report.columns if row.key == "missing"]
    if missing:
        warnings.append(f"not checked, for want of keys: {', '.join(missing)}")
    plain = [row.path for row in report.columns if row.key == "plain"]
    if plain:
        warnings.append(f"not encrypted, and not authenticated: {', '.join(plain)}")
    if not absent:
        between = opened.footer_offset - MAGIC_NBYTES - sum(piece.end - piece.begin for piece in waiting)
        if between:
            warnings.append(f"{between} bytes of the file belong to no module")
    return warnings


def _groups(pages: list[Piece]) -> list[list[Piece]]:
    """Small chunks that follow each other, as many as a window holds; a large one is alone."""
    groups: list[list[Piece]] = []
    for piece in pages:
        fits = groups and piece.end - groups[-1][0].begin <= WINDOW_NBYTES
        if fits:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


class _Room:
    """A thread's buffers: of the file, and for what a page opens to, which nobody looks at."""

    def __init__(self, source: Source) -> None:
        self.window = Window(source)
        self.scratch = with_room(memoryview(b""), WINDOW_NBYTES)


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
    """A column chunk, its pages and what names them."""

    def __init__(self, opened: Opened, chunk: Chunk, allow_unauthenticated_levels: bool) -> None:
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
            keep_checksum=False,
            refuse_levels=not allow_unauthenticated_levels,
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
        """An index or a bloom filter."""
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
                if thrift.Struct(plain).integer(1) != len(bits):
                    raise self._wrong("bloom filter header", f"tells another size than its {len(bits)} bytes")
            if frame != len(data):
                raise FormatError(f"{len(data) - frame} bytes too many where column {self.chunk.name!r} has a module")
        if piece.module == OFFSET_INDEX:
            self._check_locations(plain)
        elif piece.module == COLUMN_INDEX:
            index = thrift.Struct(plain)
            if any(len(index.elements(number) or []) != self.run.pages for number in (1, 2, 3)):
                raise self._wrong("column index", f"does not tell of the {self.run.pages} pages that are there")

    def _check_locations(self, plain: bytes) -> None:
        begin = self.chunk.begin()
        pages = [(begin + offset, nbytes) for offset, nbytes, _, _ in self.run.table()]
        listed, rows = [], [0]
        for at, _ in thrift.Struct(plain).elements(1) or []:
            location = thrift.Struct(plain, at)
            listed.append((location.integer(1), location.integer(2)))
            rows.append(location.integer(3) or 0)
        if listed != pages:
            raise self._wrong("offset index", "does not name the pages that are there")
        rows.append(thrift.Struct(self.opened.data, self.opened.groups[self.chunk.row_group][0]).integer(3) or 0)
        if rows != sorted(rows) or rows[1] != 0:
            raise self._wrong("offset index", "has rows in another order than its pages")

    def report(self, row: ColumnReport) -> None:
        """Compare the pages with the metadata, and add them to the column's row."""
        metadata, run = self.chunk.numbers(), self.run
        dictionaries = run.counts["dictionary_pages"]
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
