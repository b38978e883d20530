"""What all jobs over files share: arguments, running of tasks, the commit."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ags_fast.dataset.decide import Wish
from ags_fast.dataset.entries import FileEntry, with_lengths
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import HIDDEN
from ags_fast.dataset.open_jobs import dead_plans
from ags_fast.dataset.planning import begin_plan, commit_plan, reserve_keys
from ags_fast.fs import without_password
from ags_fast.fs.numbered import numbered
from ags_fast.jobs.engines.base import Engine, checked
from ags_fast.jobs.engines.local import LocalEngine
from ags_fast.jobs.results import JobError, JobResult, Row, result_of, shown
from ags_fast.jobs.retention import apply_retention
from ags_fast.jobs.work.rows import failed_row, is_there, make_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ags_fast.dataset.commit import Committed
    from ags_fast.dataset.plan import Plan
    from ags_fast.dataset.policy import Policy
    from ags_fast.dataset.versions import Version
    from ags_fast.fs import Store
    from ags_fast.jobs.results import Progress
    from ags_fast.jobs.work.context import Context, Task
    from ags_fast.keys.envelope import Envelope


LOCAL_OPEN_COST = 512 << 10  # cost of opening a file, in bytes of work
STORE_OPEN_COST = 4 << 20  # the same in an object store


class Options:
    """The arguments on how a job is run, checked."""

    def __init__(
        self, engine: Engine | None, resume: str | None, on_error: str, max_failures: int | None, progress: Progress
    ) -> None:
        if resume not in (None, "length", "verify"):
            raise ValueError(f"resume must be None, 'length' or 'verify', not {resume!r}")
        if on_error not in ("row", "raise"):
            raise ValueError(f"on_error must be 'row' or 'raise', not {on_error!r}")
        if max_failures is not None and max_failures < 0:
            raise ValueError(f"max_failures must not be negative, not {max_failures}")
        given = checked(engine)
        if given is None:
            given = LocalEngine()
            given.start_early()
        self.engine: Engine = given
        self.resume = resume
        self.max_failures = 0 if on_error == "raise" else max_failures
        self.progress = progress


def check_apart(one: Store, other: Store) -> None:
    """Raise ValueError if two folders are the same, or one is inside the other."""
    a, b = ((os.path.realpath(s.url) if s.local else s.url).rstrip("/") + "/" for s in (one, other))
    if a.startswith(b) or b.startswith(a):
        raise ValueError(f"{one.url} and {other.url}: the two must differ, and neither may be inside the other")


def envelope_for(dataset: Ledger, entries: Sequence[FileEntry], *more: FileEntry) -> Envelope:
    """Return the part of the envelope that opens these entries, to be sent to workers."""
    return dataset.envelope.subset({key_id for entry in (*entries, *more) for key_id in entry.key_ids()})


def run_tasks(context: Context, tasks: Sequence[Task], options: Options, plan: Plan | None) -> list[Row]:
    """Run the tasks, in any order. Returns their rows; raises JobError if more files fail than allowed."""
    from ags_fast.jobs.bars import make_bar

    rows: list[Row] = []
    if plan is not None and getattr(options.engine, "tasks_outlive_driver", False):
        context = replace(context, plan=plan.folder + numbered(plan.number))  # kept until the job ends
    todo, ready = _split_ready(context, tasks, plan is not None)
    failures = 0
    callback = options.progress if callable(options.progress) else None
    # A written Parquet file and its source differ in length: the bar counts the planned bytes.
    planned = {
        context.dataset.full_path(task.entry.file): task.entry.plain_length
        for task in tasks
        if task.entry.format == "parquet" and context.op in ("encrypt", "rekey")
    }
    total = sum(task.entry.plain_length for task in tasks)
    with make_bar(context.op, total, options.progress, files=len(tasks), divisor=1024) as bar:

        def report(more: list[Row]) -> None:
            nonlocal failures
            rows.extend(more)
            failures += sum(row.status == "failed" for row in more)
            bar.update(sum(planned.get(row.dst or "", row.plain_length or 0) for row in more), len(more))
            if callback is not None:
                callback(more)
            if options.max_failures is not None and failures > options.max_failures:
                raise _TooManyError

        local = context.dataset.local and (context.other is None or context.other.local)
        try:
            if ready:
                report(ready)
            options.engine.run(context, todo, LOCAL_OPEN_COST if local else STORE_OPEN_COST, report)
        except BaseException as error:
            # Finished files stay, because the plan names them. Temporary files go.
            _sweep_job(context, tasks)
            if not isinstance(error, _TooManyError):
                raise
            result = JobResult(context.job_id, context.op, context.dataset.url, None, rows)
            first = result.failed[0]
            raise JobError(
                f"stopped after {failures} failed files, of which the first is {first.src}: "
                f"{first.error_class}: {first.error}",
                result,
            ) from None
    if plan is not None and getattr(options.engine, "reports_deaths", False):
        plan.no_writer_died = all(row.attempt == 0 and row.error_class != "WorkerDiedError" for row in rows)
    return rows


def _split_ready(context: Context, tasks: Sequence[Task], planned: bool) -> tuple[list[Task], list[Row]]:
    """Split off the tasks that need no worker. Returns the other tasks, and the rows of those split off."""
    if planned and context.resume == "length":  # one listing in place of a look at every file
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


def without_false_alarm(dataset: Ledger, version: Version, rows: list[Row]) -> list[Row]:
    """Reword rows if the version was expired during the read: missing files are then not evidence of tampering."""
    if dataset.has_version(version.number):
        return rows
    why = f"version {version.number} was expired while its files were read: run the job again"
    return [
        row._replace(error_class="ConcurrentChangeError", error=why) if row.error_class == "IntegrityError" else row
        for row in rows
    ]


class _TooManyError(Exception):
    pass


def _sweep_job(context: Context, tasks: Sequence[Task]) -> None:
    if context.op == "decrypt" and context.other is not None:
        context.other.sweep(context.job_id, paths={task.entry.path for task in tasks})
    elif context.op != "verify":
        context.dataset.sweep(context.job_id, paths={task.entry.file for task in tasks})


def commit_files(
    plan: Plan,
    context: Context,
    entries: Sequence[FileEntry],
    rows: list[Row],
    base: Version | None,
    replaced: Mapping[str, FileEntry],
    policy: Policy | None = None,
) -> JobResult:
    """Commit the version with the files that succeeded, and end the job."""
    by_name, above = {entry.file: entry for entry in entries}, len(context.dataset.full_path(""))
    good = [
        with_lengths(by_name[row.dst[above:]], row.file_length or 0, row.plain_length)
        for row in rows
        if row.status == "ok" and row.dst is not None
    ]
    del by_name
    good.sort(key=lambda entry: entry.path)
    remove = [replaced[entry.path] for entry in good if entry.path in replaced]
    wish = Wish(context.op, context.job_id, good, remove, base, policy=policy)
    version, _, change = commit_plan(plan, wish, fsync=context.fsync)
    if change.refused:
        names = {context.dataset.full_path(entry.file) for entry in change.refused}
        why = "another job has put a file of this path into the dataset meanwhile: run the job again"
        rows = [
            row._replace(status="failed", error_class="ConcurrentChangeError", error=why) if row.dst in names else row
            for row in rows
        ]
    result = result_of(plan.dataset.store, context.op, context.job_id, version, rows)
    warn_of_dead(plan.dataset, plan.beside, result)
    if good:
        apply_retention(plan.dataset, result)
    return result


def warn_of_dead(dataset: Ledger, job_ids: Iterable[str], result: JobResult) -> None:
    """Add a warning to a result for each of these other jobs that died and can be continued or given up."""
    for plan in dead_plans(dataset, job_ids):
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.strptime(plan.job_id[:15], "%Y%m%dT%H%M%S"))
        what = str(plan.body.get("operation"))
        if what == "encrypt":
            what += f" of {without_password(str(plan.body.get('source')))}"
        result.warnings.append(
            f"the job {plan.job_id} ({what}, begun at {begun} UTC) died before its end, and its plan still holds keys "
            "and names. To go on with the job, run it again as it was, with resume; to give it up, run `ags-fast "
            "sweep` with the options of the KMS"
        )


def commit_without_files(dataset: Ledger, wish: Wish) -> Committed:
    """Commit a wish for which no file is written, under a plan of its own."""
    dataset.store.check_writable()
    base = dataset.committed(wish.base)
    reserve_keys(dataset, base.policy, wish.job_id, None, True, [], [])  # for the key that seals the manifests
    with ExitStack() as held:
        facts = {"operation": wish.operation, "source": shown(dataset.store.url)}
        plan, _ = begin_plan(dataset, held, wish.job_id, [], 0, base=base.number, **facts)
        return commit_plan(plan, wish)
