"""Rewrite files, each under a new data key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack

from ags_fast._types import KeyMaterial, OnError, Resume, check_choice
from ags_fast.dataset.access import Access
from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.entry import main_key
from ags_fast.dataset.job import Job
from ags_fast.dataset.key_material import KEYTOOLS, check_key_material
from ags_fast.dataset.keys import check_not_left, followed, kinds_of_files, scopes_of
from ags_fast.dataset.kinds import Want, clock_ms
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.snapshot import Snapshot
from ags_fast.engines.local import client_for
from ags_fast.jobs import run
from ags_fast.jobs.results import JobResult, counted
from ags_fast.jobs.retention import apply_retention
from ags_fast.jobs.sources import aad_prefixes
from ags_fast.jobs.work.rows import planned_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.entries import FileEntry, Patterns
    from ags_fast.dataset.entry import Entry
    from ags_fast.engines.base import Engine
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.results import Progress


@counted
def rekey_files(  # noqa: PLR0913 the contract's arguments
    dataset: Folder,
    *,
    wrapping_key_id: str | None = None,
    engine: Engine | None = None,
    double_wrap: bool | None = None,
    dek_length: int = 16,
    paths: Patterns = None,
    exclude: Patterns = None,
    resume: Resume | None = None,
    on_error: OnError = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    verify_after: bool = False,
    dry_run: bool = False,
    progress: Progress = None,
    key_material: KeyMaterial | Literal["none"] | None = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Rewrite files of `dataset`, each under a new data key, and commit a version with the new files.

    The previous version, and its files, stay readable until that version is expired.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        wrapping_key_id: The id of the master key; None: the master key in use.
        engine: What runs the tasks; None: `LocalEngine`.
        double_wrap: True: a KEK of the dataset wraps the data keys. False: the KMS wraps every data key. None: as for
            the files that are rewritten.
        dek_length: Bytes of a data key: 16, 24 or 32.
        paths: Rewrite only files whose path matches one of these patterns of `fnmatch`; None: all files.
        exclude: Leave out the files whose path matches one of these patterns.
        resume: Continue a dead job: "length" or "verify", as for `encrypt_files`.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        fsync: Commit the version only when its files are on the disk.
        verify_after: Read each file back before the file counts as written.
        dry_run: Only plan; the rows have the status "planned".
        progress: How the progress is shown: see `encrypt_files`.
        key_material: Of the Parquet files: "keytools" gives them key material (see `encrypt_files`), "none" takes it
            away. None: files with key material get new key material, and the others none.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each file, and the version.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow. The plan stays for `resume`.
        JobEndedError: Another process has ended the job, as a sweep does with a job that is silent for long.
        UnknownOutcomeError: The storage does not answer: the version may be there, now or later.
        PolicyError: The dataset has left the master key.
        FileNotFoundError: A pattern of `paths` matches no file.
        ValueError: An argument is malformed.
    """
    check_key_material(None, dek_length)
    check_choice("key_material", key_material, KeyMaterial, "none", None)
    options = run.Options(engine, progress, on_error, max_failures, resume, fsync=fsync, verify_after=verify_after)
    at["kms"] = client_for(options.engine, at["kms"], dataset)
    snapshot, chosen = Access.of(dataset, **at).files(paths, exclude)
    log, head, store = snapshot.log, snapshot.entry, snapshot.log.store
    facts = run.source_fact(store.url)
    job = run.take_up(log, head, "rekey", facts) if options.resume and not dry_run else None
    if job is not None and not isinstance(job, Job):  # it was committed before it died
        files = [row for row in Snapshot(log, job).files() if row.job_id == job.job_id]
        rows = [planned_row(row.path, row.path, row, "ok") for row in files]
        return JobResult(job.job_id, "rekey", store.url, job.number, rows, job.pin)
    with snapshot.unless_expired():
        masters = _column_masters(head, chosen)
    wanted = _new_files(chosen, masters, key_material)
    if any(row.key_material is not None for row in wanted):
        check_key_material(KEYTOOLS, dek_length)
    old = {row.path: row for row in chosen}
    if dry_run or not wanted:
        rows = [planned_row(row.path, row.path, row) for row in wanted]
        result = JobResult(new_job_id(), "rekey", store.url, head.number, rows, head.pin)
        if not dry_run:
            if job is not None:
                job.give_up()
            apply_retention(log, head, result)
        return result
    store.check_writable()
    with snapshot.unless_expired():
        if double_wrap is None:
            double_wrap = all(head.keys[key_id].double_wrap for key_id in wrapped_by(chosen))
        if wrapping_key_id is not None:
            check_not_left(head.keys, wrapping_key_id)
        main = wrapping_key_id or main_key(head.keys).wrapping_key_id

    def kinds_of(job_id: str) -> list[list[Want]]:
        scopes = scopes_of(head.policy, [row.path for row in chosen], job_id, clock_ms())
        return kinds_of_files(scopes, masters, main, double_wrap)

    taken_up = None if job is None else (job, {row.path: row for row in job.planned()})
    job, entries = run.begin_files(snapshot, "rekey", facts, wanted, kinds_of, dek_length, taken_up=taken_up)
    with job:
        rows = run.unless_expired(snapshot, run.write_files(job, entries, options, old=old))
        return run.commit_files(job, entries, rows, old)


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
        made.append(run.with_columns(new, columns))
    return made
