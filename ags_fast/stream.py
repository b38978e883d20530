"""AGS1 streams as files: AgsReader and AgsWriter.

Random access is the primitive: `AgsReader.readinto_at` has no cursor and may be called from many threads. The cursor
of an `io.RawIOBase`, and read-ahead for a cursor that moves steadily, are a layer on top.
"""

from __future__ import annotations

import _thread  # noqa: PLC2701 (threading takes longer to import)
import operator
import os

from ags_fast._blocks import OpenBlocks
from ags_fast._core import OVERHEAD_NBYTES, Behind, Descriptor, Pending, grow, read_at
from ags_fast._cursor import Unfinished
from ags_fast._threads import thread_count, usable_cpus
from ags_fast.ags1 import (
    DEFAULT_BLOCK_SIZE,
    HEADER_NBYTES,
    MAX_BLOCKS_WRITTEN,
    as_key,
    block_offset,
    bytes_view,
    check_block_size,
    check_length,
    decode_header,
    encode_header,
    encrypted_length,
    nbytes_of,
    plaintext_in,
    prefix_bytes,
    sealing_key,
    trusted_length,
)
from ags_fast.errors import FormatError, IntegrityError
from ags_fast.files.sink import OrderedSink, PositionalSink, open_sink
from ags_fast.files.source import SeekableSource, open_source

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ags_fast._types import Buffer, ReadableSource, WritableTarget

__all__ = ["AgsReader", "AgsWriter"]

VERIFIED_NBYTES = 4 << 20  # of plaintext, opened at a time by `AgsReader.verify`; a block a thread at least
GATHERED_NBYTES = 256 << 10  # a thread, that a writer gathers before it seals them; at least one block


class AgsReader(OpenBlocks):
    """Read the plaintext of an AGS1 stream, as a seekable file. Nothing is returned before its tag has passed.

    Threads may share `read_at`, `readinto_at`, `read_ranges` and `verify`, but not the methods that move the cursor.
    `close` does not wait for reads in other threads: a read in flight ends as if `close` came later, or raises
    ValueError. A file passed in is read through a duplicate of its descriptor, so its owner may close it at any time.
    (Closing the duplicate releases the process's fcntl locks on the file, as closing any of its descriptors does.)

    Args:
        source: A path, a URL of fsspec, an open binary file, a bytes-like object, or any seekable binary file-like
            object. Offsets count from its beginning, wherever its cursor is. `close` leaves a file passed in open.
        key: 16, 24 or 32 bytes.
        length: The stream's length in bytes, from a trusted place. AGS1 has no end marker, so only this length shows
            when blocks were cut from the end. None, which must be written out, accepts the length of the source.
        aad_prefix: The AAD prefix that the stream was written with; None is ``b""`` (spec: "AES GCM encryption").
        block_size: The only block size to accept, in bytes of plaintext. None accepts what the header claims, up to
            `max_block_size` (spec: "File structure").
        max_block_size: The largest block size to accept from the header, in bytes.
        threads: How many threads may work on one call, or ahead of reads without a gap; None as for AgsCodec.
        storage_options: Options for fsspec, of a URL.

    Raises:
        FormatError: The source is not an AGS1 stream, or `length` is impossible for its block size.
        IntegrityError: The source is shorter than `length`. Reads raise it for a block that does not authenticate, each
            time; other blocks stay readable. Inside the length no read returns short or raises EOFError.
    """

    __slots__ = ("_behind",)

    def __init__(
        self,
        source: ReadableSource,
        key: Buffer,
        *,
        length: int | None,
        aad_prefix: Buffer | None = b"",
        block_size: int | str | None = None,
        max_block_size: int | str = 64 << 20,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._position = self._length = self._block_size = 0
        key = self._key = as_key(key)
        self._aad_prefix = prefix_bytes(aad_prefix)
        length = check_length(length)
        self._file = open_source(source, length, storage_options)
        try:
            self._file_length = trusted_length(length, self._file.size)
            self._behind = self._file.size - self._file_length
            self._block_size = self._read_header(block_size, nbytes_of(max_block_size))
            self._length = plaintext_in(self._file_length, self._block_size)
            # To count the CPUs takes longer than to open a block.
            self._share(1 if threads is None and self._length <= self._block_size else thread_count(threads))
        except BaseException:
            self._file.close()
            del self._file  # for `close`
            raise
        self._unchecked = self._length == 0 and self._file_length > HEADER_NBYTES  # the block of an empty stream

    def _read_header(self, block_size: int | str | None, max_block_size: int) -> int:
        if self._file_length < HEADER_NBYTES:
            raise FormatError(
                f"{self._file_length} bytes are too short for an AGS1 stream: its header alone has {HEADER_NBYTES}"
            )
        if isinstance(self._file, SeekableSource):
            self._file = self._file.buffered(self._file_length)
        source, _ = self._file.fetch(0, HEADER_NBYTES)
        if isinstance(source, Descriptor):
            with source as fd:
                source = os.pread(fd, HEADER_NBYTES, 0)
        claimed = decode_header(source)
        if block_size is not None and claimed != check_block_size(block_size):
            raise FormatError(f"the header claims blocks of {claimed} bytes, not of {block_size} as asked for")
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
        """Length of the plaintext in bytes."""
        return self._length

    @property
    def block_size(self) -> int:
        """Bytes of plaintext in each block but the last."""
        return self._block_size

    # ---- random access

    read_at = read_at

    def readinto_at(self, offset: int, buffer: Buffer) -> int:
        """Read plaintext from `offset` into a writable buffer, and return its bytes: fewer than asked for at the end.

        After an error the buffer is all zeros.
        """
        return self._readinto(offset, buffer, False)

    def verify(self, progress: Callable[[int], object] | None = None) -> None:
        """Check the tag of every block. `progress` gets the bytes of plaintext that have passed since its last call.

        Raises:
            IntegrityError: A block is bad (``block_index`` is the lowest one), or the source has bytes after `length`.
                Reads never see such bytes; they are reported after all tags have passed.
        """
        self._check_open()
        if self._unchecked:
            self._check_empty()
        step = max(self._threads, VERIFIED_NBYTES // self._block_size) * self._block_size
        scratch = bytearray(min(step, self._length))
        for offset in range(0, self._length, step):
            size = min(step, self._length - offset)
            self._open_steadily(offset // self._block_size, memoryview(scratch)[:size])
            if progress is not None:
                progress(size)
        if self._behind > 0:
            raise IntegrityError(f"the stream is intact, but {self._behind} bytes follow its trusted length")

    # ---- io.RawIOBase

    def read(self, size: int | None = -1, /) -> bytes:
        """Read exactly `size` bytes, or all that are left if fewer are; with None or -1, all that are left."""
        position = self._position
        size = -1 if size is None else operator.index(size)
        if size < 0:
            size = max(0, self._length - position)
        data = self._hot.get(position, size)
        if data is None:
            data = self._read(position, size, True)
        self._position = position + len(data)
        return data

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill a writable buffer from the cursor, as `readinto_at` does it. Returns the number of bytes read."""
        size = self._readinto(self._position, buffer, True)
        self._position += size
        return size

    def close(self) -> None:
        """Release opened blocks, and close the source if the reader opened it. May be called again."""
        super().close()
        file = getattr(self, "_file", None)  # None if the constructor failed
        if file is not None:
            self._over = True  # before blocks are released: see _let_go
            self._let_go()
            file.close()


# ---------------------------------------------------------------------------------------------------------- writer


class AgsWriter(Unfinished):
    """Write an AGS1 stream. `write` takes everything; `close` completes the stream, `abort` discards it.

    An exception that leaves a ``with`` block aborts: no last block is written, and no file appears at the path. A
    writer that is collected without `close`, or whose buffer is, aborts too, with a ResourceWarning. So does a writer
    whose target raises; that error may come a call later. A forked process cannot complete its parent's stream.

    Threads may share a writer: each `write` is taken as a whole, and `close` waits for the `write` in flight. `abort`
    does not wait: a call in flight ends as if `abort` came later, or raises ValueError. A signal handler may abort. If
    the handler writes or closes while a call is in flight in its thread, that is a RuntimeError. A file passed in is
    written through a duplicate of its descriptor: when its owner closes the file, nothing goes to another file.

    Keep `file_length` where the key is kept: a stream without its trusted length can be cut unseen.

    Args:
        target: A path or a URL of fsspec, which appears only when the stream is complete; a NewFile or NewObject of
            `ags_fast.fs`, which is published or discarded; or a binary file open for writing, which is written from its
            cursor on and left open.
        key: 16, 24 or 32 bytes.
        aad_prefix: Bytes that tell this stream from others under the key; None is ``b""``.
        block_size: Bytes of plaintext in a block (spec: "File structure").
        threads: How many threads may work on one call, or behind writes to a file; None as for AgsCodec.
        exclusive: Whether to refuse a path that exists (FileExistsError).
        fsync: Whether `close` returns only when a path's file and folder are on the disk.
        sealed_before: Messages that other processes have sealed with this key. They count against the key's limit.
        storage_options: Options for fsspec, of a URL.

    Raises:
        ValueError: A key, block size or number of threads is impossible.
        KeyLimitError: The key would seal more than 2^32 messages.
    """

    _file_length: int | None = None
    _target: PositionalSink | OrderedSink | None = None

    def __init__(
        self,
        target: WritableTarget,
        key: Buffer,
        *,
        aad_prefix: Buffer | None = b"",
        block_size: int | str = DEFAULT_BLOCK_SIZE,
        threads: int | None = None,
        exclusive: bool = False,
        fsync: bool = False,
        sealed_before: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._block_size = 0
        self._key = sealing_key(key := as_key(key), sealed_before)
        self._aad_prefix = prefix_bytes(aad_prefix)
        self._block_size = check_block_size(block_size)
        self._threads = thread_count(threads)
        self._pending = Pending()
        self._blocks = 0  # sealed so far
        self._sealed = bytearray()  # blocks on their way to a target that is written in order
        self._fate = _thread.allocate_lock()  # taken once: by the call that completes the stream or discards it
        most = self._block_size * max(1, GATHERED_NBYTES // self._block_size)
        helpers = self._threads - 1 if self._threads > 1 and usable_cpus() > 1 else 0
        self._behind = Behind(self._key, self._aad_prefix, self._block_size, most, self._threads, helpers)
        self._target = open_sink(target, exclusive, fsync, storage_options)
        self._owner = os.getpid()
        self._capacity = self._threads * most
        if isinstance(self._target, PositionalSink):  # more would leave the core's cache, and helpers write behind
            self._capacity = most
        try:
            self._target.begin(encode_header(self._block_size))
        except BaseException:
            self.abort()
            raise

    def __repr__(self) -> str:
        return f"<AgsWriter block_size={self._block_size}{' closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a writer holds a key and is never pickled: open it where it is written")

    @property
    def file_length(self) -> int:
        """Length of the complete stream in bytes: the trusted length that a reader needs. ValueError before `close`."""
        if self._file_length is None:
            raise ValueError("the stream has no length: it is not complete")
        return self._file_length

    @property
    def block_size(self) -> int:
        """Bytes of plaintext in each block but the last."""
        return self._block_size

    def tell(self) -> int:
        """Return the bytes of plaintext written so far."""
        self._check_open()
        return self._blocks * self._block_size + self._pending.filled

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object, and return its bytes. If the target raises, the writer has aborted."""
        if self._owner != os.getpid():
            raise ValueError("this writer belongs to the process that opened it")
        try:
            taken = self._pending.add(data)
        except TypeError:
            bytes_view(data)  # whose error says what to do with text
            raise
        if taken >= 0:  # a small piece of a block
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
            gap = -pending.filled % size  # whole blocks after the gap need not be copied
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
        """Write the next blocks; no bytes make one empty block."""
        assert self._target is not None
        blocks = max(1, -(-len(view) // self._block_size))
        if self._blocks + blocks > MAX_BLOCKS_WRITTEN:
            raise FormatError(
                f"a stream has at most {MAX_BLOCKS_WRITTEN} blocks, and the blocks of this one have "
                f"{self._block_size} bytes: use larger blocks"
            )
        if isinstance(self._target, PositionalSink):
            self._target.check_open()
            offset = self._target.offset + block_offset(self._blocks, self._block_size)
            self._behind.seal(self._blocks, view, self._target.descriptor, offset)
        else:
            self._seal_in_order(self._target, view)
        self._blocks += blocks

    def _seal_in_order(self, target: OrderedSink, view: memoryview) -> None:
        size = self._block_size
        step = self._threads * size * max(1, GATHERED_NBYTES // size)  # bounds how much sealed data is in memory
        for begin in range(0, max(1, len(view)), step):
            piece = view[begin : begin + step]
            needed = len(piece) + max(1, -(-len(piece) // size)) * OVERHEAD_NBYTES
            if len(self._sealed) < needed:
                self._sealed = bytearray(needed)
            first = self._blocks + begin // size
            self._key.seal_run(self._aad_prefix, size, first, piece, self._sealed, 0, self._threads)
            target.write(memoryview(self._sealed)[:needed])

    def close(self) -> None:
        """Write the last block and complete the stream; a path now exists. May be called again."""
        if self.closed or self._target is None:
            return
        if self._owner != os.getpid():
            self.abort()
            return
        try:
            with self._pending:
                if not self.closed:  # by another thread that this one has waited for
                    self._complete(self._target)
        finally:
            self._discard_if_aborted()

    def _complete(self, target: PositionalSink | OrderedSink) -> None:
        try:
            file_length = encrypted_length(self.tell(), self._block_size)
            if self._pending.filled or self._blocks == 0:
                self._seal_pending()
            self._behind.finish()
        except BaseException:
            self.abort()
            raise
        if not self._fate.acquire(False):
            raise ValueError("the stream was aborted while it was closed")
        try:
            target.finish(encode_header(self._block_size), file_length)
            self._file_length = file_length
        finally:
            self._end()

    def abort(self) -> None:
        """Discard the stream: no last block is written, and no file appears at the path. After `close`, do nothing."""
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
        """Undo what was written. If a call in flight still writes, that call undoes it when it ends."""
        if self._file_length is None and self.closed and self._pending.try_turn():
            try:
                self._pending.buffer = bytearray()
                self._behind.drop()
                if self._target is not None:
                    self._target.abort()
            finally:
                self._pending.__exit__()
