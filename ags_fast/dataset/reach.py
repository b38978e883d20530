"""What may be deleted: the one module that deletes objects of other jobs (rules 6 to 8).

An object goes if its job has no plan and no kept version names it. Candidates are chosen first, then plans are listed,
then the head is read, then all that its kept versions name.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from ags_fast.dataset.change import first_kept
from ags_fast.dataset.draft import Draft, Idle
from ags_fast.dataset.keks import Keks
from ags_fast.dataset.keys import leaving
from ags_fast.dataset.kinds import clock_ms
from ags_fast.dataset.names import LOCK, LOG, PLANS, beside_plan, entry_path, is_plan, job_of, plan_path
from ags_fast.dataset.plan import read_plan
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.stores import job_of_row, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ags_fast.dataset.draft import Plans, Work
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.entry import Entry, MasterVersion
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.tables import Table
    from ags_fast.keys.entry import KeyEntry

AT_ONCE = 8  # plans that are read at the same time
SOME = 64  # expired entries in memory
ROUNDS = 100  # in which a version that is read may be expired meanwhile


def clean(log: Log, head: Entry | None = None) -> list[str]:
    """Delete what expired entries named, and then the entries: rule 6, by difference of tables.

    Only tables that either an expired entry or the kept versions lack are read. An entry that is still there is the
    to-do list of whoever comes next.

    Args:
        log: The log.
        head: A head that was read before; None: the newest one.

    Returns:
        The objects that were deleted.
    """
    head = head or log.head()
    deleted: list[str] = []
    numbers = log.below_first(head)
    for at in range(0, len(numbers), SOME):
        for _ in range(ROUNDS):
            if not (expired := log.expired(head, numbers[at : at + SOME])):
                break
            plans = log.plans()
            head = log.head()
            log.settle(head)
            try:
                deleted += _clean(log, head, expired, plans)
                break
            except FileNotFoundError as error:
                log.check_moved(head, error)
    return deleted


def _clean(log: Log, head: Entry, expired: Iterable[Entry], plans: Collection[str]) -> list[str]:
    deleted: list[str] = []
    kept = log.kept(head, returning(head, head.first) if log.descends_from(head, expired) else None)
    for entry, candidates in outdated(log, head, kept, expired):
        gone = [path for path in candidates if _may_go(path, plans)]
        for path in gone:  # the tables after the files that they name
            log.store.delete(path)
        deleted += gone
        if len(gone) == len(candidates):  # else a plan protects something: whoever comes next tries again
            log.store.delete(entry_path(entry.number))
            deleted.append(entry_path(entry.number))
    return deleted


def returning(head: Entry, first: int) -> set[int]:
    """Return the versions that name all that an ancestor below `first` and any version from `first` on name (rule 6).

    What one version names and the next one does not comes back only with files of an older version.
    """
    return {first, *(number for number in head.returns if number >= first)}


def outdated(
    log: Log, head: Entry, kept: Sequence[Entry], expired: Iterable[Entry]
) -> Iterator[tuple[Entry, list[str]]]:
    """Yield expired entries, and what each of them names that neither a kept version nor an entry before it does.

    Args:
        log: The log.
        head: The head, whose KEKs open everything.
        kept: The versions that are kept, or enough of them: see `returning`.
        expired: Entries. Those that are kept are left out.
    """
    tables = {table.path: table for entry in kept for table in entry.files}
    named = set().union(*(entry.named() for entry in kept))
    said: set[str] = set()  # by an entry before
    files: dict[str, list[str]] = {}  # by table of a kept version
    first = min(entry.number for entry in kept)
    for entry in expired:
        if entry.number >= first:
            continue
        own = {table.path for table in entry.files}
        candidates: list[str] = []
        if lacking := [table for table in entry.files if table.path not in tables and table.path not in said]:
            for path in tables.keys() - own - files.keys():
                files[path] = [row.file for row in _rows(log, tables[path], head)]
            needed = {file for path in tables.keys() - own for file in files[path]}
            for table in lacking:
                gone = [file for file in _files(log, table, head) if file not in needed and file not in said]
                candidates += [*gone, table.path]
                said.update(gone)
        yield entry, candidates + sorted(entry.named() - named - said - own)
        said |= entry.named()


def delete(log: Log, candidates: Collection[str]) -> list[str]:
    """Delete and return those of some objects of jobs that nothing needs (rule 6)."""
    return [path for path in unneeded(log, candidates) if job_of(path) is not None and _delete(log, path)]


def _delete(log: Log, path: str) -> bool:
    """Delete an object, unless it is a lock that somebody holds: a job has its lock before its plan is there."""
    lock = path.startswith(PLANS) and path.endswith(f"/{LOCK}")
    with suppress(BlockingIOError), (log.store.lock(path) if lock else None) or nullcontext():
        log.store.delete(path)
        return True
    return False


def unneeded(log: Log, candidates: Collection[str]) -> list[str]:
    """Return those of some objects that no kept version names, and whose job, if a job made them, has no plan.

    Args:
        log: The log.
        candidates: Objects that were listed, or made, before.
    """
    for _ in range(ROUNDS):
        plans = log.plans()
        head = log.head()
        log.settle(head)
        try:
            named = needed(log, head)
        except FileNotFoundError as error:
            log.check_moved(head, error)
            continue
        return [path for path in candidates if path not in named and job_of(path) not in plans]
    return []


def remove_rows(log: Log, candidates: Collection[str] | None = None) -> list[str]:
    """Remove those of some rows of a key store that nothing needs (rule 10). Only the head has rows that are needed.

    Args:
        log: The log.
        candidates: The rows; None: all that the dataset has.

    Returns:
        The rows that were removed.
    """
    if not log.kek_rows.elsewhere or (candidates is not None and not candidates):
        return []
    store, dataset_id = log.kek_rows.store(), log.head().dataset_id
    if candidates is None:
        candidates = [*store.list(dataset_id)]
    plans = log.plans()
    head = log.head()
    log.settle(head)
    named = set(rows_of(head.keys.values()))
    gone = [row for row in candidates if row not in named and (job_of_row(row) or "") not in {*plans, ""}]
    if gone:
        store.remove(dataset_id, gone)
    return gone


def needed(log: Log, head: Entry) -> set[str]:
    """Return all objects that the kept versions name. FileNotFoundError: one of them is missing."""
    named: set[str] = set()
    seen: set[str] = set()
    for entry in log.kept(head):
        named |= entry.named()
        for table in entry.files:
            if table.path not in seen:
                seen.add(table.path)
                named |= {row.file for row in _rows(log, table, head)}
    return named


def sweep(log: Log, job: Work, age: float | None = None) -> list[str]:
    """End dead jobs by an entry, delete their plans, and then all that nothing needs (rule 8).

    Args:
        log: The log.
        job: An idle job, which makes the entry.
        age: See `is_dead`.

    Returns:
        The objects that were deleted.
    """

    def decide(head: Entry, plans: Plans) -> Draft | None:
        dead = [plan_id for plan_id in plans if plan_id not in head.over and is_dead(log, plan_id, plans, age)]
        return Draft("sweep", uses=reserved(log, dead, plans, head), ends=dead) if dead else None

    log.append(job, decide)
    plans = log.plans()
    head = log.head()
    log.settle(head)
    swept = [plan_id for plan_id in plans if plan_id in head.over and is_dead(log, plan_id, plans, age)]
    for plan_id in swept:
        log.store.delete(plan_path(plan_id, plans[plan_id].of))
    remove_rows(log)
    deleted = [*(plan_path(plan_id, plans[plan_id].of) for plan_id in swept), *clean(log)]
    there = [listed.path for listed in log.store.list() if _is_object(listed.path)]
    deleted += delete(log, there)
    for number in sorted({*log.below_first(head)} - {entry.number for entry in log.expired(head)}):
        log.store.delete(entry_path(number))  # nobody can read it, so `clean` leaves it
        deleted.append(entry_path(number))
    if log.store.local:
        log.store.remove_empty_folders(PLANS)
    return deleted


def is_dead(log: Log, plan_id: str, plans: Plans, age: float | None = None) -> bool:
    """Return whether the process of a plan is dead, as far as anyone can tell. Nothing but patience hangs on it.

    Args:
        log: The log.
        plan_id: The plan.
        plans: What a listing has told of all plans.
        age: Seconds of silence after which a job counts as dead, unless it holds its lock. None: a day where the
            storage has no locks, and for a job that waits for another process; else none.
    """
    sign = plans[plan_id]
    owner = sign.of if sign.of is not None and sign.of in plans else plan_id
    held = log.store.is_locked(beside_plan(owner, LOCK))
    if held:
        return False
    if age is None:
        age = NO_LOCK_SECONDS if held is None or plans[owner].waits else 0
    return time.time() - plans[owner].alive >= age


def retention(log: Log, head: Entry, policy: Policy, *, changes: bool = True) -> int:
    """Return the first entry that is kept when the next one is made, as a policy says.

    Args:
        log: The log.
        head: The head.
        policy: The policy.
        changes: Whether the next entry changes files.
    """
    times: dict[int, int] = {}
    if policy.keep is not None and policy.keep_days is not None:
        times = {entry.number: entry.time_ms for entry in log.kept(head)}
    number = head.number + 1
    same = {*head.same, *(() if changes else (number,))}
    return first_kept(policy, number, head.first, same, times, clock_ms())


def expire(log: Log, job: Work, first: Callable[[Entry], int] | None, *, skip_grace: bool, now_ms: int) -> list[str]:
    """Expire versions, delete what they alone named, and let KEKs leave that nothing needs (rules 7 and 9).

    Args:
        log: The log.
        job: An idle job, which makes the entry.
        first: Takes the head, and returns the first version that stays. An error that it raises ends the work. None:
            as the policy says.
        skip_grace: See `leaving`.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        The objects that were deleted.
    """

    def older(head: Entry, plans: Plans) -> Draft | None:
        number = retention(log, head, head.policy, changes=False) if first is None else first(head)
        if number <= head.first:
            return None
        # What expires must be what the head descends from, and what is compared with it must be readable.
        log.kept(head, {*range(head.first, number), *returning(head, number)})
        return Draft("expire", first=number)

    def keks(head: Entry, plans: Plans) -> Draft | None:
        expired = log.expired(head)  # whoever cleans up reads their tables
        left = leaving_keks(log, head, [*log.kept(head), *expired], plans, skip_grace, now_ms)
        return Draft("expire", keys=Keks.of(head.keys).changed(dict.fromkeys(left))) if left else None

    _, after = log.append(job, older)
    deleted = clean(log, after)
    if log.look(lambda head: leaving(head.keys, (), (), True, now_ms), after):
        log.append(Idle(), keks)
    remove_rows(log)
    return deleted


def leaving_keks(
    log: Log, head: Entry, needing: Iterable[Entry], plans: Plans, skip_grace: bool, now_ms: int
) -> set[str]:
    """Return the KEKs of the head that may leave, if these versions are all that need KEKs: see `leaving`."""
    return leaving(head.keys, needed_keks(log, needing, head), reserved(log, plans, plans, head), skip_grace, now_ms)


def needed_keks(log: Log, entries: Iterable[Entry], head: Entry) -> set[str]:
    """Return the KEKs that these versions need: for themselves, their tables and their files.

    An expired version needs those of the tables that are left of it. FileNotFoundError: a kept one lacks a table.
    """
    ids: set[str] = set()
    tables: dict[str, Table] = {}
    kept: set[str] = set()
    for entry in entries:
        ids |= entry.key_ids()
        tables |= {table.path: table for table in entry.files}
        kept |= {table.path for table in entry.files if entry.number >= head.first}
    for table in tables.values():
        try:
            ids |= log.tables.counted([table], log.envelope(head)).keys()
        except FileNotFoundError:
            if table.path in kept:
                raise
    return ids


def reserved(log: Log, plan_ids: Collection[str], plans: Plans, head: Entry) -> Counter[str]:
    """Count what some plans reserve of each KEK. A plan that cannot be read reserves nothing."""

    def uses(plan_id: str) -> Mapping[str, int]:
        with suppress(FormatError, IntegrityError, KeyAccessError):
            if (plan := read_plan(log, plan_id, head, plans[plan_id].of)) is not None:
                return plan.uses
        return {}

    at_once = min(AT_ONCE, len(plan_ids)) if log.store.parallel and plan_ids else 1
    return sum(map(Counter, in_threads(uses, plan_ids, at_once)), Counter())


def retire_master(log: Log, job: Work, version: MasterVersion) -> None:
    """Forbid a version of a master key by an entry, so that the KMS may destroy it (rule 11).

    Args:
        log: The log.
        job: An idle job, which makes the entry.
        version: The master key, and its version.

    Raises:
        PolicyError: A KEK, or a data key in single wrap of a kept version, is under it, or may be.
    """

    def decide(head: Entry, plans: Plans) -> Draft | None:
        check_master(log, head, version)
        return None if version in head.gone else Draft("retire-master", gone=(*head.gone, version))

    def check(head: Entry) -> None:
        log.settle(head)
        check_master(log, head, version)
        if version not in head.gone:
            raise IntegrityError(
                f"version {head.number} of {log.store.url} allows what an earlier version has forbidden"
            )

    log.append(job, decide)
    log.look(check)


def check_master(log: Log, head: Entry, version: MasterVersion) -> None:
    """Raise PolicyError if a KEK, or a data key of a kept version, is under a version of a master key, or may be."""
    doubles = [key for key in head.keys.values() if key.double_wrap and key.wrapping_key_id == version[0]]
    log.kek_rows.fetch(head.dataset_id, doubles)
    under = [key.key_id for key in doubles if _may_be_under(log, key, version)]
    if not under:
        by_kms: Counter[MasterVersion] = Counter()
        singles = {key.key_id for key in head.keys.values() if not key.double_wrap}
        for table in {table.path: table for entry in log.kept(head) for table in entry.files}.values():
            if table.material or singles & log.tables.counted([table], log.envelope(head)).keys():
                by_kms += wrapped_by_kms(log, table, head)
        under = [f"one in {version[0]}" for one in (version, (version[0], "")) if by_kms[one]]
    if under:
        raise PolicyError(
            f"version {version[1]} of the master key {version[0]!r} still wraps {len(under)} keys, such as {under[0]}: "
            "rotate them first"
        )


def wrapped_by_kms(log: Log, table: Table, head: Entry) -> Counter[MasterVersion]:
    """Count the data keys in a table that versions of master keys wrap themselves, in single wrap and for key tools."""
    counts: Counter[MasterVersion] = Counter()
    for row in _rows(log, table, head):
        for key_id, wrapped, _ in row.wraps(""):
            if not (key := head.keys[key_id]).double_wrap:
                counts[key.wrapping_key_id, log.kms.key_version(wrapped) or ""] += 1
        for one in row.key_material or ():
            told = log.kms.key_version(one["wrapped_dek"]) or one["master_version"] or ""
            counts[one["wrapping_key_id"], told] += 1
    return counts


def _may_be_under(log: Log, key: KeyEntry, version: MasterVersion) -> bool:
    """Whether a KEK is under a version of its master key, as far as anyone can tell."""
    try:
        return log.version_of(key) in (version, (version[0], ""))
    except KeyAccessError:  # its key store does not show it
        return True


def _is_object(path: str) -> bool:
    """Whether a sweep may delete the object at a path: plans go by their jobs, entries by their numbers."""
    return job_of(path) is not None and not is_plan(path) and not path.startswith(LOG)


def _may_go(path: str, plans: Collection[str]) -> bool:
    return (job_id := job_of(path)) is not None and job_id not in plans


def _rows(log: Log, table: Table, head: Entry) -> Iterable[FileEntry]:
    return log.tables.rows(table, log.envelope(head))


def _files(log: Log, table: Table, head: Entry) -> list[str]:
    """Return the objects that an expired table names; none if it is gone already or damaged, or opens no more."""
    try:
        return [row.file for row in log.tables.rows(table, log.envelope(head))]
    except (FileNotFoundError, FormatError, IntegrityError, KeyAccessError):
        return []
