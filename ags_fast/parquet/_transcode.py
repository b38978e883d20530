"""encrypt_file, decrypt_file and reencrypt_file: pages pass from one side to the other, and the footer follows.

The parts of a file (pages of a chunk, bloom filters, indexes) are taken in the order in which they stand, so the
source is read once and the target written once, from beginning to end: a pipe will do. Only the footer, which comes
last, depends on where everything went.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ags_fast._core import (
    COPY,
    DONE,
    FRAME_NBYTES,
    LIST,
    MORE_OUTPUT,
    SAME_SIZE,
    Modules,
    PageRun,
    offset_index,
    run_pages,
    thrift_splice,
)
from ags_fast._threads import thread_count
from ags_fast.errors import FormatError, KeyAccessError, PolicyError
from ags_fast.files.sink import Target
from ags_fast.files.source import Window, with_room
from ags_fast.parquet import _thrift as thrift
from ags_fast.parquet._file import (
    ALGORITHMS,
    BLOOM_BITSET,
    BLOOM_HEADER,
    COLUMN_INDEX,
    COLUMN_METADATA,
    FOOTER,
    FOOTER_KEY,
    KNOWN,
    MAGIC_NBYTES,
    OFFSET_INDEX,
    Chunk,
    Crypto,
    Dropped,
    Keys,
    Opened,
    with_kept,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ags_fast.parquet._file import _Edits, _Retriever

__all__ = ["ColumnReport", "Report", "decrypt_file", "encrypt_file", "reencrypt_file"]

WINDOW_NBYTES = 1 << 20  # of the source, in memory at once: what fits a core's cache; one page at least
BEYOND_NBYTES = 1 << 20  # by how much a chunk may be longer than its footer says
UNIQUE_NBYTES = 8  # of aad_file_unique, as parquet-java and Arrow choose it
V2_LAYOUTS = {None: 0, "arrow": 1, "parquet-java": 2}


@dataclass
class ColumnReport:
    """What became of a column, over all row groups. Sizes are bytes as they stand in the sealed file."""

    path: str
    key: str  # "plain", "footer", "column", or "missing": encrypted, and the key is not held
    data_pages: int = 0
    dictionary_pages: int = 0
    modules: int = 0
    nbytes: int = 0
    authenticated: bool = True  # every part in `tags` has a tag
    key_metadata: bytes | None = field(default=None, repr=False)
    # Which parts have a tag: "headers" (of pages, with all other metadata, indexes and bloom filters), "levels" and
    # "values". Nothing of a plain column has. Under AES_GCM_CTR_V1 only "headers" have, and all but "levels" where V2
    # pages are in parquet-java's layout. Empty if the key is not held.
    tags: dict[str, bool] = field(default_factory=dict)

    def note_tags(self, modules: Modules | None, outside_levels: bool) -> None:
        """Add a chunk, by how it is sealed."""
        sealed = modules is not None
        body = modules is not None and not modules.ctr
        for part, has in (("headers", sealed), ("levels", body and not outside_levels), ("values", body)):
            self.tags[part] = has and self.tags.get(part, True)
        self.authenticated = all(self.tags.values())


@dataclass
class Report:
    """What was done to a file. `warnings` are for people: what readers may not take, or what the source had wrong."""

    op: str
    algorithm: str | None
    footer: str  # "encrypted", "signed" (in plain text) or "plain"
    row_groups: int
    source_length: int
    file_length: int = 0
    columns: list[ColumnReport] = field(default_factory=list)
    footer_verified: bool = True  # not so of a signed one that was read without the footer key
    # (column, row group) where levels of V2 pages have no tag, in what was read or in what was written: which values
    # are null, and where lists begin, could be changed there.
    unauthenticated_levels: list[tuple[str, int]] = field(default_factory=list)
    buffer_nbytes: int = 0  # the most that was held of the file at once
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: key metadata as hexadecimal digits."""
        row = asdict(self)
        for column in row["columns"]:
            column["key_metadata"] = None if column["key_metadata"] is None else column["key_metadata"].hex()
        return row


# ---------------------------------------------------------------------------------------------------------- moving


@dataclass
class Side:
    """How a chunk is to be sealed: its key's kind ("plain", "footer" or "column"), Modules, and key_metadata."""

    kind: str
    modules: Modules | None = None
    key_metadata: bytes | None = None


@dataclass
class Moved:
    """Where a chunk's parts are in the target."""

    begin: int = 0
    nbytes: int = 0
    uncompressed: int = 0
    first_data_page: int | None = None
    dictionary_page: int | None = None
    encoding_stats: list[tuple[int, int, int]] | None = None
    run: PageRun | None = None
    outside_levels: bool = False  # levels of V2 pages are outside of their modules, in the sealed file
    shift: int | None = None  # if it was copied as it is
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # module type: offset and bytes, as framed


@dataclass
class Piece:
    begin: int
    end: int
    module: int  # 2: pages
    chunk: Chunk
    limit: int = 0


PAGES = 2


def bloom_end(opened: Opened, chunk: Chunk) -> int:
    """Where a chunk's bloom filter ends; old files do not say."""
    metadata = chunk.numbers()
    begin, nbytes = metadata.bloom_filter, metadata.bloom_filter_nbytes
    if nbytes > 0:
        return begin + nbytes
    if chunk.modules is not None:
        for _ in range(2):
            _inside(opened, begin, begin + 4, chunk, "bloom filter")
            begin += 4 + int.from_bytes(opened.source.read(begin, begin + 4), "little")
        return begin
    head = opened.source.read(begin, min(begin + 256, opened.footer_offset))
    header = thrift.Struct(head)
    return begin + header.end + (header.integer(1) or 0)


def _inside(opened: Opened, begin: int, end: int, chunk: Chunk, what: str) -> None:
    if begin < MAGIC_NBYTES or end < begin or end > opened.footer_offset:
        raise FormatError(
            f"the {what} of column {chunk.name!r}, row group {chunk.row_group} would be at {begin} to {end}, outside "
            "the file's data: the file is damaged or was cut"
        )


def pieces(opened: Opened, chunks: Iterable[Chunk]) -> list[Piece]:
    """The parts of these chunks in the order in which they stand in the file; none may overlap another."""
    found: list[Piece] = []
    for chunk in chunks:
        metadata, raw = chunk.numbers(), chunk.raw
        if metadata.compressed_nbytes > 0:
            found.append(Piece(chunk.begin(), chunk.begin() + metadata.compressed_nbytes, PAGES, chunk))
        if metadata.bloom_filter > 0:
            found.append(Piece(metadata.bloom_filter, bloom_end(opened, chunk), BLOOM_HEADER, chunk))
        if raw.column_index > 0:
            found.append(Piece(raw.column_index, raw.column_index + raw.column_index_nbytes, COLUMN_INDEX, chunk))
        if raw.offset_index > 0:
            found.append(Piece(raw.offset_index, raw.offset_index + raw.offset_index_nbytes, OFFSET_INDEX, chunk))
    found.sort(key=lambda piece: piece.begin)
    names = {PAGES: "pages", BLOOM_HEADER: "bloom filter", COLUMN_INDEX: "column index", OFFSET_INDEX: "offset index"}
    for piece, following in zip_longest(found, found[1:]):
        _inside(opened, piece.begin, piece.end, piece.chunk, names[piece.module])
        piece.limit = opened.footer_offset if following is None else following.begin
        if piece.module == PAGES and piece.chunk.modules is None and piece.limit > piece.end:
            piece.end = _real_end(opened, piece)
        if piece.limit < piece.end:
            raise FormatError(
                f"the {names[piece.module]} of column {piece.chunk.name!r}, row group {piece.chunk.row_group} overlap "
                "with what follows: the file is damaged"
            )
        piece.limit = min(piece.limit, piece.end + BEYOND_NBYTES)
    return found


def _scan(opened: Opened, run: PageRun, begin: int, limit: int) -> None:
    """Run a LIST of a chunk's pages over the file."""
    step = 64 << 10
    while run.stop != DONE:
        view = opened.source.read(begin, min(limit, begin + step))
        run.feed(view, begin + len(view) >= limit)
        run_pages([run], 1)
        begin += run.consumed
        step = max(64 << 10, run.wanted)


def _real_end(opened: Opened, piece: Piece) -> int:
    """Where a plain chunk's pages end. Old writers leave the dictionary's header out of total_compressed_size."""
    metadata = piece.chunk.numbers()
    name, row_group = piece.chunk.name, piece.chunk.row_group
    run = PageRun(
        None, None, LIST, metadata.compressed_nbytes, max(0, metadata.num_values), label=name, row_group=row_group
    )
    _scan(opened, run, piece.begin, min(piece.limit, piece.end + BEYOND_NBYTES))
    return piece.begin + run.in_total


class _Buffers:
    """What is to be written, and the writes that still read from it."""

    def __init__(self) -> None:
        self.outward = memoryview(b"")
        self.pending: list[Future[Any] | None] = []


class Mover:
    """Moves the parts of chunks from an opened file to a target."""

    def __init__(
        self,
        opened: Opened,
        target: Target,
        side: Callable[[Chunk], Side],
        threads: int,
        *,
        v2_layout: int = 0,
        same_size: bool = False,
        check_crc: bool = True,
        allow_unauthenticated_levels: bool = True,
        drop_bloom_filters: bool = False,
        progress: Callable[[int], object] | None = None,
        held: list[tuple[Chunk, int, bytes]] | None = None,
    ) -> None:
        """held: where indexes are put, sealed, with their chunk and module type, and not in the target."""
        self.opened = opened
        self.target = target
        self.side = side
        self.threads = threads
        self.v2_layout = v2_layout
        self.same_size = same_size
        self.check_crc = check_crc
        self.allow_unauthenticated_levels = allow_unauthenticated_levels
        self.drop_bloom_filters = drop_bloom_filters
        self.progress = progress
        self.held = held
        self.moved: dict[int, Moved] = {}
        self.unauthenticated_levels: list[tuple[str, int]] = []
        self.counts = dict.fromkeys(("v2_levels", "wrong_checksums", "dropped_checksums"), 0)
        self._window = Window(opened.source)
        # Two sets of buffers: one is written while the other is filled.
        self._sets = [_Buffers() for _ in range(2 if threads > 1 else 1)]

    @property
    def buffer_nbytes(self) -> int:
        return self._window.nbytes + sum(len(buffers.outward) for buffers in self._sets)

    def _read(self, begin: int, end: int) -> memoryview:
        if self._window.source is not self.opened.source:
            self._window = Window(self.opened.source)
        return self._window.read(begin, end, WINDOW_NBYTES)

    def _buffers(self, nbytes: int) -> _Buffers:
        """The set that was written longer ago, with room."""
        self._sets.append(self._sets.pop(0))
        buffers = self._sets[-1]
        for future in buffers.pending:
            if future is not None:
                future.result()
        buffers.pending.clear()
        buffers.outward = with_room(buffers.outward, max(nbytes, _room(WINDOW_NBYTES)))
        return buffers

    def move(self, chunks: Iterable[Chunk]) -> None:
        waiting = pieces(self.opened, chunks)
        deferred: list[Piece] = []
        at = MAGIC_NBYTES
        i = 0
        while i < len(waiting):
            piece = waiting[i]
            if self.same_size:
                self._copy_gap(at, piece.begin)
            group = self._group(waiting, i) if piece.module == PAGES else [piece]
            if piece.module == PAGES:
                self._move_pages(group)
            elif self.same_size or self._pages_moved(piece.chunk):
                self._move_part(piece)
            else:
                deferred.append(piece)
            i += len(group)
            at = group[-1].end
            if self.progress is not None:
                self.progress(sum(p.end - p.begin for p in group))
        for piece in deferred:
            self._move_part(piece)
        if self.same_size:
            self._copy_gap(at, self.opened.footer_offset)

    def check_ordinals(self, chunks: Iterable[Chunk]) -> None:
        """Refuse a chunk with too many pages before a byte is written to what cannot be undone."""
        for chunk in chunks:
            side, metadata = self.side(chunk), chunk.numbers()
            if side.modules is None or metadata.compressed_nbytes < 8 * 32768:  # no page has fewer bytes
                continue
            run = PageRun(chunk.modules, side.modules, LIST, metadata.compressed_nbytes, metadata.num_values)
            _scan(self.opened, run, chunk.begin(), chunk.begin() + metadata.compressed_nbytes)

    def _copy_gap(self, begin: int, end: int) -> None:
        if end > begin:
            self.target.copy(self.opened.source, begin, end)

    def _pages_moved(self, chunk: Chunk) -> bool:
        return chunk.number in self.moved or chunk.numbers().compressed_nbytes <= 0

    def _passes(self, chunk: Chunk) -> bool:
        return chunk.modules is None and self.side(chunk).modules is None

    def _group(self, waiting: list[Piece], i: int) -> list[Piece]:
        """Pages of the chunks that follow each other in the file, as many as a window holds."""
        group = [waiting[i]]
        passes = self._passes(waiting[i].chunk)
        for piece in waiting[i + 1 :]:
            beyond = piece.end - group[0].begin > WINDOW_NBYTES and not passes
            if piece.module != PAGES or beyond or self._passes(piece.chunk) != passes:
                break
            if (self.same_size or passes) and piece.begin != group[-1].end:
                break
            group.append(piece)
        return group

    # ---- pages

    def _move_pages(self, group: list[Piece]) -> None:
        if self._passes(group[0].chunk):
            self._copy_pages(group)
            return
        begin = group[0].begin
        end = group[-1].end if self.same_size else group[-1].limit
        runs = []
        for piece in group:
            chunk, side = piece.chunk, self.side(piece.chunk)
            metadata = chunk.numbers()
            dialect = chunk.modules is not None and chunk.modules.aad is None
            sealed_ctr = chunk.modules is not None and chunk.modules.ctr
            run = PageRun(
                chunk.modules,
                side.modules,
                SAME_SIZE if self.same_size else COPY,
                metadata.compressed_nbytes,
                max(0, metadata.num_values),
                v2_layout=self.v2_layout,
                short_sizes=dialect,
                keep_checksum=not (sealed_ctr and self.check_crc),
                refuse_levels=not self.allow_unauthenticated_levels,
                table=True,
                dictionary=metadata.dictionary_page > 0,
                label=chunk.name,
            )
            runs.append((piece, run))
        if len(runs) == 1 and end - begin > WINDOW_NBYTES:
            self._move_windows(*runs[0])
            return
        rooms = [_room(piece.end - piece.begin) for piece, _ in runs]
        buffers = self._buffers(sum(rooms))
        outward, pending = buffers.outward, buffers.pending
        window = self._read(begin, end)
        at = 0
        for (piece, run), room in zip(runs, rooms, strict=True):
            run.feed(window[piece.begin - begin : min(piece.limit, end) - begin], True, outward[at : at + room])
            at += room
        run_pages([run for _, run in runs], self.threads)
        at = 0
        for (piece, run), room in zip(runs, rooms, strict=True):
            start = self.target.position
            if run.produced:
                pending.append(self.target.put(outward[at : at + run.produced]))
            at += room
            if run.stop != DONE:  # many small pages
                buffers.outward = memoryview(b"")  # what the next runs have made is still in it
                self._move_windows(piece, run, piece.begin + run.consumed)
            self._pages_done(piece.chunk, run, start)

    def _move_windows(self, piece: Piece, run: PageRun, at: int | None = None) -> None:
        """Pages of a chunk, a window at a time."""
        first = at is None
        at = piece.begin if at is None else at
        start = self.target.position
        wanted_in, wanted_out = 0, 0
        limit = piece.end if self.same_size else piece.limit
        while run.stop != DONE:
            end = min(limit, at + max(WINDOW_NBYTES, wanted_in))
            buffers = self._buffers(max(_room(end - at), wanted_out))
            run.feed(self._read(at, end), end == limit, buffers.outward)
            run_pages([run], self.threads)
            if run.produced:
                buffers.pending.append(self.target.put(buffers.outward[: run.produced]))
            elif not run.consumed:  # one page needs more of either
                if run.stop == MORE_OUTPUT:
                    wanted_out = max(wanted_out, run.wanted)
                elif end < limit:
                    wanted_in = max(wanted_in, run.wanted)
                else:
                    raise FormatError(f"column {piece.chunk.name!r} ends inside a page: the file is damaged")
            at += run.consumed
        if first:
            self._pages_done(piece.chunk, run, start)

    def _pages_done(self, chunk: Chunk, run: PageRun, start: int) -> None:
        table = run.first_data_page
        moved = self._moved(chunk)
        moved.begin = start
        moved.nbytes = run.out_total
        moved.uncompressed = run.uncompressed
        moved.first_data_page = None if table is None else start + table
        counts = run.counts
        moved.dictionary_page = start if counts["dictionary_pages"] else None
        moved.encoding_stats = run.encodings
        moved.run = run
        # Without a layout that is asked for, pages keep the one that they have.
        to = (run.outside_levels, 0, counts["v2_levels"])[self.v2_layout]
        moved.outside_levels = (run.outside_levels if run.target is None else to) > 0
        if run.outside_levels or moved.outside_levels:
            self.unauthenticated_levels.append((chunk.name, chunk.row_group))
        for name in self.counts:
            self.counts[name] += counts[name]

    def _copy_pages(self, group: list[Piece]) -> None:
        """Plain pages that stay plain."""
        start = self.target.position
        self.target.copy(self.opened.source, group[0].begin, group[-1].end)
        for piece in group:
            metadata = piece.chunk.numbers()
            moved = self._moved(piece.chunk)
            moved.shift = start - group[0].begin
            moved.begin = piece.begin + moved.shift
            moved.nbytes = piece.end - piece.begin
            moved.uncompressed = metadata.uncompressed_nbytes
            moved.first_data_page = metadata.data_page + moved.shift if metadata.data_page > 0 else None
            moved.dictionary_page = metadata.dictionary_page + moved.shift if metadata.dictionary_page > 0 else None

    def _moved(self, chunk: Chunk) -> Moved:
        return self.moved.setdefault(chunk.number, Moved())

    # ---- what is no page

    def _move_part(self, piece: Piece) -> None:
        chunk = piece.chunk
        side = self.side(chunk)
        if piece.module == BLOOM_HEADER and self.drop_bloom_filters:
            return
        data = self.opened.source.read(piece.begin, piece.end)
        moved = self._moved(chunk)
        start = self.target.position
        if piece.module == BLOOM_HEADER:
            parts = [(BLOOM_HEADER, b""), (BLOOM_BITSET, b"")]
            if chunk.modules is not None:
                header, frame = chunk.modules.open(BLOOM_HEADER, data)
                bits, _ = chunk.modules.open(BLOOM_BITSET, data[frame:])
                if not self.same_size and side.modules is None:
                    header = header[: thrift.Struct(header).end]  # parquet-java pads; the bits follow directly
            else:
                split = thrift.Struct(data).end
                header, bits = bytes(data[:split]), bytes(data[split:])
            parts = [(BLOOM_HEADER, header), (BLOOM_BITSET, bits)]
        else:
            plain = bytes(data) if chunk.modules is None else chunk.modules.open(piece.module, data)[0]
            if piece.module == OFFSET_INDEX and not self.same_size:
                plain = self._offset_index(chunk, plain, moved)
            elif not self.same_size and (chunk.modules is not None or side.modules is not None):
                end = thrift.Struct(plain).end  # what is no index now would not be opened later
                plain = plain[:end] if side.modules is None else plain
            parts = [(piece.module, plain)]
            if self.held is not None:
                framed = plain if side.modules is None else side.modules.seal(piece.module, plain)
                self.held.append((chunk, piece.module, framed))
                moved.parts[piece.module] = (0, len(framed))
                return
        for module, plain in parts:
            self.target.put(plain if side.modules is None else side.modules.seal(module, plain))
        self.target.drain()
        moved.parts[piece.module] = (start, self.target.position - start)

    def _offset_index(self, chunk: Chunk, plain: bytes, moved: Moved) -> bytes:
        begin = chunk.begin()
        if moved.run is not None:
            return moved.run.offset_index(plain, begin, moved.begin)
        return offset_index(plain, begin, begin + (moved.shift or 0))


def _room(nbytes: int) -> int:
    return nbytes + nbytes // 8 + 1024


# ---------------------------------------------------------------------------------------------------------- footers


def _column_metadata(chunk: Chunk, moved: Moved) -> bytes:
    """A chunk's ColumnMetaData with its new places and sizes."""
    metadata = chunk.numbers()
    data_page = moved.first_data_page
    if data_page is None and metadata.data_page > 0:
        data_page = moved.begin  # a chunk without data pages that names one all the same
    index_page = None
    if moved.shift is not None and metadata.index_page > 0:
        index_page = metadata.index_page + moved.shift
    bloom = moved.parts.get(BLOOM_HEADER)
    stats = None
    if metadata.encoding_stats == 0 and moved.encoding_stats:
        # parquet-java finds out from them whether there is a dictionary.
        stats = thrift.list_of(
            thrift.STRUCT,
            [
                thrift.struct((i, thrift.I32, thrift.integer(value)) for i, value in enumerate(row, 1))
                for row in moved.encoding_stats
            ],
        )

    def number(value: int | None) -> bytes | None:
        return None if value is None else thrift.integer(value)

    edits: _Edits = [
        (6, thrift.I64, thrift.integer(moved.uncompressed)),
        (7, thrift.I64, thrift.integer(moved.nbytes)),
        (9, thrift.I64, thrift.integer(data_page or 0)),
        (10, thrift.I64, number(index_page)),
        (11, thrift.I64, number(moved.dictionary_page)),
        *([(13, thrift.LIST, stats)] if stats is not None else []),
        (14, thrift.I64, number(bloom[0] if bloom else None)),
        (15, thrift.I32, number(bloom[1] if bloom else None)),
    ]
    return thrift_splice(chunk.shown_metadata(), 0, edits)


def _redacted(metadata: bytes) -> bytes:
    """What a plaintext footer may show of an encrypted column: nothing that was computed from its values."""
    shown = {*range(1, 8), 9, 10, 11, 14, 15}
    fields = thrift.Struct(metadata).fields
    return thrift_splice(metadata, 0, [(number, 0, None) for number in sorted(fields) if number not in shown])


def _crypto_metadata(side: Side, chunk: Chunk) -> bytes:
    """ColumnCryptoMetaData (section 5.2)."""
    if side.kind == "footer":
        return thrift.struct([(1, thrift.STRUCT, thrift.struct([]))])
    path = thrift.list_of(
        thrift.BINARY, [thrift.binary(name.encode("utf-8", "surrogateescape")) for name in chunk.path]
    )
    metadata = thrift.binary(side.key_metadata) if side.key_metadata else None
    fields = thrift.struct([(1, thrift.LIST, path), (2, thrift.BINARY, metadata)])
    return thrift.struct([(2, thrift.STRUCT, fields)])


def _chunk_edits(
    chunk: Chunk, metadata: bytes, side: Side, parts: dict[int, tuple[int, int]], plaintext_footer: bool
) -> bytes:
    """The ColumnChunk as it goes into the new footer (section 5.3)."""
    shown: bytes | None = metadata
    sealed = None
    unknown = _unknown(chunk) if side.modules is not None and plaintext_footer else []
    if side.modules is not None and (side.kind == "column" or plaintext_footer):
        whole = with_kept(metadata, chunk.data) if unknown else metadata
        sealed = thrift.binary(side.modules.seal(COLUMN_METADATA, whole))
        shown = _redacted(metadata) if plaintext_footer else None

    def place(module: int, at: int) -> bytes | None:
        return thrift.integer(parts[module][at]) if module in parts else None

    return thrift_splice(
        chunk.data,
        0,
        [
            (2, thrift.I64, thrift.integer(0)),
            (3, thrift.STRUCT, shown),
            (4, thrift.I64, place(OFFSET_INDEX, 0)),
            (5, thrift.I32, place(OFFSET_INDEX, 1)),
            (6, thrift.I64, place(COLUMN_INDEX, 0)),
            (7, thrift.I32, place(COLUMN_INDEX, 1)),
            (8, thrift.STRUCT, None if side.modules is None else _crypto_metadata(side, chunk)),
            (9, thrift.BINARY, sealed),
            *((number, 0, None) for number in unknown),
        ],
    )


def _unknown(chunk: Chunk) -> list[int]:
    """Fields of a ColumnChunk that this version does not know: they may have been computed from its values."""
    return [number for number in thrift.Struct(chunk.data).fields if number > KNOWN]


def _new_footer(
    opened: Opened,
    chunks: list[Chunk],
    moved: dict[int, Moved],
    side: Callable[[Chunk], Side],
    crypto: Crypto | None,
    plaintext_footer: bool,
    dropped: Dropped | None,
) -> bytes:
    """The FileMetaData of the target, unsealed."""
    by_group: list[list[Chunk]] = [[] for _ in opened.groups]
    for chunk in chunks:
        by_group[chunk.row_group].append(chunk)
    groups = []
    for number, (begin, end, _, _) in enumerate(opened.groups):
        sorting = [] if dropped is None else dropped.sorting(opened.data, begin)
        data = opened.data[begin:end]
        groups.append(row_group(data, number, by_group[number], moved, side, plaintext_footer, sorting))
    edits: _Edits = [
        *([] if dropped is None else dropped.schema(opened.data)),
        (4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups)),
        *([] if dropped is None else dropped.orders(opened.data)),
        *signing(crypto if plaintext_footer else None),
    ]
    return thrift_splice(opened.data[: opened.footer.end], 0, edits)


def row_group(
    data: bytes,
    number: int,
    chunks: Iterable[Chunk],
    moved: dict[int, Moved],
    side: Callable[[Chunk], Side],
    plaintext_footer: bool,
    sorting: _Edits,
) -> bytes:
    """A RowGroup as it goes into the new footer, as the row group of this number."""
    columns, first, total, uncompressed = [], 0, 0, 0
    for chunk in chunks:
        there = moved.get(chunk.number) or Moved()
        columns.append(_chunk_edits(chunk, _column_metadata(chunk, there), side(chunk), there.parts, plaintext_footer))
        first = first or there.begin
        total += there.nbytes
        uncompressed += there.uncompressed
    edits: _Edits = [
        (1, thrift.LIST, thrift.list_of(thrift.STRUCT, columns)),
        (2, thrift.I64, thrift.integer(uncompressed)),
        *sorting,
        (5, thrift.I64, thrift.integer(first)),
        (6, thrift.I64, thrift.integer(total)),
        (7, thrift.I16, thrift.integer(number)),
    ]
    return thrift_splice(data, 0, edits)


def signing(crypto: Crypto | None) -> _Edits:
    """FileMetaData's encryption_algorithm and footer_signing_key_metadata; an encrypted footer must not have them."""
    metadata = thrift.binary(crypto.key_metadata) if crypto is not None and crypto.key_metadata else None
    return [
        (8, thrift.STRUCT, None if crypto is None else crypto.encode()),
        (9, thrift.BINARY, metadata),
    ]


def put_footer(target: Target, footer: bytes, crypto: Crypto | None, modules: Modules | None, plaintext: bool) -> None:
    """The end of the file: the footer, sealed or signed, its length and the magic (section 5.4 and 5.5)."""
    magic = b"PAR1"
    if crypto is not None:
        assert modules is not None
        sealed = modules.seal(FOOTER, footer)
        if plaintext:
            footer += sealed[4:16] + sealed[-16:]  # nonce and tag: a signature
        else:
            magic = b"PARE"
            metadata = thrift.binary(crypto.key_metadata) if crypto.key_metadata else None
            outer = thrift.struct([(1, thrift.STRUCT, crypto.encode()), (2, thrift.BINARY, metadata)])
            footer = outer + sealed
    if len(footer) > 0x7FFFFFFF:
        raise FormatError("the footer would be larger than 2 GiB")
    target.put(footer)
    target.put(len(footer).to_bytes(4, "little") + magic)
    target.finish()


# ---------------------------------------------------------------------------------------------------------- the three


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")


def new_crypto(algorithm: str, prefix: bytes, store_prefix: bool, keys: Keys) -> tuple[Crypto, bytes]:
    """How a new file is encrypted, and what its AADs begin with: never the same for two files."""
    unique = os.urandom(UNIQUE_NBYTES)
    stored = prefix if prefix and store_prefix else None
    supply = bool(prefix) and not store_prefix
    return Crypto(algorithm, unique, stored, supply, keys.footer_metadata or None), prefix + unique


class Sealer:
    """How every chunk is to be sealed under new keys."""

    def __init__(
        self, opened: Opened, keys: Keys, crypto: Crypto, aad: bytes | None, other_columns: str, like: bool = False
    ) -> None:
        if not keys.has_footer_key:
            raise ValueError("a file is sealed with a footer key: these Keys have none")
        keys.check_paths(opened.leaves)
        self.crypto = crypto
        self.aad = aad
        self._opened = opened
        self._keys = keys
        self._other = other_columns
        self._like = like  # columns stay under the kind of key that they are under
        self._sides: dict[int, Side] = {}

    def footer(self) -> Modules:
        return Modules(self._opened.key(self._keys.footer_key()), self.aad, None, None)

    def forget(self) -> None:
        """The chunks to come are of other row groups, and may have the same numbers."""
        self._sides.clear()

    def __call__(self, chunk: Chunk) -> Side:
        side = self._sides.get(chunk.number)
        if side is None:
            side = self._sides[chunk.number] = self._side(chunk)
        return side

    def _side(self, chunk: Chunk) -> Side:
        entry = self._keys.column(chunk.path)
        if entry is None and (chunk.kind == "plain" if self._like else self._other == "plain"):
            return Side("plain")
        key, metadata = entry if entry is not None else (FOOTER_KEY, None)
        if isinstance(key, bytes):
            kind, value = "column", key
        else:
            kind, value = "footer", self._keys.footer_key()
        ctr = self.crypto.algorithm == "AES_GCM_CTR_V1"
        modules = Modules(
            self._opened.key(value),
            self.aad,
            chunk.row_group if not self._like else chunk.ordinal,
            chunk.column,
            ctr=ctr,
            label=chunk.name,
        )
        return Side(kind, modules, metadata)


def count_columns(
    columns: dict[int, ColumnReport],
    chunks: Iterable[Chunk],
    side: Callable[[Chunk], Side],
    moved: dict[int, Moved],
    plaintext_footer: bool,
) -> None:
    """Add chunks to the rows of their columns."""
    for chunk in chunks:
        if chunk.missing:
            columns[chunk.column] = ColumnReport(chunk.name, "missing", authenticated=False)
            continue
        there = moved.get(chunk.number)
        now = side(chunk)
        sealed = now if now.modules is not None or chunk.modules is None else Side(chunk.kind, chunk.modules)
        row = columns.get(chunk.column)
        if row is None:
            row = columns[chunk.column] = ColumnReport(chunk.name, sealed.kind, key_metadata=sealed.key_metadata)
        row.note_tags(sealed.modules, there is not None and there.outside_levels)
        if there is None:
            continue
        row.nbytes += there.nbytes
        if now.modules is None:
            row.modules += chunk.raw.sealed_metadata > 0
        else:
            row.modules += now.kind == "column" or plaintext_footer
        if there.run is not None:
            dictionaries = there.run.counts["dictionary_pages"]
            row.data_pages += there.run.pages
            row.dictionary_pages += dictionaries
            row.modules += 2 * (there.run.pages + dictionaries) + len(there.parts) + (BLOOM_HEADER in there.parts)


def _report(
    op: str,
    opened: Opened,
    chunks: list[Chunk],
    side: Callable[[Chunk], Side],
    mover: Mover,
    algorithm: str | None,
    plaintext_footer: bool,
) -> Report:
    footer = "signed" if plaintext_footer else "encrypted"
    report = Report(op, algorithm, footer, len(opened.groups), opened.source.size, mover.target.position)
    columns: dict[int, ColumnReport] = {}
    count_columns(columns, chunks, side, mover.moved, plaintext_footer)
    report.columns = [columns[number] for number in sorted(columns)]
    report.buffer_nbytes = mover.buffer_nbytes
    report.unauthenticated_levels = mover.unauthenticated_levels
    report.warnings += level_warnings(report.unauthenticated_levels)
    if opened.crypto is not None and any(chunk.modules is not None and chunk.modules.ctr for chunk in chunks):
        report.warnings.append("the source's pages had no tag (AES_GCM_CTR_V1): a change in them went unseen")
    if mover.counts["wrong_checksums"]:
        report.warnings.append(
            f"{mover.counts['wrong_checksums']} pages had a CRC that was not their bytes', and still have: the source "
            "was damaged before"
        )
    if mover.counts["dropped_checksums"]:
        report.warnings.append(
            f"{mover.counts['dropped_checksums']} page headers had no room for the new CRC, which was left out"
        )
    return report


def footer_warnings(report: Report) -> list[str]:
    if report.footer_verified:
        return []
    return [
        "the footer's signature was not verified, for want of the footer key: the schema, how many rows and row groups "
        "there are, and columns that are not encrypted could have been changed"
    ]


def level_warnings(places: list[tuple[str, int]]) -> list[str]:
    if not places:
        return []
    columns = ", ".join(dict.fromkeys(column for column, _ in places))
    return [
        f"the levels of {columns} have no tag (parquet-java's V2 layout): which values are null, and where lists "
        "begin, can be changed unseen (allow_unauthenticated_levels=False refuses that)"
    ]


def encrypt_file(
    src: Any,
    dst: Any,
    keys: Keys,
    *,
    algorithm: str = "AES_GCM_V1",
    plaintext_footer: bool = False,
    other_columns: str = "footer",
    aad_prefix: bytes | None = None,
    store_aad_prefix: bool = True,
    v2_layout: str = "arrow",
    drop_bloom_filters: bool = False,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Encrypt a Parquet file without decoding a value (Parquet Modular Encryption, sections 4 and 5).

    src: a path, a URL of fsspec such as s3://bucket/file, a bytes-like object or a seekable binary file. dst: a path or
    URL, which appears only when it is complete (PolicyError for a store that cannot promise that), a bytearray, or a
    file open for writing, which need not seek. storage_options: for fsspec, of URLs. keys: the footer key and, by
    column, others.

    algorithm: "AES_GCM_V1", or "AES_GCM_CTR_V1", under which page bytes have no tag; reading then needs allow_ctr=True.
    plaintext_footer: legacy readers can read the plain columns; the footer is signed, and shows no statistics of
    encrypted columns. other_columns: what `keys` does not name is sealed with the footer key ("footer") or stays
    "plain". aad_prefix: binds the file to a name; store_aad_prefix=False leaves it out, and readers must know it.
    v2_layout: V2 pages sealed as a whole ("arrow": Arrow, polars) or with their levels in plain text and without a tag
    ("parquet-java"); neither reads the other's. drop_bloom_filters: for readers that cannot open them. threads: as for
    AgsCodec. progress: called with bytes of the source that are done.

    What is not encryption's stays as it is, byte by byte: encodings, compression, statistics, fields that this version
    does not know. Raises FormatError for what is no Parquet file or cannot be numbered, PolicyError if it is encrypted.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("other_columns", other_columns, ("footer", "plain"))
    check_choice("v2_layout", v2_layout, ("arrow", "parquet-java"))
    n = thread_count(threads)
    with Opened(src, None, storage_options=storage_options) as opened:
        if opened.crypto is not None:
            raise PolicyError("the file is encrypted already: reencrypt_file gives it other keys")
        crypto, aad = new_crypto(algorithm, bytes(aad_prefix or b""), store_aad_prefix, keys)
        sealer = Sealer(opened, keys, crypto, aad, other_columns)
        chunks = list(opened.chunks())
        with Target(dst, private=False, fsync=fsync, threads=n, storage_options=storage_options) as target:
            mover = Mover(
                opened,
                target,
                sealer,
                n,
                v2_layout=V2_LAYOUTS[v2_layout],
                drop_bloom_filters=drop_bloom_filters,
                progress=progress,
            )
            return _write("encrypt", opened, chunks, mover, sealer, plaintext_footer)


def _write(
    op: str,
    opened: Opened,
    chunks: list[Chunk],
    mover: Mover,
    sealer: Sealer,
    plaintext_footer: bool,
) -> Report:
    target, crypto = mover.target, sealer.crypto
    if not target.discardable:
        mover.check_ordinals(chunks)
    target.put(b"PAR1" if plaintext_footer else b"PARE")
    mover.move(chunks)
    footer = _new_footer(opened, chunks, mover.moved, sealer, crypto, plaintext_footer, None)
    put_footer(target, footer, crypto, sealer.footer(), plaintext_footer)
    report = _report(op, opened, chunks, sealer, mover, crypto.algorithm, plaintext_footer)
    report.warnings = v2_warnings(mover) + report.warnings
    if plaintext_footer:
        left = sorted({number for chunk in chunks if sealer(chunk).modules is not None for number in _unknown(chunk)})
        if left:
            report.warnings.append(
                f"unknown fields {left} of encrypted columns are in their sealed metadata, not in the plaintext "
                "footer: only ags_fast puts them back"
            )
    report.warnings += target.warnings
    return report


def v2_warnings(mover: Mover) -> list[str]:
    count, layout = mover.counts["v2_levels"], mover.v2_layout
    if not count:
        return []
    readers = "parquet-java and Spark" if layout != 2 else "Arrow, polars and other readers but parquet-java"
    warnings = [f"{count} V2 pages have levels: {readers} will not read them (see v2_layout)"]
    if layout == 2:
        warnings.append("where values are null stays visible in these pages")
    return warnings


def decrypt_file(
    src: Any,
    dst: Any,
    keys: Keys | _Retriever,
    *,
    aad_prefix: bytes | None = None,
    aad_prefix_verifier: Callable[[bytes], object] | None = None,
    missing: str = "error",
    quirks: Iterable[str] = (),
    allow_ctr: bool = False,
    check_crc: bool = True,
    allow_unauthenticated_levels: bool = True,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Decrypt a Parquet file to a plain one, which appears at `dst` only when every tag has passed.

    src, dst, threads, storage_options, progress: as for encrypt_file. keys: Keys, or a function from the file's
    key_metadata, None where it stores none, to a key. aad_prefix: required if the file does not hold it, else compared
    with it (PolicyError). aad_prefix_verifier: called with the prefix, raises if this is the wrong file. missing:
    "error", or "drop" the columns (whole top-level fields) whose keys are not held. `Keys(None, {...})` reads columns
    with keys of their own of a file with a signed footer: its signature is not verified, which the report says. quirks:
    "duckdb" and "arrow-ctr-mislabel" read what these writers get wrong.

    allow_ctr: whether to take a file under AES_GCM_CTR_V1, whose page bytes have no tag (else PolicyError). Pass True
    only for a file that you know to be written so. Beside an encrypted footer no tag covers the algorithm's name:
    anyone with write access to the storage can rename AES_GCM_V1 to AES_GCM_CTR_V1, and then change the pages of a file
    that had tags. check_crc: a CRC that does not fit a page without a tag is an IntegrityError. That finds damage, but
    no forgery: 16 bytes of such a page can be chosen so that the CRC fits.

    allow_unauthenticated_levels: whether to take V2 pages as parquet-java writes them, with their levels outside of the
    module, in plain text and without a tag: anyone with write access can change which values are null, and where lists
    begin. The report names them; False refuses them with IntegrityError.

    Raises IntegrityError, FormatError, PolicyError, and KeyAccessError, which names a column whose key is missing.
    """
    check_choice("missing", missing, ("error", "drop"))
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
        chunks = list(opened.chunks())
        dropped = Dropped.of(opened, chunks)
        if dropped is not None:
            if missing == "error":
                raise opened.lacks(next(chunk for chunk in chunks if chunk.missing))
            reasons = {opened.refusal(chunk) for chunk in chunks if chunk.missing} - {""}
            chunks = [chunk for chunk in chunks if chunk.column not in dropped.columns]

        def side(chunk: Chunk) -> Side:
            return Side("plain")

        with Target(dst, private=True, fsync=fsync, threads=n, storage_options=storage_options) as target:
            mover = Mover(
                opened,
                target,
                side,
                n,
                check_crc=check_crc,
                allow_unauthenticated_levels=allow_unauthenticated_levels,
                progress=progress,
            )
            target.put(b"PAR1")
            mover.move(chunks)
            footer = _new_footer(opened, chunks, mover.moved, side, None, False, dropped)
            put_footer(target, footer, None, None, False)
            assert opened.crypto is not None
            algorithm, signed = opened.crypto.algorithm, not opened.encrypted_footer
            report = _report("decrypt", opened, chunks, side, mover, algorithm, signed)
            report.footer_verified = opened.footer_verified
            report.warnings += footer_warnings(report)
            if dropped is not None:
                report.warnings.append(
                    f"left out for want of keys: {', '.join(dropped.names)}{''.join(sorted(reasons))}"
                )
            report.warnings += target.warnings
            return report


def reencrypt_file(
    src: Any,
    dst: Any,
    old: Keys | _Retriever,
    new: Keys,
    *,
    aad_prefix: bytes | None = None,
    aad_prefix_verifier: Callable[[bytes], object] | None = None,
    new_aad_prefix: bytes | None = None,
    store_aad_prefix: bool = True,
    same_size: bool = False,
    algorithm: str | None = None,
    plaintext_footer: bool | None = None,
    other_columns: str = "footer",
    v2_layout: str | None = None,
    quirks: Iterable[str] = (),
    allow_ctr: bool = False,
    check_crc: bool = True,
    allow_unauthenticated_levels: bool = True,
    threads: int | None = None,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Give an encrypted Parquet file new keys, without decoding a value and without plaintext on the way.

    src, dst, threads, progress: as for encrypt_file; dst may be src, which is replaced when the new one is complete.
    old: as for decrypt_file, with aad_prefix, quirks, allow_ctr, check_crc and allow_unauthenticated_levels. new: the
    keys from now on. What had no tag before gets one, also if it was changed: the report's warnings name such parts.
    new_aad_prefix: a new prefix; None keeps the old one. algorithm, plaintext_footer, v2_layout: None keeps what the
    file has.

    same_size=True keeps every module where it is and as long as it is. Each column keeps its kind of key. Columns whose
    old key is not held pass through as they are, under the key that they have: so a footer key and some columns can be
    turned by somebody who must not read the others. The prefix and the algorithm stay.

    Raises as decrypt_file does, and ValueError for what same_size cannot do.
    """
    if algorithm is not None:
        check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("other_columns", other_columns, ("footer", "plain"))
    check_choice("v2_layout", v2_layout, V2_LAYOUTS)
    if same_size and not (
        new_aad_prefix is None and algorithm is None and plaintext_footer is None and v2_layout is None
    ):
        raise ValueError("same_size keeps the AAD prefix, the algorithm, the footer's mode and the V2 layout")
    n = thread_count(threads)
    with Opened(
        src,
        old,
        aad_prefix=aad_prefix,
        aad_prefix_verifier=aad_prefix_verifier,
        quirks=quirks,
        allow_ctr=allow_ctr,
        storage_options=storage_options,
    ) as opened:
        if not opened.footer_verified:
            raise KeyAccessError(
                "the old footer key is needed and not given: a footer that nobody has verified would be sealed"
            )
        chunks = list(opened.chunks())
        assert opened.crypto is not None
        if same_size:
            return _reseal(
                opened, chunks, dst, new, n, check_crc, allow_unauthenticated_levels, fsync, storage_options, progress
            )
        absent = [chunk for chunk in chunks if chunk.missing]
        if absent:
            raise opened.lacks(absent[0])
        was = opened.crypto
        prefix = opened.prefix if new_aad_prefix is None else bytes(new_aad_prefix)
        stored = was.stored is not None if new_aad_prefix is None else store_aad_prefix
        crypto, aad = new_crypto(algorithm or was.algorithm, prefix, stored, new)
        sealer = Sealer(opened, new, crypto, aad, other_columns)
        plaintext = not opened.encrypted_footer if plaintext_footer is None else plaintext_footer
        with Target(dst, private=False, fsync=fsync, threads=n, storage_options=storage_options) as target:
            mover = Mover(
                opened,
                target,
                sealer,
                n,
                v2_layout=V2_LAYOUTS[v2_layout],
                check_crc=check_crc,
                allow_unauthenticated_levels=allow_unauthenticated_levels,
                progress=progress,
            )
            return _write("reencrypt", opened, chunks, mover, sealer, plaintext)


def _reseal(
    opened: Opened,
    chunks: list[Chunk],
    dst: Any,
    new: Keys,
    threads: int,
    check_crc: bool,
    allow_unauthenticated_levels: bool,
    fsync: bool,
    storage_options: Mapping[str, Any] | None,
    progress: Callable[[int], object] | None,
) -> Report:
    was = opened.crypto
    assert was is not None
    if was.unique is None:
        raise ValueError("same_size cannot turn DuckDB's dialect: leave it out, and the file is written to the spec")
    crypto = Crypto(was.algorithm, was.unique, was.stored, was.supply, new.footer_metadata or None)
    sealer = Sealer(opened, new, crypto, opened.aad, "footer", like=True)
    for chunk in chunks:
        if chunk.missing:
            continue
        if sealer(chunk).kind != chunk.kind:
            raise ValueError(
                f"column {chunk.name!r} is under a {chunk.kind} key, and same_size keeps that: "
                + ("give it a key of its own in `new`" if chunk.kind == "column" else "name no other for it in `new`")
            )
    held = [chunk for chunk in chunks if not chunk.missing]
    plaintext = not opened.encrypted_footer
    with Target(dst, private=False, fsync=fsync, threads=threads, storage_options=storage_options) as target:
        mover = Mover(
            opened,
            target,
            sealer,
            threads,
            same_size=True,
            check_crc=check_crc,
            allow_unauthenticated_levels=allow_unauthenticated_levels,
            progress=progress,
        )
        target.put(b"PAR1" if plaintext else b"PARE")
        mover.move(held)
        footer = _resealed_footer(opened, held, sealer, crypto, plaintext)
        put_footer(target, footer, crypto, sealer.footer(), plaintext)
        report = _report("reencrypt", opened, chunks, sealer, mover, crypto.algorithm, plaintext)
        report.warnings += target.warnings
        return report


def _resealed_footer(opened: Opened, held: list[Chunk], sealer: Sealer, crypto: Crypto, plaintext: bool) -> bytes:
    """The same footer, with the crypto_metadata and the sealed ColumnMetaData of the new keys."""
    by_number = {chunk.number: chunk for chunk in held if chunk.modules is not None}
    groups = []
    for begin, end, first, count in opened.groups:
        columns = []
        for number in range(first, first + count):
            raw = opened.footer.chunk(number)
            data = opened.data[raw.begin : raw.end]
            chunk = by_number.get(number)
            if chunk is not None:
                side = sealer(chunk)
                assert side.modules is not None
                edits: _Edits = [(8, thrift.STRUCT, _crypto_metadata(side, chunk))]
                if raw.sealed_metadata:
                    sealed = side.modules.seal(COLUMN_METADATA, _padded(chunk))
                    edits.append((9, thrift.BINARY, thrift.binary(sealed)))
                data = thrift_splice(data, 0, edits)
            columns.append(data)
        edits = [(1, thrift.LIST, thrift.list_of(thrift.STRUCT, columns))]
        groups.append(thrift_splice(opened.data[begin:end], 0, edits))
    edits = [(4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups)), *signing(crypto if plaintext else None)]
    footer = thrift_splice(opened.data[: opened.footer.end], 0, edits)
    return footer if plaintext else footer.ljust(len(opened.data), b"\0")  # parquet-java pads


def _padded(chunk: Chunk) -> bytes:
    """A ColumnMetaData with the zeros that parquet-java puts behind it, so that its module keeps its size."""
    nbytes = chunk.raw.sealed_metadata_nbytes - FRAME_NBYTES
    return chunk.metadata_bytes + bytes(nbytes - len(chunk.metadata_bytes))
