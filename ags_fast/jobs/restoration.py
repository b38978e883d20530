"""Go back to an older document of the key store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import VERSIONS, new_job_id
from ags_fast.dataset.versions import version_numbers
from ags_fast.errors import AgsError, KeyAccessError, PolicyError
from ags_fast.fs.numbered import numbered
from ags_fast.jobs.results import JobResult, Row, describe
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.entry import KeyEntry, for_columns
from ags_fast.keys.kek import check_unwraps
from ags_fast.keys.kms import KmsClient
from ags_fast.keys.stores import DatasetKeyStore, MemoryKeyStore, open_key_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.versions import Version
    from ags_fast.keys.stores.restore import Earlier


def restore_keys(
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Go back to an older document of a dataset's key store, if the newest document does not open with this KMS.

    The new document has the content of the old one, and comes after the current one. Nothing is removed, so this can
    be taken back in the same way. Keys that were made since are not in the new document. Keys that were retired since
    wrap again.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        kms: The properties of a KMS, or a client.
        version: The number of the document in ``_ags/keys``. None: the newest one before the current one whose active
            KEKs the KMS unwraps, except KEKs of columns. Then nothing is done if the KMS unwraps those of the current
            document.
        dry_run: Return what would be done, and change nothing.
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each KEK, "skipped" if the newest keys open, and a "failed" row for each version of the dataset that
        these keys do not open any more. `JobResult.version` is the dataset's newest version.

    Raises:
        KeyAccessError: No document opens.
        PolicyError: The keys are in a database, which has a past of its own, or the dataset is older than
            `min_version`.
        FileNotFoundError: There is no dataset, or no document of this number.
        IntegrityError: The document was changed, or the dataset does not descend from the pin.
    """
    access = Access.of(dataset, kms, key_store, storage_options, min_version=min_version, pin=pin)
    store, client = access.store, access.kms
    keys = open_key_store(key_store, client, store=store, storage_options=storage_options)
    if not isinstance(keys, DatasetKeyStore):
        raise PolicyError(f"{keys!r} keeps no documents: put the database back, or rows of it, by its own means")
    clear_cache()  # whether the KMS opens a key is not what this process remembers
    if version is None and (current := _entries_that_open(keys, client)) is not None:
        access.open()
        why = "the newest keys open: name a version to go back anyway"
        rows = [Row(e.key_id, None, "skipped", "Current", why, format="key", key_id=e.key_id) for e in current]
        return JobResult(new_job_id(), "restore", store.url, max(version_numbers(store), default=None), rows)
    found = keys.earlier(version) if version is not None else _newest_that_opens(keys, client, store.url)
    opened = Ledger(store, client, MemoryKeyStore(found.dataset_id, found.entries, found.newest + 1), pin, min_version)
    if pin is not None or min_version:
        opened.current()
    own, done = client.for_dataset(found.dataset_id), "planned" if dry_run else "ok"
    rows = [_unwrap_row(own, entry, done) for entry in found.entries.values()]
    failed, head = _closed_versions(opened)
    if not dry_run:
        store.check_writable()
        keys.restore(found)
    number = max(opened.version_numbers(), default=None)
    pinned = head.pin if head is not None and head.number == number else None
    return JobResult(new_job_id(), "restore", store.url, number, rows + failed, pinned)


def _entries_that_open(keys: DatasetKeyStore, kms: KmsClient) -> list[KeyEntry] | None:
    """Return the active KEKs of the newest document, except KEKs of columns; None if the KMS does not unwrap them."""
    try:
        entries = _needed(keys.list())
        _check_unwraps_all(kms.for_dataset(keys.dataset_id), entries)
    except AgsError:
        return None
    return entries


def _newest_that_opens(keys: DatasetKeyStore, kms: KmsClient, url: str) -> Earlier:
    """Return the newest document before the current one whose active KEKs the KMS unwraps. KeyAccessError if none."""
    why = ""
    for number in keys.earlier_numbers():
        try:
            earlier = keys.earlier(number)
            _check_unwraps_all(kms.for_dataset(earlier.dataset_id), _needed(earlier.entries.values()))
            return earlier
        except (AgsError, FileNotFoundError) as error:
            why = why or f": version {number}: {describe(error)}"
    raise KeyAccessError(f"no older document in _ags/keys of {url} opens with this KMS{why}")


def _closed_versions(opened: Ledger) -> tuple[list[Row], Version | None]:
    """Return a row for each version that these keys do not open, and the newest version whose document they open."""
    rows, seen = [], None
    for number in opened.version_numbers():
        try:
            seen = opened.version(number)
            for ref in seen.manifests:
                opened.open_table(ref, opened.envelope)
        except AgsError as error:
            path = opened.store.full_path(VERSIONS + numbered(number))
            rows.append(Row(path, None, "failed", type(error).__name__, describe(error), format="version"))
    return rows, seen


def _needed(entries: Iterable[KeyEntry]) -> list[KeyEntry]:
    return [entry for entry in entries if entry.state == "active" and not for_columns(entry)]


def _check_unwraps_all(kms: KmsClient, entries: Iterable[KeyEntry]) -> None:
    for entry in entries:
        if entry.double_wrap:
            check_unwraps(kms, entry, None)


def _unwrap_row(kms: KmsClient, entry: KeyEntry, status: str) -> Row:
    try:
        _check_unwraps_all(kms, [entry])
    except AgsError as error:
        return Row(
            entry.key_id, None, "failed", type(error).__name__, describe(error), format="key", key_id=entry.key_id
        )
    return Row(entry.key_id, None, status, format="key", key_id=entry.key_id)
