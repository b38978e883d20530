"""Remove old versions: when a caller asks for it, and after a job as the dataset's policy has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset import expiry
from ags_fast.dataset.access import Access
from ags_fast.dataset.names import new_job_id
from ags_fast.errors import AgsError
from ags_fast.jobs.results import JobResult, Row, counted, describe, result_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.keys.kms import KmsClient


@counted
def expire(
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    keep: int = 1,
    older_than: timedelta | None = None,
    force: bool = False,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Remove old versions of `dataset`, and then whatever no version needs: manifests, files, keys.

    **This is final.** What was removed and not copied elsewhere cannot be read again. Of what was copied, old KEKs that
    are removed here open nothing more.

    With the versions go manifests and files that no other version has, retired KEKs that nothing names and whose grace
    is over, and the past of the key store, where KEKs are still wrapped by old versions of master keys. Before that,
    each KEK that was wrapped again since the last expiry is unwrapped once, to see that it opens. What open jobs may
    need stays. If an expiry dies, the next one finishes its work.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        kms: The properties of a KMS, or a client.
        keep: How many of the newest versions stay, at least 1.
        older_than: Remove only versions that are older; None: of any age.
        force: Do not wait for the grace of KEKs.
        dry_run: Only plan; the rows have the status "planned".
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each thing that was removed, and one with the status "skipped" for each retired KEK that stays.

    Raises:
        FileNotFoundError: There is no dataset.
        IntegrityError: The versions do not share one history, or do not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        ValueError: `keep` is less than 1, or the pin is malformed.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}: the newest version stays")
    opened = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin).open()
    return expire_versions(opened, keep, older_than, force, dry_run)


def expire_versions(
    opened: Ledger, keep: int, older_than: timedelta | None, force: bool, dry_run: bool = False
) -> JobResult:
    """Do what `expire` does, with an open dataset."""
    job_id, head, rows = expiry.expire_versions(opened, keep, older_than, force, dry_run)
    return result_of(opened.store, "expire", job_id, head, rows)


def apply_retention(opened: Ledger, result: JobResult) -> None:
    """After a job, expire what the dataset's policy does not keep."""
    try:
        done = expiry.expire_by_policy(opened, opened.current())
        if done is not None:
            result.expired = result_of(opened.store, "expire", *done)
    except (AgsError, OSError) as error:  # the job itself has done what it had to do
        row = Row(opened.store.url, None, "failed", type(error).__name__, describe(error))
        result.expired = JobResult(new_job_id(), "expire", opened.store.url, result.version, [row], result.pin)
