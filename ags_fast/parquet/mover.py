"""Moves the parts of a file from one side to the other: opened, sealed, both, or copied as they are.

The parts are taken in the order in which they stand, so that the source is read once and the target written once, from
beginning to end: a pipe will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast._core import DONE, LIST, MORE_OUTPUT, PageMover, PageRun, offset_index, page_room, run_pages
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.files.source import Window, with_room
from ags_fast.parquet.pieces import list_pages, pieces
from ags_fast.parquet.spec import BLOOM_BITSET, BLOOM_HEADER, MAGIC_NBYTES, OFFSET_INDEX, PAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from typing import Any

    from ags_fast._core import Chunk, Piece, Side
    from ags_fast.files.sink import Target
    from ags_fast.parquet.opened import Opened

__all__ = ["Mover"]

WINDOW_NBYTES = 1 << 20  # of the source, in memory at once: what fits a core's cache; one page at least


class _Buffers:
    """A buffer of bytes to write, and the writes that still read from it."""

    def __init__(self) -> None:
        self.outward = memoryview(b"")
        self.pending: list[Future[Any] | None] = []


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
        self.same_size = same_size
        self.drop_bloom_filters = drop_bloom_filters
        self.progress = progress
        self.held = held
        reading = opened.reading
        self.pages = PageMover(
            same_size, v2_layout, reading.check_crc, not reading.allow_unauthenticated_levels, threads
        )
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
        buffers.outward = with_room(buffers.outward, max(nbytes, page_room(WINDOW_NBYTES)))
        return buffers

    def move(self, chunks: list[Chunk]) -> None:
        """Move all parts of chunks. A chunk's `moved` then tells where they are, and its `side` how they are sealed."""
        for chunk in chunks:
            chunk.seal_as(self.side(chunk))
        waiting = pieces(self.opened, chunks)
        deferred: list[Piece] = []
        at = MAGIC_NBYTES
        i = 0
        while i < len(waiting):
            piece = waiting[i]
            group = [piece]
            if self.same_size:
                self._copy_gap(at, piece.begin)
            if piece.module == PAGES:
                group, passes = self.pages.group(waiting, i, WINDOW_NBYTES)
                if passes:
                    self._copy_pages(group)
                else:
                    self._move_pages(group)
            elif self.same_size or _pages_moved(piece.chunk):
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
            chunk.seal_as(self.side(chunk))
            metadata = chunk.numbers()
            if chunk.target is None or metadata.compressed_nbytes < 8 * 32768:  # no page has fewer bytes
                continue
            run = PageRun(chunk.modules, chunk.target, LIST, metadata.compressed_nbytes, metadata.num_values)
            list_pages(self.opened, run, chunk.begin(), chunk.begin() + metadata.compressed_nbytes)

    def _copy_gap(self, begin: int, end: int) -> None:
        if end > begin:
            self.target.copy(self.opened.source, begin, end)

    # ---- pages

    def _move_pages(self, group: list[Piece]) -> None:
        begin = group[0].begin
        end = group[-1].end if self.same_size else group[-1].limit
        if len(group) == 1 and end - begin > WINDOW_NBYTES:
            start = self.target.position
            run = self.pages.run(group[0].chunk)
            self._move_windows(group[0], run, begin)
            self.pages.done(group[0].chunk, run, start)
            return
        buffers = self._buffers(self.pages.room(group))
        out, i = buffers.outward, 0
        runs = self.pages.run_group(group, self._read(begin, end), begin, end, out)
        while i < len(runs):
            made, i, start = self.pages.pack(group, runs, i, out, self.target.position)
            buffers.pending.append(self.target.put(*made))
            if i < len(runs):  # many small pages
                buffers.outward = memoryview(b"")  # the output of the next runs is still in the buffer
                self._move_windows(group[i], runs[i], group[i].begin + runs[i].consumed)
                self.pages.done(group[i].chunk, runs[i], start)
                i += 1

    def _move_windows(self, piece: Piece, run: PageRun, at: int) -> None:
        """Move the pages of a chunk from offset `at` of the source, a window at a time."""
        wanted_in, wanted_out = 0, 0
        limit = piece.end if self.same_size else piece.limit
        while run.stop != DONE:
            end = min(limit, at + max(WINDOW_NBYTES, wanted_in))
            buffers = self._buffers(max(page_room(end - at), wanted_out))
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

    def _copy_pages(self, group: list[Piece]) -> None:
        """Copy plain pages that stay plain."""
        start = self.target.position
        self.target.copy(self.opened.source, group[0].begin, group[-1].end)
        self.pages.copied(group, start)

    # ---- indexes and bloom filters

    def _move_part(self, piece: Piece) -> None:
        chunk = piece.chunk
        target = chunk.target
        if piece.module == BLOOM_HEADER and self.drop_bloom_filters:
            return
        data = self.opened.source.read(piece.begin, piece.end)
        start = self.target.position
        if piece.module == BLOOM_HEADER:
            parts = self._open_bloom_filter(chunk, data)
        else:
            plain = self._open_index(piece, data)
            if self.held is not None:
                framed = plain if target is None else target.seal(piece.module, plain)
                self.held.append((chunk, piece.module, framed))
                chunk.part(piece.module, 0, len(framed))
                return
            parts = [(piece.module, plain)]
        sealed = [plain if target is None else target.seal(module, plain) for module, plain in parts]
        if self.target.put(*sealed) is not None:
            self.target.drain()  # so that only one large part is in memory
        chunk.part(piece.module, start, self.target.position - start)

    def _open_bloom_filter(self, chunk: Chunk, data: memoryview) -> list[tuple[int, bytes]]:
        if chunk.modules is None:
            split = Struct(data).end
            header, bits = bytes(data[:split]), bytes(data[split:])
        else:
            header, frame = chunk.modules.open(BLOOM_HEADER, data)
            bits, _ = chunk.modules.open(BLOOM_BITSET, data[frame:])
            if not self.same_size and chunk.target is None:
                header = header[: Struct(header).end]  # parquet-java pads, but the bits must follow the header directly
        return [(BLOOM_HEADER, header), (BLOOM_BITSET, bits)]

    def _open_index(self, piece: Piece, data: memoryview) -> bytes:
        chunk = piece.chunk
        plain = bytes(data) if chunk.modules is None else chunk.modules.open(piece.module, data)[0]
        if self.same_size:
            return plain
        if piece.module == OFFSET_INDEX:
            return _offset_index(chunk, plain)
        if chunk.modules is not None or chunk.target is not None:
            end = Struct(plain).end  # raises for bytes that are not an index, which no reader could open
            return plain[:end] if chunk.target is None else plain
        return plain


def _pages_moved(chunk: Chunk) -> bool:
    return chunk.moved is not None or chunk.numbers().compressed_nbytes <= 0


def _offset_index(chunk: Chunk, plain: bytes) -> bytes:
    """Return an OffsetIndex with the new places of its pages."""
    begin, moved = chunk.begin(), chunk.moved
    if moved is not None and moved.run is not None:
        return moved.run.offset_index(plain, begin, moved.begin)
    return offset_index(plain, begin, begin + (0 if moved is None else moved.shift))
