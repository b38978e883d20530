"""Go back to an older document of the key store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import VERSIONS, new_job_id
from ags_fast.dataset.versions import version_numbers
from ags_fast.errors import AgsError, KeyAccessError, PolicyError
from ags_fast.fs import Store
from ags_fast.fs.numbered import numbered
from ags_fast.jobs.results import JobResult, Row, describe
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.entry import KeyEntry, for_columns
from ags_fast.keys.kek import check_unwraps
from ags_fast.keys.kms import KmsClient, as_kms
from ags_fast.keys.stores import DatasetKeyStore, MemoryKeyStore, open_key_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def restore_keys(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Go back to an older document of the key store of `dataset`, where the newest does not open with this KMS.

    version: of the key store, the number in ``_ags/keys``; None takes the newest one before the current one whose
    active KEKs the KMS unwraps, but for those of columns, and only if it does not unwrap those of the current one.

    The new document has the content of the old one, and comes after the current one. Nothing is removed, so this can
    be taken back in the same way. Keys that were made since are not in it; those that were retired since wrap again.

    A row for each KEK, and for each version of the dataset that these keys do not open any more ("failed"). In a
    result's `version` is that of the dataset. If the newest keys open, nothing is done, and the rows are "skipped".
    dry_run: look only. PolicyError if the keys are in a database, which has a past of its own. KeyAccessError if no
    document opens.
    """
    client = as_kms(kms)
    store = dataset if isinstance(dataset, Store) else Store(dataset, storage_options)
    keys = open_key_store(key_store, client, store=store, storage_options=storage_options)
    if not isinstance(keys, DatasetKeyStore):
        raise PolicyError(f"{keys!r} keeps no documents: put the database back, or rows of it, by its own means")
    clear_cache()  # whether the KMS opens a key is not what this process remembers
    if version is None:
        try:
            there = _needed(keys.list())
            _check_unwraps_all(client.for_dataset(keys.dataset_id), there)
        except AgsError:
            pass
        else:
            Ledger.open(store, client, key_store=keys, pin=pin, min_version=min_version)
            row = Row(
                "", None, "skipped", "Current", "the newest keys open: name a version to go back anyway", format="key"
            )
            rows = [row._replace(src=entry.key_id, key_id=entry.key_id) for entry in there]
            return JobResult(new_job_id(), "restore", store.url, max(version_numbers(store), default=None), rows)
    found, why = None, ""
    for number in [version] if version is not None else keys.earlier_numbers():
        try:
            earlier = keys.earlier(number)
            if version is None:
                _check_unwraps_all(client.for_dataset(earlier.dataset_id), _needed(earlier.entries.values()))
            found = earlier
            break
        except (AgsError, FileNotFoundError) as error:
            if version is not None:
                raise
            why = why or f": version {number}: {describe(error)}"
    if found is None:
        raise KeyAccessError(f"no older document in _ags/keys of {store.url} opens with this KMS{why}")
    preview = MemoryKeyStore(found.dataset_id, found.entries, found.newest + 1)
    opened = Ledger(store, client, preview, pin, min_version)
    if pin is not None or min_version:
        opened.current()
    own, done = client.for_dataset(found.dataset_id), "planned" if dry_run else "ok"
    rows = [_unwrap_row(own, entry, done) for entry in found.entries.values()]
    numbers, seen = opened.version_numbers(), None
    for n in numbers:
        try:
            seen = opened.version(n)
            for ref in seen.manifests:
                opened.open_table(ref, opened.envelope)
        except AgsError as error:
            path = store.full_path(VERSIONS + numbered(n))
            rows.append(Row(path, None, "failed", type(error).__name__, describe(error), format="version"))
    if not dry_run:
        store.check_writable()
        keys.restore(found)
    pinned = seen.pin if seen is not None and seen.number == numbers[-1] else None
    return JobResult(new_job_id(), "restore", store.url, numbers[-1] if numbers else None, rows, pinned)


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
