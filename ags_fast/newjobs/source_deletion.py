"""Delete the sources of an encryption: only what was read back as the newest version of the dataset names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.errors import AgsError, ConcurrentChangeError
from ags_fast.jobs.results import describe
from ags_fast.jobs.work.context import Context, SourceChangedError, Task
from ags_fast.jobs.work.dispatch import work_on
from ags_fast.newjobs.run import run_tasks
from ags_fast.onelog.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.fs import Store
    from ags_fast.jobs.results import JobResult
    from ags_fast.newjobs.run import Options
    from ags_fast.onelog.log import Log


def delete_sources(log: Log, source: Store, entries: Sequence[FileEntry], result: JobResult, options: Options) -> None:
    """Delete the sources of an encryption after every file was read back from storage, by what the dataset says of it.

    Args:
        log: The log of the dataset.
        source: The folder of the sources.
        entries: The files that the job was to write.
        result: The result of the job. The rows of files that do not read back, and of sources that stay, fail.
        options: How the job is run.
    """
    names = {log.store.full_path(entry.file): entry for entry in entries}
    made = [names[row.dst] for row in result.rows if row.status == "ok" and row.dst in names]
    snapshot = Snapshot(log, log.head())
    there = {row.path: row for _, row in snapshot.find([entry.path for entry in made]).values()}
    good = [there[entry.path] for entry in made if entry.path in there and there[entry.path].file == entry.file]
    contents = snapshot.holding({key_id for row in good for key_id in row.key_ids()})
    context = Context("verify", result.job_id, contents.dataset_id, contents.store, contents.envelope)
    checked = {row.src: row for row in run_tasks(context, [Task(row) for row in good], options)}
    for i, row in enumerate(result.rows):
        check = checked.get(row.dst or "")
        if check is not None and check.status != "ok":
            result.rows[i] = row._replace(status="failed", error_class=check.error_class, error=check.error)
    replaced = {entry.file for entry in made} - {row.file for row in good}

    def may_go(entry: FileEntry) -> bool:
        if entry.file in replaced:
            raise ConcurrentChangeError("another job has replaced or removed the file since")
        return True

    if not result.failed:
        _delete(log.store, source, made, result, may_go)


def delete_unchanged(snapshot: Snapshot, source: Store, same: Sequence[FileEntry], result: JobResult) -> None:
    """Delete sources that an earlier run encrypted but did not delete. Bytes are compared: that run may be long ago."""
    if result.failed or not same:
        return
    contents = snapshot.holding({key_id for row in same for key_id in row.key_ids()})
    context = Context("decrypt", result.job_id, contents.dataset_id, contents.store, contents.envelope, source)
    _delete(contents.store, source, same, result, lambda entry: work_on(entry.format).same_as_source(context, entry))


def _delete(
    dataset: Store,
    source: Store,
    entries: Sequence[FileEntry],
    result: JobResult,
    may_go: Callable[[FileEntry], bool],
) -> None:
    rows = {row.dst: i for i, row in enumerate(result.rows)}
    for entry in entries:
        try:
            there = source.stat(entry.path)
            if there is None:
                continue
            if not entry.is_of(there.size, there.stamp):
                raise SourceChangedError("the source has changed since")
            if not may_go(entry):
                raise SourceChangedError("the source has other bytes, but the same size and time of change")
            source.delete_read(there)
        except (AgsError, OSError) as error:  # the file is committed, and other sources are deleted by now: only report
            i = rows[dataset.full_path(entry.file)]
            why = f"the file is in the dataset, but its source was not deleted: {describe(error)}"
            result.rows[i] = result.rows[i]._replace(status="failed", error_class=type(error).__name__, error=why)
