"""Files of a dataset that are read: as fsspec wants them, and many ranges of many files at once."""

from __future__ import annotations

import io
import operator
import os
from typing import TYPE_CHECKING, Any

from ags_fast._cursor import Turns
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fsspec.spec import AbstractFileSystem

    from ags_fast._types import Buffer
    from ags_fast.dataset.dataset import DatasetFile

__all__ = ["AgsFile", "info_of", "read_ranges"]

BUFFER_NBYTES = 64 << 10  # of lines; larger reads go past the buffer


class AgsFile(io.BufferedReader):
    """A file of a dataset, open for reading.

    It has the attributes of fsspec's files that callers use. The reader below keeps opened blocks or pages, so fsspec's
    caches would only keep them twice. Of a Parquet file exactly those bytes are read that are asked for: one more could
    cost another page.

    Threads may share the file: each reads from where it has sought, and larger reads run at the same time.

    Attributes:
        fs: The file system.
        path: The path in the dataset.
        size: Bytes of plaintext.
    """

    def __init__(self, fs: AbstractFileSystem, path: str, raw: io.RawIOBase) -> None:
        self.fs = fs
        self.path = path
        self.size = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        self._buffered = BUFFER_NBYTES if isinstance(raw, AgsReader) else 1
        self._turns = Turns()
        self._reader: Any = raw
        super().__init__(raw, self._buffered)

    @property
    def name(self) -> str:
        """The path in the dataset."""
        return self.path

    @property
    def full_name(self) -> str:
        """The path with the protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def loc(self) -> int:
        """The position, in bytes from the beginning."""
        return self.tell()

    def info(self) -> dict[str, Any]:
        """Return what `info` of the file system returns."""
        info: dict[str, Any] = self.fs.info(self.path)
        return info

    details = property(info)

    # ---- each thread reads where it has sought

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the cursor, also past the end. Returns the new position, in bytes from the beginning."""
        with self._turns.lock:
            if whence == os.SEEK_CUR:
                self._place()
            position = super().seek(offset, whence)
            self._turns.sought(position)
            return position

    def tell(self) -> int:
        """Return the position of the cursor, in bytes from the beginning."""
        with self._turns.lock:
            position = self._turns.mine(reads=False)
            return super().tell() if position is None else position

    def _place(self) -> int:
        """Go to where this thread has sought last, if another one has moved the cursor. Returns the position."""
        position = self._turns.mine(reads=True)
        return super().tell() if position is None else super().seek(position)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read exactly `size` bytes, or all that are left if fewer are; with None or -1, all that are left."""
        data: bytes = self._read(size, super().read, self._reader.read_at)
        return data

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a writable buffer. Returns the number of bytes read: fewer than the buffer has only at the end."""
        view, buffered = memoryview(buffer).cast("B"), super().readinto
        size: int = self._read(
            view.nbytes, lambda _: buffered(view), lambda begin, _: self._reader.readinto_at(begin, view)
        )
        return size

    def _read(self, size: int | None, from_buffer: Callable[[int], Any], directly: Callable[[int, int], Any]) -> Any:
        with self._turns.lock:
            begin = self._place()
            size = -1 if size is None else operator.index(size)
            if size < 0:
                size = max(0, self.size - begin)
            if size < self._buffered or not self._turns.shared:
                return from_buffer(size)
            super().seek(max(begin, min(begin + size, self.size)))
        try:
            return directly(begin, size)
        except BaseException:
            self.seek(begin)  # no caller goes on behind bytes that could not be read
            raise

    def read1(self, size: int = -1, /) -> bytes:
        """Read at most `size` bytes, with at most one read of the file below."""
        with self._turns.lock:
            self._place()
            return super().read1(size)

    def readinto1(self, buffer: Buffer, /) -> int:
        """Read into a writable buffer, with at most one read of the file below. Returns the number of bytes read."""
        with self._turns.lock:
            self._place()
            return super().readinto1(buffer)

    def peek(self, size: int = 0, /) -> bytes:
        """Return bytes from the cursor on, and leave the cursor where it is."""
        with self._turns.lock:
            self._place()
            return super().peek(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line, or the first `size` bytes of a longer one."""
        with self._turns.lock:
            begin = self._place()
            if self._buffered > 1:
                return super().readline(size)
            self._reader.seek(begin)  # without a buffer io reads byte by byte
            line: bytes = self._reader.readline(size)
            super().seek(begin + len(line))
            return line

    def __iter__(self) -> Iterator[bytes]:  # io's takes twice as long in a subclass
        with self._turns.lock:
            self._place()
        return iter(super().readline if self._buffered > 1 else self.readline, b"")

    def __repr__(self) -> str:
        return f"<AgsFile {self.path!r}, {self.size} bytes{', closed' if self.closed else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.fs, self.path, self.tell())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


def _reopen(fs: AbstractFileSystem, path: str, position: int) -> Any:
    file = fs.open(path, "rb")
    file.seek(position)
    return file


def info_of(file: DatasetFile) -> dict[str, Any]:
    """Return what fsspec wants to know of a file. Sizes are in bytes; times, if known, in seconds since the epoch."""
    info = {
        "name": file.path,
        "size": file.plain_length,
        "type": "file",
        "format": file.format,
        "key_id": file.key_id,
        "file_length": file.file_length,
        "source_length": file.source_length,
        "columns": list(file.columns),
        "stamp": file.stamp,
    }
    if file.mtime_ns is not None:
        info["mtime"] = file.mtime_ns / 1e9
    return info


def read_ranges(raw: Any, ranges: Sequence[tuple[int | None, int | None]]) -> list[bytes]:
    """Return parts of an open file. The storage gets the requests for all of them at once."""
    size = raw.seek(0, os.SEEK_END)
    wanted = [slice(start, end).indices(size)[:2] for start, end in ranges]
    sizes = [(begin, max(0, stop - begin)) for begin, stop in wanted]
    found: list[bytes] = raw.read_ranges(sizes)
    return found
