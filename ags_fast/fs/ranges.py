"""A file over requests of ranges: an object of a store, with several requests at once ahead of a steady reader."""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_right, insort
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from ags_fast._core import new_bytes
from ags_fast._cursor import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol, Self

    from ags_fast._types import Buffer

    class _Answer(Protocol):
        """A request on its way: a Future, or what has its methods."""

        def result(self) -> bytes:
            """Wait for the bytes."""

        def done(self) -> bool:
            """Whether `result` returns at once."""

        def cancel(self) -> bool:
            """Give the request up."""


__all__ = ["AHEAD_NBYTES", "HEAD_NBYTES", "Later", "RangeReader"]

AHEAD_NBYTES = 16 << 20  # the most bytes of one file that are requested ahead of its reader
HEAD_NBYTES = 64 << 10  # of a file whose size is not known, read when it is opened
REQUESTS = 8  # of one reader that run at once
GROWTH = 4  # bytes that are requested ahead for each byte that was read without a gap
LEAST_NBYTES = 64 << 10  # of a request ahead
PIECE_NBYTES = 1 << 20  # a larger read is several requests, if these can run at once
LARGEST_NBYTES = 4 << 20  # of each of these
START_NBYTES = 7 << 20  # requested by the first read of a run, which may be the only one
EXPECTED_NBYTES = 64 << 20  # of ranges that were announced, requested at once
EXPECTED_REQUESTS = 16

DEMANDED, AHEAD, EXPECTED, KEPT = range(4)  # why a piece was requested


class Later:
    """An answer of a file system that makes one request at a time: the request is made when the bytes are needed."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._data: bytes | None = None

    def result(self) -> bytes:
        """Make the request, once."""
        with self._lock:
            if self._data is None:
                self._data = self._work()
            return self._data

    def done(self) -> bool:
        """Return whether the request was made."""
        return self._data is not None

    def cancel(self) -> bool:
        """Return False: nothing is under way."""
        return False


class _Piece:
    """The bytes from `begin` to `end`, requested and not read yet."""

    __slots__ = ("answer", "begin", "end", "of", "why")

    def __init__(self, begin: int, end: int, answer: _Answer, why: int, of: Expected | None = None) -> None:
        self.begin, self.end, self.answer, self.why, self.of = begin, end, answer, why, of


class Expected:
    """Ranges that a caller is about to read. Their requests run at once, at most 64 MiB of them.

    Use it in a ``with`` block: what was not read is given up at its end.
    """

    def __init__(self, reader: RangeReader, ranges: Iterable[tuple[int, int]]) -> None:
        self._reader = reader
        self._left = deque(ranges)
        self._nbytes = self._requests = 0

    def __enter__(self) -> Self:
        self.request()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.clear()
        self._reader.forget(self)

    def request(self) -> None:
        """Request as many of the ranges as there is room for."""
        while self._left and (
            not self._requests or (self._nbytes < EXPECTED_NBYTES and self._requests < EXPECTED_REQUESTS)
        ):
            begin, end = self._left.popleft()
            self._reader.cover(begin, end, self)

    def begun(self, piece: _Piece) -> None:
        """Count a piece."""
        self._nbytes += piece.end - piece.begin
        self._requests += 1

    def ended(self, piece: _Piece) -> None:
        """Make room for the next ranges."""
        self._nbytes -= piece.end - piece.begin
        self._requests -= 1
        self.request()


class RangeReader(Cursor):
    """A seekable file over requests of ranges. Threads may share `read_at`, `readinto_at` and `fetch_range`.

    A read that is not the continuation of two others requests just its own bytes; a large one is several requests at
    once. Reads that go on without a gap get bytes ahead of them: four times what was read without a gap, up to
    `read_ahead`, in up to eight requests at once. An error of such a request is raised by the read that needs its
    bytes, and the next read makes the request again.

    Args:
        ask: Requests the bytes from a begin to an end.
        size: Of the file, in bytes.
        parallel: Whether several requests may run at once.
        known: The offset and the bytes of a part that is at hand.
        steady: Whether the file will be read from its beginning to its end.
        read_ahead: See the property.
    """

    def __init__(
        self,
        ask: Callable[[int, int], _Answer],
        size: int,
        *,
        parallel: bool,
        known: tuple[int, bytes] | None = None,
        steady: bool = False,
        read_ahead: int = AHEAD_NBYTES,
    ) -> None:
        self._ask, self._length, self._position = ask, size, 0
        self._parallel, self._read_ahead = parallel, read_ahead
        self._steady = True if steady else None
        self._run_end = -1  # where the last read ended
        self._run = 0  # bytes read without a gap until there
        self._continued = 0  # reads that have continued that run
        self._stride = 0  # bytes of each of its requests ahead, once it is long
        self._begin_pieces()
        if known is not None and known[1]:
            there: Future[bytes] = Future()
            there.set_result(known[1])
            self._add(_Piece(known[0], known[0] + len(known[1]), there, KEPT))

    def _begin_pieces(self) -> None:
        self._pieces: dict[int, _Piece] = {}  # by begin; no two have the same byte
        self._begins: list[int] = []
        self._lock, self._owner = threading.RLock(), os.getpid()

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return self._length

    @property
    def read_ahead(self) -> int:
        """Bytes that may be requested ahead of steady reads, and are held until they are read; 0 requests none."""
        return self._read_ahead

    @read_ahead.setter
    def read_ahead(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"read_ahead is a number of bytes, not {nbytes}")
        self._read_ahead = nbytes

    def read_at(self, offset: int, size: int) -> bytes:
        """See `Cursor.read_at`."""
        self._check_open()
        begin = min(offset, self._length)
        return self.fetch_range(begin, min(begin + size, self._length), self._steady)

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """See `Cursor.readinto_at`."""
        view = memoryview(buffer).cast("B")
        data = self.read_at(offset, len(view))
        view[: len(data)] = data
        return len(data)

    def fetch_range(self, begin: int, end: int, steady: bool | None = False) -> bytes:
        """Return the bytes from `begin` to `end`, at most the end of the file, or fewer if the store returns fewer.

        steady: whether reads will go on from `end`; None: judge by the reads until now.
        """
        if begin >= end:
            return b""
        mine: list[_Piece] = []
        out, view, at = b"", memoryview(b""), begin
        try:
            step = self._step(end - begin)
            with self._locked():
                upto = self._plan(begin, end, steady)
            while at < end:
                piece = self._next(at, end, upto, step, mine)
                try:
                    data = piece.answer.result()
                except CancelledError:  # by another thread: it was closed, or had an error
                    self._check_open()
                    self._drop(piece)
                    continue
                except BaseException:
                    self._drop(piece)
                    raise
                if len(data) > piece.end - piece.begin:
                    raise OSError("the store returned more bytes than were requested")
                part = memoryview(data)[at - piece.begin : end - piece.begin]
                if at == begin and len(part) == len(data) == end - begin:
                    out, at = data, end  # all of a piece: not copied
                else:
                    if not out:
                        out, view = new_bytes(end - begin)
                    view[at - begin : at - begin + len(part)] = part
                    at += len(part)
                if piece.end <= at and (piece.why in (DEMANDED, EXPECTED) or steady is not False):
                    self._drop(piece)
                elif at < min(end, piece.end):  # the store returned fewer bytes
                    self._drop(piece)
                    return out[: at - begin]
            return out
        finally:
            for piece in mine:
                self._drop(piece)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> Expected:
        """Announce ranges, as (begin, end), in the order in which they will be read: see `Expected`."""
        return Expected(self, ranges if self._parallel else ())

    def release(self) -> None:
        """Give up requests that no read waits for, and release their bytes."""
        with self._locked():
            pieces = list(self._pieces.values())
            self._pieces.clear()
            self._begins.clear()
        if not sys.is_finalizing():
            for piece in pieces:
                piece.answer.cancel()

    def close(self) -> None:
        """Release bytes that were read ahead, and give up requests. A read in another thread raises ValueError."""
        super().close()
        if hasattr(self, "_owner"):  # the constructor may have failed
            self.release()

    # ---- what is requested

    def _locked(self) -> threading.RLock:
        """Return the lock. In a child of a fork, forget all requests: their answers come to the parent."""
        if self._owner != os.getpid():
            self._begin_pieces()
        return self._lock

    def _plan(self, begin: int, end: int, steady: bool | None) -> int:
        """Return the offset up to which bytes should be requested: `end`, or more if reads go on steadily."""
        if steady is False:
            return end
        if begin == self._run_end:
            self._continued += 1
        else:
            self._run = self._continued = self._stride = 0
            near = self._having(begin) is not None
            for piece in [one for one in self._pieces.values() if one.why == AHEAD]:
                if not near or piece.end <= begin:
                    self._drop(piece)
        self._run += end - begin
        self._run_end = end
        if not steady and self._continued < 2:
            return end
        growth = GROWTH if self._parallel else 1  # more in one request would let its reader wait for it
        ahead = min(growth * self._run, self._read_ahead)
        if self._run == end - begin:
            ahead = min(ahead, max(0, START_NBYTES - self._run))
        return min(end + ahead, self._length)

    def _next(self, at: int, end: int, upto: int, step: int, mine: list[_Piece]) -> _Piece:
        """Return the piece that has the byte at `at`, after requests for what follows it up to `upto` (see `_plan`).

        The reader waits for the bytes up to `end`, in requests of `step`; `mine` gets the pieces that only it needs.
        """
        with self._locked():
            self._check_open()
            running, cursor = 0, at
            while cursor < upto and running < REQUESTS:
                piece = self._having(cursor)
                if piece is None:
                    stop = min(upto, self._next_begin(cursor))
                    if cursor >= end:
                        ahead = self._step_ahead(upto - end, cursor)
                        if not self._parallel or (upto - cursor < ahead and upto < self._length):
                            break
                        piece = self._request(cursor, min(stop, cursor + ahead), AHEAD)
                    elif self._parallel or upto == end:
                        piece = self._request(cursor, min(stop, end, cursor + step), DEMANDED)
                        mine.append(piece)
                    else:
                        piece = self._request(cursor, stop, AHEAD)  # one request for all
                running += not piece.answer.done()
                cursor = piece.end
            found = self._having(at)
            assert found is not None
            return found

    def _step(self, nbytes: int) -> int:
        """Return the bytes of each request for `nbytes` that a reader waits for."""
        if not self._parallel or nbytes < 2 * PIECE_NBYTES:
            return nbytes
        return min(LARGEST_NBYTES, -(-nbytes // min(REQUESTS, nbytes // PIECE_NBYTES)))

    def _step_ahead(self, ahead: int, cursor: int) -> int:
        """Return the bytes of a request at `cursor`, if `ahead` bytes are wanted ahead."""
        if ahead < REQUESTS * PIECE_NBYTES:
            return max(LEAST_NBYTES, min(ahead // 2, PIECE_NBYTES))
        if not self._stride:  # equal parts of all that is left, so that the last ones end together
            left = self._length - cursor
            rounds = -(-left // max(REQUESTS * PIECE_NBYTES, self._read_ahead)) or 1
            self._stride = max(PIECE_NBYTES // 2, -(-left // (REQUESTS * rounds)))
        return self._stride

    def cover(self, begin: int, end: int, expected: Expected) -> None:
        """Request what is missing of an expected range."""
        with self._locked():
            if self.closed:
                return
            step = self._step(end - begin)
            while begin < end:
                piece = self._having(begin)
                if piece is None:
                    stop = min(end, self._next_begin(begin), begin + step)
                    piece = self._request(begin, stop, EXPECTED, expected)
                    expected.begun(piece)
                begin = piece.end

    def forget(self, expected: Expected) -> None:
        """Give up the requests of ranges that were announced and not read."""
        with self._locked():
            for piece in [piece for piece in self._pieces.values() if piece.of is expected]:
                self._drop(piece)

    def _request(self, begin: int, end: int, why: int, of: Expected | None = None) -> _Piece:
        piece = _Piece(begin, end, self._ask(begin, end), why, of)
        self._add(piece)
        return piece

    def _add(self, piece: _Piece) -> None:
        self._pieces[piece.begin] = piece
        insort(self._begins, piece.begin)

    def _drop(self, piece: _Piece) -> None:
        with self._locked():
            if self._pieces.get(piece.begin) is not piece:
                return
            del self._pieces[piece.begin]
            self._begins.remove(piece.begin)
        piece.answer.cancel()
        if piece.of is not None:
            piece.of.ended(piece)

    def _having(self, at: int) -> _Piece | None:
        index = bisect_right(self._begins, at) - 1
        if index < 0:
            return None
        piece = self._pieces[self._begins[index]]
        return piece if at < piece.end else None

    def _next_begin(self, at: int) -> int:
        """Return where the first piece after `at` begins, or the end of the file."""
        index = bisect_right(self._begins, at)
        return self._begins[index] if index < len(self._begins) else self._length
