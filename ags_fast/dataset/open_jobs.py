"""What the plans of all open jobs say: the names and keys that they claim, what to resume, what to remove."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.names import HIDDEN, JOB_ID, LEFT, MANIFESTS, PLANS, job_in_name, object_name
from ags_fast.dataset.plan import Plan, job_of_manifest, sealed_by, unnamed_manifests
from ags_fast.errors import AgsError, IntegrityError
from ags_fast.fs import NO_LOCK_SECONDS, Store
from ags_fast.keys.entry import UnknownKeyError
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import ExitStack

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger


def open_plans(store: Store, *, begun: bool = False) -> list[str]:
    """Return the ids of jobs that have a plan: running or dead jobs. begun: also jobs with only a part of a plan."""
    ids = set()
    for entry in store.list(PLANS):
        job_id, _, name = entry.path.removeprefix(PLANS).partition("/")
        if JOB_ID.fullmatch(job_id) and (begun or name.endswith(".json")):
            ids.add(job_id)
    return sorted(ids)


def is_dead(store: Store, job_id: str, age: float | None) -> bool:
    """Return whether a job is dead.

    Args:
        store: The folder of the dataset.
        job_id: The id of the job.
        age: Seconds without a change of the plan after which the job counts as dead, on top of the lock. None: a day
            where the storage has no locks, and for a plan that was left for another process; else none.
    """
    folder = f"{PLANS}{job_id}/"
    held = store.is_locked(folder + "lock")
    if held:
        return False
    there = {entry.path: entry.modified for entry in store.list(folder)}
    waits = held is None or folder + LEFT in there
    newest = max(there.values(), default=0.0)
    return time.time() - newest >= (age if age is not None else NO_LOCK_SECONDS if waits else 0)


def lives(store: Store, job_id: str) -> bool | None:
    """Return whether an open job lives; None if the storage does not tell, or if the job waits to be taken up."""
    held = store.is_locked(f"{PLANS}{job_id}/lock")
    return None if held is False and not is_dead(store, job_id, None) else held


def files_of(dataset: Ledger, job_id: str) -> set[str]:
    """Return the files that an open job may write; none if the job has ended."""
    plan = Plan.load(dataset, job_id)
    try:
        return plan.named_files() if plan is not None else set()
    except IntegrityError:  # a table of it is gone
        if Plan.load(dataset, job_id) is not None:
            raise
        return set()


def claimed_files(dataset: Ledger, but: str = "") -> set[str]:
    """Return the files that open jobs may write. but: the id of a job to leave out."""
    return set[str]().union(*(files_of(dataset, job_id) for job_id in open_plans(dataset.store) if job_id != but))


def dead_plans(dataset: Ledger, job_ids: Iterable[str]) -> list[Plan]:
    """Return the plans of these jobs that died and have not committed. A plan that cannot be read is left out."""
    found = []
    for job_id in job_ids:
        with suppress(AgsError, OSError):
            if is_dead(dataset.store, job_id, None):
                plan = Plan.load(dataset, job_id)
                if plan is not None and plan.committed() is None:
                    found.append(plan)
    return found


def keys_of(dataset: Ledger, job_id: str) -> set[str]:
    """Return the keys that an open job may need; none if the job has ended."""
    claimed = sealed_by(dataset, job_id)  # counts even if that key is gone and the plan cannot be read
    plan = Plan.load(dataset, job_id)
    try:
        return claimed if plan is None else claimed | plan.needed_keys(plan.known_entries())
    except IntegrityError:  # a table of it is gone
        if Plan.load(dataset, job_id) is not None:
            raise
        return set()


def claim(plan: Plan, entries: Sequence[FileEntry]) -> list[FileEntry]:
    """Make the claimed names of `entries` the own names of the plan's job.

    A name that another open plan has claimed, or that exists in the tree, is replaced by a name with the job's id.
    The order matters: this job's claim is durable before it reads other claims. So of two jobs at least one sees
    the other, and a job that ended before this look has left its files in the tree.

    Returns:
        The entries with their final names.
    """
    plan.beside = [job_id for job_id in open_plans(plan.dataset.store) if job_id != plan.job_id]
    claimed = set[str]().union(*(files_of(plan.dataset, job_id) for job_id in plan.beside))
    taken = claimed | plan.dataset.store.existing(entry.file for entry in entries)
    ours = [_renamed(plan, entry) if entry.file in taken else entry for entry in entries]
    if taken.isdisjoint(entry.file for entry in entries):
        plan.write([], "running", plan.refs)
    else:  # write all entries: every name in a running plan must be the job's own
        plan.write(ours, "running")
    return ours


def _renamed(plan: Plan, entry: FileEntry) -> FileEntry:
    """Return the entry with a name that no other job can have. Its DEKs are bound to the name, so re-wrapped."""
    dataset = plan.dataset
    renamed = entry._replace(file=object_name(entry.path, plan.job_id, format=entry.format))
    wraps = [
        (dataset.keyring.active(key_id), wrap, bound)
        for wrap, (key_id, _, bound) in zip(entry.wraps(dataset.id), renamed.wraps(dataset.id), strict=True)
    ]
    envelope = dataset.envelope
    return renamed.with_wraps(
        [(key_id, envelope.wrap(key_id, envelope.unwrap(*old), bound)) for key_id, old, bound in wraps]
    )


def resume_plan(dataset: Ledger, facts: Mapping[str, Any], held: ExitStack, *, sure: bool = True) -> Plan | None:
    """Take over the newest plan of a dead job with the same facts; None if there is none.

    What dead jobs have left without a plan, or with a plan that cannot be resumed, is removed.

    Args:
        dataset: The dataset.
        facts: What the plan must say of its job.
        held: Releases the plan when it is closed.
        sure: Whether the caller knows that such a job is dead, for storage without locks.
    """
    clear(dataset)
    for job_id in reversed(open_plans(dataset.store)):
        if dataset.store.is_locked(f"{PLANS}{job_id}/lock") or not (sure or is_dead(dataset.store, job_id, None)):
            continue
        plan = Plan.load(dataset, job_id)
        if plan is None or any(plan.body.get(name) != value for name, value in facts.items()):
            continue
        plan = Plan.take(dataset, job_id)  # read again: until now another process could have taken the plan
        if plan is not None and plan.is_lost():
            plan.end()
        elif plan is not None:
            held.callback(plan.release)
            return plan
    return None


def clear(dataset: Ledger, age: float | None = None) -> None:
    """Remove what dead jobs have left in `_ags/` outside of plans.

    That is temporary files, and folders of plans that were incomplete or being removed. Locks show what lives. Where
    the storage has no locks, only what is a day old is removed.

    Args:
        dataset: The dataset.
        age: Remove only what is at least this many seconds old; None: as above.
    """
    stores = [dataset.store]
    if isinstance(dataset.keys, DatasetKeyStore) and isinstance(dataset.keys.store, Store):
        stores += [dataset.keys.store] if dataset.keys.store.url != dataset.store.url else []
    for store in stores:
        if store.local:
            store.sweep(older_than=age, below=HIDDEN)
    store, planned = dataset.store, open_plans(dataset.store)
    for job_id in open_plans(store, begun=True):
        if job_id not in planned and is_dead(store, job_id, age):
            Plan.take(dataset, job_id)
    store.remove_empty_folders(PLANS)


def orphan_files(dataset: Ledger) -> list[str]:
    """Return objects with the id of an ended job in their names that no version names.

    The order matters: an object that was listed while its job ran is still in the job's plan, or by now in a version,
    or will never be in a version.
    """
    listed = [entry.path for entry in dataset.store.list() if job_in_name(entry.path) is not None]
    listed = [path for path in listed if not path.startswith(HIDDEN)]
    if not listed:
        return []
    running = open_plans(dataset.store)
    known = set[str]().union(*(files_of(dataset, job_id) for job_id in running))
    ended = [path for path in listed if path not in known and job_in_name(path) not in running]
    named = named_files(dataset) if ended else set()
    return [path for path in ended if path not in named]


def named_files(dataset: Ledger) -> set[str]:
    """Return the objects of all files of all versions."""
    named: set[str] = set()
    seen: set[str] = set()
    for version in dataset.versions():
        try:
            for ref in version.manifests:
                if ref.path not in seen:
                    named.update(entry.file for entry in dataset.open_table(ref, dataset.envelope))
                    seen.add(ref.path)
        except (IntegrityError, UnknownKeyError):
            if version.number in dataset.version_numbers():
                raise  # otherwise the version was expired meanwhile
    return named


def orphan_manifests(dataset: Ledger, age: float | None) -> list[str]:
    """Return manifests that no version names.

    A job that is about to commit has an open plan, and its id is in the names of its manifests. A manifest without an
    id in its name is not reported while any plan is open. The order matters: a listed manifest whose plan has ended is
    by now in a version, or will never be in a version.

    Args:
        dataset: The dataset.
        age: Return only manifests that are at least this many seconds old; None: all.
    """
    listed = [entry.path for entry in dataset.store.list(MANIFESTS) if time.time() - entry.modified >= (age or 0)]
    planned = open_plans(dataset.store) if listed else []
    ended = [path for path in listed if not planned or job_of_manifest(path) not in (None, *planned)]
    return unnamed_manifests(dataset, ended)
