"""The parts of an encrypted file as a plaintext view shows them: each in its place, and as long as it was sealed."""

from __future__ import annotations

import _thread  # noqa: PLC2701 (threading takes longer to import)
import os
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from ags_fast._core import DONE, LIST, VIEW, ColumnMetadata, PageRun, new_bytes, run_pages, thrift_splice
from ags_fast.columnar import thrift
from ags_fast.columnar.thrift import Struct
from ags_fast.errors import FormatError
from ags_fast.files.source import with_room
from ags_fast.parquet.pieces import pieces
from ags_fast.parquet.spec import BLOOM_BITSET, BLOOM_HEADER, MAGIC_NBYTES, PAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast._core import Chunk
    from ags_fast.columnar.thrift import Edits
    from ags_fast.parquet.opened import Opened

__all__ = ["Job", "Layout", "Part", "Shown", "fill_zeros", "filled"]

WINDOW_NBYTES = 16 << 20  # of the source, in memory at once; one page at least
FILE_WINDOW_NBYTES = 2 << 20  # of a file of the system, a thread: another read costs little, and this fits the cache
SCRATCH_BUFFERS = 4  # of a window each, which the process keeps
GAP_NBYTES = 64 << 10  # between two column chunks that are read from the source as one
CACHE_NBYTES = 8 << 20  # of opened pages and indexes, for readers that take less than one at a time; one page at least
LIST_NBYTES = 64 << 10  # of the source at a time, to find the pages of a chunk
LIST_LARGE_NBYTES = 4 << 10  # where pages are larger than that: a header is rarely so long
ZEROS = memoryview(bytes(64 << 10))
_scratch: list[memoryview] = []  # for sealed bytes: to touch new memory takes longer than to open what is read into it


def fill_zeros(out: memoryview) -> None:
    """Set all bytes to zero."""
    for at in range(0, len(out), len(ZEROS)):
        part = out[at : at + len(ZEROS)]
        part[:] = ZEROS[: len(part)]


class Part:
    """A part of the file, from offset `begin` to `end`: a column chunk's pages, bloom filter, or one of its indexes.

    `chunk` is None for a file without encryption, which is shown as it is. `make` makes a part that no file has.
    """

    __slots__ = ("begin", "bounds", "chunk", "dictionary", "end", "make", "module")

    def __init__(
        self, begin: int, end: int, module: int, chunk: Chunk | None, make: Callable[[], bytes] | None = None
    ) -> None:
        self.begin = begin
        self.end = end
        self.module = module
        self.chunk = chunk
        self.make = make
        self.bounds: list[int] | None = None  # where its pages begin and the last one ends, once known
        self.dictionary = False  # whether its first page is a dictionary


class Job:
    """Whole pages of a chunk that are to be opened into a buffer."""

    __slots__ = ("at", "begin", "chunk", "end", "out", "run")

    def __init__(self, chunk: Chunk, run: PageRun, begin: int, end: int, out: memoryview) -> None:
        self.chunk = chunk
        self.run = run
        self.begin = self.at = begin
        self.end = end
        self.out = out

    def advance(self) -> None:
        """After a run, go on to the next window. A page is shown as long as it was, so that room for it never lacks."""
        self.at += self.run.consumed
        self.out = self.out[self.run.produced :]


class _Cache:
    """Opened bytes by their offset, least recently used first. Safe from many threads, and after a fork."""

    def __init__(self) -> None:
        self.opened = 0  # bytes of sealed modules so far
        self._over = False
        self._clear()

    def _clear(self) -> None:
        self._data: dict[int, bytes] = {}
        self._nbytes = 0
        self._lock = _thread.allocate_lock()
        self._owner = os.getpid()

    def _check_fork(self) -> None:
        """After a fork, start empty: a thread that does not exist here may have held the lock."""
        if self._owner != os.getpid():
            self._clear()

    def get(self, key: int) -> bytes | None:
        self._check_fork()
        with self._lock:
            data = self._data.pop(key, None)
            if data is not None:
                self._data[key] = data
            return data

    def put(self, key: int, data: bytes) -> None:
        self._check_fork()
        with self._lock:
            self._nbytes += len(data) - len(self._data.pop(key, b""))
            self._data[key] = data
            while self._nbytes > CACHE_NBYTES and len(self._data) > 1:
                self._nbytes -= len(self._data.pop(next(iter(self._data))))
            if self._over:  # another thread has closed the cache, and may have missed these bytes
                self._data.clear()

    def count(self, nbytes: int) -> None:
        self._check_fork()
        with self._lock:
            self.opened += nbytes

    def close(self) -> None:
        """Release all bytes, and keep none from now on."""
        self._over = True
        self._clear()


class Layout:
    """Finds the parts of a file by offset. Chunks are read as late as possible: a file can have very many."""

    def __init__(self, opened: Opened, chunks: list[Chunk] | None, made: Sequence[Part] = ()) -> None:
        self._opened = opened
        self._chunks = chunks  # the shown ones, if the footer needed them
        self._made = made  # parts behind all others, in order
        self.end = made[-1].end if made else opened.source.size if opened.crypto is None else opened.footer_offset
        self._firsts = [first for _, _, first, _ in opened.groups]
        self._ordinals: dict[int, int] = {}
        self._pages: dict[int, Part] = {}  # by chunk
        self._begins: dict[int, int] = {}  # by chunk, as a search has seen them
        self._table: tuple[list[int], list[Part]] | None = None

    def find(self, begin: int, end: int) -> list[Part]:
        """Return the parts that have a byte from `begin` to `end`, in order."""
        if self._table is None and self._chunks is None:
            found = self._follow(begin, end)
            if found is not None:
                return found
        begins, parts = self._tabulate()
        first = bisect_right(begins, begin) - 1
        if first < 0 or parts[first].end <= begin:
            first += 1
        return parts[first : bisect_left(begins, end)]

    def _follow(self, begin: int, end: int) -> list[Part] | None:
        """Return the pages of consecutive chunks, if the file has them in the order of their numbers; else None."""
        low, high = 0, self._opened.footer.chunks
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._begin_of(middle) <= begin else (low, middle)
        found: list[Part] = []
        at = begin
        for number in range(max(0, low - 1), self._opened.footer.chunks):
            part = self._pages_of(number)
            if part is None or not (part.begin <= at < part.end if not found else part.begin == at):
                return None
            found.append(part)
            at = part.end
            if at >= end:
                return found
        return None

    def _begin_of(self, number: int) -> int:
        """Return where a chunk begins by its metadata in the footer. A chunk that is only passed costs no more."""
        begin = self._begins.get(number)
        if begin is None:
            footer = self._opened.footer
            metadata = footer.chunk(number).metadata
            begin = ColumnMetadata(footer.data, metadata).first_page if metadata else 0
            self._begins[number] = begin
        return begin

    def _pages_of(self, number: int) -> Part | None:
        part = self._pages.get(number)
        if part is None:
            chunk = self._chunk(number)
            nbytes, begin = chunk.numbers().compressed_nbytes, chunk.begin()
            if nbytes <= 0 or begin < MAGIC_NBYTES or begin + nbytes > self._opened.footer_offset:
                return None
            part = self._pages.setdefault(number, Part(begin, begin + nbytes, PAGES, chunk))
        return part

    def _chunk(self, number: int) -> Chunk:
        group = bisect_right(self._firsts, number) - 1
        ordinal = self._ordinals.get(group)
        if ordinal is None:
            ordinal = self._ordinals[group] = self._opened.ordinal(group)
        return self._opened.chunk(number, group, ordinal, number - self._firsts[group])

    def _tabulate(self) -> tuple[list[int], list[Part]]:
        """Return where all parts of the file begin, and the parts."""
        if self._table is None:
            opened = self._opened
            if opened.crypto is None:
                parts = [Part(MAGIC_NBYTES, opened.source.size, PAGES, None)]
            else:
                chunks = self._chunks
                if chunks is None:
                    chunks = [self._chunk(number) for number in range(opened.footer.chunks)]
                parts = []
                for piece in pieces(opened, chunks):
                    known = self._pages.get(piece.chunk.number) if piece.module == PAGES else None
                    parts.append(known or Part(piece.begin, piece.end, piece.module, piece.chunk))
                parts += self._made
            self._table = [part.begin for part in parts], parts
        return self._table


class Shown:
    """Shows the parts of an opened file, and keeps opened pages and indexes. Threads may share it.

    Args:
        opened: The file.
        threads: How many threads open pages.
    """

    def __init__(self, opened: Opened, threads: int) -> None:
        self.levels: dict[tuple[str, int], None] = {}  # (column, row group) of opened pages whose levels have no tag
        self._opened = opened
        self._threads = threads
        self._cache = _Cache()

    @property
    def decrypted(self) -> int:
        """Bytes of sealed modules that were opened so far."""
        return self._cache.opened

    def close(self) -> None:
        """Release opened bytes, and keep none from now on."""
        self._cache.close()

    def show(self, part: Part, begin: int, out: memoryview, jobs: list[Job]) -> None:
        """Write a part's bytes from `begin` to the whole of `out`. Whole pages are appended to `jobs`, for `run`."""
        end = begin + len(out)
        if part.make is None and (part.chunk is None or part.chunk.modules is None):
            data = self._opened.source.read_to(out, begin, end)
            if not self._opened.source.is_file:
                out[:] = data
            return
        if part.module != PAGES or part.make is not None:
            out[:] = memoryview(self._module(part))[begin - part.begin : end - part.begin]
            return
        assert part.chunk is not None
        if begin == part.begin and end == part.end:
            jobs.append(Job(part.chunk, self._pages(part.chunk, end - begin, 0, False), begin, end, out))
            return
        bounds = self._bounds(part)
        at = begin
        while at < end:
            page = bisect_right(bounds, at) - 1
            last = bisect_right(bounds, end) - 1  # where the last whole page ends
            if at == bounds[page] and page < last:
                stop = bounds[last]
                jobs.append(self._job(part, page, last, out[at - begin : stop - begin]))
            else:
                stop = min(end, bounds[page + 1])
                opened = memoryview(self._cached(part, page))
                out[at - begin : stop - begin] = opened[at - bounds[page] : stop - bounds[page]]
            at = stop

    def _pages(self, chunk: Chunk, nbytes: int, page: int, began: bool, mode: int = VIEW) -> PageRun:
        assert chunk.modules is not None
        return PageRun(
            chunk.modules,
            None,
            mode,
            nbytes,
            0,
            short_sizes=chunk.modules.aad is None,
            keep_checksum=not (chunk.modules.ctr and self._opened.reading.check_crc),
            refuse_levels=not self._opened.reading.allow_unauthenticated_levels,
            table=mode == LIST,
            page=page,
            began=began,
        )

    def _job(self, part: Part, first: int, last: int, out: memoryview) -> Job:
        """Return a job that opens the pages from number `first` to before `last`; a dictionary counts as a page."""
        assert part.bounds is not None and part.chunk is not None
        begin, end = part.bounds[first], part.bounds[last]
        ordinal = max(0, first - part.dictionary)
        return Job(part.chunk, self._pages(part.chunk, end - begin, ordinal, first > 0), begin, end, out)

    def _cached(self, part: Part, page: int) -> bytes:
        assert part.bounds is not None
        data = self._cache.get(part.bounds[page])
        if data is None:
            data, view = new_bytes(part.bounds[page + 1] - part.bounds[page])
            self.run([self._job(part, page, page + 1, view)])
            self._cache.put(part.bounds[page], data)
        return data

    def _bounds(self, part: Part) -> list[int]:
        """Return where the pages of a chunk begin. All page headers are opened for that, but no body."""
        if part.bounds is None:
            assert part.chunk is not None
            run = self._pages(part.chunk, part.end - part.begin, 0, False, LIST)
            at, step = part.begin, LIST_NBYTES
            while run.stop != DONE:
                window = self._opened.source.read(at, min(part.end, at + step))
                run.feed(window, at + len(window) == part.end)
                run_pages([run], 1)
                at += run.consumed
                # A request is expensive unless the source is a descriptor.
                large = run.consumed > len(window) and self._opened.source.is_file
                step = max(LIST_LARGE_NBYTES if large else LIST_NBYTES, run.wanted)
            bounds = [part.begin + row[0] for row in run.table()]
            part.dictionary = run.dictionary_pages > 0  # which the table does not list
            part.bounds = [part.begin] * part.dictionary + bounds + [part.end]  # last: another thread may read it
        return part.bounds

    def run(self, jobs: list[Job]) -> None:
        """Open the pages of jobs, chunks that are near each other at the same time."""
        if not jobs:  # as for most small reads
            return
        window = WINDOW_NBYTES
        if self._opened.source.is_file:
            window = min(window, FILE_WINDOW_NBYTES * self._threads)
        groups: list[list[Job]] = []
        for job in sorted(jobs, key=lambda job: job.begin):
            near = groups and job.begin - groups[-1][-1].end <= GAP_NBYTES
            if near and job.end - groups[-1][0].begin <= window:
                groups[-1].append(job)
            else:
                groups.append([job])
        with self._opened.source.expect([(group[0].begin, group[-1].end) for group in groups]):
            for group in groups:
                self._run_near(group, window)

    def _run_near(self, jobs: list[Job], window_nbytes: int) -> None:
        step = window_nbytes
        while jobs:
            begin, end = jobs[0].at, jobs[-1].end
            stop = min(end, begin + step)  # less than all only if one chunk is larger
            scratch = self._take_scratch(max(window_nbytes, stop - begin))
            window = self._opened.source.read_to(scratch, begin, stop)
            runs = []
            for job in jobs:
                job.run.feed(window[job.at - begin : job.end - begin], stop == end, job.out)
                runs.append(job.run)
            run_pages(runs, self._threads)
            for job in jobs:
                before = job.at
                job.advance()
                if job.run.outside_levels:
                    self.levels[job.chunk.name, job.chunk.row_group] = None
                self._cache.count(job.at - before)
            if scratch is not None and len(scratch) <= WINDOW_NBYTES and len(_scratch) < SCRATCH_BUFFERS:
                _scratch.append(scratch)
            step = max(window_nbytes, jobs[0].run.wanted)
            jobs = [job for job in jobs if job.run.stop != DONE]

    def _take_scratch(self, nbytes: int) -> memoryview | None:
        """Return a buffer of one's own for a read from a descriptor; other sources have their own buffers."""
        if not self._opened.source.is_file:
            return None
        try:
            scratch = _scratch.pop()
        except IndexError:
            scratch = memoryview(b"")
        return with_room(scratch, nbytes)

    # ---- indexes and bloom filters

    def _module(self, part: Part) -> bytes:
        """Return what is no page of the file as it is shown: an index or a bloom filter as long as it was sealed."""
        data = self._cache.get(part.begin)
        if data is None:
            data = self._open_module(part) if part.make is None else part.make()
            self._cache.put(part.begin, data)
        return data

    def _open_module(self, part: Part) -> bytes:
        assert part.chunk is not None and part.chunk.modules is not None
        modules, nbytes = part.chunk.modules, part.end - part.begin
        sealed = self._opened.source.read(part.begin, part.end)
        self._cache.count(nbytes)
        if part.module == BLOOM_HEADER:
            header, frame = modules.open(BLOOM_HEADER, sealed)
            bits, _ = modules.open(BLOOM_BITSET, sealed[frame:])
            # The bits must follow the header directly, and some readers compare their sizes with the footer.
            shown = filled(header, nbytes - len(bits)) + bits
        else:
            plain, _ = modules.open(part.module, sealed)
            shown = plain[: Struct(plain).end]
        return shown + bytes(nbytes - len(shown))


def filled(header: bytes, nbytes: int) -> bytes:
    """Extend a header to `nbytes` by fields that no reader knows: bytes, and a bool if one byte is left."""
    known = Struct(header)
    left = nbytes - known.end
    if left < 0:
        raise FormatError("a bloom filter is larger than the room that it has: the file is damaged")
    if left == 0 or 14 in known or 15 in known:
        return header[: known.end]
    length = max(0, left - 2)
    while length and 1 + len(thrift.binary(bytes(length))) > left:
        length -= 1
    value = thrift.binary(bytes(length)) if left > 1 else None
    edits: Edits = []
    if left > (0 if value is None else 1 + len(value)):
        edits.append((14, thrift.TRUE, b""))
    if value is not None:
        edits.append((15, thrift.BINARY, value))
    return thrift_splice(header[: known.end], 0, edits)
