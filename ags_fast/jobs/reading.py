"""Read one file of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ags_fast.dataset.access import Access
from ags_fast.dataset.dataset import Dataset
from ags_fast.errors import ExpiredError
from ags_fast.jobs.arguments import reaching

if TYPE_CHECKING:
    from collections.abc import Callable

    from ags_fast._cursor import Cursor
    from ags_fast._types import Buffer, OrShow, WritableFile
    from ags_fast.dataset.access import Folder
    from ags_fast.jobs.arguments import Reach

Result = TypeVar("Result")


@reaching
def open_file(
    dataset: Folder,
    path: str,
    *,
    version: int | None = None,
    missing: OrShow = "error",
    threads: int | None = None,
    **at: Unpack[Reach],
) -> Cursor:
    """Open one file of a dataset as a seekable binary file of its plaintext.

    To open several files, open a `Dataset` and use its `open_file`: what it reads once serves all of them.

    Args:
        dataset: The dataset's folder: a path, or a URL of fsspec.
        path: The file's path in the dataset.
        version: The version to read; None is the newest.
        missing: What becomes of Parquet columns whose master key the KMS refuses: "error", "hide", or "null".
        threads: How many threads may work on one read; None as for AgsCodec.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Raises:
        FileNotFoundError: There is no such version or file.
        ExpiredError: The version that `version` names was expired.
        IntegrityError: The file was changed.
    """
    access = Access.of(dataset, version=version, **at)
    return _read(access, lambda handle: handle.open_file(path, missing=missing, threads=threads))


@reaching
def copy_file(
    dataset: Folder,
    path: str,
    target: WritableFile,
    *,
    version: int | None = None,
    threads: int | None = None,
    **at: Unpack[Reach],
) -> None:
    """Decrypt one file of a dataset to a file open for writing, which need not seek. What is written passed its tag.

    `target` is a binary file. The other arguments, and the errors, are those of `open_file`.
    """
    access = Access.of(dataset, version=version, **at)
    counted = _Counted(target)
    _read(access, lambda handle: handle.copy_file(path, counted, threads=threads), lambda: not counted.written)


class _Counted:
    """A file open for writing, and whether it was written to."""

    def __init__(self, target: WritableFile) -> None:
        self._target = target
        self.written = False

    def write(self, data: Buffer) -> Any:
        """Write to the file."""
        self.written = True
        return self._target.write(data)


def _read(access: Access, read: Callable[[Dataset], Result], may_repeat: Callable[[], bool] = lambda: True) -> Result:
    """Read a version. If the newest one was meant, and was expired meanwhile, read the one that is the newest now."""
    while True:
        try:
            return read(Dataset(access))
        except ExpiredError:
            if access.version is not None or not may_repeat():
                raise
