"""Remove what dead jobs have left behind, and set the policy of later jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.expiry import finish_expiry
from ags_fast.dataset.names import MANIFESTS, PLANS, new_job_id
from ags_fast.dataset.open_jobs import clear, is_dead, open_plans, orphan_files, orphan_manifests
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.policy import Policy
from ags_fast.fs import Store
from ags_fast.jobs.results import JobResult, Row, counted, result_of
from ags_fast.keys.kms import KmsClient

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
    """Remove what dead jobs have left behind.

    Without a KMS, only what names alone identify is removed: temporary files that no living process holds, and uploads
    that were begun and not completed. With a KMS, also the plans of dead jobs (which can then no longer be resumed),
    the files that only these plans name, and manifests of no version. An expiry that a dead job began is finished.

    With a KMS, all versions are first checked to share one history, and to descend from the pin; only then is anything
    removed.

    Args:
        dataset: The folder of the dataset: a local path or an fsspec URL.
        kms: The properties of a KMS, or a client; None: none.
        older_than: Keep what is younger. On local files, a lock tells whether a job lives, so None removes what is not
            locked. Object stores have no locks: there, None keeps what is younger than a day, which a living job may
            own. An age that is given also counts on local files.
        min_version: Refuse a dataset whose newest version is older. Needs `kms`.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names. Needs `kms`.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each thing that was removed.

    Raises:
        IntegrityError: The versions do not share one history, or do not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        ValueError: `pin` or `min_version` is given without a KMS, or the pin is malformed.
    """
    store = Store(dataset, storage_options)
    age = None if older_than is None else older_than.total_seconds()
    opened = None
    if kms is not None:
        opened = Access.of(store, kms, key_store, storage_options, None, min_version, pin).open()
        opened.check_history()
    elif pin is not None or min_version:
        raise ValueError("pin and min_version can only be checked with a KMS: pass kms")
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
            elif any(store.list(f"{PLANS}{job_id}/")):  # the job lives
                continue
            rows.append(Row(store.full_path(f"{PLANS}{job_id}"), None, "ok", format="plan"))
        for path in orphan_files(opened):
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="file"))
        for path in orphan_manifests(opened, age):
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="manifest"))
        clear(opened, age)  # also in the folder of the keys if that is elsewhere; and empty folders
        head = opened.current()
        for path in opened.chain_orphans():
            store.delete(path)
            rows.append(Row(store.full_path(path), None, "ok", format="chain"))
    return result_of(store, "sweep", new_job_id(), head, rows)


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
    """Set the policy of later jobs on `dataset`, by a version with the same files.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        policy: The new policy.
        kms: The properties of a KMS, or a client.
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        The policy that the dataset had before.

    Raises:
        FileNotFoundError: There is no dataset.
        IntegrityError: The dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        ValueError: The pin is malformed.
    """
    opened = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin).open()
    opened.store.check_writable()
    before = opened.commit(Wish("policy", new_job_id(), policy=policy)).before
    return before.policy if before else Policy()
