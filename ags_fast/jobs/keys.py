"""Two things beside rotation: go back to older wraps of KEKs, and destroy old versions of a master key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.draft import Draft, Idle
from ags_fast.dataset.keks import Keks
from ags_fast.dataset.keys import rewrapped_as
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.errors import AgsError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.jobs.results import JobResult, Row, counted, describe, shown
from ags_fast.jobs.run import UNREADABLE
from ags_fast.keys.cache import clear_cache
from ags_fast.keys.entry import for_columns
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.kek import check_unwraps
from ags_fast.keys.kms import KMS_TYPE, local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.draft import Plans
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log
    from ags_fast.jobs.arguments import Reach
    from ags_fast.keys.entry import KeyEntry

CONCURRENCY = 8  # calls of the KMS at once


@counted
def restore_keys(
    dataset: Folder, *, version: int | None = None, dry_run: bool = False, **at: Unpack[Reach]
) -> JobResult:
    """Take KEKs that do not open with this KMS as an older version of the dataset has them.

    An entry of the log gets the older wraps, and nothing else changes: which KEKs there are, which of them wrap, and
    which versions of master keys are to be destroyed, stays as the newest version says. Nothing is removed.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        version: The number of the version whose wraps are taken. None: for each KEK the newest version that has it in a
            wrap which the KMS unwraps.
        dry_run: Return what would be done, and change nothing.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each KEK: "ok" with an older wrap, "skipped" if the newest wrap opens, or if the KEK is of columns and
        no wrap opens, which may be as it should be; "failed" if no wrap opens.

    Raises:
        KeyAccessError: No version opens, or the KMS opens no wrap of any KEK which needs one.
        IntegrityError: As that, but the KMS refused nothing: the wraps were changed.
        FileNotFoundError: There is no such version.
    """
    clear_cache()  # whether the KMS opens a key is not what this process remembers
    log = Access.of(dataset, **at).log()
    entries = log.recover()
    head, min_version = entries[0], at.get("min_version")
    if min_version is not None and head.number < min_version:
        raise PolicyError(f"the newest version of {log.store.url} is {head.number}, which is older than {min_version}")
    if version is not None:
        entries = [entry for entry in entries if entry.number == version]
        if not entries:
            raise FileNotFoundError(f"{log.store.url} has no version {version} that opens with this KMS")
    with Snapshot(log, head).unless_expired():
        closed = _closed(log, head)
        found = {key_id: new for key_id in closed if (new := _older(log, head, entries, key_id)) is not None}
        rows = [_row(key, closed, found, "planned" if dry_run else "ok") for key in head.keys.values()]
    job = Idle()
    errors = [closed[row.src] for row in rows if row.status == "failed"]
    if errors and not found:  # a call that was refused says nothing of the other wraps
        why = next((error for error in errors if isinstance(error, KeyAccessError)), errors[0])
        kind = KeyAccessError if isinstance(why, KeyAccessError) else IntegrityError
        raise kind(f"no version of {log.store.url} has its KEKs in a wrap that opens with this KMS: {describe(why)}")
    if found and not dry_run:
        log.store.check_writable()

        def decide(head: Entry, plans: Plans) -> Draft:
            now_ms = clock_ms()
            keys = {key_id: rewrapped_as(head.keys[key_id], new, now_ms) for key_id, new in found.items()}
            return Draft("restore-keys", keys=Keks.of(head.keys).changed(keys))

        head, _ = log.append(job, decide)
    return JobResult(job.id, "restore", log.store.url, head.number, rows, head.pin)


def _closed(log: Log, head: Entry) -> dict[str, AgsError]:
    """Return why the KMS does not unwrap some of the KEKs of a head, by their ids."""
    kms, keys = log.kms.for_dataset(head.dataset_id), [*head.keys.values()]
    log.kek_rows.fetch(head.dataset_id, keys)

    def why(key: KeyEntry) -> AgsError | None:
        try:
            if key.double_wrap:
                check_unwraps(kms, log.kek_rows.whole(head.dataset_id, key))
        except AgsError as error:
            return error
        return None

    answers = in_threads(why, keys, min(CONCURRENCY, len(keys)))
    return {key.key_id: error for key, error in zip(keys, answers, strict=True) if error is not None}


def _older(log: Log, head: Entry, entries: Sequence[Entry], key_id: str) -> KeyEntry | None:
    """Return a KEK as the newest of these entries has it in a wrap that opens, and that is not to be destroyed."""
    kms, tried = log.kms.for_dataset(head.dataset_id), {head.keys[key_id].wrap}
    for entry in entries:
        key = entry.keys.get(key_id)
        if key is None or key.wrap in tried:
            continue
        tried.add(key.wrap)
        with suppress(*UNREADABLE):
            check_unwraps(kms, log.kek_rows.whole(head.dataset_id, key))
            if log.version_of(key) not in head.gone:
                return key
    return None


def _row(key: KeyEntry, closed: Mapping[str, AgsError], found: Mapping[str, KeyEntry], done: str) -> Row:
    row = Row(key.key_id, None, done, format="key", key_id=key.key_id)
    if key.key_id in found:
        return row
    if key.key_id not in closed:
        return row._replace(status="skipped", error_class="Current", error="its newest wrap opens")
    status = "skipped" if for_columns(key) else "failed"
    return row._replace(status=status, error_class=type(why := closed[key.key_id]).__name__, error=describe(why))


def destroy_versions(
    kms: Mapping[str, str],
    key_id: str,
    versions: Sequence[int],
    *,
    datasets: Mapping[Any, str | None] | None = None,
    unchecked: bool = False,
    dry_run: bool = False,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Destroy versions of a master key in a local keystore, if none of `datasets` needs them.

    An entry in the log of each dataset says first that nobody may wrap under them any more. So a job that runs is not
    in the way: what it has wrapped under such a version it wraps again.

    What a destroyed version alone has wrapped never opens again: also other datasets, Iceberg tables, and copies of
    `datasets` that were made earlier. Either all versions are destroyed, or none.

    Args:
        kms: The properties of the local keystore.
        key_id: The master key.
        versions: The numbers of the versions. Neither the newest one, nor the one that wraps now, can be destroyed.
        datasets: The datasets under the master key, each with a pin that its newest version must descend from, or None:
            local paths, fsspec URLs, or `Store`.
        unchecked: Look at no dataset.
        dry_run: Check everything, and destroy nothing.
        key_store: Where the keys of `datasets` are; None: in each dataset.
        storage_options: Options for fsspec.

    Returns:
        ``destroyed``: the versions that were not destroyed before; ``versions`` as given; ``key_id``; ``datasets``:
        the names of what was looked at; ``dry_run``.

    Raises:
        PolicyError: One of the datasets needs a version, or it cannot be told. Nothing was destroyed.
        IntegrityError: A dataset was changed, or does not descend from its pin. Nothing was destroyed.
        ValueError: There are no versions, one is the newest or wraps now, `kms` is no local keystore, or neither
            `datasets` nor `unchecked` is given. Nothing was destroyed.
        KeyAccessError: The keystore has no such key or version, or does not open a dataset. Nothing was destroyed.
        FileNotFoundError: There is no such dataset. Nothing was destroyed.
    """
    if not isinstance(datasets, Mapping | None):
        raise TypeError(f"datasets are a mapping, each with a pin or None, not {type(datasets).__name__}")
    looked, numbers = dict(datasets or {}), sorted(set(versions))
    if kms.get(KMS_TYPE) != "local":
        raise ValueError(f"only versions in a local keystore can be destroyed here, with {KMS_TYPE}=local")
    if not numbers:
        raise ValueError("say which versions to destroy")
    if bool(looked) == unchecked:
        raise ValueError("give either the datasets to look at first, or unchecked=True to look at none")
    local.destroy_versions(kms, key_id, numbers, dry_run=True)  # what is wrong with the versions is known at once
    found = [Access.of(one, kms, key_store, storage_options, pin=pin).open().log for one, pin in looked.items()]
    for forbid in [False] if dry_run else [False, True]:  # all are asked before one is changed
        for log in found:
            for number in numbers:
                try:
                    if forbid:
                        reach.retire_master(log, Idle(), (key_id, str(number)))
                    else:
                        reach.check_master(log, log.head(), (key_id, str(number)))
                except PolicyError as error:
                    raise PolicyError(
                        f"version {number} of the local key {key_id!r} stays, and nothing was destroyed: of the "
                        f"dataset {log.store.url} at version {log.head().number}, {error}. `ags-fast keys audit` says "
                        "what to run first"
                    ) from None
    return {
        "key_id": key_id,
        "versions": numbers,
        "destroyed": local.destroy_versions(kms, key_id, numbers, dry_run=dry_run),
        "datasets": [shown(os.fspath(one) if isinstance(one, str | os.PathLike) else one.url) for one in looked],
        "dry_run": dry_run,
    }
