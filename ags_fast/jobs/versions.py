"""Make versions in which no file of data is written: without some files, as an older version was, in fewer tables."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Unpack

from ags_fast.dataset.access import Access
from ags_fast.dataset.change import Wish
from ags_fast.dataset.draft import Draft
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.job import Job
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.dataset.tables import TABLE_ROWS
from ags_fast.jobs.copying import table_row
from ags_fast.jobs.results import JobResult, counted
from ags_fast.jobs.retention import ended
from ags_fast.jobs.run import gone_row
from ags_fast.jobs.work.rows import planned_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.entries import FileEntry, Patterns
    from ags_fast.dataset.entry import Entry
    from ags_fast.dataset.log import Log
    from ags_fast.dataset.tables import Table
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.results import Progress

STATS = 1000  # objects at most that are looked at one by one, without a listing


@counted
def remove_files(
    dataset: Folder,
    paths: str | Sequence[str],
    *,
    exclude: Patterns = None,
    dry_run: bool = False,
    progress: Progress = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Commit a version of `dataset` without the files whose path matches one of `paths`.

    **This deletes nothing yet.** Older versions have the files: `JobResult.still_in` has their numbers, and a warning
    says so. `expire` removes these versions, and with them the objects of the files, the tables that name them, and
    KEKs that nothing else needs (`force=True`: without waiting for their grace). Copies of the dataset, and what the
    storage keeps of deleted objects, are outside the reach of ags_fast.

    The rest of a numbered set (`aad_prefix`) is no longer checked for completeness. A removed path may be encrypted
    again. A file that another job has replaced meanwhile stays, and is a failed row.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        paths: Patterns of `fnmatch` for the paths of the files.
        exclude: Leave out the files whose path matches one of these patterns.
        dry_run: Only plan; the rows have the status "planned".
        progress: A callable gets the rows.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each file, and the version.

    Raises:
        FileNotFoundError: A pattern matches no file. Nothing is done.
        JobEndedError: Another process has ended the job.
        UnknownOutcomeError: The storage does not answer: the version may be there, now or later.
        ValueError: `paths` is empty.
    """
    (log, head), chosen = Access.of(dataset, **at).files(paths, exclude)
    store = log.store
    rows = [planned_row(row.path, None, row, "planned" if dry_run else "ok") for row in chosen]
    result, but = JobResult(new_job_id(), "remove", store.url, head.number, rows, head.pin), 0
    if not dry_run:
        store.check_writable()
        job = Job.begin(log, "remove", head=head)
        made = job.commit(Wish("remove", remove={row.path: row.file for row in chosen}, whole=False))
        stays = set(made.change.refused)
        rows = [gone_row(row.src, "failed") if row.src in stays else row for row in rows]
        chosen = [file for file in chosen if file.path not in stays]
        result, but = ended(job, made, rows), (made.version or made.head).number
    if callable(progress):
        progress(rows)
    result.still_in = log.look(lambda newest: _versions_with(log, newest, chosen, but))
    text = "Copies of the dataset, and what the storage keeps of deleted objects, still have the files."
    if result.still_in:
        text = f"Still in {_numbers(result.still_in)}, until expire removes that. {text}"
    result.warnings.append(text)
    return result


def _versions_with(log: Log, head: Entry, gone: Sequence[FileEntry], but: int) -> list[int]:
    """Return the numbers of the versions, except `but`, that have a file at a path of these, or one renamed to it."""
    paths, files = {row.path for row in gone}, {row.file for row in gone}
    known: dict[str, bool] = {}  # {table: whether it has such a file}
    found = []
    for entry in log.kept(head) if gone else ():
        for table in entry.files:
            if table.path not in known:
                rows = log.tables.rows(table, log.envelope(head))
                known[table.path] = any(row.path in paths or row.file in files for row in rows)
        if entry.number != but and any(known[table.path] for table in entry.files):
            found.append(entry.number)
    return sorted(found)


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"version {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"versions {numbers[0]} to {numbers[-1]}"
    return f"versions {', '.join(map(str, numbers))}"


@counted
def restore_version(
    dataset: Folder, version: int, *, dry_run: bool = False, progress: Progress = None, **at: Unpack[Reach]
) -> JobResult:
    """Commit a version of `dataset` that has the files of an older version.

    No version is taken back, and no file is read or written: the new version names the objects of the older one. Their
    data keys are wrapped by the KEKs in use, so a rotation in between stays in force. Files are all that comes back:
    the policy and the batches of streams stay as they are. If the job dies, nothing has changed, and `sweep` removes
    its plan.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        version: The number of the version whose files come back. `expire` removes old versions.
        dry_run: Only plan; the rows have the status "planned".
        progress: A callable gets the rows.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each file that comes back (`dst` is its path) or goes (`dst` is None), and the version. If the newest
        version has these files already, there are no rows, and no version is made.

    Raises:
        ConcurrentChangeError: Another job has changed these files meanwhile. Nothing is done.
        ExpiredError: The version was expired, perhaps meanwhile. Nothing is done.
        FileNotFoundError: There is no such version, or an object of it is gone. Nothing is done.
    """
    now = Access.of(dataset, **at).open()
    log, store = now.log, now.log.store
    then = Snapshot(log, log.entry(version, now.entry))
    shared = {table.path for table in now.entry.files} & {table.path for table in then.entry.files}
    here, there = ({_identity(row): row for row in snapshot.without(shared).files()} for snapshot in (now, then))
    comes = sorted(row for key, row in there.items() if key not in here)
    goes = sorted(row for key, row in here.items() if key not in there)
    _check_objects(then, comes)
    status = "planned" if dry_run else "ok"
    rows = [planned_row(row.path, None, row, status) for row in goes]
    rows += [planned_row(row.path, row.path, row, status) for row in comes]
    if dry_run or not rows:
        result = JobResult(new_job_id(), "restore", store.url, now.entry.number, rows, now.entry.pin)
    else:
        store.check_writable()
        job = Job.begin(log, "restore", head=now.entry)
        remove = {row.path: row.file for row in goes}
        result = ended(job, job.commit(Wish("restore", comes, remove, of=version)), rows)
    if callable(progress):
        progress(rows)
    return result


def _identity(row: FileEntry) -> tuple[str, str, str | None, int | None]:
    """Return what makes a file another one. A file that is no longer of a whole set has lost its place in the set."""
    return row.path, row.file, row.set_id, row.part


def _check_objects(then: Snapshot, rows: Sequence[FileEntry]) -> None:
    """Raise FileNotFoundError if an object is gone, which somebody else must have deleted."""
    store = then.log.store
    if len(rows) > STATS:
        sizes = {listed.path: listed.size for listed in store.list()}
    else:
        sizes = {row.file: listed.size for row in rows if (listed := store.stat(row.file)) is not None}
    gone = [row for row in rows if sizes.get(row.file) != row.file_length]
    if gone:
        more = f", and {len(gone) - 1:,} more" if len(gone) > 1 else ""
        raise FileNotFoundError(
            f"version {then.entry.number} of {store.url} cannot come back: {gone[0].file} is gone, or has another "
            f"length{more}. verify_files lists all such files of the version; nothing was changed"
        )


@counted
def compact(dataset: Folder, *, dry_run: bool = False, **at: Unpack[Reach]) -> JobResult:
    """Make a version of the same files whose tables are one sorted run, so that a lookup reads one table.

    Commits merge tables by themselves and keep them few; nothing depends on this job. It pays after many commits,
    before a time of many reads. No file of data is touched. The old tables stay until the versions that name them are
    expired. If the tables are one run already, no version is made.

    Args:
        dataset: The dataset's folder: a path, or a URL of fsspec.
        dry_run: Say which tables would be merged, and do nothing.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A result with a row for each table that was merged.
    """
    log, head = Access.of(dataset, **at).open()
    merged = [*chain.from_iterable(to_merge(head.files))]
    if dry_run or not merged:
        rows = [table_row(log.store, table, "planned") for table in merged]
        return JobResult(new_job_id(), "compact", log.store.url, head.number, rows, head.pin)
    log.store.check_writable()
    job = Job.begin(log, "compact", head=head)

    def files(head: Entry) -> Draft | None:
        groups = to_merge(head.files)
        merged[:] = chain.from_iterable(groups)
        if not merged:
            return None
        gone, sealer, envelope = {table.path for table in merged}, main_key(head.keys).key_id, log.envelope(head)
        new = [table for table in head.files if table.path not in gone]
        for group in groups:
            rows = chain.from_iterable(log.tables.rows(table, envelope) for table in group)
            new += log.tables.write(rows, job.id, sealer, envelope)
        return Draft("compact", files=tuple(new), uses=job.uses(head), first=job.retention(head))

    made = job.replace_files(files)
    return ended(job, made, [table_row(log.store, table) for table in merged])


def to_merge(tables: Iterable[Table]) -> list[list[Table]]:
    """Return the groups of tables that are to be merged: those that overlap, and small neighbours."""
    runs: list[list[Table]] = []
    last = b""
    for table in sorted(tables, key=lambda table: table.first):
        if runs and table.first <= last:
            runs[-1].append(table)
        else:
            runs.append([table])
        last = max(last, table.last)
    groups: list[list[Table]] = []
    for run in runs:
        if groups and sum(table.rows for table in (*groups[-1], *run)) <= TABLE_ROWS:
            groups[-1] += run
        else:
            groups.append(run)
    return [group for group in groups if len(group) > 1]
