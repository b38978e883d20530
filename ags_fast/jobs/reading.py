"""Read one file of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ags_fast.dataset.dataset import Dataset
from ags_fast.errors import ConcurrentChangeError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Mapping

    from ags_fast._types import WritableFile
    from ags_fast.dataset.access import Folder, KeyPlace
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
        IntegrityError: No version was committed, or something is not what was written.
        KeyAccessError: The KMS refuses.
    """
    opened = Dataset.open(
        dataset,
        kms=kms,
        version=version,
        min_version=min_version,
        pin=pin,
        key_store=key_store,
        storage_options=storage_options,
    )
    return _on_newest(opened, lambda: opened.open_file(path, missing=missing, threads=threads))


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
        IntegrityError: No version was committed, or something is not what was written.
        KeyAccessError: The KMS refuses.
    """
    opened = Dataset.open(
        dataset,
        kms=kms,
        version=version,
        min_version=min_version,
        pin=pin,
        key_store=key_store,
        storage_options=storage_options,
    )
    _on_newest(opened, lambda: opened.copy_file(path, target, threads=threads))


def _on_newest(dataset: Dataset, read: Callable[[], Result]) -> Result:
    """Read; again if the version was expired before the file was open, and there is a newer one."""
    while True:
        try:
            return read()
        except ConcurrentChangeError:
            if not dataset.refresh():
                raise
