"""The opened blocks of one AGS1 stream: they are read, opened and kept here, for `ags_fast.stream.AgsReader`."""

from __future__ import annotations

import operator

from ags_fast._core import NOTHING, OVERHEAD_NBYTES, Ahead, Key, Span, go_on, new_bytes, open_ahead
from ags_fast._cursor import Cursor
from ags_fast._threads import usable_cpus
from ags_fast.ags1 import HEADER_NBYTES, block_offset, bytes_view, clamp
from ags_fast.errors import IntegrityError
from ags_fast.files.source import RangeSource, SeekableSource

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from ags_fast._types import Buffer
    from ags_fast.files.source import AnySource

__all__ = ["OpenBlocks"]

CACHE_NBYTES = 4 << 20  # of opened blocks that are kept for reads that come back to them; at least one block
SPAN_NBYTES = 250  # that a block in the cache takes beside its bytes: more than a tiny block has
AHEAD_NBYTES = 256 << 10  # a thread, opened ahead of a cursor that moves steadily; at least one block
REQUEST_NBYTES = 64 << 20  # the largest single read of a source that is not a descriptor; at least one block


class OpenBlocks(Cursor):
    """Opens the blocks that a read wants, ahead of a steady cursor also later ones, and keeps some of them.

    Threads may share it. The cache has no lock, which a fork could leave held: each step is atomic by itself.
    """

    __slots__ = (
        *("_aad_prefix", "_block_size", "_cache", "_file", "_file_length", "_hot", "_key", "_later", "_over"),
        *("_threads", "_unchecked"),
    )

    _aad_prefix: bytes
    _block_size: int  # bytes of plaintext
    _file: AnySource
    _file_length: int  # bytes of the stream, from a trusted place
    _key: Key
    _later: Ahead
    _threads: int
    _unchecked: bool  # the one block of an empty stream has not been opened yet

    def __init__(self) -> None:
        self._hot = NOTHING  # opened bytes that the next read is likely to want
        self._over = False  # closed; quicker to read than `closed`
        self._cache: dict[int, Span] = {}  # opened blocks, least recently used first

    def read_ranges(self, ranges: Iterable[Sequence[int]]) -> list[bytes]:
        """Read several ranges. Ranges whose blocks touch are read from the source, and opened, as one.

        A store gets the requests for all of them at once, for up to 64 MiB at a time.

        Args:
            ranges: ``(offset, size)`` pairs, in bytes of plaintext.

        Returns:
            What `read_at` returns for each range, in the order of `ranges`.
        """
        wanted = [(operator.index(offset), self._clamp(offset, size)) for offset, size in ranges]
        results = [b""] * len(wanted)
        groups: list[list[int]] = []
        begin = end = group_end = 0  # of the last group, in bytes, and the block where it ends
        for i in sorted((i for i, (_, size) in enumerate(wanted) if size), key=wanted.__getitem__):
            offset, size = wanted[i]
            if not groups or offset // self._block_size > group_end or offset + size - begin > REQUEST_NBYTES:
                groups.append([])
                begin, end = offset, 0
            groups[-1].append(i)
            end = max(end, offset + size)
            group_end = -(-end // self._block_size)
        spans = [(wanted[group[0]][0], max(sum(wanted[i]) for i in group)) for group in groups]
        order: list[int] = [*range(len(groups))]
        requests: list[tuple[int, int]] = []
        if isinstance(self._file, RangeSource) and len(groups) > 1:
            requests = [self._span_of(*span) for span in spans]
            order.sort(key=lambda number: requests[number][0] < requests[number][1])  # first what is kept until now
        with self._expect([requests[number] for number in order] if requests else []):
            for number in order:
                begin, end = spans[number]
                data = self.read_at(begin, end - begin)
                for i in groups[number]:
                    offset, size = wanted[i]
                    results[i] = data[offset - begin : offset - begin + size]
        return results

    def _expect(self, requests: list[tuple[int, int]]) -> AbstractContextManager[object]:
        """Let a store's requests for these parts of the source run at once, in a ``with`` block."""
        from contextlib import nullcontext

        return self._file.expect(requests) if isinstance(self._file, RangeSource) and requests else nullcontext()

    @property
    def read_ahead(self) -> int:
        """Bytes of an object in a store that may be requested ahead of reads that go on without a gap.

        They are held in memory until they are read. 16 MiB unless it is set; 0 requests none. Always 0 if the source is
        no object of a store.
        """
        return self._file.file.read_ahead if isinstance(self._file, RangeSource) else 0

    @read_ahead.setter
    def read_ahead(self, nbytes: int) -> None:
        if isinstance(self._file, RangeSource):
            self._file.file.read_ahead = nbytes

    def _share(self, threads: int) -> None:
        """Let up to so many threads work: on one call, and ahead of a steady cursor where they have a CPU."""
        most = threads * max(1, AHEAD_NBYTES // self._block_size)
        helped = threads > 1 and not isinstance(self._file, SeekableSource) and usable_cpus() > 1
        if isinstance(self._file, RangeSource):  # which requests ahead by itself
            most = max(1, threads * AHEAD_NBYTES // self._block_size)
        self._threads = threads
        self._later = Ahead(self._key, self._aad_prefix, self._block_size, self._length, threads, most, helped)

    def _check_empty(self) -> None:
        self._open_blocks(0, memoryview(bytearray()))
        self._unchecked = False

    def _clamp(self, offset: int, size: int) -> int:
        self._check_open()
        if self._unchecked:
            self._check_empty()
        return clamp(offset, size, self._length)

    def _read(self, offset: int, size: int, steady: bool) -> bytes:
        offset = operator.index(offset)
        size = self._clamp(offset, size)
        if size == 0:
            return b""
        if self._length <= self._block_size:  # the only block is kept
            span = self._hot
            if span is NOTHING:  # a short way: small files are many
                source, base = self._file.fetch(HEADER_NBYTES, self._file_length)
                at = HEADER_NBYTES - base
                key, prefix, threads = self._key, self._aad_prefix, self._threads
                opened = key.open_bytes(prefix, self._block_size, 0, source, at, self._length, threads)
                span = self._hot = Span(0, opened)
                if self._over:
                    self._let_go()
            return span.data if size == self._length else span.data[offset : offset + size]
        block, begin = divmod(offset, self._block_size)
        # The short way to a part of one block.
        if not steady and size < self._block_size and begin + size <= self._block_size:
            if (part := self._cached(block)) is None:
                self._hot = NOTHING
                part = self._open_span(block, 1, None)
                self._keep(block, part)
            self._hot = part
            if self._over:
                self._let_go()
            return part.data[offset - part.offset : offset - part.offset + size]
        if steady and self._hot.get(offset, 1) is None and self._go_on(offset, None) == 0:
            data = self._hot.get(offset, size)
            if data is not None:
                return data
        out, view = new_bytes(size)
        self._fill(offset, view, steady)
        return out

    def _readinto(self, offset: int, buffer: Buffer, steady: bool) -> int:
        view = bytes_view(buffer)
        if view.readonly:
            raise TypeError(f"a writable bytes-like object is required, not a read-only {type(buffer).__name__!r}")
        offset = operator.index(offset)
        size = self._clamp(offset, view.nbytes)
        if size > 0:
            try:
                self._fill(offset, view[:size], steady)
            except BaseException:
                view[:size] = bytes(size)
                raise
        return size

    def _fill(self, offset: int, out: memoryview, steady: bool) -> None:
        """Write the plaintext from `offset` to the whole of `out`."""
        wanted = len(out)
        while out:
            done = self._hot.copy_to(offset, out) or (self._go_on(offset, out) if steady else -1)
            if done < 0:
                break
            offset += done
            out = out[done:]
        step = max(1, REQUEST_NBYTES // self._block_size) * self._block_size
        while isinstance(self._file, SeekableSource) and len(out) > step:  # what it fetches is held in memory
            piece = step - offset % self._block_size
            self._fill_piece(offset, out[:piece], steady)
            offset += piece
            out = out[piece:]
        if out:
            self._fill_piece(offset, out, steady)
            if steady:
                self._open_ahead(wanted)

    def _fill_piece(self, offset: int, out: memoryview, steady: bool) -> None:
        """Open whole blocks straight into `out`.

        A block at either end that is wanted only in part is opened and kept, unless it is kept already, and the part is
        copied. With `steady`, more blocks after the last one are opened too.
        """
        size = self._block_size
        end = offset + len(out)
        first, last = offset // size, (end - 1) // size
        whole_end = end if end == self._length else end // size * size
        head = self._cached(first) if offset % size or first * size >= whole_end else None
        tail = self._cached(last) if last > first and last * size >= whole_end else None
        lo, hi = first + (head is not None), last + (tail is None)  # the blocks to be opened
        goes_on = steady and lo == self._later.end
        ahead = self._later.plan(lo, hi, whole_end < end) if steady and lo < hi else hi
        fetched = None
        if isinstance(self._file, SeekableSource) and lo < hi:  # one request for all of them
            fetched, ahead = self._fetch(self._file, lo, hi, ahead, goes_on)
        at = offset
        while at < end:
            block = at // size
            if at % size == 0 and at < whole_end:
                self._open_blocks(block, out[at - offset : whole_end - offset], fetched)
                at = whole_end
                continue
            span = head if block == first else tail
            if span is None:
                self._hot = NOTHING  # release the old bytes before there are new ones
                span = self._open_span(block, ahead - block if block == last else 1, fetched)
                self._keep(block, span)
            self._hot = span
            if self._over:
                self._let_go()
            at += span.copy_to(at, out[at - offset : (block + 1) * size - offset])

    def _fetch(self, file: SeekableSource, lo: int, hi: int, ahead: int, goes_on: bool) -> tuple[tuple[Any, int], int]:
        begin = block_offset(lo, self._block_size)
        try:
            return file.fetch(begin, min(block_offset(ahead, self._block_size), self._file_length), goes_on), ahead
        except IntegrityError:
            if ahead == hi:
                raise
        return file.fetch(begin, block_offset(hi, self._block_size)), hi  # the source may have the wanted blocks

    def _span_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return where in the source the blocks begin and end that a read of plaintext fetches."""
        first, last = begin // self._block_size, (end - 1) // self._block_size
        first += first in self._cache
        last -= last >= first and last in self._cache
        at = block_offset(first, self._block_size)
        return at, max(at, min(block_offset(last + 1, self._block_size), self._file_length))

    # ---- opened blocks

    _open_ahead, _go_on = open_ahead, go_on

    def _open_steadily(self, first: int, out: memoryview) -> None:
        """Open the blocks from `first` whose plaintext fills `out`, and let a store go on to the next ones."""
        fetched = None
        if isinstance(self._file, RangeSource):
            last = first + -(-len(out) // self._block_size)
            fetched, _ = self._fetch(self._file, first, last, last, True)
        self._open_blocks(first, out, fetched)

    def _open_blocks(self, first: int, out: memoryview, fetched: tuple[Any, int] | None = None) -> None:
        """Open the blocks from `first` whose plaintext fills `out`."""
        size = len(out)
        source, at = self._find(first, size, fetched)
        self._key.open_run(self._aad_prefix, self._block_size, first, source, at, size, out, self._threads)

    def _find(self, first: int, size: int, fetched: tuple[Any, int] | None) -> tuple[Any, int]:
        """Return what `Key.open_run` reads the blocks from, and where in it they begin."""
        begin = block_offset(first, self._block_size)
        if fetched is None:
            blocks = -(-size // self._block_size) or 1
            fetched = self._file.fetch(begin, begin + size + blocks * OVERHEAD_NBYTES)
        return fetched[0], begin - fetched[1]

    def _open_span(self, first: int, count: int, fetched: tuple[Any, int] | None) -> Span:
        """Open up to `count` blocks, but at least the first."""
        begin = first * self._block_size
        size = min(self._length - begin, count * self._block_size)
        source, at = self._find(first, size, fetched)
        try:
            opened = self._key.open_bytes(self._aad_prefix, self._block_size, first, source, at, size, self._threads)
        except IntegrityError:
            if count == 1:
                raise
            return self._open_span(first, 1, fetched)  # the bad block may be one that no read asked for
        return Span(begin, opened)

    def _cached(self, block: int) -> Span | None:
        hot = self._hot
        if hot.offset <= block * self._block_size < hot.offset + len(hot.data):
            return hot
        if (span := self._cache.pop(block, None)) is not None:
            self._cache[block] = span  # the most recently used is last
        return span

    def _let_go(self) -> None:
        """Release all opened blocks. Also called after a block is kept: a thread that closed the reader missed it."""
        self._hot = NOTHING
        self._later.drop()
        self._cache.clear()

    def _keep(self, block: int, span: Span) -> None:
        if len(span.data) > self._block_size:  # opened ahead: a steady cursor does not come back
            return
        self._cache[block] = span
        while len(self._cache) > max(1, CACHE_NBYTES // max(self._block_size, SPAN_NBYTES)):
            try:
                del self._cache[next(iter(self._cache))]
            except (KeyError, RuntimeError, StopIteration):  # another thread has removed it
                continue
