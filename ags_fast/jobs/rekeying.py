"""Rewrite files, each under a new data key."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.key_material import KEYTOOLS, check_key_material
from ags_fast.dataset.names import new_job_id, object_name
from ags_fast.dataset.open_jobs import resume_plan
from ags_fast.dataset.planning import begin_plan, column_masters, continue_plan, reserve_keys
from ags_fast.errors import ConcurrentChangeError
from ags_fast.jobs.engines.local import client_for
from ags_fast.jobs.results import JobResult, counted, result_of, shown
from ags_fast.jobs.run import Options, commit_files, envelope_for, run_tasks, without_false_alarm
from ags_fast.jobs.sources import aad_prefixes
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.rows import planned_row
from ags_fast.keys.entry import UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.jobs.engines.base import Engine
    from ags_fast.jobs.results import Progress
    from ags_fast.keys.kms import KmsClient


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
        ConcurrentChangeError: The files were replaced and expired while the job was planned.
        IntegrityError: The dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        FileNotFoundError: There is no dataset, or a pattern of `paths` matches no file.
        ValueError: An argument is malformed.
    """
    if dek_length not in (16, 24, 32):
        raise ValueError(f"dek_length must be 16, 24 or 32 bytes, not {dek_length}")
    if key_material not in (None, "none", KEYTOOLS):
        raise ValueError(f"key_material must be {KEYTOOLS!r}, 'none' or None, not {key_material!r}")
    options = Options(engine, resume, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset)
    opened, base, chosen = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin).load(
        paths, writes=True
    )
    target = opened.store
    facts = {"operation": "rekey", "source": shown(target.url)}
    with ExitStack() as held:
        plan = resume_plan(opened, facts, held) if options.resume and not dry_run else None
        if plan is not None and (made := plan.committed()) is not None:
            rows = [planned_row(e.file, e.file, e, "ok") for e in opened.entries(made) if e.job_id == plan.job_id]
            plan.end()
            return result_of(target, "rekey", plan.job_id, made, rows)
        job_id = plan.job_id if plan else new_job_id()
        entries = _new_entries(chosen, job_id, key_material)
        if any(entry.key_material is not None for entry in entries):
            check_key_material(KEYTOOLS, dek_length)
        old = {entry.path: entry for entry in chosen}
        if dry_run or not entries:
            rows = [planned_row(target.full_path(old[e.path].file), target.full_path(e.file), e) for e in entries]
            return result_of(target, "rekey", job_id, base, rows)
        target.check_writable()
        if double_wrap is None:
            double_wrap = all(opened.keys.get(key_id).double_wrap for key_id in wrapped_by(chosen))
        columns = [column_masters(opened, entry) for entry in chosen]
        entries = reserve_keys(opened, base.policy, job_id, wrapping_key_id, double_wrap, entries, columns)
        if plan is None:
            plan, entries = begin_plan(opened, held, job_id, entries, dek_length, base=base.number, **facts)
        else:
            entries = continue_plan(opened, plan, plan.entries(), entries, dek_length)
        try:
            envelope = envelope_for(opened, entries, *chosen)
        except UnknownKeyError:
            plan.end()
            raise ConcurrentChangeError(
                "the files to rewrite were replaced and expired while the job was planned: run it again"
            ) from None
        context = Context(
            "rekey",
            job_id,
            opened.id,
            target,
            envelope,
            fsync=fsync,
            verify_after=verify_after,
            resume=options.resume,
        )
        rows = run_tasks(context, [Task(entry, old[entry.path]) for entry in entries], options, plan)
        rows = without_false_alarm(opened, base, rows)
        return commit_files(plan, context, entries, rows, base, old)


def _new_entries(chosen: Sequence[FileEntry], job_id: str, key_material: str | None) -> list[FileEntry]:
    """Return the files to make, without keys yet."""
    made = []
    for entry, prefix in zip(chosen, aad_prefixes(None, len(chosen)), strict=True):
        has_material = entry.key_material is not None if key_material is None else key_material == KEYTOOLS
        new = entry._replace(
            file=object_name(entry.path, job_id, format=entry.format),
            file_length=entry.file_length if entry.format == "ags1" else 0,
            job_id=job_id,
            aad_prefix=prefix if entry.set_id is None else entry.aad_prefix,
            key_material=() if has_material and entry.format == "parquet" else None,
        )
        made.append(new)
    return made
