"""Commit a version without some files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.names import new_job_id
from ags_fast.handle.access import Access
from ags_fast.jobs.results import JobResult, counted
from ags_fast.jobs.work.rows import planned_row
from ags_fast.keys.kms import KmsClient
from ags_fast.newjobs.run import apply_retention, result_of
from ags_fast.onelog.change import Wish
from ags_fast.onelog.job import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.handle.access import Folder, KeyPlace
    from ags_fast.jobs.results import Progress
    from ags_fast.onelog.entry import Entry
    from ags_fast.onelog.log import Log


@counted
def remove_files(
    dataset: Folder,
    paths: str | Sequence[str],
    *,
    kms: KmsClient | Mapping[str, str],
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Commit a version of `dataset` without the files whose path matches one of `paths`.

    **This deletes nothing yet.** Older versions have the files: `JobResult.still_in` has their numbers, and a warning
    says so. `expire` removes these versions, and with them the objects of the files, the manifests that name them, and
    KEKs that nothing else needs (`force=True`: without waiting for their grace). Copies of the dataset, and what the
    storage keeps of deleted objects, are outside the reach of ags_fast.

    The rest of a numbered set (`aad_prefix`) is no longer checked for completeness. A removed path may be encrypted
    again. A file that another job has replaced meanwhile stays, and is a failed row.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        paths: Patterns of `fnmatch` for the paths of the files.
        kms: The properties of a KMS, or a client: see `encrypt_files`.
        dry_run: Only plan; the rows have the status "planned".
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        progress: A callable gets the rows.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each file, and the version.

    Raises:
        FileNotFoundError: There is no dataset, or a pattern matches no file. Nothing is done.
        IntegrityError: The dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        JobEndedError: Another process has ended the job.
        UnknownOutcomeError: The storage does not answer: the version may be there, now or later.
        ValueError: `paths` is empty, or the pin is malformed.
    """
    access = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin)
    snapshot, chosen = access.files(paths)
    log, head, store = snapshot.log, snapshot.entry, access.store
    rows = [planned_row(store.full_path(row.file), None, row, "planned" if dry_run else "ok") for row in chosen]
    made = job = None
    if not dry_run:
        store.check_writable()
        job = Job.begin(log, "remove", head=head)
        made = job.commit(Wish("remove", remove={row.path: row.file for row in chosen}, whole=False))
        head = made.version or made.head
        why = "another job has put another file of this path into the dataset meanwhile: run the job again"
        stays = set(made.change.refused)
        rows = [
            row._replace(status="failed", error_class="ConcurrentChangeError", error=why) if file.path in stays else row
            for file, row in zip(chosen, rows, strict=True)
        ]
        chosen = [file for file in chosen if file.path not in stays]
    if callable(progress):
        progress(rows)
    result = result_of(store, "remove", job.id if job else new_job_id(), head, rows)
    if made is not None and job is not None:
        apply_retention(log, made.head, result, job.cleaned)
    result.still_in = log.look(lambda newest: _versions_with(log, newest, chosen, 0 if dry_run else head.number))
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
