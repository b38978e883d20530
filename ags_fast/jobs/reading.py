"""Read one file of a dataset."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.changes import until_read
from ags_fast.dataset.dataset import Dataset

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping

    from ags_fast._types import WritableFile
    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.keys.kms import KmsClient


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
    access = Access.of(dataset, kms, key_store, storage_options, version, min_version, pin)

    def read(handle: Dataset) -> io.RawIOBase:
        return handle.open_file(path, missing=missing, threads=threads)

    return until_read(partial(Dataset, access), read)


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
    access = Access.of(dataset, kms, key_store, storage_options, version, min_version, pin)
    until_read(partial(Dataset, access), lambda handle: handle.copy_file(path, target, threads=threads))
