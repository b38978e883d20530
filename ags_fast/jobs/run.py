"""What all jobs over files share: how they are run, their tasks, plans of dead jobs, the commit."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ags_fast._types import OnError, Resume, check_choice
from ags_fast.dataset import reach
from ags_fast.dataset.change import Wish
from ags_fast.dataset.deks import key_ids
from ags_fast.dataset.entries import FileEntry, with_lengths
from ags_fast.dataset.job import Committed, Job
from ags_fast.dataset.kinds import Want
from ags_fast.dataset.log import ENDED
from ags_fast.dataset.names import HIDDEN, LOCK, beside_plan, job_of, new_job_id, plan_path, written_name
from ags_fast.dataset.plan import read_plan
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.engines.base import Engine, checked
from ags_fast.engines.local import LocalEngine
from ags_fast.errors import AgsError, ExpiredError, FormatError, IntegrityError, JobEndedError, KeyAccessError
from ags_fast.fs import without_password
from ags_fast.jobs.bars import make_bar
from ags_fast.jobs.results import JobError, JobResult, Row, shown
from ags_fast.jobs.retention import ended
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.rows import failed_row, is_there, make_row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.plan import Plan
    from ags_fast.dataset.policy import Policy
    from ags_fast.fs import Store
    from ags_fast.jobs.results import Progress


LOCAL_OPEN_COST = 512 << 10  # cost of opening a file, in bytes of work
STORE_OPEN_COST = 4 << 20  # the same in an object store
EVIDENCE = ("IntegrityError", "Different")  # classes of rows, unless the version has expired meanwhile
UNKNOWN = {"KeyAccessError": KeyAccessError, "ExpiredError": ExpiredError}  # they say nothing of a source
GONE = {  # class and message of a file whose source is gone, by status
    "skipped": ("NotRemoved", "its source is gone, but it stays, because another file has failed"),
    "failed": ("ConcurrentChangeError", "another job has put another file at this path meanwhile: run the job again"),
}
UNREADABLE = (FormatError, IntegrityError, KeyAccessError)  # what is wrong with the plan of one job stops no other


class Options:
    """The arguments on how a job is run, checked."""

    def __init__(
        self,
        engine: Engine | None,
        progress: Progress,
        on_error: OnError = "row",
        max_failures: int | None = None,
        resume: Resume | None = None,
        *,
        fsync: bool = True,
        verify_after: bool = False,
    ) -> None:
        check_choice("resume", resume, Resume, None)
        check_choice("on_error", on_error, OnError)
        if max_failures is not None and max_failures < 0:
            raise ValueError(f"max_failures must not be negative, not {max_failures}")
        self.engine: Engine = checked(engine) or LocalEngine()
        self.resume = resume
        self.max_failures = 0 if on_error == "raise" else max_failures
        self.progress = progress
        self.fsync, self.verify_after = fsync, verify_after


def check_apart(one: Store, other: Store) -> None:
    """Raise ValueError if two folders are the same, or one is inside the other."""
    a, b = ((os.path.realpath(s.url) if s.local else s.url).rstrip("/") + "/" for s in (one, other))
    if a.startswith(b) or b.startswith(a):
        raise ValueError(f"{one.url} and {other.url}: the two must differ, and neither may be inside the other")


# ---- tasks


def run_tasks(context: Context, tasks: Sequence[Task], options: Options, *, writes: bool = False) -> list[Row]:
    """Run the tasks, in any order, and return their rows. writes: they write files of a job with a plan.

    JobError: more files failed than allowed. JobEndedError: a task has found that: see `Context.check_plan`.
    """
    rows: list[Row] = []
    if writes and getattr(options.engine, "tasks_outlive_driver", False):
        context = replace(context, plan=plan_path(context.job_id))  # which is there until the job ends
    todo, ready = _split_ready(context, tasks, writes)
    failures = 0
    callback = options.progress if callable(options.progress) and context.op != "compare" else None
    total, counts, lock = sum(task.nbytes for task in tasks), {"rows": 0, "parts": 0}, threading.Lock()
    with make_bar(context.op, total, options.progress, files=len(tasks)) as bar:

        def show(what: str, nbytes: int, files: int = 0) -> None:
            """Show the bytes of rows, or of parts of files where the engine tells them, which are there earlier."""
            with lock:
                counts[what] += nbytes
                bar.update(max(0, min(total, max(counts.values())) - bar.n), files)

        context = replace(context, moved=partial(show, "parts"))

        def report(more: list[Row]) -> None:
            nonlocal failures
            rows.extend(more)
            failures += sum(row.status == "failed" for row in more)
            show("rows", sum(row.nbytes for row in more), len(more))
            if callback is not None:
                callback(more)
            for row in more if context.plan else ():  # no file that is left could be published
                if row.error_class == JobEndedError.__name__:
                    raise JobEndedError(row.error)
            if options.max_failures is not None and failures > options.max_failures:
                raise _TooManyError

        local = context.dataset.local and (context.other is None or context.other.local)
        try:
            if ready:
                report(ready)
            options.engine.run(context, todo, LOCAL_OPEN_COST if local else STORE_OPEN_COST, report)
        except BaseException as error:
            # Finished files stay, because the plan names them. Temporary files go.
            _sweep_temporary(context, tasks)
            if not isinstance(error, _TooManyError):
                raise
            result = JobResult(context.job_id, context.op, context.dataset.url, None, rows)
            raise JobError(f"stopped after {failures} failed files: {result.failure}", result) from None
    return rows


def _split_ready(context: Context, tasks: Sequence[Task], writes: bool) -> tuple[list[Task], list[Row]]:
    """Split off the tasks that need no worker. Returns the other tasks, and the rows of those split off."""
    if writes and context.resume == "length":  # one listing in place of a look at every file
        there = {entry.path: entry.size for entry in context.dataset.list() if not entry.path.startswith(HIDDEN)}
        done = {t.entry.path for t in tasks if t.entry.file_length and there.get(t.entry.file) == t.entry.file_length}
        rows = [make_row(context, task) for task in tasks if task.entry.path in done]
    elif context.op == "decrypt" and context.other is not None and not context.overwrite and not context.resume:
        # Checked here, once, and not by workers: there, another attempt of the same file may run at the same time.
        done = {entry.path for entry in context.other.list()}
        paths = {task.entry.path: task for task in tasks if task.entry.path in done}
        rows = [failed_row(context, task, 0, "FileExistsError", is_there(path)) for path, task in paths.items()]
    else:
        return list(tasks), []
    return [task for task in tasks if task.entry.path not in done], rows


def verified(
    snapshot: Snapshot, entries: Sequence[FileEntry], options: Options, job_id: str = "", source: Store | None = None
) -> tuple[Context, list[Row]]:
    """Check every tag of some files of a version. Returns what the tasks shared, and their rows."""
    contents = snapshot.holding({key_id for entry in entries for key_id in entry.key_ids()})
    op = "verify" if source is None else "compare"  # then the row of a file that differs from its source is "skipped"
    context = Context(op, job_id or new_job_id(), contents.dataset_id, contents.store, contents.envelope, source)
    rows = unless_expired(snapshot, run_tasks(context, [Task(entry) for entry in entries], options))
    for row in rows if source is not None else ():
        if row.error_class in UNKNOWN:
            raise UNKNOWN[row.error_class](f"{row.src} cannot be compared with its source: {row.error}")
    return context, rows


class _TooManyError(Exception):
    pass


def _sweep_temporary(context: Context, tasks: Sequence[Task]) -> None:
    if context.op == "decrypt" and context.other is not None:
        context.other.sweep(context.job_id, paths={task.entry.path for task in tasks})
    elif context.op in ("encrypt", "rekey"):
        context.dataset.sweep(context.job_id, paths={task.entry.file for task in tasks})


def unless_expired(snapshot: Snapshot, rows: list[Row]) -> list[Row]:
    """Reword rows if the version was expired during the read: missing files are then not evidence of tampering."""
    if all(row.error_class not in EVIDENCE for row in rows):
        return rows
    number = snapshot.entry.number
    if snapshot.log.head().first <= number:
        return rows
    why = f"version {number} was expired while its files were read: run the job again"
    return [row._replace(error_class="ExpiredError", error=why) if row.error_class in EVIDENCE else row for row in rows]


# ---- jobs that write files


def take_up(
    log: Log, head: Entry, operation: str, facts: Mapping[str, Any], *, patient: bool = False
) -> Job | Entry | None:
    """Take up the newest job with these facts that no living process is known to hold.

    Where the storage has no locks, whoever resumes knows that such a job is dead; patient: it must have been silent for
    long. If it is not dead, the log lets only one process commit. Returns the job; the version that it has made, if its
    process died after the commit; None if there is no such job.
    """
    plans = log.plans()
    for plan_id in sorted(plans, reverse=True):
        if plans[plan_id].of is not None or head.over.get(plan_id) == ENDED:
            continue
        lives = log.store.is_locked(beside_plan(plan_id, LOCK))
        if lives or (lives is None and patient and not reach.is_dead(log, plan_id, plans)):
            continue
        plan = _plan(log, plan_id, head)
        if plan is not None and (plan.operation, plan.facts, plan.resumable) == (operation, dict(facts), True):
            return Job.finish(log, plan_id) or Job.resume(log, plan_id)
    return None


def _plan(log: Log, plan_id: str, head: Entry) -> Plan | None:
    """Return a plan; None if it is gone, or cannot be read."""
    with suppress(*UNREADABLE):
        return read_plan(log, plan_id, head)
    return None


def begin_files(
    snapshot: Snapshot,
    operation: str,
    facts: Mapping[str, Any],
    wanted: Sequence[FileEntry],
    kinds_of: Callable[[str], list[list[Want]]],
    dek_length: int,
    *,
    taken_up: tuple[Job, Mapping[str, FileEntry]] | None = None,
    policy: Policy | None = None,
) -> tuple[Job, list[FileEntry]]:
    """Begin a job that writes files, or go on with one: its plan has every file before the first one is written.

    A process that resumes it must share `facts`. `wanted` are files without jobs, names and keys; the set "" is that of
    the job. `kinds_of` tells from the job's id the kinds of each file's KEKs: of its own data key, then of those of
    columns. `taken_up` is a job to go on with, and the files of its plan, by path: those that are still what is wanted
    are taken as they are. Returns the job, and the files in their order.
    """
    kinds: list[list[Want]] = []

    def wants(job_id: str) -> Counter[Want]:
        kinds[:] = kinds_of(job_id)
        return Counter(chain.from_iterable(kinds))

    planned: Mapping[str, FileEntry] = {}
    if taken_up is None:
        head = snapshot.entry
        job = Job.begin(snapshot.log, operation, wants, head=head, resumable=True, facts=facts, policy=policy)
    else:
        job, planned = taken_up
    try:
        if taken_up is not None:
            job.keys.policy = policy
            wants(job.id)
        taken = [_planned(job, planned.get(row.path), row, each) for row, each in zip(wanted, kinds, strict=True)]
        missing = [i for i, row in enumerate(taken) if row is None]
        new: list[FileEntry] = []
        if missing:
            named = (_named(wanted[i], job.id) for i in missing)  # one by one: a million take some memory
            new = job.keys.sealed(named, [kinds[i] for i in missing], dek_length)
            job.will_write(new)
    except BaseException as error:
        if taken_up is None and isinstance(error, Exception):
            with suppress(AgsError, OSError):
                job.give_up()  # it has written nothing
        job.release()
        raise
    fresh = iter(new)
    return job, [row or next(fresh) for row in taken]


def _named(row: FileEntry, job_id: str) -> FileEntry:
    set_id = job_id if row.set_id == "" else row.set_id
    return row._replace(file=written_name(row.path, job_id, row.format), job_id=job_id, set_id=set_id)


def _planned(job: Job, old: FileEntry | None, new: FileEntry, kinds: Sequence[Want]) -> FileEntry | None:
    """Return a planned file if it is what is wanted now. Its KEK may be another by now: the commit wraps again."""

    def what(row: FileEntry) -> tuple[Any, ...]:
        columns = tuple(key["column"] for key in row.column_keys or ())
        return row.format, row.plain_length, row.stamp, row.block_size, row.key_material is None, columns

    if old is None or what(old) != what(new):
        return None
    masters = [job.keys.kind_of(key_id).wrapping_key_id for key_id in list(key_ids(old))[1:]]
    return old if masters == [kind.wrapping_key_id for kind in kinds[1:]] else None


def with_columns(row: FileEntry, masters: Mapping[str, str]) -> FileEntry:
    """Return a new file whose columns of these names are to have data keys of their own."""
    columns = tuple({"column": column, "key_id": "", "wrapped_dek": b""} for column in masters)
    return row._replace(key_id="", wrapped_dek=b"", column_keys=columns or None)


def write_files(
    job: Job,
    entries: Sequence[FileEntry],
    options: Options,
    *,
    source: Store | None = None,
    old: Mapping[str, FileEntry] = MappingProxyType({}),
    checksum: bool = False,
) -> list[Row]:
    """Write the files of a job, and return their rows.

    They are made from the files of a folder, `source`, or from files of the dataset, `old` (by path). checksum: the
    rows get keyed digests of the sources.
    """
    store, key_ids = job.log.store, {key_id for row in (*entries, *old.values()) for key_id in row.key_ids()}
    context = Context(
        job.operation,
        job.id,
        job.base.dataset_id,
        store,
        job.keys.envelope().subset(key_ids),
        source,
        fsync=options.fsync,
        verify_after=options.verify_after,
        checksum=checksum,
        resume=options.resume if job.has_tasks else None,
    )
    rows = run_tasks(context, [Task(entry, old.get(entry.path)) for entry in entries], options, writes=True)
    if options.fsync:
        done = {row.dst for row in rows if row.status == "ok"}
        store.sync_folders(entry.file for entry in entries if entry.path in done)
    return rows


def commit_files(
    job: Job,
    entries: Sequence[FileEntry],
    rows: list[Row],
    replaced: Mapping[str, FileEntry],
    *,
    whole: bool = False,
    gone: Mapping[str, FileEntry] = MappingProxyType({}),
) -> JobResult:
    """Commit the version with the files that succeeded, end the job, and do what the policy says of old versions.

    whole: commit all of them, or nothing if another job has changed one of the paths. gone: the files that the version
    leaves out, by path.
    """
    done = {row.dst: row for row in rows if row.status == "ok"}
    good = [
        with_lengths(entry, row.file_length or 0, row.plain_length, bytes.fromhex(row.checksum or ""))
        for entry in sorted(entries, key=lambda entry: entry.path)
        if (row := done.get(entry.path)) is not None
    ]
    del done
    remove = {entry.path: replaced[entry.path].file for entry in good if entry.path in replaced}
    remove |= {path: entry.file for path, entry in gone.items()}
    job.writer_died |= any(row.attempt or row.error_class == "WorkerDiedError" for row in rows)
    made = job.commit(Wish(job.operation, good, remove, whole=whole, policy=job.keys.policy))
    taken = _taken(job, made, good)
    if lost := {entry.path for entry in good if entry.file not in taken}:
        why = (
            "another job has changed this path, or there is a file or a folder in its place, so the file is not in the "
            "dataset: run the job again"
        )
        rows = [
            row._replace(status="failed", error_class="ConcurrentChangeError", error=why) if row.dst in lost else row
            for row in rows
        ]
    rows += [gone_row(path, "failed" if path in made.change.refused else "ok") for path in gone]
    result = ended(job, made, rows)
    warn_of_dead(job, made.head, result)
    return result


def gone_row(path: str, status: str) -> Row:
    """Return the row of a file of the dataset whose source is gone. "skipped": the file stays."""
    return Row(path, None, status, *GONE.get(status, ("Removed", "its source is gone; older versions keep it")))


def _taken(job: Job, made: Committed, good: Sequence[FileEntry]) -> set[str]:
    """Return which of a job's objects its version names. Another process of the job may have made the version."""
    if made.version is None:
        return set()
    own = set(job.made)
    if all(job_of(table.path) != job.id or table.path in own for table in made.version.files):
        return {row.file for row in made.change.add}
    found = Snapshot(job.log, made.version).find([row.path for row in good])
    return {row.file for _, row in found.values()}


def warn_of_dead(job: Job, head: Entry, result: JobResult) -> None:
    """Add a warning to a result for each other job that died and can be continued or given up."""
    for plan_id, sign in sorted(job.plans_seen.items()):
        if sign.of is not None or plan_id in head.over or plan_id == job.id:
            continue
        with suppress(OSError, *UNREADABLE):
            plan = _plan(job.log, plan_id, head) if reach.is_dead(job.log, plan_id, job.plans_seen) else None
            if plan is not None:
                begun = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(plan.time_ms / 1000))
                what = plan.operation
                if what == "encrypt":
                    what += f" of {plan.facts.get('source')}"
                result.warnings.append(
                    f"the job {plan_id} ({what}, begun at {begun} UTC) died before its end, and its plan still holds "
                    "what it has written. To go on with the job, run it again as it was, with resume; to give it up, "
                    "run `ags-fast sweep` with the options of the KMS"
                )


def source_fact(url: str) -> dict[str, str]:
    """Return what a process that resumes a job must share with the one that began it."""
    return {"source": without_password(shown(url))}
