"""Remove what dead jobs have left, and set the policy of later jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import MANIFESTS, PLANS, new_job_id
from ags_fast.dataset.plan import Plan, clear, is_dead, open_plans, orphan_files, orphan_manifests
from ags_fast.dataset.policy import Policy
from ags_fast.fs import Store
from ags_fast.jobs.expiry import finish_expiry
from ags_fast.jobs.results import JobResult, Row, counted
from ags_fast.keys.kms import KmsClient, as_kms

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from ags_fast._types import FilePath
    from ags_fast.dataset.access import Folder, KeyPlace


@counted
def sweep(
    dataset: FilePath,
    *,
    kms: KmsClient | Mapping[str, str] | None = None,
    older_than: timedelta | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Remove what jobs that died have left behind; a row for each thing removed.

    Without a KMS that is what can be told from names alone: temporary files that no living process holds, and uploads
    that were begun and not completed. With one it is also the plans of dead jobs, so that they can no longer be
    resumed, with the files that only they name, and manifests of no version; what a dead expiry had begun is finished.

    On local files a lock tells whether a job lives. Object stores have none: there, what is younger than `older_than`,
    by default a day, may be a living job's and stays. Given, it counts on local files too.

    With a KMS nothing is removed before all versions that are there were seen to be of one history, and of that of the
    pin: IntegrityError otherwise. ValueError for a pin or min_version without a KMS, which cannot be checked.
    """
    store = Store(dataset, storage_options)
    age = None if older_than is None else older_than.total_seconds()
    opened = None
    if kms is not None:
        opened = Ledger.open(store, as_kms(kms), key_store=key_store, pin=pin, min_version=min_version)
        opened.check_history()
    elif pin is not None or min_version:
        raise ValueError("a pin, and min_version, are checked with a KMS: pass kms")
    rows = [Row(store.full_path(path), None, "ok", format="temporary") for path in store.sweep(older_than=age)]
    head = None
    if opened is not None:
        for job_id in open_plans(store, begun=True):
            if not is_dead(store, job_id, age):
                continue
            plan = Plan.take(opened, job_id)
            if plan is not None:
                finish_expiry(opened, plan, rows)
                for path in plan.end():
                    kind = "manifest" if path.startswith(MANIFESTS) else "file"
                    rows.append(Row(store.full_path(path), None, "ok", format=kind))
            elif any(store.list(f"{PLANS}{job_id}/")):  # it lives
                continue
            rows.append(Row(store.full_path(f"{PLANS}{job_id}"), None, "ok", format="plan"))
        for path in orphan_files(opened):
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="file"))
        for path in orphan_manifests(opened, age):
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="manifest"))
        clear(opened, age)  # of the keys, where they are elsewhere; and folders that are empty by now
        head = opened.current()
        for path in opened.chain_orphans():
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="chain"))
    number, pinned = (head.number, head.pin) if head else (None, None)
    return JobResult(new_job_id(), "sweep", store.url, number, rows, pinned)


def set_policy(
    dataset: Folder,
    policy: Policy,
    *,
    kms: KmsClient | Mapping[str, str],
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Policy:
    """Lay down `policy` for later jobs on `dataset`, by a version that has the same files; returns what was before."""
    opened = Ledger.open(dataset, as_kms(kms), storage_options, key_store, pin=pin, min_version=min_version)
    opened.store.check_writable()
    while True:
        head = opened.current(writes=True)
        try:
            opened.succeed(head, "policy", new_job_id(), head.manifests if head else (), policy=policy)
        except FileExistsError:
            continue
        return head.policy if head else Policy()
