"""Files of a dataset that are written through fsspec, and the transactions that make versions of them."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsspec.transaction import Transaction

from ags_fast._cursor import Unfinished
from ags_fast._text import TextWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

    from ags_fast._types import Buffer
    from ags_fast.dataset.files.writing import NewDatasetFile


__all__ = ["AgsTransaction", "CompressedFile", "NewFile", "refuse_mode"]


class AgsTransaction(Transaction):  # type: ignore[misc]
    """``with fs.transaction:`` makes one version of all that is written and removed inside, or none.

    It begins at the newest version, which is what reads inside show: a file that was written in the transaction is seen
    after its end. A conflict with another job raises ConcurrentChangeError and drops all of it.
    Its threads share it. In a fork's child there is no transaction, and the child's end of the block does nothing.
    """

    fs: Any  # an AgsFileSystem, which knows the transaction that runs

    def start(self) -> None:
        """Begin at the newest version. Raises ValueError in a transaction, and if the version is fixed."""
        self.fs.begin_changes()

    def complete(self, commit: bool = True) -> None:
        """Make the version, or drop all of it."""
        self.fs.finish_changes(commit)

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        self.complete(error_class is None)


def refuse_mode(path: str, mode: str) -> NoReturn:
    """Raise io.UnsupportedOperation: a file of a dataset is written once, as a whole."""
    raise io.UnsupportedOperation(
        f"mode {mode!r} would change {path!r} in place, but a file of a dataset is written as a whole: read the file, "
        "and write it with mode 'wb'"
    )


class NewFile(Unfinished):
    """A file of a dataset, open for writing. `close` completes it, and outside of a transaction makes a version.

    A file that an exception leaves is discarded: by the ``with`` block of the file itself, or of an object that closes
    its files in any case, such as ``with fsspec.open(...)``. A file that is opened, or closed by hand, because of an
    exception is completed. A file that is collected without `close` is discarded, with a ResourceWarning.

    Args:
        path: The path in the dataset.
        file: The file of the transaction.
        end: Ends the transaction of which this is the only file, by a commit or not; None: the transaction goes on.
        autocommit: Whether `close` ends the transaction; if not, `commit` or `discard` does.
    """

    def __init__(
        self, path: str, file: NewDatasetFile, end: Callable[[bool], None] | None, autocommit: bool = True
    ) -> None:
        self.path = path
        self.autocommit = autocommit
        self._file = file
        self._end_changes = end
        self.handled = sys.exc_info()[1]  # the exception because of which the file is written
        self._owner = os.getpid()

    @property
    def name(self) -> str:
        """The path in the dataset."""
        return self.path

    def __repr__(self) -> str:
        return f"<NewFile {self.path!r}{', closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a file in the making is never pickled: open it where it is written")

    def tell(self) -> int:
        """Return the bytes of plaintext written so far."""
        return self._file.tell()

    def write(self, data: Buffer, /) -> int:
        """Write all of a bytes-like object. Returns its size in bytes."""
        return self._file.write(data)

    def close(self) -> None:
        """Complete the file. May be called again.

        Raises:
            FormatError: A file that is written as Parquet is not a Parquet file.
            ConcurrentChangeError: Another job has changed this path meanwhile.
        """
        if self.closed:
            return
        if left_by_exception(self.handled):
            self.abort()
            return
        try:
            self._file.close()
        except BaseException:
            self._end(False)
            raise
        finally:
            super().close()
        if self.autocommit:
            self._end(True)

    def commit(self) -> None:
        """Make the version, if the file was opened with ``autocommit=False``."""
        self._end(True)

    def abort(self) -> None:
        """Discard the file. After its version was made, do nothing."""
        try:
            self._file.abort()
        finally:
            super().close()
            self._end(False)

    discard = abort  # fsspec's name

    def _end(self, commit: bool) -> None:
        end, self._end_changes, self.handled = self._end_changes, None, None
        if end is not None and self._owner == os.getpid():
            end(commit)


class CompressedFile(Unfinished):
    """Bytes on their way to a new file through a compressor, which `close` completes together with the file."""

    def __init__(self, file: NewFile, compress: Callable[..., Any]) -> None:
        self._file = file
        self._inner = compress(file, mode="w")
        self._owner = os.getpid()

    def tell(self) -> int:
        """Return the bytes of plaintext written so far."""
        return self._inner.tell()  # type: ignore[no-any-return]

    def write(self, data: Buffer, /) -> int:
        """Compress all of a bytes-like object. Returns its size in bytes."""
        self._inner.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        """Complete the file. May be called again."""
        if self.closed:
            return
        if left_by_exception(self._file.handled):
            self.abort()
            return
        try:
            self._inner.close()
            self._file.close()
        except BaseException:
            self._file.abort()
            raise
        finally:
            super().close()

    def abort(self) -> None:
        """Discard the file."""
        try:
            self._file.abort()
        finally:
            super().close()
            with suppress(ValueError, OSError):  # it would write its last bytes
                self._inner.close()

    discard = abort


def left_by_exception(handled: BaseException | None) -> bool:
    """Whether a file is closed by an object that an exception leaves, and that closes its files in any case.

    `fsspec.OpenFile` and the handles of pandas have such a `close`, which their ``__exit__`` calls. Who calls the
    file's `close` in an ``__exit__``, an ``except`` or a ``finally`` knows of the exception, and wants the file.

    Args:
        handled: The exception that was handled when the file was opened. That one leaves another block.
    """
    if sys.exc_info()[1] in (None, handled):
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (the documented way to the caller)
    by_other = False
    while frame is not None and frame.f_code.co_name == "close":
        by_other = frame.f_globals.get("__name__") not in (__name__, TextWriter.__module__)
        frame = frame.f_back
    return by_other and frame is not None and frame.f_code.co_name == "__exit__"
