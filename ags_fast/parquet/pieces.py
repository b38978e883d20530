"""The parts of a file in the order in which they stand: pages of column chunks, indexes, bloom filters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast._core import DONE, LIST, PageRun, list_pieces, run_pages
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.parquet.spec import BLOOM_HEADER, COLUMN_INDEX, MAGIC_NBYTES, OFFSET_INDEX, PAGES

if TYPE_CHECKING:
    from ags_fast._core import Chunk, Piece
    from ags_fast.parquet.opened import Opened

__all__ = ["list_pages", "pieces"]

BEYOND_NBYTES = 1 << 20  # by how much a chunk may be longer than its footer says
LIST_NBYTES = 64 << 10  # of the source at a time, to find the pages of a chunk
NAMES = {PAGES: "pages", BLOOM_HEADER: "bloom filter", COLUMN_INDEX: "column index", OFFSET_INDEX: "offset index"}


def _bloom_end(opened: Opened, chunk: Chunk) -> int:
    """Return where a chunk's bloom filter ends, where an old file's footer does not tell."""
    begin = chunk.numbers().bloom_filter
    if chunk.modules is not None:
        for _ in range(2):
            _inside(opened, begin, begin + 4, chunk, "bloom filter")
            begin += 4 + int.from_bytes(opened.source.read(begin, begin + 4), "little")
        return begin
    head = opened.source.read(begin, min(begin + 256, opened.footer_offset))
    header = Struct(head)
    return begin + header.end + (header.integer(1) or 0)


def _inside(opened: Opened, begin: int, end: int, chunk: Chunk, what: str) -> None:
    if begin < MAGIC_NBYTES or end < begin or end > opened.footer_offset:
        elsewhere = "this is a _metadata file, whose pages are in other files: pass these files one by one"
        why = elsewhere if chunk.raw.file_path else "the file is damaged or was cut"
        raise FormatError(
            f"the {what} of column {chunk.name!r}, row group {chunk.row_group} would be at {begin} to {end}, outside "
            f"the file's data: {why}"
        )


def pieces(opened: Opened, chunks: list[Chunk]) -> list[Piece]:
    """Return the parts of chunks in file order. FormatError if one is outside the data, or two overlap."""
    blooms = {}
    for chunk in chunks:
        metadata = chunk.numbers()
        if metadata.bloom_filter > 0 and metadata.bloom_filter_nbytes <= 0:
            blooms[chunk.number] = _bloom_end(opened, chunk) - metadata.bloom_filter
    found, odd = list_pieces(chunks, blooms, opened.footer_offset, BEYOND_NBYTES)
    for piece in (found[i] for i in odd):
        _inside(opened, piece.begin, piece.end, piece.chunk, NAMES[piece.module])
        if piece.module == PAGES and piece.chunk.modules is None and piece.limit > piece.end:
            piece.end = _real_end(opened, piece)
        if piece.limit < piece.end:
            raise FormatError(
                f"the {NAMES[piece.module]} of column {piece.chunk.name!r}, row group {piece.chunk.row_group} overlap "
                "with the next part: the file is damaged"
            )
        piece.limit = min(piece.limit, piece.end + BEYOND_NBYTES)
    return found


def list_pages(opened: Opened, run: PageRun, begin: int, limit: int) -> None:
    """Run a PageRun over a chunk's pages, which only lists them."""
    step = LIST_NBYTES
    while run.stop != DONE:
        view = opened.source.read(begin, min(limit, begin + step))
        run.feed(view, begin + len(view) >= limit)
        run_pages([run], 1)
        begin += run.consumed
        step = max(LIST_NBYTES, run.wanted)


def _real_end(opened: Opened, piece: Piece) -> int:
    """Return where a plain chunk's pages end: some old writers do not count the dictionary's header."""
    metadata = piece.chunk.numbers()
    name, row_group = piece.chunk.name, piece.chunk.row_group
    run = PageRun(
        None, None, LIST, metadata.compressed_nbytes, max(0, metadata.num_values), label=name, row_group=row_group
    )
    list_pages(opened, run, piece.begin, min(piece.limit, piece.end + BEYOND_NBYTES))
    return piece.begin + run.in_total
