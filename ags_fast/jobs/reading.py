"""Read one file of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from ags_fast.dataset.ledger import Ledger
from ags_fast.errors import ConcurrentChangeError
from ags_fast.jobs.run import denied_keys, envelope_for
from ags_fast.jobs.work.context import Context
from ags_fast.jobs.work.dispatch import work_on
from ags_fast.keys.kms import KmsClient, as_kms

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.stream import AgsReader


def open_file(
    dataset: Any,
    path: str,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    missing: str = "error",
    threads: int | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> AgsReader | io.RawIOBase:
    """One file of a dataset as a seekable binary file; `path` as it was in the tree that was encrypted.

    Of a Parquet file it is what `ags_fast.parquet.open_plain` makes: a plaintext Parquet file to any reader, decrypted
    as far as it is read. missing: columns whose master key the KMS does not give are an "error", or "hide" them.
    """
    if missing not in ("error", "hide"):
        raise ValueError(f"missing must be 'error' or 'hide', not {missing!r}")
    context, entry = _one_file(
        dataset, path, kms, key_store, storage_options, version, min_version, pin, threads, missing == "hide"
    )
    return work_on(entry.format).view(context, entry)


def copy_file(
    dataset: Any,
    path: str,
    target: BinaryIO,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    threads: int | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Decrypt one file of a dataset to a file open for writing, which need not seek. What is written passed its tag."""
    context, entry = _one_file(
        dataset, path, kms, key_store, storage_options, version, min_version, pin, threads, False
    )
    work_on(entry.format).copy(context, entry, target)


def _one_file(
    dataset: Any,
    path: str,
    kms: KmsClient | Mapping[str, str],
    key_store: Any,
    storage_options: Mapping[str, Any] | None,
    version: int | None,
    min_version: int | None,
    pin: str | None,
    threads: int | None,
    hide: bool,
) -> tuple[Context, FileEntry]:
    opened = Ledger.open(dataset, as_kms(kms), storage_options, key_store, pin=pin)
    while True:
        head = opened.committed(opened.current(version=version, min_version=min_version))
        try:
            entry = opened.find(head, path)
            break
        except ConcurrentChangeError:
            if version is not None:
                raise
    if entry is None:
        raise FileNotFoundError(f"the dataset's version {head.number} has no {path!r}")
    envelope = envelope_for(opened, [entry])
    without = denied_keys(opened, [entry]) if hide else frozenset()
    return Context("verify", "", opened.id, opened.store, envelope, threads=threads, without=without), entry
