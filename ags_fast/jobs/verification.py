"""Check every tag of every file of a version, and that no file is missing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.names import HIDDEN, new_job_id
from ags_fast.dataset.open_jobs import claimed_files
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


MISSING_ROWS = 10_000  # for missing members; above this number, one row for each gap


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
    """Check every tag of every file of a version, and that numbered sets are complete.

    A missing, cut, changed or swapped file is a failed row. Each member of a numbered set must be there once, in its
    place; a missing member is a failed row. A file in the tree that no version and no open job knows is a row with the
    status "skipped" and the class "ExtraFile"; `JobResult.extra_files` counts these files, and a warning says so.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        kms: The properties of a KMS, or a client: see `encrypt_files`.
        engine: What runs the tasks; None: `LocalEngine`.
        version: The number of the version; None: the newest.
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        paths: Check only files whose path matches one of these patterns of `fnmatch`, and neither sets nor extra files;
            None: everything.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        progress: None shows a bar on a terminal. "lines" does, too, and prints a line every 30 s to a standard error
            that is not a terminal. True always shows a bar, and False nothing. A callable gets rows as they come.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each file, for each missing member of a set, and for each extra file.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow.
        IntegrityError: No version has been committed, or the dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        FileNotFoundError: There is no dataset, or a pattern of `paths` matches no file.
        ValueError: An argument is malformed.
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
    """Name the files that hold each other's content, among those whose tags fail."""
    bad = {row.src: i for i, row in enumerate(rows) if row.error_class in ("IntegrityError", "FormatError")}
    suspects = [entry for entry in entries if context.dataset.full_path(entry.file) in bad]
    if len(suspects) > 100:  # each file is tried as each other one
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
    """Return a failed row for each number that a set lacks or has twice; for each gap if many numbers are missing."""
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
            if after - before < MISSING_ROWS - len(rows):  # `parts` comes from a manifest and may be huge
                gap = list(range(before + 1, after))
            for n in gap:
                text = f"part {n} of the {parts} files that job {set_id} numbered is missing"
                rows.append(Row(f"{dataset.store.url}#{set_id}/{n}", None, "failed", "IntegrityError", text))
        for entry in members:
            if entry.part is not None and (numbers[entry.part] > 1 or not 0 <= entry.part < parts):
                text = (
                    f"part {entry.part} of the {parts} files that job {set_id} numbered is there twice or out of range"
                )
                name = dataset.store.full_path(entry.file)
                rows.append(Row(name, None, "failed", "IntegrityError", text))
    return rows


def _extra_files(dataset: Ledger, head: Version, entries: Sequence[FileEntry]) -> list[Row]:
    """Return rows for files of no version and no job. `entries` are those of the version `head`.

    The order matters: a file that was listed while its job had a plan is still in the plan, or by now in a version.
    """
    listed = [entry for entry in dataset.store.list() if not entry.path.startswith(HIDDEN)]
    known = {entry.file for entry in entries} | claimed_files(dataset)
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
