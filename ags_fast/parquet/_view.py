"""open_plain and filesystem: an encrypted Parquet file as the plain one that any reader takes it for.

Every module is shown where it stands in the sealed file, and as long as it is there: what sealing added to a page
becomes a field of its header that no reader knows. So all offsets in the footer stay right, and to open a file takes
its footer only. Pages are opened when somebody reads them.
"""

from __future__ import annotations

import operator
import os
from _thread import allocate_lock
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from ags_fast._core import DONE, LIST, VIEW, Footer, PageRun, new_bytes, run_pages, thrift_splice
from ags_fast._cursor import Cursor
from ags_fast._threads import thread_count
from ags_fast.ags1 import bytes_view, clamp
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.files.source import with_room
from ags_fast.parquet import _thrift as thrift
from ags_fast.parquet._file import (
    BLOOM_BITSET,
    BLOOM_HEADER,
    MAGIC_NBYTES,
    Chunk,
    Dropped,
    Keys,
    Opened,
    dotted,
)
from ags_fast.parquet._transcode import PAGES, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from typing_extensions import Buffer

    from ags_fast.parquet._file import _Retriever

__all__ = ["PlainView", "filesystem", "open_plain"]

WINDOW_NBYTES = 16 << 20  # of the source, in memory at once; one page at least
GAP_NBYTES = 64 << 10  # between two column chunks that are read from the source as one
CACHE_NBYTES = 8 << 20  # of opened pages and indexes, for readers that take less than one at a time; one page at least
SPECULATIVE_NBYTES = 64 << 10  # from the end: what Arrow reads in the hope that it has all of the footer
LIST_NBYTES = 64 << 10  # of the source at a time, to find the pages of a chunk
LIST_LARGE_NBYTES = 4 << 10  # where pages are larger than that: a header is rarely so long
FOOTER_KEY_NBYTES = 4  # that the crypto_metadata of a chunk under the footer key takes in a footer, field head and all
ZEROS = memoryview(bytes(64 << 10))


def _zero(out: memoryview) -> None:
    for at in range(0, len(out), len(ZEROS)):
        part = out[at : at + len(ZEROS)]
        part[:] = ZEROS[: len(part)]


class _Part:
    """What stands somewhere in the file: a column chunk's pages, its bloom filter, or an index of it.

    chunk: None for what is shown as it is, of a file without encryption.
    """

    __slots__ = ("begin", "bounds", "chunk", "dictionary", "end", "module")

    def __init__(self, begin: int, end: int, module: int, chunk: Chunk | None) -> None:
        self.begin = begin
        self.end = end
        self.module = module
        self.chunk = chunk
        self.bounds: list[int] | None = None  # where its pages begin, and where the last one ends, once that is known
        self.dictionary = False  # whether the first of them is one


class _Job:
    """Whole pages of a chunk on their way into a buffer."""

    __slots__ = ("at", "begin", "chunk", "end", "out", "run")

    def __init__(self, chunk: Chunk, run: PageRun, begin: int, end: int, out: memoryview) -> None:
        self.chunk = chunk
        self.run = run
        self.begin = self.at = begin
        self.end = end
        self.out = out

    def advance(self) -> None:
        """Note what was done with a window, after a run. A page takes as much room as it had: output never lacks."""
        self.at += self.run.consumed
        self.out = self.out[self.run.produced :]


class _Cache:
    """Opened bytes by where they stand, least recently used first. Safe from many threads, and after a fork."""

    def __init__(self) -> None:
        self.opened = 0  # bytes of sealed modules so far
        self._over = False
        self._clear()

    def _clear(self) -> None:
        self._data: dict[int, bytes] = {}
        self._nbytes = 0
        self._lock = allocate_lock()
        self._owner = os.getpid()

    def _check_fork(self) -> None:
        """A fork may have left the lock held, and the rest half done, by a thread that does not exist here."""
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
            if self._over:  # closed by another thread, which may not have found this
                self._data.clear()

    def count(self, nbytes: int) -> None:
        self._check_fork()
        with self._lock:
            self.opened += nbytes

    def close(self) -> None:
        """Let go of everything, and keep nothing any more."""
        self._over = True
        self._clear()


class _Layout:
    """Which part of a file stands where. Chunks are looked at as late as possible: a file can have very many."""

    def __init__(self, opened: Opened, chunks: list[Chunk] | None) -> None:
        self._opened = opened
        self._chunks = chunks  # those that are shown, if they had to be looked at for the footer
        self._firsts = [first for _, _, first, _ in opened.groups]
        self._ordinals: dict[int, int] = {}
        self._pages: dict[int, _Part] = {}  # by chunk
        self._table: tuple[list[int], list[_Part]] | None = None

    def find(self, begin: int, end: int) -> list[_Part]:
        """The parts that have a byte from `begin` to `end`, in order."""
        if self._table is None and self._chunks is None:
            found = self._follow(begin, end)
            if found is not None:
                return found
        begins, parts = self._tabulate()
        first = bisect_right(begins, begin) - 1
        if first < 0 or parts[first].end <= begin:
            first += 1
        return parts[first : bisect_left(begins, end)]

    def _follow(self, begin: int, end: int) -> list[_Part] | None:
        """The pages of chunks that follow each other as their numbers do, which nearly always they do; or None."""
        low, high = 0, self._opened.footer.chunks
        while low < high:
            middle = (low + high) // 2
            part = self._pages_of(middle)
            if part is None:
                return None
            low, high = (middle + 1, high) if part.begin <= begin else (low, middle)
        found: list[_Part] = []
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

    def _pages_of(self, number: int) -> _Part | None:
        part = self._pages.get(number)
        if part is None:
            chunk = self._chunk(number)
            nbytes, begin = chunk.numbers().compressed_nbytes, chunk.begin()
            if nbytes <= 0 or begin < MAGIC_NBYTES or begin + nbytes > self._opened.footer_offset:
                return None
            part = self._pages.setdefault(number, _Part(begin, begin + nbytes, PAGES, chunk))
        return part

    def _chunk(self, number: int) -> Chunk:
        group = bisect_right(self._firsts, number) - 1
        ordinal = self._ordinals.get(group)
        if ordinal is None:
            ordinal = self._ordinals[group] = self._opened.ordinal(group)
        return self._opened.chunk(number, group, ordinal, number - self._firsts[group])

    def _tabulate(self) -> tuple[list[int], list[_Part]]:
        """All parts of the file, and where they begin."""
        if self._table is None:
            opened = self._opened
            if opened.crypto is None:
                parts = [_Part(MAGIC_NBYTES, opened.source.size, PAGES, None)]
            else:
                chunks = self._chunks
                if chunks is None:
                    chunks = [self._chunk(number) for number in range(opened.footer.chunks)]
                parts = []
                for piece in pieces(opened, chunks):
                    known = self._pages.get(piece.chunk.number) if piece.module == PAGES else None
                    parts.append(known or _Part(piece.begin, piece.end, piece.module, piece.chunk))
            self._table = [part.begin for part in parts], parts
        return self._table


class PlainView(Cursor):
    """What `open_plain` returns. Offsets are those of the sealed file; only the footer is another.

    `read_at` and `readinto_at` are safe from many threads; what moves the cursor is not. `columns` are the dotted paths
    of the columns that are shown, `size` the bytes of the view.
    """

    def __init__(
        self,
        src: Any,
        keys: Keys | _Retriever,
        *,
        aad_prefix: bytes | None = None,
        aad_prefix_verifier: Callable[[bytes], object] | None = None,
        missing: str = "error",
        quirks: Iterable[str] = (),
        allow_ctr: bool = False,
        check_crc: bool = True,
        allow_unauthenticated_levels: bool = True,
        plain: bool = False,
        threads: int | None = None,
        length: int | None = None,
        exact: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """plain: whether a file without encryption is shown, as it is. exact: bytes after `length` are an
        IntegrityError. All else as for `open_plain`.
        """
        if missing not in ("error", "hide"):
            raise ValueError(f"missing is one of 'error', 'hide', not {missing!r}")
        if not isinstance(keys, Keys) and not callable(keys):
            raise TypeError(f"keys must be Keys, or a function from key_metadata to a key, not {type(keys).__name__!r}")
        self._position = 0
        self._cache = _Cache()
        self._scratch: list[memoryview | None] = []
        self._check_crc = check_crc
        self._refuse_levels = not allow_unauthenticated_levels
        self._levels: dict[tuple[str, int], None] = {}
        self._threads = thread_count(threads)
        self._opened = opened = Opened(
            src,
            keys,
            aad_prefix=aad_prefix,
            aad_prefix_verifier=aad_prefix_verifier,
            quirks=quirks,
            allow_ctr=allow_ctr,
            plain=plain,
            length=length,
            exact=exact,
            storage_options=storage_options,
        )
        try:
            self._begin(opened, missing)
        except BaseException:
            opened.close()
            raise

    def _begin(self, opened: Opened, missing: str) -> None:
        """Make the plain footer, and settle what is shown."""
        self._dropped: Dropped | None = None
        if opened.crypto is None:
            self._layout = _Layout(opened, None)
            self._tail = bytearray()
            self._tail_begin = self._length = opened.source.size
            return
        footer = opened.footer.plain({})
        chunks = None
        # Where it lost no more than it does under the footer key, there are no columns whose keys could be missing, and
        # no metadata that is still sealed. There can be so many chunks that to look at each would take longer than all
        # of the rest.
        shed = opened.footer.end - len(footer)
        if not opened.footer_verified or shed != FOOTER_KEY_NBYTES * len(opened.footer.encrypted()):
            chunks = list(opened.chunks())
            self._dropped = Dropped.of(opened, chunks)
            if self._dropped is not None:
                if missing == "error":
                    raise opened.lacks(next(chunk for chunk in chunks if chunk.missing))
                chunks = [chunk for chunk in chunks if chunk.column not in self._dropped.columns]
            footer = opened.footer.plain({c.number: c.shown_metadata() for c in chunks if c.modules is not None})
            if any(chunk.kept for chunk in chunks):
                footer = _with_kept(bytes(footer), chunks)
            if self._dropped is not None:
                footer = _without(bytes(footer), self._dropped, chunks)
        if not opened.encrypted_footer:
            footer = bytearray(thrift_splice(footer, 0, [(8, 0, None), (9, 0, None)]))  # algorithm and signing key
        footer += len(footer).to_bytes(4, "little")
        footer += b"PAR1"
        self._layout = _Layout(opened, chunks)
        self._tail = footer
        # What a reader reads on the off chance must not be pages: they would be opened for nothing, and one that is
        # damaged would keep it from all others.
        self._tail_begin = opened.footer_offset + max(0, SPECULATIVE_NBYTES - len(footer))
        self._length = self._tail_begin + len(footer)

    def __repr__(self) -> str:
        name = "" if self._opened.source.path is None else f" of {self._opened.source.path!r}"
        return f"<ags_fast plain view{name}, {self._length} bytes{', closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a view holds keys and is never pickled: open it where it is read")

    @property
    def size(self) -> int:
        """Length of the view in bytes."""
        return self._length

    @property
    def columns(self) -> list[str]:
        """Dotted paths of the leaf columns that are shown."""
        hidden = self._dropped.columns if self._dropped is not None else ()
        return [dotted(leaf) for number, leaf in enumerate(self._opened.leaves) if number not in hidden]

    @property
    def hidden(self) -> list[str]:
        """Dotted paths of the leaf columns that are not, for want of keys."""
        return [] if self._dropped is None else list(self._dropped.names)

    @property
    def decrypted(self) -> int:
        """Bytes of pages, indexes and bloom filters that were opened so far, as long as they stand in the file."""
        return self._cache.opened

    @property
    def footer_verified(self) -> bool:
        """Whether the footer passed its tag or signature: not so if it was read by Keys without a footer key."""
        return self._opened.footer_verified

    @property
    def unauthenticated_levels(self) -> list[tuple[str, int]]:
        """(column, row group) of pages that were opened so far, whose levels have no tag. See `decrypt_file`."""
        return list(self._levels)

    # ---- random access

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, or fewer at the end; negative ones are a ValueError."""
        size = self._clamp(offset, size)
        if size == 0:
            return b""
        out, view = new_bytes(size)
        self._fill(offset, view)
        return out

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """Like `read_at`, but into a writable buffer; returns how many bytes. After an error they are all zero."""
        view = bytes_view(buffer)
        if view.readonly:
            raise TypeError(f"a writable bytes-like object is required, not a read-only {type(buffer).__name__!r}")
        size = self._clamp(offset, view.nbytes)
        if size > 0:
            try:
                self._fill(offset, view[:size])
            except BaseException:
                _zero(view[:size])
                raise
        return size

    def _clamp(self, offset: int, size: int) -> int:
        self._check_open()
        return clamp(operator.index(offset), operator.index(size), self._length)

    def _fill(self, offset: int, out: memoryview) -> None:
        """Write what is shown from `offset` to all of `out`."""
        end = offset + len(out)
        at = offset
        if at < MAGIC_NBYTES:
            out[: MAGIC_NBYTES - at] = b"PAR1"[at:end]
            at = min(end, MAGIC_NBYTES)
        body_end = min(end, self._tail_begin if self._opened.crypto is None else self._opened.footer_offset)
        jobs: list[_Job] = []
        for part in self._layout.find(at, body_end) if at < body_end else ():
            begin, stop = max(at, part.begin), min(part.end, body_end)
            _zero(out[at - offset : begin - offset])
            self._show(part, begin, out[begin - offset : stop - offset], jobs)
            at = stop
        if at < self._tail_begin:
            stop = min(end, self._tail_begin)
            _zero(out[at - offset : stop - offset])
            at = stop
        if at < end:
            out[at - offset :] = memoryview(self._tail)[at - self._tail_begin : end - self._tail_begin]
        self._run(jobs)

    def _show(self, part: _Part, begin: int, out: memoryview, jobs: list[_Job]) -> None:
        """Write a part's bytes from `begin` to all of `out`; whole pages are left as jobs."""
        end = begin + len(out)
        if part.chunk is None or part.chunk.modules is None:
            data = self._opened.source.read_to(out, begin, end)
            if not self._opened.source.is_file:
                out[:] = data
            return
        if part.module != PAGES:
            out[:] = memoryview(self._module(part))[begin - part.begin : end - part.begin]
            return
        if begin == part.begin and end == part.end:
            jobs.append(_Job(part.chunk, self._pages(part.chunk, end - begin, 0, False), begin, end, out))
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

    # ---- pages

    def _pages(self, chunk: Chunk, nbytes: int, page: int, began: bool, mode: int = VIEW) -> PageRun:
        assert chunk.modules is not None
        return PageRun(
            chunk.modules,
            None,
            mode,
            nbytes,
            0,
            short_sizes=chunk.modules.aad is None,
            keep_checksum=not (chunk.modules.ctr and self._check_crc),
            refuse_levels=self._refuse_levels,
            table=mode == LIST,
            page=page,
            began=began,
        )

    def _job(self, part: _Part, first: int, last: int, out: memoryview) -> _Job:
        """To open the pages from number `first` to before `last`, a dictionary being one."""
        assert part.bounds is not None and part.chunk is not None
        begin, end = part.bounds[first], part.bounds[last]
        ordinal = max(0, first - part.dictionary)
        return _Job(part.chunk, self._pages(part.chunk, end - begin, ordinal, first > 0), begin, end, out)

    def _cached(self, part: _Part, page: int) -> bytes:
        assert part.bounds is not None
        data = self._cache.get(part.bounds[page])
        if data is None:
            data, view = new_bytes(part.bounds[page + 1] - part.bounds[page])
            self._run([self._job(part, page, page + 1, view)])
            self._cache.put(part.bounds[page], data)
        return data

    def _bounds(self, part: _Part) -> list[int]:
        """Where the pages of a chunk begin, from their headers; each is opened for that, but no body is."""
        if part.bounds is None:
            assert part.chunk is not None
            run = self._pages(part.chunk, part.end - part.begin, 0, False, LIST)
            at, step = part.begin, LIST_NBYTES
            while run.stop != DONE:
                window = self._opened.source.read(at, min(part.end, at + step))
                run.feed(window, at + len(window) == part.end)
                run_pages([run], 1)
                at += run.consumed
                # A request has its price, but where the source is a descriptor.
                large = run.consumed > len(window) and self._opened.source.is_file
                step = max(LIST_LARGE_NBYTES if large else LIST_NBYTES, run.wanted)
            bounds = [part.begin + row[0] for row in run.table()]
            part.dictionary = run.counts["dictionary_pages"] > 0  # which the table does not list
            part.bounds = [part.begin] * part.dictionary + bounds + [part.end]  # last: another thread may look at it
        return part.bounds

    def _run(self, jobs: list[_Job]) -> None:
        """Open pages, those of chunks that are near to each other at the same time."""
        i = 0
        while i < len(jobs):
            j = i + 1
            while (
                j < len(jobs)
                and jobs[j].end - jobs[i].begin <= WINDOW_NBYTES
                and jobs[j].begin - jobs[j - 1].end <= GAP_NBYTES
            ):
                j += 1
            self._run_near(jobs[i:j])
            i = j

    def _run_near(self, jobs: list[_Job]) -> None:
        step = WINDOW_NBYTES
        while jobs:
            begin, end = jobs[0].at, jobs[-1].end
            stop = min(end, begin + step)  # before the end only of one chunk that is larger
            scratch = self._take_scratch(stop - begin)
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
                    self._levels[job.chunk.name, job.chunk.row_group] = None
                self._cache.count(job.at - before)
            self._scratch[:] = [scratch]  # one is enough to be kept
            step = max(WINDOW_NBYTES, jobs[0].run.wanted)
            jobs = [job for job in jobs if job.run.stop != DONE]

    def _take_scratch(self, nbytes: int) -> memoryview | None:
        """A buffer that nobody else has, for what is read from a descriptor; other sources bring their own."""
        if not self._opened.source.is_file:
            return None
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = None
        return with_room(scratch or memoryview(b""), nbytes)

    # ---- what is no page

    def _module(self, part: _Part) -> bytes:
        """An index or a bloom filter as it is shown: as long as it was sealed."""
        data = self._cache.get(part.begin)
        if data is None:
            data = self._open_module(part)
            self._cache.put(part.begin, data)
        return data

    def _open_module(self, part: _Part) -> bytes:
        assert part.chunk is not None and part.chunk.modules is not None
        modules, nbytes = part.chunk.modules, part.end - part.begin
        sealed = self._opened.source.read(part.begin, part.end)
        self._cache.count(nbytes)
        if part.module == BLOOM_HEADER:
            header, frame = modules.open(BLOOM_HEADER, sealed)
            bits, _ = modules.open(BLOOM_BITSET, sealed[frame:])
            # The bits follow the header directly, and some readers compare their sizes with the footer.
            shown = _filled(header, nbytes - len(bits)) + bits
        else:
            plain, _ = modules.open(part.module, sealed)
            shown = plain[: thrift.Struct(plain).end]
        return shown + bytes(nbytes - len(shown))

    def close(self) -> None:
        """Let go of keys and opened pages, and close the source if the view opened it. May be called again.

        It waits for no other thread: reads in flight end as if it came later, or raise ValueError.
        """
        opened = getattr(self, "_opened", None)  # none if the constructor failed
        if opened is not None:
            self._cache.close()
            self._scratch.clear()
            opened.close()
        super().close()


def _filled(header: bytes, nbytes: int) -> bytes:
    """A header of `nbytes`, by fields that no reader knows: bytes, and a bool where their length leaves a byte over."""
    known = thrift.Struct(header)
    left = nbytes - known.end
    if left < 0:
        raise FormatError("a bloom filter is larger than its place: the file is damaged")
    if left == 0 or 14 in known or 15 in known:
        return header[: known.end]
    length = max(0, left - 2)
    while length and 1 + len(thrift.binary(bytes(length))) > left:
        length -= 1
    value = thrift.binary(bytes(length)) if left > 1 else None
    edits: list[tuple[int, int, bytes | None]] = []
    if left > (0 if value is None else 1 + len(value)):
        edits.append((14, thrift.TRUE, b""))
    if value is not None:
        edits.append((15, thrift.BINARY, value))
    return thrift_splice(header[: known.end], 0, edits)


def _with_kept(footer: bytes, chunks: list[Chunk]) -> bytearray:
    """A plain footer, with the fields of ColumnChunks that were kept in their sealed metadata."""
    parsed = Footer(footer)
    kept: dict[int, list[tuple[int, int, bytes | None]]] = {chunk.number: chunk.kept for chunk in chunks}
    groups = []
    for begin, end, first, count in parsed.groups():
        spans = [(number, parsed.chunk(number)) for number in range(first, first + count)]
        columns = [thrift_splice(footer[span.begin : span.end], 0, kept.get(number) or []) for number, span in spans]
        value = thrift.list_of(thrift.STRUCT, columns)
        groups.append(thrift_splice(footer[begin:end], 0, [(1, thrift.LIST, value)]))
    return bytearray(thrift_splice(footer, 0, [(4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups))]))


def _without(footer: bytes, dropped: Dropped, chunks: list[Chunk]) -> bytearray:
    """A plain footer without the columns that are hidden; `chunks` are the others."""
    parsed = Footer(footer)
    shown: list[list[Chunk]] = [[] for _ in parsed.groups()]
    for chunk in chunks:
        shown[chunk.row_group].append(chunk)
    groups = []
    for (begin, end, _, _), kept in zip(parsed.groups(), shown, strict=True):
        spans = [parsed.chunk(chunk.number) for chunk in kept]
        numbers = [chunk.numbers() for chunk in kept]
        edits = [
            (1, thrift.LIST, thrift.list_of(thrift.STRUCT, [footer[span.begin : span.end] for span in spans])),
            (2, thrift.I64, thrift.integer(sum(number.uncompressed_nbytes for number in numbers))),
            *dropped.sorting(footer, begin),
            (5, thrift.I64, thrift.integer(kept[0].begin() if kept else 0)),
            (6, thrift.I64, thrift.integer(sum(number.compressed_nbytes for number in numbers))),
        ]
        groups.append(thrift_splice(footer[begin:end], 0, edits))
    edits = [
        *dropped.schema(footer),
        (4, thrift.LIST, thrift.list_of(thrift.STRUCT, groups)),
        *dropped.orders(footer),
    ]
    return bytearray(thrift_splice(footer, 0, edits))


def open_plain(
    src: Any,
    keys: Keys | _Retriever | None = None,
    *,
    key_metadata: Any = None,
    length: int | None = None,
    aad_prefix: bytes | None = None,
    aad_prefix_verifier: Callable[[bytes], object] | None = None,
    missing: str = "error",
    quirks: Iterable[str] = (),
    allow_ctr: bool = False,
    check_crc: bool = True,
    allow_unauthenticated_levels: bool = True,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PlainView:
    """Open an encrypted Parquet file as a seekable, read-only one that is a plain Parquet file to any reader.

    src: a path, a URL, a bytes-like object or a seekable binary file, which is left open. keys: Keys, or a function
    from the file's key_metadata to a key. aad_prefix, aad_prefix_verifier, quirks, allow_ctr, check_crc,
    allow_unauthenticated_levels, storage_options: as for decrypt_file. missing: what becomes of columns whose keys are
    not held: "error", here and now, or "hide" them, whole top-level fields. threads: as for AgsCodec; a read that
    covers several column chunks opens them in parallel.

    key_metadata: in place of keys, Iceberg's StandardKeyMetadata, or its encoded bytes: one key for all columns, the
    AAD prefix and, if it has one, the file's length. ValueError if keys are given, too, or another prefix.

    length: the bytes of the file, from a trusted place. A source with fewer is an IntegrityError, and bytes after them
    are never read. The length in key_metadata must be the file's, which is `length` or else what the source has: if it
    differs, that is an IntegrityError.

    Only the footer is read, and checked, by this call; pages are opened when they are read, and kept in small number.
    Nothing is handed out before its tag has passed; pages under CTR have none, nor have levels in parquet-java's V2
    layout. Raises FormatError, IntegrityError, PolicyError, and KeyAccessError, which names a column; reading raises
    IntegrityError, which names the place, each time, while all else stays readable.
    """
    exact = False
    if key_metadata is not None:
        if keys is not None:
            raise ValueError("keys and key_metadata are given: give one of them")
        if not hasattr(key_metadata, "encryption_key"):
            from ags_fast.keys import StandardKeyMetadata

            key_metadata = StandardKeyMetadata.decode(key_metadata)
        stored_prefix = key_metadata.aad_prefix or b""
        if aad_prefix and bytes(aad_prefix) != stored_prefix:
            raise ValueError("aad_prefix is not the one in key_metadata: give one of them")
        keys, aad_prefix = Keys(key_metadata.encryption_key), stored_prefix
        if key_metadata.file_length is not None:
            exact = length is None
            if not exact and length != key_metadata.file_length:
                raise IntegrityError(
                    f"the file should have {length} bytes, and {key_metadata.file_length} by its key_metadata"
                )
            length = key_metadata.file_length
    if keys is None:
        raise TypeError("keys or key_metadata is required")
    return PlainView(
        src,
        keys,
        aad_prefix=aad_prefix,
        aad_prefix_verifier=aad_prefix_verifier,
        missing=missing,
        quirks=quirks,
        allow_ctr=allow_ctr,
        check_crc=check_crc,
        allow_unauthenticated_levels=allow_unauthenticated_levels,
        threads=threads,
        length=length,
        exact=exact,
        storage_options=storage_options,
    )


def filesystem(
    keys: Keys | _Retriever | None = None,
    *,
    keys_for: Callable[[str], Keys | _Retriever] | None = None,
    target_protocol: str = "file",
    target_options: Mapping[str, Any] | None = None,
    fs: Any = None,
    aad_prefix: bytes | Callable[[str], bytes | None] | None = None,
    aad_prefix_verifier: Callable[[bytes], object] | None = None,
    missing: str = "error",
    quirks: Iterable[str] = (),
    allow_ctr: bool = False,
    check_crc: bool = True,
    allow_unauthenticated_levels: bool = True,
    plain: str = "refuse",
    threads: int | None = None,
) -> Any:
    """An fsspec filesystem, "ags-parquet", that shows encrypted Parquet files as plain ones; read-only.

    For what takes a filesystem: `duckdb.register_filesystem`, `pyarrow.dataset`, `pandas.read_parquet`. Paths are the
    target's, "ags-parquet:///data/a.parquet" too. keys: of all files; or keys_for: a function from a path to keys.
    target_protocol, target_options: of the filesystem that holds the files; or fs: that filesystem itself. aad_prefix:
    of all files, or a function from a path. plain: files without encryption are a PolicyError ("refuse"), or shown as
    they are ("allow"). All else as for open_plain.

    `info` and `size` tell a view's size, for which they open its footer; listings do not, and have None there.
    """
    from ags_fast.parquet._filesystem import PlainFileSystem, Settings

    return PlainFileSystem(
        Settings(
            keys,
            keys_for,
            fs,
            target_protocol,
            target_options,
            aad_prefix,
            plain,
            {
                "aad_prefix_verifier": aad_prefix_verifier,
                "missing": missing,
                "quirks": quirks,
                "allow_ctr": allow_ctr,
                "check_crc": check_crc,
                "allow_unauthenticated_levels": allow_unauthenticated_levels,
                "threads": threads,
            },
        )
    )
