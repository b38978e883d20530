"""What `io.RawIOBase` wants: a cursor for every reader of this package, and the end of every writer."""

from __future__ import annotations

import _thread  # noqa: PLC2701 (threading takes longer to import)
import io
import operator
import os
import warnings

from ags_fast._core import NOTHING, Lines, Span, readline
from ags_fast.errors import IntegrityError

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast._types import Buffer

__all__ = ["Cursor", "Turns", "Unfinished"]

LINES_NBYTES = 8 << 10  # that are read for the first line; then twice as many each time, up to MOST_LINES_NBYTES
MOST_LINES_NBYTES = 256 << 10


class Cursor(io.RawIOBase):
    """A seekable, read-only binary file. A subclass sets `_length` and has `read_at` and `readinto_at`.

    `read_at` and `readinto_at` do not move the cursor, so that threads can share them. Other methods do move it.
    """

    __slots__ = ("_length", "_position")
    _length: int  # bytes that can be read
    _position: int  # of the cursor
    _lines = NOTHING  # bytes that were read for lines

    @property
    def mode(self) -> str:
        """How the file is open."""
        return "rb"

    def read_at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`, or fewer at the end. ValueError: one is negative, or the file is closed."""
        raise NotImplementedError

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """Read from `offset` into a writable buffer, and return the number of bytes: fewer than it has at the end only.

        After an error the buffer is all zeros.
        """
        raise NotImplementedError

    _check_open = io.RawIOBase._checkClosed  # noqa: SLF001 (undocumented, and in each Python since 2.6)

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    seekable = readable

    def writable(self) -> bool:
        """Return False."""
        self._check_open()
        return False

    def read(self, size: int | None = -1, /) -> bytes:
        """Read exactly `size` bytes, or all that are left if fewer are; with None or -1, all that are left."""
        position = self._position
        size = -1 if size is None else operator.index(size)
        if size < 0:
            size = max(0, self._length - position)
        data = self.read_at(position, size)
        self._position = position + len(data)
        return data

    def readall(self) -> bytes:
        """Read all bytes that are left."""
        return self.read()

    readline = readline

    def __iter__(self) -> Iterator[bytes]:
        self._check_open()
        return Lines(self) if type(self).readline is readline else super().__iter__()

    def _readline(self, size: int) -> bytes:
        position, parts = self._position, []
        left = max(0, self._length - position)
        size = operator.index(size)
        size = left if size < 0 else min(size, left)
        self._check_open()
        while size > 0:
            begin = position - self._lines.offset
            data = self._lines.data
            if not 0 <= begin < len(data):
                begin, data = 0, self._read_for_lines(position)
            end = data.find(b"\n", begin, begin + size) + 1
            parts.append(data[begin : end or begin + size])
            position += len(parts[-1])
            size -= len(parts[-1])
            if end:
                break
        self._position = position
        return b"".join(parts)

    def _read_for_lines(self, position: int) -> bytes:
        """Read some bytes from `position` for this line and the next ones, and leave the cursor where it is."""
        before, count = self._lines, LINES_NBYTES
        if before.offset + len(before.data) == position:
            count = min(2 * max(count, len(before.data)), MOST_LINES_NBYTES)
        stays = self._position
        self._lines = NOTHING
        try:
            while True:
                self._position = position
                try:
                    data = self.read(count)
                    break
                except IntegrityError:  # of bytes that no line may want
                    if count == 1:
                        raise
                    count = max(1, count // 16)
        finally:
            self._position = stays
        self._lines = Span(position, data)
        if self.closed:  # by another thread
            self._lines = NOTHING
        return data

    def close(self) -> None:
        """Release what is held for lines."""
        super().close()
        self._lines = NOTHING

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a writable buffer from the cursor, as `readinto_at` does it. Returns the number of bytes read."""
        position = self._position
        size = self.readinto_at(position, buffer)
        self._position = position + size
        return size

    def write(self, data: Buffer, /) -> int:
        """Raise io.UnsupportedOperation."""
        raise io.UnsupportedOperation("not writable")

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the cursor, also past the end, and return its position in bytes from the beginning.

        io.UnsupportedOperation, an OSError and a ValueError, if the position would be negative. ValueError if `whence`
        is not 0, 1 or 2.
        """
        self._check_open()
        offset = operator.index(offset)
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._length
        elif whence != io.SEEK_SET:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        if offset < 0:
            raise io.UnsupportedOperation(f"a position cannot be negative: {offset}")
        self._position = offset
        return offset

    def tell(self) -> int:
        """Return the position of the cursor, in bytes from the beginning."""
        self._check_open()
        return self._position


class Unfinished(io.RawIOBase):
    """A binary file open for writing, which `close` completes and `abort` discards.

    An exception that leaves a ``with`` block aborts. So does whoever collects the file, or a buffer around the file,
    without `close`: with a ResourceWarning, unless the file is that of a parent process.
    """

    _owner: int  # the process. A subclass sets it when there is something to abort
    _check_open = io.RawIOBase._checkClosed  # noqa: SLF001

    @property
    def mode(self) -> str:
        """How the file is open."""
        return "wb"

    def abort(self) -> None:
        """Discard the file. After `close`, do nothing."""
        raise NotImplementedError

    def writable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def readable(self) -> bool:
        """Return False."""
        self._check_open()
        return False

    seekable = readable

    def readinto(self, buffer: Buffer, /) -> int:
        """Raise io.UnsupportedOperation."""
        raise io.UnsupportedOperation("not readable")

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self.close()
        else:
            self.abort()

    def __del__(self, source: object = None) -> None:
        # io.IOBase would close, and so complete, a file that was never closed.
        if hasattr(self, "_owner") and not self.closed:
            if self._owner == os.getpid():
                message = f"{self!r} was neither closed nor aborted, and is lost"
                warnings.warn(message, ResourceWarning, source=source or self, stacklevel=2)
            self.abort()

    _dealloc_warn = __del__  # what a buffer of io that is collected calls, before the buffer closes the file


class Turns:
    """Lets threads that share the cursor of a file call `seek`, and then read where they have sought.

    DuckDB reads so, from several threads, and takes the bytes of another place for its own if the cursor was moved
    between the two calls. Otherwise the threads go on with one cursor, wherever it is.

    Attributes:
        lock: To be held during the calls of methods, and while the cursor moves.
        shared: Whether several threads have sought.
    """

    __slots__ = ("_last", "_sought", "lock", "shared")

    def __init__(self) -> None:
        self.lock = _thread.allocate_lock()
        self.shared = False
        self._sought: dict[int, int] = {}  # by thread: the position of its last `seek`, until it reads
        self._last = 0  # the thread that has placed the cursor

    def sought(self, position: int) -> None:
        """Take up that this thread has moved the cursor."""
        me = _thread.get_ident()
        if self._last not in (0, me):
            self.shared = True
        self._last = me
        self._sought[me] = position

    def mine(self, *, reads: bool) -> int | None:
        """Return where the cursor would have to go for this thread, which `reads` there; None: it is in place."""
        if not self._sought:
            return None
        me = _thread.get_ident()
        position = self._sought.pop(me, None) if reads else self._sought.get(me)
        if position is None or self._last == me:
            return None
        if reads:
            self._last = me
        return position
