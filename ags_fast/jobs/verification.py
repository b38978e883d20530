"""Check every tag of every file of a version, and that no file is missing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.names import HIDDEN, new_job_id
from ags_fast.dataset.plan import Plan, open_plans
from ags_fast.errors import AgsError
from ags_fast.jobs.engines.local import client_for
from ags_fast.jobs.results import JobResult, Row, counted
from ags_fast.jobs.run import Options, envelope_for, run_tasks, without_false_alarm
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.dispatch import work_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version
    from ags_fast.jobs.engines.base import Engine
    from ags_fast.jobs.results import Progress
    from ags_fast.keys.kms import KmsClient


MISSING_ROWS = 10_000  # of one verify, before they are told by gaps


@counted
def verify_files(
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    engine: Engine | None = None,
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    paths: str | Sequence[str] | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Check every tag of every file of a version, and of numbered sets that each member is there, once, in its place.

    A missing, cut, changed or swapped file is a failed row; so is a missing member of a set. A file in the tree that no
    version and no open job knows is a row with the status "skipped" and the class "ExtraFile"; `JobResult.extra_files`
    counts these, and a warning says so. IntegrityError if no version has been committed. The other arguments are those
    of `decrypt_files`.
    """
    options = Options(engine, None, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset)
    opened, head, entries = Access.of(dataset, kms, key_store, storage_options, version, min_version, pin).load(paths)
    job_id = new_job_id()
    context = Context("verify", job_id, opened.id, opened.store, envelope_for(opened, entries))
    rows = without_false_alarm(opened, head, run_tasks(context, [Task(entry) for entry in entries], options, None))
    rows = _name_swaps(context, entries, rows)
    if paths is None:
        rows += _missing_members(opened, entries)
        rows += _extra_files(opened, head, entries)
    result = JobResult(job_id, "verify", opened.store.url, head.number, rows, head.pin)
    if extra := result.extra_files:
        files = "1 file is" if extra == 1 else f"{extra} files are"
        result.warnings.append(
            f"{files} in the dataset's folder that no version and no open job knows: somebody else put them there, or "
            "a job left them"
        )
    return result


def _name_swaps(context: Context, entries: Sequence[FileEntry], rows: list[Row]) -> list[Row]:
    """Say of files that fail their tags if they are each other's."""
    bad = {row.src: i for i, row in enumerate(rows) if row.error_class in ("IntegrityError", "FormatError")}
    suspects = [entry for entry in entries if context.dataset.full_path(entry.file) in bad]
    if len(suspects) > 100:  # every one is tried as every other
        return rows
    for entry in suspects:
        for other in suspects:
            if other is entry or not _holds(context, entry, other):
                continue
            i = bad[context.dataset.full_path(entry.file)]
            what = other.path if other.part is None else f"{other.path}, part {other.part}"
            rows[i] = rows[i]._replace(error=f"swapped: {entry.file} holds what belongs to {what}")
    return rows


def _holds(context: Context, entry: FileEntry, other: FileEntry) -> bool:
    if entry.format != other.format:
        return False
    try:
        return work_on(other.format).holds(context, other, entry.file)
    except (AgsError, OSError):
        return False


def _missing_members(dataset: Ledger, entries: Sequence[FileEntry]) -> list[Row]:
    """A failed row for each number that a set of files lacks, or has twice; of many that are missing, for each gap."""
    sets: dict[tuple[str, int], list[FileEntry]] = {}
    rows: list[Row] = []
    for entry in entries:
        if entry.set_id is not None and entry.part is not None and entry.parts is not None:
            sets.setdefault((entry.set_id, entry.parts), []).append(entry)
    for (set_id, parts), members in sets.items():
        numbers = Counter(entry.part for entry in members)
        there = sorted(number for number in numbers if number is not None and 0 <= number < parts)
        for before, after in pairwise([-1, *there, parts]):
            gap: list[Any] = [f"{before + 1} to {after - 1}"] if after > before + 1 else []
            if after - before < MISSING_ROWS - len(rows):  # how many there are to be is only what manifests say
                gap = list(range(before + 1, after))
            for n in gap:
                text = f"part {n} of the {parts} files that job {set_id} numbered is missing"
                rows.append(Row(f"{dataset.store.url}#{set_id}/{n}", None, "failed", "IntegrityError", text))
        for entry in members:
            if entry.part is not None and (numbers[entry.part] > 1 or not 0 <= entry.part < parts):
                text = f"part {entry.part} of the {parts} files that job {set_id} numbered is one too many"
                name = dataset.store.full_path(entry.file)
                rows.append(Row(name, None, "failed", "IntegrityError", text))
    return rows


def _extra_files(dataset: Ledger, head: Version, entries: Sequence[FileEntry]) -> list[Row]:
    """Files that no version and no job has. `entries`: of the version `head`, which has been read.

    In this order: a file whose job had a plan when it was listed is in the plan still, or in a version by then.
    """
    listed = [entry for entry in dataset.store.list() if not entry.path.startswith(HIDDEN)]
    known = {entry.file for entry in entries}
    for job_id in open_plans(dataset.store):
        known |= Plan.names(dataset, job_id)
    seen = {ref.path for ref in head.manifests}
    for version in dataset.versions():
        for ref in version.manifests:
            if ref.path not in seen:
                seen.add(ref.path)
                known.update(entry.file for entry in dataset.open_table(ref, dataset.envelope))
    return [
        Row(
            dataset.store.full_path(entry.path),
            None,
            "skipped",
            "ExtraFile",
            "no version and no open job of the dataset knows this file",
            file_length=entry.size,
        )
        for entry in listed
        if entry.path not in known
    ]
