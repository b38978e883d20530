"""Remove what is needed no more: old versions, also after each job as the policy says, and what dead jobs have left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from ags_fast import telemetry
from ags_fast.dataset import reach
from ags_fast.dataset.access import Access
from ags_fast.dataset.change import Wish
from ags_fast.dataset.draft import Idle
from ags_fast.dataset.job import Job
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import BLOCKS, LOG, PLANS, TABLES, entry_path, new_job_id
from ags_fast.dataset.policy import DAY_MS
from ags_fast.errors import AgsError, PolicyError
from ags_fast.fs import Store, without_password
from ags_fast.jobs.arguments import milliseconds, reaching
from ags_fast.jobs.results import JobResult, Row, counted, describe
from ags_fast.keys.entry import retires_ms

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from ags_fast._types import FilePath
    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.job import Committed
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.policy import Policy
    from ags_fast.jobs.arguments import Reach
    from ags_fast.keys.kms import Kms

KINDS = ((LOG, "version"), (TABLES, "table"), (BLOCKS, "chain"), (PLANS, "plan"), ("", "file"))  # of objects, by path


@counted
def expire(
    dataset: Folder,
    *,
    keep: int | None = None,
    older_than: timedelta | None = None,
    skip_grace: bool = False,
    force: bool = False,
    dry_run: bool = False,
    **at: Unpack[Reach],
) -> JobResult:
    """Remove old versions of `dataset`, and then whatever no version needs: tables, files, keys.

    **This is final.** What was removed and not copied elsewhere cannot be read again. Of what was copied, old KEKs that
    are removed here open nothing more.

    With the versions go tables and files that no other version has, and retired KEKs that nothing names and whose grace
    is over. What open jobs may need stays. If an expiry dies, the next one, or the next job that commits, finishes its
    work.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        keep: How many of the newest versions stay, at least 1. A version with the files of the one before is not
            counted. None: as many as the policy keeps.
        older_than: Remove only versions that are older; None: of any age, or with ``keep=None`` as the policy says.
        skip_grace: Do not wait for the grace of KEKs: a job that is about to use one wraps again.
        force: Also remove versions that the policy keeps.
        dry_run: Only plan; the rows have the status "planned".
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each thing that was removed, and one with the status "skipped" for each retired KEK that stays.

    Raises:
        PolicyError: The policy keeps versions that were to be removed.
        ValueError: `keep` is less than 1, or None though the dataset's policy keeps all versions.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}: the newest version stays")
    older_than_ms = milliseconds("older_than", older_than)
    log, head = Access.of(dataset, **at).open()
    return expire_versions(log, head, keep, older_than_ms, skip_grace=skip_grace, force=force, dry_run=dry_run)


def expire_versions(
    log: Log,
    before: Entry,
    keep: int | None,
    older_than_ms: int | None,
    *,
    skip_grace: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> JobResult:
    """Do what `expire` does, with an open log, whose head was read just before."""

    def first(head: Entry) -> int:
        policy = head.policy
        if keep is None and policy.keep is None:
            raise ValueError(f"the policy of {log.store.url} keeps all versions: pass keep=1 or a greater number")
        days = None if older_than_ms is None else older_than_ms / DAY_MS
        number = reach.retention(log, head, policy.for_expiry(keep, days), changes=False)
        if policy.keep is not None and not force:
            least = reach.retention(log, head, policy, changes=False)
            if number > least:
                raise PolicyError(
                    f"the policy of {log.store.url} keeps versions {least} and newer ones, and versions up to "
                    f"{number - 1} were to be removed: pass force=True, or set another policy"
                )
        return number

    job, now_ms = Idle(), clock_ms()
    if dry_run:
        gone, left = log.look(lambda head: _foreseen(log, head, first(head), skip_grace), before)
        rows = [row._replace(status="planned") for row in removed_rows(log.store, gone)]
        rows += [Row(key_id, None, "planned", format="key", key_id=key_id) for key_id in sorted(left)]
        return JobResult(job.id, "expire", log.store.url, before.number, rows, before.pin)
    log.store.check_writable()
    rows = [*removed_rows(log.store, reach.expire(log, job, first, skip_grace=skip_grace, now_ms=now_ms))]
    head = log.head()
    left = before.keys.keys() - head.keys.keys()
    rows += [Row(key_id, None, "ok", format="key", key_id=key_id) for key_id in sorted(left)]
    rows += log.look(lambda head: [*_staying(log, head, now_ms)], head)
    return JobResult(job.id, "expire", log.store.url, head.number, rows, head.pin)


def _foreseen(log: Log, head: Entry, first: int, skip_grace: bool) -> tuple[list[str], set[str]]:
    """Return the objects that an expiry would delete, and the ids of the KEKs that would leave."""
    kept, gone = log.kept(head), dict[str, None]()
    stays = [entry for entry in kept if entry.number >= first]
    going = [entry for entry in kept if entry.number < first] + log.expired(head)
    for entry, candidates in reach.outdated(log, head, stays, going):
        gone.update(dict.fromkeys((*candidates, entry_path(entry.number))))
    return list(gone), reach.leaving_keks(log, head, stays, log.plans(), skip_grace, clock_ms())


def removed_rows(store: Store, paths: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of objects that were deleted."""
    for path in paths:
        kind = next(kind for begin, kind in KINDS if path.startswith(begin))
        yield Row(store.full_path(path), None, "ok", format=kind)


def _staying(log: Log, head: Entry, now_ms: int) -> Iterator[Row]:
    """Yield a row for each retired KEK that stays, which says why."""
    retired = [key for key in head.keys.values() if key.state == "retired"]
    needs = [(entry.number, reach.needed_keks(log, [entry], head)) for entry in log.kept(head)] if retired else []
    plans = log.plans() if retired else {}
    planned = reach.reserved(log, plans, plans, head) if plans else {}
    for key in retired:
        by = [number for number, key_ids in needs if key.key_id in key_ids]
        days = (retires_ms(key) - now_ms) / DAY_MS
        if by:
            why = "InUse", f"version {by[0]} needs it" + (f", and {len(by) - 1} more do" if len(by) > 1 else "")
        elif key.key_id in planned:
            why = "InUse", "an open job may need it"
        else:
            why = "Grace", f"its grace is over in {max(days, 0):.1f} days"
        yield Row(key.key_id, None, "skipped", *why, format="key", key_id=key.key_id)


def apply_retention(log: Log, head: Entry, result: JobResult, cleaned: Collection[str] = ()) -> None:
    """After a job, do what the dataset's policy says of old versions, and add it to the job's result.

    An error is rows and a warning. cleaned: what the job itself has deleted of versions that are not kept.
    """
    if head.policy.keep is None and not cleaned:
        return
    done = JobResult(new_job_id(), "expire", log.store.url, result.version, (), result.pin)
    try:
        if head.policy.keep is not None:
            done = expire_versions(log, head, None, None)
    except (AgsError, OSError) as error:  # the job itself has done what it had to do
        done.rows.append(Row(log.store.url, None, "failed", type(error).__name__, describe(error)))
        why = f"old versions that the dataset's policy does not keep were not expired: {describe(error)}"
        result.warnings.append(why)
    done.rows[:0] = removed_rows(log.store, cleaned)
    result.expired = done


def ended(job: Job, made: Committed, rows: Sequence[Row]) -> JobResult:
    """Return the result of a job that has committed, and do what the policy says of old versions."""
    version = made.version or made.head
    result = JobResult(job.id, job.operation, job.log.store.url, version.number, rows, version.pin)
    apply_retention(job.log, made.head, result, job.cleaned)
    return result


@counted
def sweep(
    dataset: FilePath,
    *,
    kms: Kms | None = None,
    older_than: timedelta | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Remove what dead jobs have left behind.

    Without a KMS, only what names alone identify is removed: temporary files that no living process holds, and uploads
    that were begun and not completed. With a KMS, dead jobs are also ended by an entry of the log (they can then no
    longer be resumed), and their plans and all objects of jobs that no version names are removed. An expiry that a dead
    job began is finished.

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
        IntegrityError: The versions do not share one history, or do not descend from the pin. Nothing was removed.
        PolicyError: The dataset is older than `min_version`.
        ValueError: `pin` or `min_version` is given without a KMS, or the pin is malformed.
    """
    store = Store(dataset, storage_options)
    age_ms = milliseconds("older_than", older_than)
    age = None if age_ms is None else age_ms / 1000
    if kms is None:
        if pin is not None or min_version:
            raise ValueError("pin and min_version can only be checked with a KMS: pass kms")
        return JobResult(new_job_id(), "sweep", store.url, None, _temporary(store, age))
    log = Access.of(store, kms, key_store, storage_options, None, min_version, pin).open().log
    return sweep_log(log, age)


def sweep_log(log: Log, age: float | None) -> JobResult:
    """Do what `sweep` does, with an open log. age: in seconds."""
    job, store = Idle(), log.store
    rows = _temporary(store, age)
    rows += removed_rows(store, dict.fromkeys(reach.sweep(log, job, age)))
    head = log.head()
    return JobResult(job.id, "sweep", store.url, head.number, rows, head.pin)


def _temporary(store: Store, age: float | None) -> list[Row]:
    return [Row(store.full_path(path), None, "ok", format="temporary") for path in store.sweep(older_than=age)]


@reaching
def set_policy(dataset: Folder, policy: Policy, **at: Unpack[Reach]) -> Policy:
    """Set the policy of later jobs on `dataset`, by a version with the same files.

    Nothing is removed. If the next job that commits a version will expire versions by this policy, a warning in the log
    `ags_fast.jobs` says which; `will_expire` says so beforehand.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        policy: The new policy.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        The policy that the dataset had before.
    """
    log, head = Access.of(dataset, **at).open()
    log.store.check_writable()
    before = Job.begin(log, "policy", head=head).commit(Wish("policy", policy=policy)).before
    if gone := will_expire(log, policy):
        which = f"version {gone[0]}" if len(gone) == 1 else f"versions {gone[0]} to {gone[-1]}"
        url = without_password(log.store.url)
        telemetry.warning("jobs", "the next job that commits a version of %s will expire %s", url, which)
    return before.policy


def will_expire(log: Log, policy: Policy) -> range:
    """Return the numbers of the versions that the next job which commits a version would expire by a policy."""
    return log.look(lambda head: range(head.first, reach.retention(log, head, policy)))
