"""Where a file's bytes come from, read by position: memory, a descriptor, or a seekable file.

`open_source` picks one of these, or opens an object of a store. `Source` adds a trusted length, and reads into a
buffer; `Window` is a part of a source that moves on.
"""

from __future__ import annotations

import _thread  # noqa: PLC2701 (threading takes longer to import)
import errno
import io
import os
import stat

from ags_fast._core import Descriptor, grow, open_file
from ags_fast.ags1 import bytes_view
from ags_fast.errors import IntegrityError
from ags_fast.fs import LocalFile, file_at, local_path

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from ags_fast._types import FilePath, ReadableSource

__all__ = [
    "AnySource",
    "DescriptorSource",
    "MemorySource",
    "RangeSource",
    "SeekableSource",
    "Source",
    "Window",
    "duplicate",
    "is_content",
    "open_source",
    "with_room",
]

SMALL_FILE_NBYTES = 64 << 10  # a file up to this size is read whole when it is opened


class MemorySource:
    """Bytes in a buffer."""

    __slots__ = ("data", "size")

    def __init__(self, data: bytes | memoryview, size: int) -> None:
        self.data: bytes | memoryview | None = data
        self.size = size  # of the whole source; `data` may have fewer bytes: those of a trusted length

    def fetch(self, begin: int, end: int) -> tuple[Any, int]:
        """Return a buffer or a Descriptor that has the bytes from `begin` to `end`, and the offset of its start."""
        data = self.data
        if data is None:  # another thread has closed the source since this call began
            raise ValueError("I/O operation on closed file")
        return data, 0

    def close(self) -> None:
        """Release the buffer."""
        self.data = None


class DescriptorSource:
    """A file of the system, read by position."""

    __slots__ = ("descriptor", "file", "size")

    def __init__(self, descriptor: Descriptor, size: int, file: Any) -> None:
        self.descriptor = descriptor
        self.size = size
        self.file = file  # the caller's file object, which stays open; None for a path

    def fetch(self, begin: int, end: int) -> tuple[Any, int]:
        """See `MemorySource.fetch`."""
        if self.file is not None and self.file.closed:
            raise ValueError("the source was closed")
        return self.descriptor, 0

    def close(self) -> None:
        """Close the descriptor."""
        self.descriptor.close()


class SeekableSource:
    """A seekable binary file-like object. Each fetch moves its cursor, under a lock."""

    __slots__ = ("file", "lock", "locker", "size")

    def __init__(self, file: Any) -> None:
        if not file.seekable():
            raise _cannot_seek()
        self.file = file
        self.lock = _thread.allocate_lock()
        self.locker = os.getpid()
        self.size = file.seek(0, io.SEEK_END)

    def fetch(self, begin: int, end: int, steady: bool = False) -> tuple[Any, int]:
        """See `MemorySource.fetch`. Makes one request, unless the file returns less than it was asked for.

        Args:
            begin: The offset of the first byte.
            end: The offset after the last byte.
            steady: Whether fetches will go on from `end`.
        """
        if self.locker != os.getpid():  # a thread that does not exist after the fork may have held the lock
            self.lock = _thread.allocate_lock()
            self.locker = os.getpid()
        pieces = []
        at = begin
        with self.lock:
            self.file.seek(begin)
            while at < end:
                try:
                    piece = self.file.read(end - at)
                except EOFError as error:  # a caller would take EOFError for the end of the plaintext
                    raise _cut(at) from error
                if piece is None:
                    raise BlockingIOError("the source has no data now: a reader needs one that blocks")
                if not piece:
                    raise _cut(at)
                pieces.append(piece)
                at += len(piece)
        if at > end:
            raise OSError(f"the source returned {at - end} bytes more than it was asked for")
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), begin

    def buffered(self, length: int) -> MemorySource | SeekableSource:
        """Return the first `length` bytes in memory if they are few (one request), else this source."""
        if length > SMALL_FILE_NBYTES:
            return self
        data, _ = self.fetch(0, length)
        return MemorySource(data, self.size)

    def close(self) -> None:
        """Do nothing: the file is the caller's."""


class RangeSource(SeekableSource):
    """An object of a store. Threads fetch at the same time; steady and expected fetches are requested ahead."""

    __slots__ = ("own",)

    def __init__(self, file: Any, own: bool = False) -> None:
        self.file = file
        self.size = file.size
        self.own = own  # whether the file was opened here

    def fetch(self, begin: int, end: int, steady: bool = False) -> tuple[Any, int]:
        """See `SeekableSource.fetch`."""
        data = self.file.fetch_range(begin, end, steady)
        if len(data) < end - begin:
            raise _cut(begin + len(data))
        return data, begin

    def expect(self, ranges: Iterable[tuple[int, int]]) -> AbstractContextManager[object]:
        """Let requests for these ranges, (begin, end), run at once. They are fetched, in order, in a ``with`` block."""
        expected: AbstractContextManager[object] = self.file.expect(ranges)
        return expected

    def close(self) -> None:
        """Give up requests that no fetch waits for. Close the file if it was opened here."""
        if self.own:
            self.file.close()
        else:
            self.file.release()


AnySource = MemorySource | DescriptorSource | SeekableSource


def _cannot_seek() -> io.UnsupportedOperation:
    return io.UnsupportedOperation("the source cannot seek: read it into memory, or into a file, first")


def _cut(at: int) -> IntegrityError:
    return IntegrityError(f"the source ends after {at} bytes: it was cut after its length was known")


def is_content(file: Any) -> bool:
    """Whether the bytes of a file's descriptor are the bytes of the file: false for a gzip file, for example."""
    raw = file.raw if type(file) in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom) else file
    return type(raw) is io.FileIO and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def duplicate(file: Any) -> Descriptor:
    """Duplicate a file's descriptor: the file's owner may close the original at any time."""
    return Descriptor(os.dup(file.fileno()))


def open_source(
    source: ReadableSource,
    length: int | None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    tail: bool = False,
) -> AnySource:
    """Open a path, a URL, a bytes-like object or a seekable binary file.

    Args:
        source: What to read.
        length: The trusted length in bytes. Of a small file only these bytes are read.
        storage_options: Options for fsspec, of a URL.
        tail: Whether the end of an object is likely to be read first.
    """
    if isinstance(source, (str, os.PathLike)):
        path: FilePath | None = source
        if not isinstance(source, LocalFile) and ":" in os.fsdecode(source):
            path = local_path(source)
        if path is not None:
            return _open_path(path, length)
        store, name = file_at(source, storage_options)
        return RangeSource(store.open_seekable(name, tail=tail), own=True)
    try:
        view = bytes_view(source)  # type: ignore[arg-type]  # a file raises TypeError
        return MemorySource(view, len(view))
    except TypeError:
        if not hasattr(source, "read"):
            raise
    file: Any = source
    if not is_content(file):
        return RangeSource(file) if hasattr(file, "fetch_range") else SeekableSource(file)
    if file.writable():
        file.flush()
    descriptor = duplicate(file)
    with descriptor as fd:
        return DescriptorSource(descriptor, os.fstat(fd).st_size, file)


def _open_path(path: FilePath, length: int | None) -> MemorySource | DescriptorSource:
    if isinstance(path, LocalFile):
        descriptor, size, data = path.open(length, SMALL_FILE_NBYTES)
    else:
        descriptor, size, data = open_file(path, length, SMALL_FILE_NBYTES)
    if descriptor is None:
        return MemorySource(data, size)
    try:
        return DescriptorSource(descriptor, size if size >= 0 else _device_size(descriptor, path), None)
    except BaseException:
        descriptor.close()
        raise


def _device_size(descriptor: Descriptor, path: FilePath) -> int:
    """Return the bytes of a file that is not regular: a disk has some, a pipe cannot seek, a folder is refused."""
    with descriptor as fd:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            raise _cannot_seek() from error


class Source:
    """A path, a URL, a bytes-like object or a seekable binary file, read by position.

    Args:
        source: What to read. A file is left open by `close`.
        length: The file's trusted length in bytes. Bytes after it are never read.
        exact: Whether bytes after `length` are an IntegrityError.
        storage_options: Options for fsspec, of a URL.
        tail: Whether the end is likely to be read first.

    Raises:
        IntegrityError: The source has fewer bytes than `length`, or more with `exact`.
    """

    __slots__ = ("_file", "path", "size")

    def __init__(
        self,
        source: ReadableSource,
        length: int | None = None,
        *,
        exact: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        tail: bool = False,
    ) -> None:
        if length is not None and length < 0:
            raise ValueError(f"length is a number of bytes, not {length}")
        self.path: str | None = None
        if isinstance(source, LocalFile):  # its path could lead elsewhere by now
            self.path = os.fspath(source)
        elif isinstance(source, (str, os.PathLike)):
            self.path = local_path(source)
        self._file = open_source(source, None, storage_options, tail=tail)
        self.size = self._file.size
        if length is not None:
            if self.size < length or (exact and self.size > length):
                self.close()
                raise IntegrityError(f"the file has {self.size} bytes, not {length}: it was cut, or is another one")
            self.size = length

    @property
    def is_file(self) -> bool:
        """Whether it is a file of the system, which is read into the caller's buffer."""
        return isinstance(self._file, DescriptorSource)

    @property
    def is_remote(self) -> bool:
        """Whether it is an object of a store: each read is a request."""
        return isinstance(self._file, RangeSource)

    @property
    def read_ahead(self) -> int:
        """See `ags_fast.fs.ranges.RangeReader.read_ahead`; 0 if the source is not an object of a store."""
        return self._file.file.read_ahead if isinstance(self._file, RangeSource) else 0

    def expect(self, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[object]:
        """Let a store's requests for these ranges run at once: see `RangeSource.expect`."""
        from contextlib import nullcontext

        return self._file.expect(ranges) if isinstance(self._file, RangeSource) else nullcontext()

    def read(self, begin: int, end: int, steady: bool = False) -> memoryview:
        """Return all bytes from `begin` to `end`. Bytes in memory are not copied. steady: reads go on from `end`."""
        return self.read_to(None, begin, end, steady)

    def read_to(self, buffer: memoryview | None, begin: int, end: int, steady: bool = False) -> memoryview:
        """Like `read`, but a file of the system is read into `buffer`, if there is one."""
        if isinstance(self._file, SeekableSource):
            data, base = self._file.fetch(begin, end, steady)
        else:
            data, base = self._file.fetch(begin, end)
        if not isinstance(data, Descriptor):
            return memoryview(data)[begin - base : end - base]
        view = memoryview(bytearray(end - begin)) if buffer is None else buffer[: end - begin]
        at = 0
        with data as fd:
            while at < len(view):
                got = os.preadv(fd, [view[at:]], begin + at)
                if not got:
                    raise IntegrityError(f"the file ends after {begin + at} bytes: it was cut while it was read")
                at += got
        return view

    def close(self) -> None:
        """Close what was opened here."""
        self._file.close()


def with_room(buffer: memoryview, nbytes: int) -> memoryview:
    """Return the buffer, or a new one of `nbytes` if it is smaller. The bytes of a new one are arbitrary."""
    if len(buffer) >= nbytes:
        return buffer
    fresh = bytearray()
    grow(fresh, nbytes)
    return memoryview(fresh)


class Window:
    """A part of a source that moves on, in a buffer that is kept. Bytes that stay in the window are not read again."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.nbytes = 0  # of the buffer
        self._buffer = memoryview(b"")
        self._begin = self._end = 0

    def read(self, begin: int, end: int, nbytes: int) -> memoryview:
        """Return the bytes from `begin` to `end`, valid until the next call.

        Args:
            begin: The offset of the first byte.
            end: The offset after the last byte.
            nbytes: The size that the buffer should have at least: what later calls are likely to ask for.
        """
        if not self.source.is_file and not self.source.is_remote:
            return self.source.read(begin, end)
        kept = min(end, self._end) - begin if self._begin <= begin < self._end else 0
        left = self._buffer[begin - self._begin : begin - self._begin + kept]
        self._buffer = with_room(self._buffer, max(end - begin, nbytes))
        self.nbytes = len(self._buffer)
        self._buffer[:kept] = left
        self._begin, self._end = begin, begin + kept
        data = self.source.read_to(self._buffer[kept:], begin + kept, end, True)
        if self.source.is_remote:
            self._buffer[kept : end - begin] = data
        self._end = end
        return self._buffer[: end - begin]
