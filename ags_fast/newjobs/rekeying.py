"""Rewrite files, each under a new data key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.keks import Want, clock_ms
from ags_fast.dataset.key_material import KEYTOOLS, check_key_material
from ags_fast.dataset.names import new_job_id, written_name
from ags_fast.handle.access import Access
from ags_fast.jobs.engines.local import client_for
from ags_fast.jobs.results import JobResult, Row, counted
from ags_fast.jobs.sources import aad_prefixes
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.rows import planned_row
from ags_fast.newjobs.run import (
    Options,
    apply_retention,
    begin_files,
    commit_files,
    result_of,
    run_tasks,
    source_fact,
    take_up,
    unless_expired,
    with_columns,
)
from ags_fast.onelog.entry import main_key
from ags_fast.onelog.job import Job
from ags_fast.onelog.keys import check_not_left, followed, kinds_of_files, scopes_of
from ags_fast.onelog.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.handle.access import Folder, KeyPlace
    from ags_fast.jobs.engines.base import Engine
    from ags_fast.jobs.results import Progress
    from ags_fast.keys.kms import KmsClient
    from ags_fast.onelog.entry import Entry


@counted
def rekey_files(  # noqa: PLR0913 the contract's arguments
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    wrapping_key_id: str | None = None,
    engine: Engine | None = None,
    double_wrap: bool | None = None,
    dek_length: int = 16,
    paths: str | Sequence[str] | None = None,
    resume: str | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    verify_after: bool = False,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
    key_material: str | None = None,
) -> JobResult:
    """Rewrite files of `dataset`, each under a new data key, and commit a version with the new files.

    The previous version, and its files, stay readable until that version is expired.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        kms: The properties of a KMS, or a client: see `encrypt_files`.
        wrapping_key_id: The id of the master key; None: the master key in use.
        engine: What runs the tasks; None: `LocalEngine`.
        double_wrap: True: a KEK of the dataset wraps the data keys. False: the KMS wraps every data key. None: as for
            the files that are rewritten.
        dek_length: Bytes of a data key: 16, 24 or 32.
        paths: Rewrite only files whose path matches one of these patterns of `fnmatch`; None: all files.
        resume: Continue a dead job: "length" or "verify", as for `encrypt_files`.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        fsync: Commit the version only when its files are on the disk.
        verify_after: Read each file back before the file counts as written.
        dry_run: Only plan; the rows have the status "planned".
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        progress: None shows a bar on a terminal. "lines" does, too, and prints a line every 30 s to a standard error
            that is not a terminal. True always shows a bar, and False nothing. A callable gets rows as they come.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.
        key_material: Of the Parquet files: "keytools" gives them key material (see `encrypt_files`), "none" takes it
            away. None: files with key material get new key material, and the others none.

    Returns:
        A row for each file, and the version.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow. The plan stays for `resume`.
        JobEndedError: Another process has ended the job, as a sweep does with a job that is silent for long.
        UnknownOutcomeError: The storage does not answer: the version may be there, now or later.
        IntegrityError: The dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`, or has left the master key.
        FileNotFoundError: There is no dataset, or a pattern of `paths` matches no file.
        ValueError: An argument is malformed.
    """
    if dek_length not in (16, 24, 32):
        raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {dek_length}")
    if key_material not in (None, "none", KEYTOOLS):
        raise ValueError(f"key_material must be {KEYTOOLS!r}, 'none' or None, not {key_material!r}")
    options = Options(engine, resume, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset)
    snapshot, chosen = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin).files(paths)
    log, head, store = snapshot.log, snapshot.entry, snapshot.log.store
    facts = source_fact(store.url)
    job = take_up(log, head, "rekey", facts) if options.resume and not dry_run else None
    if job is not None and not isinstance(job, Job):  # it was committed before it died
        files = [store.full_path(row.file) for row in Snapshot(log, job).files() if row.job_id == job.job_id]
        return result_of(store, "rekey", job.job_id, job, [Row(file, file, "ok") for file in files])
    masters = _column_masters(head, chosen)
    wanted = _new_files(chosen, masters, key_material)
    if any(row.key_material is not None for row in wanted):
        check_key_material(KEYTOOLS, dek_length)
    old = {row.path: row for row in chosen}
    if dry_run or not wanted:
        result = _planned(snapshot, wanted, old)
        if not dry_run:
            if job is not None:
                job.give_up()
            apply_retention(log, head, result)
        return result
    store.check_writable()
    if double_wrap is None:
        double_wrap = all(head.keys[key_id].double_wrap for key_id in wrapped_by(chosen))
    if wrapping_key_id is not None:
        check_not_left(head.keys, wrapping_key_id)
    main = wrapping_key_id or main_key(head.keys).wrapping_key_id

    def kinds_of(job_id: str) -> list[list[Want]]:
        scopes = scopes_of(head.policy, [row.path for row in chosen], job_id, clock_ms())
        return kinds_of_files(scopes, masters, main, double_wrap)

    taken_up = None if job is None else (job, {row.path: row for row in job.planned()})
    job, entries = begin_files(snapshot, "rekey", facts, wanted, kinds_of, dek_length, taken_up=taken_up)
    with job:
        context = Context(
            "rekey",
            job.id,
            head.dataset_id,
            store,
            job.keys.envelope().subset({key_id for row in (*entries, *chosen) for key_id in row.key_ids()}),
            fsync=fsync,
            verify_after=verify_after,
            resume=options.resume if taken_up else None,
        )
        tasks = [Task(entry, old[entry.path]) for entry in entries]
        rows = unless_expired(snapshot, run_tasks(context, tasks, options, writes=True))
        return commit_files(job, context, entries, rows, old)


def _planned(snapshot: Snapshot, wanted: Sequence[FileEntry], old: Mapping[str, FileEntry]) -> JobResult:
    """Return the result of a dry run."""
    store, job_id = snapshot.log.store, new_job_id()
    names = [(row, written_name(row.path, job_id, row.format)) for row in wanted]
    rows = [planned_row(store.full_path(old[row.path].file), store.full_path(name), row) for row, name in names]
    return result_of(store, "rekey", job_id, snapshot.entry, rows)


def _column_masters(head: Entry, chosen: Sequence[FileEntry]) -> list[dict[str, str]]:
    """Return for each file {column: master key} of the columns that have a key of their own."""
    ids = {key["key_id"] for row in chosen for key in row.column_keys or ()}
    masters = {key_id: followed(head.keys, Want.of(head.keys[key_id])).wrapping_key_id for key_id in ids}
    return [{key["column"]: masters[key["key_id"]] for key in row.column_keys or ()} for row in chosen]


def _new_files(
    chosen: Sequence[FileEntry], masters: Sequence[dict[str, str]], key_material: str | None
) -> list[FileEntry]:
    """Return the files to make, without names and keys yet."""
    made = []
    for row, columns, prefix in zip(chosen, masters, aad_prefixes(None, len(chosen)), strict=True):
        has_material = row.key_material is not None if key_material is None else key_material == KEYTOOLS
        new = row._replace(
            file_length=row.file_length if row.format == "ags1" else 0,
            aad_prefix=prefix if row.set_id is None else row.aad_prefix,
            key_material=() if has_material and row.format == "parquet" else None,
        )
        made.append(with_columns(new, columns))
    return made
