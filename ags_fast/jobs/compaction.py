"""Merge the manifests of a dataset into one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.decide import Wish, next_version
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.rows import manifest_row
from ags_fast.jobs.results import JobResult, counted, result_of
from ags_fast.jobs.retention import apply_retention
from ags_fast.jobs.run import commit_without_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.keys.kms import KmsClient


@counted
def compact(
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Make a version of the same files whose manifests are one sorted run, so that a lookup reads one manifest.

    Commits merge manifests by themselves and keep them few; nothing depends on this job. It pays after many commits,
    before a time of many reads. No file of data is touched. The old manifests stay until the versions that name them
    are expired. If the manifests are one run already, no version is made.

    Args:
        dataset: The dataset's folder: a path, or a URL of fsspec.
        kms: The properties of a KMS, or a client.
        dry_run: Say which manifests would be merged, and do nothing.
        min_version: The least number that the newest version may have (else PolicyError).
        pin: A pin that the newest version must descend from (else IntegrityError).
        key_store: Where the dataset's keys are, if not in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A result with a row for each manifest that was merged.

    Raises:
        FileNotFoundError: There is no such dataset.
        IntegrityError: No version was committed, or something is not what was written.
        KeyAccessError: The KMS refuses.
    """
    opened = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin).open()
    head = opened.committed(opened.current(writes=not dry_run))
    wish = Wish("compact", new_job_id(), base=head, compact=True)
    change = next_version(wish, head, None)
    if dry_run or not change:
        rows = [manifest_row(opened.store, ref, "planned") for ref in change.merges]
        return result_of(opened.store, "compact", wish.job_id, head, rows)
    made = commit_without_files(opened, wish)
    rows = [manifest_row(opened.store, ref) for ref in made.change.merges]
    result = result_of(opened.store, "compact", wish.job_id, made.version, rows)
    apply_retention(opened, result)
    return result
