"""AGS1 streams as files: AgsReader, AgsWriter and open().

Random access is the primitive: `AgsReader.readinto_at` has no cursor and may be called from many threads. The cursor
of an `io.RawIOBase`, and read-ahead for those who move it steadily, are a layer on top.
"""

from __future__ import annotations

import errno
import fcntl
import io
import operator
import os
import stat
import warnings
from _thread import allocate_lock

from ags_fast._core import (
    OVERHEAD_NBYTES,
    Descriptor,
    Key,
    Pending,
    Span,
    grow,
    new_bytes,
    open_file,
    read_at,
)
from ags_fast._threads import thread_count
from ags_fast.ags1 import (
    DEFAULT_BLOCK_SIZE,
    HEADER_NBYTES,
    MAX_BLOCKS_WRITTEN,
    block_offset,
    bytes_view,
    check_block_size,
    check_length,
    clamp,
    decode_header,
    encode_header,
    encrypted_length,
    plaintext_in,
    prefix_bytes,
    sealing_key,
    trusted_length,
)
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.fs import LocalFile, NewFile, NewObject, pwrite_all

TYPE_CHECKING = False  # to import typing takes longer than all of this package
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import EllipsisType
    from typing import Any

    from typing_extensions import Buffer

__all__ = ["AgsReader", "AgsWriter", "open"]

SMALL_FILE_NBYTES = 64 << 10  # a stream up to this size is read whole when it is opened
CACHE_NBYTES = 4 << 20  # of opened blocks that a reader keeps for reads that come back to them; at least one block
SPAN_NBYTES = 250  # what a block in the cache takes beside its bytes: more than a tiny block has
AHEAD_NBYTES = 256 << 10  # a thread, to be opened ahead of a cursor that moves steadily; at least one block
REQUEST_NBYTES = 64 << 20  # the largest single read of a source that is no descriptor; at least one block
NOTHING = Span(-1, b"")  # no opened bytes: every read misses them


# ---------------------------------------------------------------------------------------------------------- sources


class _Memory:
    """A stream in a buffer."""

    __slots__ = ("data", "size")

    def __init__(self, data: bytes | memoryview, size: int) -> None:
        self.data: bytes | memoryview | None = data
        self.size = size  # of the whole source, of which nobody reads more than the stream

    def fetch(self, begin: int, end: int) -> tuple[Any, int]:
        """What `Key.open_run` can read the bytes from `begin` to `end` from, and where in the stream it begins."""
        data = self.data
        if data is None:  # closed by another thread since this call began
            raise ValueError("I/O operation on closed file")
        return data, 0

    def close(self) -> None:
        self.data = None


class _Descriptor:
    """A stream in a file of the system, read by position."""

    __slots__ = ("descriptor", "file", "size")

    def __init__(self, descriptor: Descriptor, size: int, file: Any) -> None:
        self.descriptor = descriptor
        self.size = size
        self.file = file  # as it was passed in, which is left open; None for a path

    def fetch(self, begin: int, end: int) -> tuple[Any, int]:
        if self.file is not None and self.file.closed:
            raise ValueError("the source was closed")
        return self.descriptor, 0

    def close(self) -> None:
        self.descriptor.close()


class _SeekableFile:
    """A stream in a seekable binary file-like object. Its cursor is moved, under a lock."""

    __slots__ = ("file", "lock", "locker", "size")

    def __init__(self, file: Any) -> None:
        if not file.seekable():
            raise _cannot_seek()
        self.file = file
        self.lock = allocate_lock()
        self.locker = os.getpid()
        self.size = file.seek(0, io.SEEK_END)

    def fetch(self, begin: int, end: int) -> tuple[Any, int]:
        if self.locker != os.getpid():  # a fork may have left it held by a thread that does not exist here
            self.lock = allocate_lock()
            self.locker = os.getpid()
        pieces = []
        at = begin
        with self.lock:
            self.file.seek(begin)
            while at < end:
                try:
                    piece = self.file.read(end - at)
                except EOFError as error:  # would be taken for the end of the plaintext
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

    def close(self) -> None:
        """Nothing: the file is the caller's."""


def _cannot_seek() -> io.UnsupportedOperation:
    return io.UnsupportedOperation("the source cannot seek: read it into memory, or into a file, first")


def _cut(at: int) -> IntegrityError:
    return IntegrityError(f"the source ends after {at} bytes: it was cut after its length was known")


def _is_content(file: Any) -> bool:
    """Whether the bytes of a file's descriptor are what its methods read and write: not so for a gzip file."""
    raw = file.raw if type(file) in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom) else file
    return type(raw) is io.FileIO and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def _source(source: Any, length: int | None) -> _Memory | _Descriptor | _SeekableFile:
    if isinstance(source, (str, os.PathLike)):
        if isinstance(source, LocalFile):
            descriptor, size, data = source.open(length, SMALL_FILE_NBYTES)
        else:
            descriptor, size, data = open_file(source, length, SMALL_FILE_NBYTES)
        if descriptor is None:
            return _Memory(data, size)
        try:
            return _Descriptor(descriptor, size if size >= 0 else _device_size(descriptor, source), None)
        except BaseException:
            descriptor.close()
            raise
    try:
        view = bytes_view(source)
        return _Memory(view, len(view))
    except TypeError:
        if not hasattr(source, "read"):
            raise
    if not _is_content(source):
        return _SeekableFile(source)
    if source.writable():
        source.flush()
    descriptor = _duplicate(source)
    with descriptor as fd:
        return _Descriptor(descriptor, os.fstat(fd).st_size, source)


def _duplicate(file: Any) -> Descriptor:
    """A descriptor of our own for what was passed in: its owner may close the other at any time."""
    return Descriptor(os.dup(file.fileno()))


def _device_size(descriptor: Descriptor, path: Any) -> int:
    """The bytes of what is no regular file: a disk has some, a pipe cannot seek, a folder is refused."""
    with descriptor as fd:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            raise _cannot_seek() from error


# ---------------------------------------------------------------------------------------------------------- reader


def sought(offset: int, whence: int, position: int, end: int) -> int:
    """Where `seek` moves a cursor that is at `position` of a file of `end` bytes; that may be behind the end."""
    offset = operator.index(offset)
    if whence == io.SEEK_CUR:
        offset += position
    elif whence == io.SEEK_END:
        offset += end
    elif whence != io.SEEK_SET:
        raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
    if offset < 0:
        raise ValueError(f"a position cannot be negative: {offset}")
    return offset


class AgsReader(io.RawIOBase):
    """The plaintext of an AGS1 stream as a seekable, read-only file. Nothing is handed out before its tag has passed.

    source: a path, an open binary file, a bytes-like object, or any seekable binary file-like object. Offsets count
    from its beginning, wherever its cursor is. A file passed in is left open by `close`.
    key: 16, 24 or 32 bytes. length: the stream's bytes as a trusted place has them. AGS1 has no end marker, so only
    this tells when blocks were cut from the end; None, which must be written out, takes what the source says.
    aad_prefix: as when it was written; None is ``b""``. block_size: the only block size to accept; None accepts what
    the header claims, up to max_block_size. threads: as for AgsCodec.

    Raises FormatError if the source is no AGS1 stream or `length` is impossible for its block size, IntegrityError if
    it is shorter than `length`. Reading raises IntegrityError for a block that does not authenticate, each time, while
    the others stay readable; inside the length no read returns short or raises EOFError.

    `read_at`, `readinto_at`, `read_ranges` and `verify` are safe from many threads; what moves the cursor is not.
    `close` may be called while other threads read, and waits for none: their calls end as if it came later, or raise
    ValueError. A file passed in is read through a duplicate of its descriptor, so its owner, too, may close it at any
    time. (Closing a duplicate releases the process's fcntl locks on the file, as closing any of its descriptors does.)
    """

    __slots__ = (
        "_aad_prefix",
        "_ahead",
        "_ahead_from",
        "_behind",
        "_block_size",
        "_cache",
        "_file",
        "_file_length",
        "_hot",
        "_key",
        "_length",
        "_over",
        "_position",
        "_threads",
        "_unchecked",
    )
    mode = "rb"

    def __init__(
        self,
        source: Any,
        key: Buffer,
        *,
        length: int | None,
        aad_prefix: Buffer | None = b"",
        block_size: int | None = None,
        max_block_size: int = 64 << 20,
        threads: int | None = None,
    ) -> None:
        self._hot = NOTHING  # opened bytes that the next read is likely to want
        self._position = 0
        self._over = False  # closed; quicker to ask than `closed`
        self._key = Key(key)
        self._aad_prefix = prefix_bytes(aad_prefix)
        self._cache: dict[int, Span] = {}  # opened blocks, least recently used first
        self._ahead = 1  # blocks to open at once if the cursor goes on where the last ones ended
        self._ahead_from = 0  # the block where they ended
        length = check_length(length)
        self._file = _source(source, length)
        try:
            self._file_length = trusted_length(length, self._file.size)
            self._behind = self._file.size - self._file_length
            self._block_size = self._read_header(block_size, max_block_size)
            self._length = plaintext_in(self._file_length, self._block_size)
            # To find out how many CPUs there are takes longer than to open a block.
            self._threads = 1 if threads is None and self._length <= self._block_size else thread_count(threads)
        except BaseException:
            self._file.close()
            raise
        self._unchecked = self._length == 0 and self._file_length > HEADER_NBYTES  # the block of an empty stream

    def _read_header(self, block_size: int | None, max_block_size: int) -> int:
        if self._file_length < HEADER_NBYTES:
            raise FormatError(
                f"{self._file_length} bytes are too short for an AGS1 stream: its header alone has {HEADER_NBYTES}"
            )
        if isinstance(self._file, _SeekableFile) and self._file_length <= SMALL_FILE_NBYTES:
            data, _ = self._file.fetch(0, self._file_length)  # one request for all of it
            self._file.close()
            self._file = _Memory(data, self._file.size)
        source, _ = self._file.fetch(0, HEADER_NBYTES)
        if isinstance(source, Descriptor):
            with source as fd:
                source = os.pread(fd, HEADER_NBYTES, 0)
        claimed = decode_header(source)
        if block_size is not None and claimed != check_block_size(block_size):
            raise FormatError(f"the header claims blocks of {claimed} bytes, asked for were {block_size}")
        if claimed > max_block_size:
            raise FormatError(
                f"the header claims blocks of {claimed} bytes, more than max_block_size={max_block_size}: "
                "pass a larger one if you trust it"
            )
        return claimed

    def __repr__(self) -> str:
        return f"<AgsReader length={self._length} block_size={self._block_size}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a reader holds a key and is never pickled: send key metadata, and open it where it is read")

    @property
    def length(self) -> int:
        """Bytes of plaintext."""
        return self._length

    @property
    def block_size(self) -> int:
        """Bytes of plaintext in each block but the last."""
        return self._block_size

    # ---- random access

    read_at = read_at

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """Like `read_at`, but into a writable buffer; returns how many bytes. After an error they are all zero."""
        return self._readinto(offset, buffer, False)

    def read_ranges(self, ranges: Iterable[Sequence[int]]) -> list[bytes]:
        """What `read_at` returns for each ``(offset, size)``, in that order.

        Ranges whose blocks touch are read from the source, and opened, as one.
        """
        wanted = [(operator.index(offset), self._clamp(offset, size)) for offset, size in ranges]
        results = [b""] * len(wanted)
        group: list[int] = []
        group_end = 0  # the block where it ends
        for i in sorted((i for i, (_, size) in enumerate(wanted) if size), key=wanted.__getitem__):
            offset, size = wanted[i]
            first = offset // self._block_size
            grown = offset + size - wanted[group[0]][0] if group else 0
            if group and (first > group_end or grown > REQUEST_NBYTES):
                self._read_group(group, wanted, results)
                group = []
            group_end = max(group_end if group else 0, -(-(offset + size) // self._block_size))
            group.append(i)
        if group:
            self._read_group(group, wanted, results)
        return results

    def _read_group(self, group: list[int], wanted: list[tuple[int, int]], results: list[bytes]) -> None:
        begin = wanted[group[0]][0]
        end = max(offset + size for offset, size in (wanted[i] for i in group))
        data = self.read_at(begin, end - begin)
        for i in group:
            offset, size = wanted[i]
            results[i] = data[offset - begin : offset - begin + size]

    def verify(self, progress: Callable[[int], object] | None = None) -> None:
        """Check the tag of every block. Returns None if all pass.

        progress: called with the bytes of plaintext that have passed since its last call, as ``tqdm.update`` wants.
        Raises IntegrityError with the lowest bad block's ``block_index``; also if the source has bytes behind `length`,
        which no read ever looks at, after all tags have passed.
        """
        self._check_open()
        if self._unchecked:
            self._check_empty()
        step = max(self._threads, CACHE_NBYTES // self._block_size) * self._block_size
        scratch = bytearray(min(step, self._length))
        for offset in range(0, self._length, step):
            size = min(step, self._length - offset)
            self._open_blocks(offset // self._block_size, memoryview(scratch)[:size])
            if progress is not None:
                progress(size)
        if self._behind > 0:
            raise IntegrityError(f"the stream is intact, but {self._behind} bytes follow its trusted length")

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

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
        if self._length <= self._block_size:  # one block, which then stays at hand
            span = self._hot
            if span is NOTHING:
                span = self._hot = self._open_span(0, 1, None)
                if self._over:
                    self._let_go()
            return span.data if size == self._length else span.data[offset : offset + size]
        block, begin = divmod(offset, self._block_size)
        # The short way for a part of one block.
        if not steady and size < self._block_size and begin + size <= self._block_size:
            part = self._cached(block)
            if part is None:
                self._hot = NOTHING
                part = self._open_span(block, 1, None)
                self._keep(block, part)
            self._hot = part
            if self._over:
                self._let_go()
            begin = offset - part.offset
            return part.data[begin : begin + size]
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
        """Write the plaintext from `offset` to all of `out`."""
        hot = self._hot
        begin = offset - hot.offset
        if 0 <= begin < len(hot.data):
            part = memoryview(hot.data)[begin : begin + len(out)]
            out[: len(part)] = part
            offset += len(part)
            out = out[len(part) :]
        step = max(1, REQUEST_NBYTES // self._block_size) * self._block_size
        while isinstance(self._file, _SeekableFile) and len(out) > step:  # what is fetched is held in memory
            piece = step - offset % self._block_size
            self._fill_piece(offset, out[:piece], steady)
            offset += piece
            out = out[piece:]
        if out:
            self._fill_piece(offset, out, steady)

    def _fill_piece(self, offset: int, out: memoryview, steady: bool) -> None:
        """Open whole blocks straight into `out`. Of a block at either end that is only wanted in part, copy that from
        what is at hand, or open the block and keep it; with `steady`, open more blocks behind it as well.
        """
        size = self._block_size
        end = offset + len(out)
        first, last = offset // size, (end - 1) // size
        whole_end = end if end == self._length else end // size * size
        head = self._cached(first) if offset % size or first * size >= whole_end else None
        tail = self._cached(last) if last > first and last * size >= whole_end else None
        lo, hi = first + (head is not None), last + (tail is None)  # the blocks to be opened
        ahead = self._plan_ahead(lo, hi, whole_end < end) if steady and lo < hi else hi
        fetched = None
        if isinstance(self._file, _SeekableFile) and lo < hi:  # one request for all of them
            fetched, ahead = self._fetch(self._file, lo, hi, ahead)
        at = offset
        while at < end:
            block = at // size
            if at % size == 0 and at < whole_end:
                self._open_blocks(block, out[at - offset : whole_end - offset], fetched)
                at = whole_end
                continue
            span = head if block == first else tail
            if span is None:
                self._hot = NOTHING  # let go of the old before there is new
                span = self._open_span(block, ahead - block if block == last else 1, fetched)
                self._keep(block, span)
            self._hot = span
            if self._over:
                self._let_go()
            begin = at - span.offset
            part = memoryview(span.data)[begin : begin + min(end - at, (block + 1) * size - at)]
            out[at - offset : at - offset + len(part)] = part
            at += len(part)

    def _plan_ahead(self, lo: int, hi: int, in_part: bool) -> int:
        """Where to stop opening, instead of at `hi`: later each time the cursor goes on where it stopped before."""
        most = self._threads * max(1, AHEAD_NBYTES // self._block_size)
        self._ahead = min(2 * self._ahead, most) if lo == self._ahead_from else 1
        if in_part:
            hi = min(max(hi, lo + self._ahead), -(-self._length // self._block_size))
        self._ahead_from = hi
        return hi

    def _fetch(self, file: _SeekableFile, lo: int, hi: int, ahead: int) -> tuple[tuple[Any, int], int]:
        begin = block_offset(lo, self._block_size)
        try:
            return file.fetch(begin, min(block_offset(ahead, self._block_size), self._file_length)), ahead
        except IntegrityError:
            if ahead == hi:
                raise
        return file.fetch(begin, block_offset(hi, self._block_size)), hi  # what is wanted may be there

    # ---- opened blocks

    def _open_blocks(self, first: int, out: memoryview, fetched: tuple[Any, int] | None = None) -> None:
        """Open the blocks from `first` whose plaintext fills `out`."""
        size = len(out)
        source, at = self._find(first, size, fetched)
        self._key.open_run(self._aad_prefix, self._block_size, first, source, at, size, out, self._threads)

    def _find(self, first: int, size: int, fetched: tuple[Any, int] | None) -> tuple[Any, int]:
        """What `Key.open_run` can read the blocks from `first` with `size` bytes of plaintext from, and where there."""
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
            return self._open_span(first, 1, fetched)  # the bad one may be one that nobody has asked for
        return Span(begin, opened)

    # The cache needs no lock, which a fork could leave held: each step is one that the interpreter does at once.

    def _cached(self, block: int) -> Span | None:
        hot = self._hot
        if hot.offset <= block * self._block_size < hot.offset + len(hot.data):
            return hot
        span = self._cache.pop(block, None)
        if span is not None:
            self._cache[block] = span  # the most recently used is last
        return span

    def _let_go(self) -> None:
        """Also after a block was put by, if another thread has closed the reader: it did not find that one."""
        self._hot = NOTHING
        self._cache.clear()

    def _keep(self, block: int, span: Span) -> None:
        if len(span.data) > self._block_size:  # opened ahead: a cursor does not come back
            return
        self._cache[block] = span
        while len(self._cache) > max(1, CACHE_NBYTES // max(self._block_size, SPAN_NBYTES)):
            try:
                del self._cache[next(iter(self._cache))]
            except (KeyError, RuntimeError):  # another thread has done it
                continue

    # ---- io.RawIOBase

    def readable(self) -> bool:
        self._check_open()
        return True

    def seekable(self) -> bool:
        self._check_open()
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Exactly `size` bytes, or all that are left if fewer are; with None or a negative size, all that are left."""
        position = self._position
        if size is None or size < 0:
            size = max(0, self._length - position)
        data = self._hot.get(position, size)
        if data is None:
            data = self._read(position, size, True)
        self._position = position + len(data)
        return data

    def readall(self) -> bytes:
        """All that are left."""
        return self.read()

    def write(self, data: Buffer, /) -> int:
        raise io.UnsupportedOperation("not writable")

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a writable buffer; fewer bytes only at the end. After an error they are all zero."""
        size = self._readinto(self._position, buffer, True)
        self._position += size
        return size

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the cursor, also behind the end; returns where it is."""
        self._check_open()
        self._position = sought(offset, whence, self._position, self._length)
        return self._position

    def tell(self) -> int:
        self._check_open()
        return self._position

    def close(self) -> None:
        """Let go of opened blocks, and close the source if the reader opened it. May be called again."""
        super().close()
        file = getattr(self, "_file", None)  # none if the constructor failed
        if file is not None:
            self._over = True  # before it lets go: see _let_go
            self._let_go()
            file.close()


# ---------------------------------------------------------------------------------------------------------- writer


class AgsWriter(io.RawIOBase):
    """Writes an AGS1 stream. `write` takes everything; `close` completes the stream, `abort` gives it up.

    target: a path, which appears only when the stream is complete; a NewFile or a NewObject of `ags_fast.fs`, which is
    published or discarded; or a binary file open for writing, which is written from where its cursor stands and left
    open. key, aad_prefix, block_size, threads, sealed_before: as for AgsCodec. exclusive: refuse a path that exists
    (FileExistsError). fsync: `close` returns only when a path's file and folder are on the disk.

    Left by an exception, a ``with`` block aborts: no last block, no file at the path. So does a writer that is
    collected without `close`, with a ResourceWarning, and one whose target raises; the error is the target's. A process
    forked meanwhile cannot complete the stream: it is its parent's.

    Threads may share a writer: each `write` is taken as a whole, and `close` waits for the one in flight. `abort` does
    not wait: a call in flight ends as if it came later, or raises ValueError. A signal handler may abort, too; if it
    writes or closes while a call is in flight in its thread, that is a RuntimeError. A file passed in is written
    through a duplicate of its descriptor: when its owner closes it, nothing goes to another file.

    A stream without its trusted length can be cut unseen: keep `file_length` where the key is kept.
    """

    mode = "wb"

    def __init__(
        self,
        target: Any,
        key: Buffer,
        *,
        aad_prefix: Buffer | None = b"",
        block_size: int = DEFAULT_BLOCK_SIZE,
        threads: int | None = None,
        exclusive: bool = False,
        fsync: bool = False,
        sealed_before: int = 0,
    ) -> None:
        self._file_length: int | None = None
        self._target: _Positional | _Sink | None = None
        self._owner = os.getpid()
        self._key = sealing_key(key, sealed_before)
        self._aad_prefix = prefix_bytes(aad_prefix)
        self._block_size = check_block_size(block_size)
        self._threads = thread_count(threads)
        self._pending = Pending()
        self._blocks = 0  # sealed so far
        self._fate = allocate_lock()  # taken once and for all by who completes the stream or gives it up
        self._target = _target(target, exclusive, fsync)
        # The threads would wait for each other at a regular file, where the system lets one write at a time, and what
        # is collected for them leaves the core's cache meanwhile.
        sharing = 1 if isinstance(self._target, _Positional) else self._threads
        self._capacity = sharing * self._block_size * max(1, AHEAD_NBYTES // self._block_size)
        try:
            self._target.begin(encode_header(self._block_size))
        except BaseException:
            self.abort()
            raise

    def __repr__(self) -> str:
        return f"<AgsWriter block_size={self._block_size}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a writer holds a key and is never pickled: open it where it is written")

    def __del__(self) -> None:
        # io.IOBase would close, and so complete, what nobody has said is complete.
        if self._target is not None and not self.closed:
            if self._owner == os.getpid():
                warnings.warn(f"{self!r} was neither closed nor aborted", ResourceWarning, source=self, stacklevel=2)
            self.abort()

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self.close()
        else:
            self.abort()

    @property
    def file_length(self) -> int:
        """Bytes of the complete stream: the trusted length that a reader needs. ValueError before `close`."""
        if self._file_length is None:
            raise ValueError("the stream has no length: it is not complete")
        return self._file_length

    @property
    def block_size(self) -> int:
        """Bytes of plaintext in each block but the last."""
        return self._block_size

    def writable(self) -> bool:
        self._check_open()
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        raise io.UnsupportedOperation("not readable")

    def readinto(self, buffer: Buffer, /) -> int:
        raise io.UnsupportedOperation("not readable")

    def tell(self) -> int:
        """Bytes of plaintext written so far."""
        self._check_open()
        return self._blocks * self._block_size + self._pending.filled

    def flush(self) -> None:
        """Nothing: a block is written when it is full, and a part of one cannot be."""
        self._check_open()

    def write(self, data: Buffer, /) -> int:
        """Take all of a bytes-like object; returns its size in bytes. If the target raises, the writer has aborted."""
        if self._owner != os.getpid():
            raise ValueError("this writer belongs to the process that opened it")
        taken = self._pending.add(data)
        if taken >= 0:  # a small piece of a block, as most are
            return taken
        view = bytes_view(data)
        try:
            with self._pending:
                try:
                    self._check_open()
                    self._take(view)
                    self._check_open()  # or another thread has aborted meanwhile
                except BaseException:
                    self.abort()
                    raise
        finally:
            self._discard_if_aborted()
        return view.nbytes

    def _take(self, view: memoryview) -> None:
        size, pending = self._block_size, self._pending
        if pending.filled:
            gap = -pending.filled % size  # if whole blocks follow it, they need not be copied
            taken = gap if len(view) - gap >= size else min(len(view), self._capacity - pending.filled)
            self._keep(view[:taken])
            view = view[taken:]
            if view or pending.filled == self._capacity:
                self._seal_pending()
        whole = len(view) // size * size
        if whole:
            self._seal(view[:whole])
        if len(view) > whole:
            self._keep(view[whole:])

    def _keep(self, view: memoryview) -> None:
        pending = self._pending
        filled = pending.filled + len(view)
        if filled > len(pending.buffer):
            grow(pending.buffer, min(self._capacity, max(filled, 2 * len(pending.buffer))))
        memoryview(pending.buffer)[pending.filled : filled] = view
        pending.filled = filled

    def _seal_pending(self) -> None:
        self._seal(memoryview(self._pending.buffer)[: self._pending.filled])
        self._pending.filled = 0

    def _seal(self, view: memoryview) -> None:
        """Write the next blocks; no bytes are one empty block."""
        assert self._target is not None
        blocks = max(1, -(-len(view) // self._block_size))
        if self._blocks + blocks > MAX_BLOCKS_WRITTEN:
            raise FormatError(
                f"a stream has at most {MAX_BLOCKS_WRITTEN} blocks, and this one's have {self._block_size} bytes: "
                "use larger ones"
            )
        self._target.seal(self._key, self._aad_prefix, self._block_size, self._blocks, view, self._threads)
        self._blocks += blocks

    def close(self) -> None:
        """Write the last block and complete the stream; a path now exists. May be called again."""
        if self.closed or self._target is None:
            return
        if self._owner != os.getpid():
            self.abort()
            return
        try:
            with self._pending:
                if not self.closed:  # by another thread, for which this one has waited
                    self._complete(self._target)
        finally:
            self._discard_if_aborted()

    def _complete(self, target: _Positional | _Sink) -> None:
        try:
            plain_length = self.tell()
            if self._pending.filled or self._blocks == 0:
                self._seal_pending()
            file_length = encrypted_length(plain_length, self._block_size)
            header = encode_header(self._block_size)
        except BaseException:
            self.abort()
            raise
        if not self._fate.acquire(False):
            raise ValueError("the stream was aborted while it was closed")
        try:
            target.finish(header, file_length)
            self._file_length = file_length
        finally:
            self._end()

    def abort(self) -> None:
        """Give the stream up: no last block, and no file at the path. Does nothing after `close`."""
        if self.closed or not self._fate.acquire(False):
            return
        try:
            if self._target is not None:
                self._target.stop()
        finally:
            self._end()
            self._discard_if_aborted()

    def _end(self) -> None:
        self._pending.end()
        super().close()

    def _discard_if_aborted(self) -> None:
        """Undo what was written, unless a call in flight still writes: that one does it then, when it ends."""
        if self._file_length is None and self.closed and self._pending.try_turn():
            try:
                self._pending.buffer = bytearray()
                if self._target is not None:
                    self._target.abort()
            finally:
                self._pending.__exit__()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")


class _Positional:
    """A regular file, written by position. Its header comes last: without it, nothing looks like a stream."""

    def __init__(self, descriptor: Descriptor, new: NewFile | None, file: Any = None) -> None:
        self.descriptor = descriptor
        self.new = new
        self.file = file  # as it was passed in
        self.offset = 0  # where the stream begins

    def begin(self, header: bytes) -> None:
        if self.file is not None:
            self.file.flush()
            self.offset = self.file.tell()
            pwrite_all(self.descriptor, bytes(len(header)), self.offset)  # there may be an old one

    def seal(self, key: Key, aad_prefix: bytes, block_size: int, first: int, view: memoryview, threads: int) -> None:
        self._check_open()
        offset = self.offset + block_offset(first, block_size)
        key.seal_run(aad_prefix, block_size, first, view, self.descriptor, offset, threads)

    def _check_open(self) -> None:
        if self.file is not None and self.file.closed:
            raise ValueError("the target was closed")

    def finish(self, header: bytes, file_length: int) -> None:
        self._check_open()
        pwrite_all(self.descriptor, header, self.offset)
        if self.file is not None:
            self.file.seek(self.offset + file_length)
        if self.new is not None:
            self.new.publish()
        else:
            self.descriptor.close()

    def stop(self) -> None:
        """Give it up, also while another thread is in `seal`, which then raises or ends: all is undone at once."""
        self.descriptor.close()
        if self.new is not None:
            self.new.discard()

    def abort(self) -> None:
        self.stop()


class _Sink:
    """Anything else with a write method: a pipe, a socket's file, an object of a store."""

    def __init__(self, file: Any, new: NewFile | NewObject | None) -> None:
        self.file = file
        self.new = new
        self.sealed = bytearray()
        self.stopped = False

    def begin(self, header: bytes) -> None:
        self.write(memoryview(header))

    def seal(self, key: Key, aad_prefix: bytes, block_size: int, first: int, view: memoryview, threads: int) -> None:
        step = threads * block_size * max(1, AHEAD_NBYTES // block_size)  # bounds what is held sealed
        for begin in range(0, max(1, len(view)), step):
            piece = view[begin : begin + step]
            needed = len(piece) + max(1, -(-len(piece) // block_size)) * OVERHEAD_NBYTES
            if len(self.sealed) < needed:
                self.sealed = bytearray(needed)
            key.seal_run(aad_prefix, block_size, first + begin // block_size, piece, self.sealed, 0, threads)
            if self.stopped:
                raise ValueError("I/O operation on closed file")
            self.write(memoryview(self.sealed)[:needed])

    def write(self, view: memoryview) -> None:
        while view:
            written = self.file.write(view)
            if written is None:
                if isinstance(self.file, io.RawIOBase):
                    raise BlockingIOError("the target takes no data now: a writer needs one that blocks")
                return  # an object that does not say, and so has taken everything
            if not 0 < written <= len(view):
                raise OSError(f"the target says it has written {written} of {len(view)} bytes")
            view = view[written:]

    def finish(self, header: bytes, file_length: int) -> None:
        if hasattr(self.file, "flush"):
            self.file.flush()
        if self.new is not None:
            self.new.publish()

    def stop(self) -> None:
        """Give it up: `seal` in another thread writes nothing more, after the piece that it is at."""
        self.stopped = True

    def abort(self) -> None:
        """Undo what was written. Not while another thread is in `seal`: a request of it might come later."""
        if self.new is not None:
            self.new.discard()


def _new_file(new: NewFile) -> _Positional | _Sink:
    return _Positional(new.descriptor, new) if new.positional else _Sink(new, new)


def _target(target: Any, exclusive: bool, fsync: bool) -> _Positional | _Sink:
    if isinstance(target, (str, os.PathLike)):
        return _new_file(NewFile(target, exclusive=exclusive, fsync=fsync))
    if exclusive or fsync:
        raise ValueError("exclusive and fsync are for a path: open the file as you want it")
    if isinstance(target, NewFile):
        return _new_file(target)
    if isinstance(target, NewObject):
        return _Sink(target, target)
    if not hasattr(target, "write"):
        raise TypeError(f"a path or a binary file open for writing is required, not {type(target).__name__!r}")
    if _is_content(target) and not fcntl.fcntl(target.fileno(), fcntl.F_GETFL) & os.O_APPEND:
        return _Positional(_duplicate(target), None, target)
    return _Sink(target, None)


# ---------------------------------------------------------------------------------------------------------- open


def open(
    file: Any,
    mode: str = "rb",
    *,
    key: Buffer | None = None,
    key_metadata: Any = None,
    length: int | EllipsisType | None = ...,  # None means something, so it cannot be the default
    aad_prefix: Buffer | None = b"",
    block_size: int | None = None,
    max_block_size: int = 64 << 20,
    threads: int | None = None,
    fsync: bool = False,
) -> AgsReader | AgsWriter:
    """Open an AGS1 stream: ``rb`` reads it, ``wb`` writes it, ``xb`` writes a path that must not exist yet.

    file: a source of AgsReader or a target of AgsWriter. key_metadata: StandardKeyMetadata, or its encoded bytes; it
    brings the key, the AAD prefix and, for reading, the length. What it brings may be given as well, but must be the
    same (ValueError). TypeError if there is no key, or, for reading, no length: say ``length=None`` to take the length
    that the source has, and with it that nobody cut blocks from its end. The other arguments are the classes'.
    """
    if mode not in ("rb", "wb", "xb"):
        raise ValueError(f"mode must be 'rb', 'wb' or 'xb', not {mode!r}")
    if key_metadata is not None:
        from hmac import compare_digest

        if not hasattr(key_metadata, "encryption_key"):
            from ags_fast.keys import StandardKeyMetadata

            key_metadata = StandardKeyMetadata.decode(key_metadata)
        if key is not None and not compare_digest(prefix_bytes(key), key_metadata.encryption_key):
            raise ValueError("key is not the one in key_metadata: give one of them")
        if prefix_bytes(aad_prefix) not in (b"", key_metadata.aad_prefix):
            raise ValueError("aad_prefix is not the one in key_metadata: give one of them")
        key, aad_prefix = key_metadata.encryption_key, key_metadata.aad_prefix
        if mode == "rb" and key_metadata.file_length is not None:
            if length is not ... and length != key_metadata.file_length:
                raise ValueError("length is not the one in key_metadata: give one of them")
            length = key_metadata.file_length
    if key is None:
        raise TypeError("key or key_metadata is required")
    if mode == "rb":
        if length is ...:
            raise TypeError(
                "length is required: the stream's bytes as a trusted place has them, or None to trust the source"
            )
        return AgsReader(
            file,
            key,
            length=length,
            aad_prefix=aad_prefix,
            block_size=block_size,
            max_block_size=max_block_size,
            threads=threads,
        )
    if length is not ...:
        raise TypeError("length is for reading: a writer says it, as file_length, when it is closed")
    return AgsWriter(
        file,
        key,
        aad_prefix=aad_prefix,
        block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
        threads=threads,
        exclusive=mode == "xb",
        fsync=fsync,
    )
