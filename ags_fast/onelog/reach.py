"""What may be deleted: the one module that deletes objects of other jobs (rules 6 to 8).

An object goes if its job has no plan and no kept version names it. Candidates are chosen first, then plans are listed,
then the head is read, then all that its kept versions name.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from ags_fast.dataset.keks import clock_ms
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS
from ags_fast.keys.envelope import in_threads
from ags_fast.onelog.change import first_kept
from ags_fast.onelog.keys import leaving
from ags_fast.onelog.keystores import job_of_row, rows_of
from ags_fast.onelog.log import Draft, Idle
from ags_fast.onelog.names import LOCK, LOG, beside_plan, entry_path, is_plan, job_of, plan_path
from ags_fast.onelog.plan import read_plan
from ags_fast.onelog.tables import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.policy import Policy
    from ags_fast.keys.entry import KeyEntry
    from ags_fast.onelog.log import Entry, Log, MasterVersion, Plans, Work
    from ags_fast.onelog.tables import Table

AT_ONCE = 8  # plans that are read at the same time
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
    for _ in range(ROUNDS):
        expired = log.expired(head or log.head())
        if not expired:
            return []
        plans = log.plans()
        head = log.head()
        log.settle(head)
        try:
            return _clean(log, head, expired, plans)
        except FileNotFoundError:
            _check_moved(log, head)
    return []


def _clean(log: Log, head: Entry, expired: Iterable[Entry], plans: Collection[str]) -> list[str]:
    kept = log.kept(head)
    tables = {table.path: table for entry in kept for table in entry.files}
    blocks = {block.path for entry in kept for block in entry.blocks}
    deleted: list[str] = []
    for entry in expired:
        if entry.number >= head.first:
            continue
        own = {table.path for table in entry.files}
        candidates: list[str] = []
        if lacking := [table for table in entry.files if table.path not in tables]:
            needed = {row.file for path, table in tables.items() if path not in own for row in _rows(log, table, head)}
            for table in lacking:
                candidates += [file for file in _files(log, table, head) if file not in needed] + [table.path]
        candidates += [block.path for block in entry.blocks if block.path not in blocks]
        gone = [path for path in candidates if _may_go(path, plans)]
        for path in gone:  # the tables after the files that they name
            log.store.delete(path)
        deleted += gone
        if len(gone) == len(candidates):  # else a plan protects something: whoever comes next tries again
            log.store.delete(entry_path(entry.number))
    return deleted


def delete(log: Log, candidates: Collection[str]) -> list[str]:
    """Delete those of some objects that nothing needs (rule 6). Returns the objects that were deleted."""
    for _ in range(ROUNDS):
        plans = log.plans()
        head = log.head()
        log.settle(head)
        try:
            named = needed(log, head)
        except FileNotFoundError:
            _check_moved(log, head)
            continue
        gone = [path for path in candidates if path not in named and _may_go(path, plans)]
        for path in gone:
            log.store.delete(path)
        return gone
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
        named |= {block.path for block in entry.blocks}
        for table in entry.files:
            if table.path not in seen:
                seen.add(table.path)
                named |= {table.path, *(row.file for row in _rows(log, table, head))}
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
    return deleted + delete(log, [listed.path for listed in log.store.list() if _is_object(listed.path)])


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
    return time.time() - sign.alive >= age


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


def expire(log: Log, job: Work, keep: int | None, *, skip_grace: bool, now_ms: int) -> list[str]:
    """Expire versions, delete what they alone named, and let KEKs leave that nothing needs (rules 7 and 9).

    Args:
        log: The log.
        job: An idle job, which makes the entries.
        keep: How many of the newest versions stay; None: as the policy says.
        skip_grace: See `leaving`.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        The objects that were deleted.
    """

    def older(head: Entry, plans: Plans) -> Draft | None:
        policy = head.policy if keep is None else head.policy.replace(keep=keep, keep_days=None)
        number = retention(log, head, policy, changes=False)
        return Draft("expire", first=number) if number > head.first else None

    def keks(head: Entry, plans: Plans) -> Draft | None:
        ids = set().union(*(entry.key_ids() for entry in log.kept(head)))
        for entry in log.expired(head):
            ids |= entry.key_ids()  # whoever cleans up reads its tables
        gone = leaving(head.keys, ids, reserved(log, plans, plans, head), skip_grace, now_ms)
        keys: dict[str, KeyEntry] = {key_id: key for key_id, key in head.keys.items() if key_id not in gone}
        return Draft("expire", keys=keys) if gone else None

    log.append(job, older)
    deleted = clean(log)
    log.append(Idle(), keks)
    remove_rows(log)
    return deleted


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
        _check_master(log, head, version)
        return None if version in head.gone else Draft("retire-master", gone=(*head.gone, version))

    log.append(job, decide)
    head = log.head()
    log.settle(head)
    _check_master(log, head, version)
    if version not in head.gone:
        raise IntegrityError(f"version {head.number} of {log.store.url} allows what an earlier version has forbidden")


def _check_master(log: Log, head: Entry, version: MasterVersion) -> None:
    doubles = [key for key in head.keys.values() if key.double_wrap and key.wrapping_key_id == version[0]]
    log.kek_rows.fetch(head.dataset_id, doubles)
    under = [key.key_id for key in doubles if _may_be_under(log, key, version)]
    singles = {key.key_id for key in head.keys.values() if not key.double_wrap and key.wrapping_key_id == version[0]}
    if not under and singles:
        under = sorted(singles.intersection(key_id for entry in log.kept(head) for key_id in counted(entry.files)))
    if under:
        raise PolicyError(
            f"version {version[1]} of the master key {version[0]!r} still wraps {len(under)} keys, such as {under[0]}: "
            "rotate them first"
        )


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
    job_id = job_of(path)
    return job_id is not None and job_id not in plans


def _rows(log: Log, table: Table, head: Entry) -> Iterable[FileEntry]:
    return log.tables.rows(table, log.envelope(head))


def _files(log: Log, table: Table, head: Entry) -> list[str]:
    """Return the objects that an expired table names; none if it is gone already, or opens no more."""
    try:
        return [row.file for row in log.tables.rows(table, log.envelope(head))]
    except (FileNotFoundError, KeyAccessError):
        return []


def _check_moved(log: Log, head: Entry) -> None:
    """Raise IntegrityError if the head is still the newest entry, and something that it needs is missing."""
    if log.head().digest == head.digest:
        raise IntegrityError(f"an object that version {head.number} of {log.store.url} needs is missing")
