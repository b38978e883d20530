"""Files of a dataset that are written through fsspec, and the transactions that make versions of them."""

from __future__ import annotations

import io
import os
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsspec.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from ags_fast._types import Buffer
    from ags_fast.dataset.files.writing import NewDatasetFile


__all__ = ["AgsTransaction", "CompressedFile", "NewFile", "refuse_mode"]

FRAMES = 8  # of callers, that may stand between an `__exit__` and the `close` of a file


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


class NewFile(io.RawIOBase):
    """A file of a dataset, open for writing. `close` completes it, and outside of a transaction makes a version.

    A file that an exception leaves is discarded: by the ``with`` block of the file itself, or of an object that closes
    the file in its ``__exit__``, such as ``with fsspec.open(...)``. A file that is collected without `close` is
    discarded, with a ResourceWarning.

    Args:
        path: The path in the dataset.
        file: The file of the transaction.
        end: Ends the transaction of which this is the only file, by a commit or not; None: the transaction goes on.
        autocommit: Whether `close` ends the transaction; if not, `commit` or `discard` does.
    """

    mode = "wb"

    def __init__(
        self, path: str, file: NewDatasetFile, end: Callable[[bool], None] | None, autocommit: bool = True
    ) -> None:
        self.path = path
        self.autocommit = autocommit
        self._file = file
        self._end_changes = end
        self._owner = os.getpid()

    @property
    def name(self) -> str:
        """The path in the dataset."""
        return self.path

    def __repr__(self) -> str:
        return f"<NewFile {self.path!r}{', closed' if self.closed else ''}>"

    def __reduce__(self) -> str:
        raise TypeError("a file in the making is never pickled: open it where it is written")

    def writable(self) -> bool:
        """Return True."""
        return True

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
        if left_by_exception():
            self.discard()
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

    def discard(self) -> None:
        """Discard the file. After its version was made, do nothing."""
        try:
            self._file.abort()
        finally:
            super().close()
            self._end(False)

    def _end(self, commit: bool) -> None:
        end, self._end_changes = self._end_changes, None
        if end is not None and self._owner == os.getpid():
            end(commit)

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # Without this, io.IOBase would close, and so complete, a file that was never closed.
        if hasattr(self, "_owner") and not self.closed:
            if self._owner == os.getpid():
                warnings.warn(f"{self!r} was not closed, and is lost", ResourceWarning, source=self, stacklevel=2)
                self.discard()
            else:
                super().close()


class CompressedFile(io.RawIOBase):
    """Bytes on their way to a new file through a compressor, which `close` completes together with the file."""

    mode = "wb"

    def __init__(self, file: NewFile, compress: Callable[..., Any]) -> None:
        self._file = file
        self._inner = compress(file, mode="w")

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the bytes of plaintext written so far."""
        return self._inner.tell()  # type: ignore[no-any-return]

    def write(self, data: Buffer, /) -> int:
        """Compress all of a bytes-like object. Returns its size in bytes."""
        self._inner.write(data)
        return memoryview(data).nbytes

    def __del__(self) -> None:
        """Do not close the file, because that would complete it. Its own ``__del__`` discards it."""

    def close(self) -> None:
        """Complete the file. May be called again."""
        if self.closed:
            return
        if left_by_exception():
            self.discard()
            return
        try:
            self._inner.close()
            self._file.close()
        except BaseException:
            self._file.discard()
            raise
        finally:
            super().close()

    def discard(self) -> None:
        """Discard the file."""
        try:
            self._file.discard()
        finally:
            super().close()
            with suppress(ValueError, OSError):  # it would write its last bytes
                self._inner.close()

    def __exit__(self, error_class: object, error: object, traceback: object) -> None:
        if error_class is None:
            self.close()
        else:
            self.discard()


def left_by_exception() -> bool:
    """Whether the `close` that calls this runs in an ``__exit__`` that was called with an exception.

    `fsspec.OpenFile` and the handles of pandas close files in the same way whether their block has succeeded or not.
    """
    error = sys.exc_info()[1]
    if error is None:
        return False
    frame = sys._getframe(2)  # noqa: SLF001 (the documented way to the caller)
    for _ in range(FRAMES):
        if frame.f_code.co_name == "__exit__" and any(
            value is error or (isinstance(value, tuple) and any(one is error for one in value))
            for value in frame.f_locals.values()
        ):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
