"""Read one file of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast.handle.access import Access
from ags_fast.handle.dataset import Dataset
from ags_fast.onelog.errors import ExpiredError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Mapping

    from ags_fast._types import Buffer, WritableFile
    from ags_fast.handle.access import Folder, KeyPlace
    from ags_fast.keys.kms import KmsClient

Result = TypeVar("Result")


def open_file(
    dataset: Folder,
    path: str,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    missing: str = "error",
    threads: int | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> io.RawIOBase:
    """Open one file of a dataset as a seekable binary file of its plaintext.

    To open several files, open a `Dataset` and use its `open_file`: what it reads once serves all of them.

    Args:
        dataset: The dataset's folder: a path, or a URL of fsspec.
        path: The file's path in the dataset.
        kms: The properties of a KMS, or a client.
        version: The version to read; None is the newest.
        min_version: The least number that the newest version may have (else PolicyError).
        pin: A pin that the newest version must descend from (else IntegrityError).
        missing: What becomes of Parquet columns whose master key the KMS refuses: "error", or "hide" them.
        threads: How many threads may work on one read; None as for AgsCodec.
        key_store: Where the dataset's keys are, if not in the dataset.
        storage_options: Options for fsspec.

    Raises:
        FileNotFoundError: There is no such dataset, version or file.
        ExpiredError: The version that `version` names was expired.
        IntegrityError: Something is not what was written.
        KeyAccessError: The KMS refuses.
    """
    access = Access.of(dataset, kms, key_store, storage_options, version, min_version, pin)
    return _read(access, lambda handle: handle.open_file(path, missing=missing, threads=threads))


def copy_file(
    dataset: Folder,
    path: str,
    target: WritableFile,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    threads: int | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Decrypt one file of a dataset to a file open for writing, which need not seek. What is written passed its tag.

    Args:
        dataset: The dataset's folder: a path, or a URL of fsspec.
        path: The file's path in the dataset.
        target: A binary file, open for writing.
        kms: The properties of a KMS, or a client.
        version: The version to read; None is the newest.
        min_version: The least number that the newest version may have (else PolicyError).
        pin: A pin that the newest version must descend from (else IntegrityError).
        threads: How many threads may work on the file; None as for AgsCodec.
        key_store: Where the dataset's keys are, if not in the dataset.
        storage_options: Options for fsspec.

    Raises:
        FileNotFoundError: There is no such dataset, version or file.
        ExpiredError: The version that `version` names was expired.
        IntegrityError: Something is not what was written.
        KeyAccessError: The KMS refuses.
    """
    access = Access.of(dataset, kms, key_store, storage_options, version, min_version, pin)
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
