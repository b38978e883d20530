"""A cursor over a file that is read by position: what `io.RawIOBase` wants, for every reader of this package."""

from __future__ import annotations

import _thread  # noqa: PLC2701 (threading takes longer to import)
import io
import operator

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from ags_fast._types import Buffer

__all__ = ["Cursor", "Turns"]


class Cursor(io.RawIOBase):
    """A seekable, read-only binary file. A subclass sets `_length` and has `read_at` and `readinto_at`.

    `read_at` and `readinto_at` do not move the cursor, so that threads can share them. Other methods do move it.
    """

    __slots__ = ("_length", "_position")
    mode = "rb"

    _length: int  # bytes that can be read
    _position: int  # of the cursor

    def read_at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`, or fewer at the end.

        Raises:
            ValueError: `offset` or `size` is negative, or the file is closed.
        """
        raise NotImplementedError

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """Read from `offset` into a writable buffer.

        Returns:
            The number of bytes read: fewer than the buffer has only at the end. After an error the buffer is all zeros.
        """
        raise NotImplementedError

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Read exactly `size` bytes, or all that are left if fewer are; with None or -1, all that are left."""
        position = self._position
        if size is None or size < 0:
            size = max(0, self._length - position)
        data = self.read_at(position, size)
        self._position = position + len(data)
        return data

    def readall(self) -> bytes:
        """Read all bytes that are left."""
        return self.read()

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a writable buffer.

        Returns:
            The number of bytes read: fewer than the buffer has only at the end. After an error the buffer is all zeros.
        """
        position = self._position
        size = self.readinto_at(position, buffer)
        self._position = position + size
        return size

    def write(self, data: Buffer, /) -> int:
        """Raise io.UnsupportedOperation."""
        raise io.UnsupportedOperation("not writable")

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the cursor, also past the end.

        Returns:
            The new position, in bytes from the beginning.

        Raises:
            ValueError: The position would be negative, or `whence` is not 0, 1 or 2.
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
            raise ValueError(f"a position cannot be negative: {offset}")
        self._position = offset
        return offset

    def tell(self) -> int:
        """Return the position of the cursor, in bytes from the beginning."""
        self._check_open()
        return self._position


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
        """Return where the cursor would have to go for this thread; None: it is in the right place.

        Args:
            reads: Whether the thread puts the cursor there, and reads.
        """
        if not self._sought:
            return None
        me = _thread.get_ident()
        position = self._sought.pop(me, None) if reads else self._sought.get(me)
        if position is None or self._last == me:
            return None
        if reads:
            self._last = me
        return position
