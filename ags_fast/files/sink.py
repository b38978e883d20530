"""Where a file's bytes go: to a position of a regular file, or one after the other to anything with a write method.

`open_sink` picks one of the two. `Target` writes in order, too, but in a thread of its own, and also to URLs and to a
bytearray.
"""

from __future__ import annotations

import fcntl
import io
import os

from ags_fast._core import Descriptor
from ags_fast.files.source import duplicate, is_content, with_room
from ags_fast.fs import NewFile, NewObject, file_at, local_path, pwrite_all

TYPE_CHECKING = False  # to import typing takes longer than to import this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from typing import Any

    from ags_fast._types import FilePath, WritableTarget
    from ags_fast.files.source import Source

__all__ = ["OrderedSink", "PositionalSink", "Target", "open_sink"]

COPY_NBYTES = 256 << 10  # of a source, copied at a time
SMALL_NBYTES = 16 << 10  # to copy fewer bytes is faster than to write them, or to hand them to a thread
COLLECTED_NBYTES = 256 << 10  # of small pieces, at most, before they are written


class PositionalSink:
    """A regular file, written by position. Its head comes last: a file without one looks like no file of its kind."""

    def __init__(self, descriptor: Descriptor, new: NewFile | None, file: Any = None) -> None:
        self.descriptor = descriptor
        self.new = new
        self.file = file  # the caller's file object
        self.offset = 0  # where the stream begins

    def begin(self, head: bytes) -> None:
        """Leave room for the head."""
        if self.file is not None:
            self.file.flush()
            self.offset = self.file.tell()
            pwrite_all(self.descriptor, bytes(len(head)), self.offset)  # an old head may be there

    def check_open(self) -> None:
        """Raise ValueError if the target's owner has closed it."""
        if self.file is not None and self.file.closed:
            raise ValueError("the target was closed")

    def finish(self, head: bytes, nbytes: int) -> None:
        """Write the head and publish the file, which has `nbytes`."""
        self.check_open()
        pwrite_all(self.descriptor, head, self.offset)
        if self.file is not None:
            self.file.seek(self.offset + nbytes)
        if self.new is not None:
            self.new.publish()
        else:
            self.descriptor.close()

    def stop(self) -> None:
        """Undo everything. A write in another thread raises or ends."""
        self.descriptor.close()
        if self.new is not None:
            self.new.discard()

    def abort(self) -> None:
        """See `OrderedSink.abort`."""
        self.stop()


class OrderedSink:
    """Anything else with a write method: a pipe, a socket's file, an object of a store."""

    def __init__(self, file: Any, new: NewFile | NewObject | None) -> None:
        self.file = file
        self.new = new
        self.stopped = False

    def begin(self, head: bytes) -> None:
        """Write the head."""
        self.write(memoryview(head))

    def write(self, view: memoryview) -> None:
        """Write all of `view`. ValueError after `stop`."""
        if self.stopped:
            raise ValueError("I/O operation on closed file")
        while view:
            written = self.file.write(view)
            if written is None:
                if isinstance(self.file, io.RawIOBase):
                    raise BlockingIOError("the target takes no data now: a writer needs one that blocks")
                return  # an object that does not report a number has taken everything
            if not 0 < written <= len(view):
                raise OSError(f"the target reports {written} of {len(view)} bytes as written")
            view = view[written:]

    def finish(self, head: bytes, nbytes: int) -> None:
        """Flush and publish the file."""
        if hasattr(self.file, "flush"):
            self.file.flush()
        if self.new is not None:
            self.new.publish()

    def stop(self) -> None:
        """Refuse further writes. A `write` in another thread goes on until it has written its piece."""
        self.stopped = True

    def abort(self) -> None:
        """Undo what was written. Not while another thread is in `write`: its request might arrive later."""
        if self.new is not None:
            self.new.discard()


def open_sink(
    target: WritableTarget, exclusive: bool, fsync: bool, storage_options: Mapping[str, Any] | None = None
) -> PositionalSink | OrderedSink:
    """Open a path, a URL, a file in the making, or a binary file open for writing.

    Args:
        target: Where to write.
        exclusive: Whether a path that exists is refused (FileExistsError).
        fsync: Whether a path's file and folder are on the disk when it is published.
        storage_options: Options for fsspec, of a URL.
    """
    if isinstance(target, (str, os.PathLike)):
        path: FilePath | None = local_path(target) if ":" in os.fsdecode(target) else target
        if path is not None:
            return _new_file(NewFile(path, exclusive=exclusive, fsync=fsync))
        store, name = file_at(target, storage_options)
        new = store.begin(name, exclusive=exclusive, fsync=fsync)
        return _new_file(new) if isinstance(new, NewFile) else OrderedSink(new, new)
    if exclusive or fsync:
        raise ValueError("exclusive and fsync are for a path: open the file as you want it")
    if isinstance(target, NewFile):
        return _new_file(target)
    if isinstance(target, NewObject):
        return OrderedSink(target, target)
    file: Any = target
    if not hasattr(file, "write"):
        raise TypeError(f"a path or a binary file open for writing is required, not {type(file).__name__!r}")
    if is_content(file) and not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_APPEND:
        return PositionalSink(duplicate(file), None, file)
    return OrderedSink(file, None)


def _new_file(new: NewFile) -> PositionalSink | OrderedSink:
    return PositionalSink(new.descriptor, new) if new.positional else OrderedSink(new, new)


class Target:
    """A file that is written from its beginning to its end. A path, or a URL, appears only when it is complete.

    Args:
        dst: A path, a URL, a NewFile or NewObject, a bytearray, or a binary file open for writing.
        private: Whether other users are kept from reading a path before it is complete.
        fsync: Whether a path's file and folder are on the disk when `finish` returns.
        threads: With more than one, a thread writes what `put` takes.
        storage_options: Options for fsspec, of a URL.
    """

    def __init__(
        self,
        dst: WritableTarget | bytearray,
        *,
        private: bool,
        fsync: bool,
        threads: int,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.position = 0
        self.warnings: list[str] = []
        self.discardable = True
        self._new: NewFile | NewObject | None = None
        self._list: bytearray | None = None
        if isinstance(dst, (str, os.PathLike)):
            path = local_path(dst)
            if path is not None:
                self._new = NewFile(path, private=private, fsync=fsync)
            else:
                store, name = file_at(dst, storage_options)
                self._new = store.begin(name, private=private, fsync=fsync)
        elif isinstance(dst, (NewFile, NewObject)):
            self._new = dst
        elif isinstance(dst, bytearray):
            self._list = dst
        elif hasattr(dst, "write"):
            self.discardable = False
        else:
            raise TypeError(f"a path, a bytearray or a file open for writing is required, not {type(dst).__name__!r}")
        self._write: Callable[[Any], Any] = self._new.write if self._new is not None else OrderedSink(dst, None).write
        if self._list is not None:
            self._list.clear()
            self._write = self._list.extend
        self._pool = None
        if threads > 1:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(1)
        self._pending: Future[Any] | None = None
        self._failed: BaseException | None = None  # of the first write that failed
        self._collected = bytearray()  # small pieces that are still to be written
        self._flushed: Future[Any] | None = None  # the write of the small pieces before them
        self._file: Any = dst

    def put(self, *pieces: bytes | memoryview) -> Future[Any] | None:
        """Write pieces in order, with one hand-over to the thread that writes.

        Few bytes are copied, and written with what follows. The pieces must not change until the future is done.
        """
        nbytes = sum(map(len, pieces))
        self.position += nbytes
        if nbytes > SMALL_NBYTES:
            self.flush()
            return self._submit(self._write_all, pieces)
        if len(self._collected) + nbytes > COLLECTED_NBYTES:
            self.flush()
        for piece in pieces:
            self._collected += piece
        return None

    def _write_all(self, pieces: tuple[bytes | memoryview, ...]) -> None:
        for piece in pieces:
            self._write(memoryview(piece))

    def flush(self) -> None:
        """Write the small pieces that wait, once those before them are written: two buffers are in memory at most."""
        if self._collected:
            if self._flushed is not None:
                self._flushed.result()
            collected, self._collected = self._collected, bytearray()
            self._flushed = self._submit(self._write, memoryview(collected))

    def _submit(self, call: Callable[..., Any], *args: Any) -> Future[Any] | None:
        if self._pool is None:
            call(*args)
            return None
        if self._failed is not None:
            raise self._failed
        self._pending = self._pool.submit(self._in_order, call, *args)
        return self._pending

    def _in_order(self, call: Callable[..., Any], *args: Any) -> None:
        """On the writing thread: write nothing after a write that failed."""
        if self._failed is None:
            try:
                call(*args)
            except BaseException as error:
                self._failed = error

    def copy(self, source: Source, begin: int, end: int) -> None:
        """Write bytes of a source. The buffer stays in a core's cache, which makes this faster than copy_file_range."""
        buffer = with_room(memoryview(b""), min(end - begin, COPY_NBYTES))
        if end - begin <= SMALL_NBYTES:
            self.put(source.read_to(buffer, begin, end, True))
            return
        self.drain()  # then write in this thread: to hand over so few bytes takes longer than to write them
        while begin < end:
            step = min(end - begin, COPY_NBYTES)
            self._write(source.read_to(buffer, begin, begin + step, True))
            self.position += step
            begin += step

    def drain(self) -> None:
        """Write everything, and wait for it. Raises the error of the first write that failed."""
        self.flush()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
        if self._failed is not None:
            raise self._failed

    def finish(self) -> None:
        """Publish the file."""
        self.drain()
        if self._new is not None:
            if isinstance(self._new, NewFile) and (sidecar := self._new.remove_sidecar()) is not None:
                self.warnings.append(f"removed {sidecar}: Hadoop's checksum of the file that was there before")
            self._new.publish()
        elif self._list is None and hasattr(self._file, "flush"):
            self._file.flush()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, error: object, *rest: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._new is not None:
            self._new.discard()  # does nothing if the file was published
        elif error is not None and self._list is not None:
            self._list.clear()
