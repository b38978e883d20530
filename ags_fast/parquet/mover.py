"""Moves the parts of a file from one side to the other: opened, sealed, both, or copied as they are.

The parts are taken in the order in which they stand, so that the source is read once and the target written once, from
beginning to end: a pipe will do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ags_fast._core import COPY, DONE, LIST, MORE_OUTPUT, SAME_SIZE, Modules, PageRun, offset_index, run_pages
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.files.source import Window, with_room
from ags_fast.parquet.pieces import list_pages, pieces
from ags_fast.parquet.spec import BLOOM_BITSET, BLOOM_HEADER, MAGIC_NBYTES, OFFSET_INDEX, PAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from typing import Any

    from ags_fast.files.sink import Target
    from ags_fast.parquet.opened import Chunk, Opened
    from ags_fast.parquet.pieces import Piece

__all__ = ["Moved", "Mover", "Side"]

PACKED_NBYTES = 16 << 10  # of a chunk's pages: to move fewer bytes is faster than to write them alone
WINDOW_NBYTES = 1 << 20  # of the source, in memory at once: what fits a core's cache; one page at least


@dataclass(slots=True)
class Side:
    """How a chunk is to be sealed: its key's kind ("plain", "footer" or "column"), Modules, and key_metadata."""

    kind: str
    modules: Modules | None = None
    key_metadata: bytes | None = None


@dataclass(slots=True)
class Moved:
    """Where a chunk's parts are in the target, in bytes from its beginning."""

    begin: int = 0
    nbytes: int = 0
    uncompressed: int = 0
    first_data_page: int | None = None
    dictionary_page: int | None = None
    run: PageRun | None = None
    outside_levels: bool = False  # whether levels of V2 pages are outside of their modules, in the sealed file
    shift: int | None = None  # of its offsets, if it was copied as it is
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # module type: offset and size, both with frame


class _Buffers:
    """A buffer of bytes to write, and the writes that still read from it."""

    def __init__(self) -> None:
        self.outward = memoryview(b"")
        self.pending: list[Future[Any] | None] = []


class _Made:
    """Parts of a buffer, to be written together. Small parts are moved up to the one before, to be one piece with it.

    A moved part takes the place of bytes that were in no part, or in one that was moved itself.
    """

    def __init__(self, buffer: memoryview) -> None:
        self.nbytes = 0  # of all parts
        self._buffer = buffer
        self._pieces: list[memoryview] = []
        self._begin = self._end = 0  # of the last piece, which may grow

    def add(self, at: int, nbytes: int) -> None:
        """Add the next part."""
        end = self._end
        if at != end and nbytes <= PACKED_NBYTES and end > self._begin:
            self._buffer[end : end + nbytes] = self._buffer[at : at + nbytes]
        else:
            self._close()
            self._begin = end = at
        self._end = end + nbytes
        self.nbytes += nbytes

    def take(self) -> list[memoryview]:
        """Return all pieces, and begin again."""
        self._close()
        self._begin = self._end
        self.nbytes = 0
        pieces, self._pieces = self._pieces, []
        return pieces

    def _close(self) -> None:
        if self._end > self._begin:
            self._pieces.append(self._buffer[self._begin : self._end])


class Mover:
    """Moves the parts of chunks from an opened file to a target.

    Args:
        opened: The file to read. Another one with the same columns may take its place between calls of `move`.
        target: Where to write.
        side: How each chunk is to be sealed.
        threads: How many threads open and seal pages.
        v2_layout: Of V2 pages, as PageRun numbers them; 0 keeps what they have.
        same_size: Whether every module stays where it is, and as long as it is.
        drop_bloom_filters: Whether bloom filters are left out.
        progress: Called with the bytes of the source that were moved since its last call.
        held: A list that gets the sealed indexes, with chunk and module type, in place of the target.
    """

    def __init__(
        self,
        opened: Opened,
        target: Target,
        side: Callable[[Chunk], Side],
        threads: int,
        *,
        v2_layout: int = 0,
        same_size: bool = False,
        drop_bloom_filters: bool = False,
        progress: Callable[[int], object] | None = None,
        held: list[tuple[Chunk, int, bytes]] | None = None,
    ) -> None:
        self.opened = opened
        self.target = target
        self.side = side
        self.threads = threads
        self.v2_layout = v2_layout
        self.same_size = same_size
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
        """Bytes of all buffers."""
        return self._window.nbytes + sum(len(buffers.outward) for buffers in self._sets)

    def _read(self, begin: int, end: int) -> memoryview:
        if self._window.source is not self.opened.source:
            self._window = Window(self.opened.source)
        return self._window.read(begin, end, WINDOW_NBYTES)

    def _buffers(self, nbytes: int) -> _Buffers:
        """Return the set of buffers that was written earlier, with room for `nbytes`."""
        self._sets.append(self._sets.pop(0))
        buffers = self._sets[-1]
        for future in buffers.pending:
            if future is not None:
                future.result()
        buffers.pending.clear()
        buffers.outward = with_room(buffers.outward, max(nbytes, _room(WINDOW_NBYTES)))
        return buffers

    def move(self, chunks: Iterable[Chunk]) -> None:
        """Move all parts of these chunks. `moved` then tells where they are."""
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
        """Refuse a chunk with too many pages, before a byte is written to a target that cannot be discarded."""
        for chunk in chunks:
            side, metadata = self.side(chunk), chunk.numbers()
            if side.modules is None or metadata.compressed_nbytes < 8 * 32768:  # no page has fewer bytes
                continue
            run = PageRun(chunk.modules, side.modules, LIST, metadata.compressed_nbytes, metadata.num_values)
            list_pages(self.opened, run, chunk.begin(), chunk.begin() + metadata.compressed_nbytes)

    def _copy_gap(self, begin: int, end: int) -> None:
        if end > begin:
            self.target.copy(self.opened.source, begin, end)

    def _pages_moved(self, chunk: Chunk) -> bool:
        return chunk.number in self.moved or chunk.numbers().compressed_nbytes <= 0

    def _passes(self, chunk: Chunk) -> bool:
        return chunk.modules is None and self.side(chunk).modules is None

    def _group(self, waiting: list[Piece], i: int) -> list[Piece]:
        """Return the pages of consecutive chunks, as many as a window holds."""
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
        runs = [(piece, self._run(piece.chunk)) for piece in group]
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
        made = _Made(outward)
        at = 0
        for (piece, run), room in zip(runs, rooms, strict=True):
            start = self.target.position + made.nbytes
            made.add(at, run.produced)
            at += room
            if run.stop != DONE:  # many small pages
                pending.append(self.target.put(*made.take()))
                buffers.outward = memoryview(b"")  # the output of the next runs is still in the buffer
                self._move_windows(piece, run, piece.begin + run.consumed)
            self._pages_done(piece.chunk, run, start)
        pending.append(self.target.put(*made.take()))

    def _run(self, chunk: Chunk) -> PageRun:
        metadata, reading = chunk.numbers(), self.opened.reading
        dialect = chunk.modules is not None and chunk.modules.aad is None
        sealed_ctr = chunk.modules is not None and chunk.modules.ctr
        return PageRun(
            chunk.modules,
            self.side(chunk).modules,
            SAME_SIZE if self.same_size else COPY,
            metadata.compressed_nbytes,
            max(0, metadata.num_values),
            v2_layout=self.v2_layout,
            short_sizes=dialect,
            keep_checksum=not (sealed_ctr and reading.check_crc),
            refuse_levels=not reading.allow_unauthenticated_levels,
            table=True,
            dictionary=metadata.dictionary_page > 0,
            label=chunk.name,
        )

    def _move_windows(self, piece: Piece, run: PageRun, at: int | None = None) -> None:
        """Move the pages of a chunk, a window at a time."""
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
            elif not run.consumed:  # one page needs more input or more room
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
        moved.run = run
        # Without a layout that was asked for, pages keep their layout.
        to = (run.outside_levels, 0, counts["v2_levels"])[self.v2_layout]
        moved.outside_levels = (run.outside_levels if run.target is None else to) > 0
        if run.outside_levels or moved.outside_levels:
            self.unauthenticated_levels.append((chunk.name, chunk.row_group))
        for name in self.counts:
            self.counts[name] += counts[name]

    def _copy_pages(self, group: list[Piece]) -> None:
        """Copy plain pages that stay plain."""
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

    # ---- indexes and bloom filters

    def _move_part(self, piece: Piece) -> None:
        chunk = piece.chunk
        side = self.side(chunk)
        if piece.module == BLOOM_HEADER and self.drop_bloom_filters:
            return
        data = self.opened.source.read(piece.begin, piece.end)
        moved = self._moved(chunk)
        start = self.target.position
        if piece.module == BLOOM_HEADER:
            parts = self._open_bloom_filter(chunk, side, data)
        else:
            plain = self._open_index(piece, side, data, moved)
            if self.held is not None:
                framed = plain if side.modules is None else side.modules.seal(piece.module, plain)
                self.held.append((chunk, piece.module, framed))
                moved.parts[piece.module] = (0, len(framed))
                return
            parts = [(piece.module, plain)]
        sealed = [plain if side.modules is None else side.modules.seal(module, plain) for module, plain in parts]
        if self.target.put(*sealed) is not None:
            self.target.drain()  # so that only one large part is in memory
        moved.parts[piece.module] = (start, self.target.position - start)

    def _open_bloom_filter(self, chunk: Chunk, side: Side, data: memoryview) -> list[tuple[int, bytes]]:
        if chunk.modules is None:
            split = Struct(data).end
            header, bits = bytes(data[:split]), bytes(data[split:])
        else:
            header, frame = chunk.modules.open(BLOOM_HEADER, data)
            bits, _ = chunk.modules.open(BLOOM_BITSET, data[frame:])
            if not self.same_size and side.modules is None:
                header = header[: Struct(header).end]  # parquet-java pads, but the bits must follow the header directly
        return [(BLOOM_HEADER, header), (BLOOM_BITSET, bits)]

    def _open_index(self, piece: Piece, side: Side, data: memoryview, moved: Moved) -> bytes:
        chunk = piece.chunk
        plain = bytes(data) if chunk.modules is None else chunk.modules.open(piece.module, data)[0]
        if self.same_size:
            return plain
        if piece.module == OFFSET_INDEX:
            return self._offset_index(chunk, plain, moved)
        if chunk.modules is not None or side.modules is not None:
            end = Struct(plain).end  # raises for bytes that are not an index, which no reader could open
            return plain[:end] if side.modules is None else plain
        return plain

    def _offset_index(self, chunk: Chunk, plain: bytes, moved: Moved) -> bytes:
        begin = chunk.begin()
        if moved.run is not None:
            return moved.run.offset_index(plain, begin, moved.begin)
        return offset_index(plain, begin, begin + (moved.shift or 0))


def _room(nbytes: int) -> int:
    return nbytes + nbytes // 8 + 1024
