"""Merge the manifests of a dataset into one run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ags_fast.dataset.access import Access
from ags_fast.dataset.decide import Wish, next_version
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.planning import reserve_keys
from ags_fast.jobs.expiry import apply_retention, manifest_row
from ags_fast.jobs.results import JobResult, counted, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast._types import FilePath
    from ags_fast.fs import Store
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.stores import KeyResolver


@counted
def compact(
    dataset: FilePath | Store,
    *,
    kms: KmsClient | Mapping[str, str],
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: FilePath | Store | KeyResolver | None = None,
    storage_options: Mapping[str, str] | None = None,
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
    job_id, store = new_job_id(), opened.store
    old = next_version(Wish("compact", job_id, compact=True), head, None).merges
    if dry_run or not old:
        rows = [manifest_row(opened, ref, "planned") for ref in old]
        return JobResult(job_id, "compact", store.url, head.number, rows, head.pin)
    store.check_writable()
    reserve_keys(opened, head.policy, job_id, None, True, [], [])  # for what seals the manifests
    with ExitStack() as held:
        facts = {"operation": "compact", "source": shown(store.url)}
        plan = Plan.create(opened, job_id, [], "running", base=head.number, **facts)
        held.callback(plan.release)
        made = opened.commit(Wish("compact", job_id, base=head, compact=True))
        plan.end()
    head = opened.committed(made.version)
    rows = [manifest_row(opened, ref) for ref in made.change.merges]
    result = JobResult(job_id, "compact", store.url, head.number, rows, head.pin)
    apply_retention(opened, result)
    return result
