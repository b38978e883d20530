"""Decrypt a version of a dataset into a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.files.contents import Contents, denied_keys
from ags_fast.dataset.names import new_job_id
from ags_fast.fs import Store
from ags_fast.jobs.engines.base import Engine
from ags_fast.jobs.engines.local import client_for
from ags_fast.jobs.results import JobResult, counted, result_of
from ags_fast.jobs.run import (
    Options,
    check_apart,
    envelope_for,
    run_tasks,
    without_false_alarm,
)
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.rows import make_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast._types import FilePath
    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.jobs.results import Progress
    from ags_fast.keys.kms import KmsClient


@counted
def decrypt_files(  # noqa: PLR0913 the contract's arguments
    dataset: Folder,
    dst: FilePath,
    *,
    kms: KmsClient | Mapping[str, str],
    engine: Engine | None = None,
    version: int | None = None,
    min_version: int | None = None,
    pin: str | None = None,
    paths: str | Sequence[str] | None = None,
    overwrite: bool = False,
    missing: str = "error",
    resume: str | None = None,
    on_error: str = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    dry_run: bool = False,
    preserve: bool = True,
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Decrypt a version of `dataset` into the folder `dst`, with the tree as it was.

    A file appears in `dst` only when all its tags have passed. Until then the file has mode 0600 and a temporary name.
    Links in `dst` that lead out of `dst` are not followed (PolicyError), even if they appear while the job runs.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        dst: The folder to write into: a local path or an fsspec URL.
        kms: The properties of a KMS, or a client: see `encrypt_files`.
        engine: What runs the tasks; None: `LocalEngine`.
        version: The number of the version; None: the newest.
        min_version: Refuse a dataset whose newest version is older. Storage alone does not show that somebody removed
            newer versions.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names, whatever its number.
        paths: Take only files whose path matches one of these patterns of `fnmatch`; None: all files.
        overwrite: Replace files that exist in `dst`; otherwise such a file is a failed row.
        missing: What becomes of a Parquet file with a column whose master key the KMS refuses. "error": the file is a
            failed row. "drop": the file is decrypted without these columns, and its row says so.
        resume: Keep a file in `dst` that has the right length ("length") or the right bytes ("verify"). Parquet files
            are always compared by bytes, because the length of their plaintext is not known.
        on_error: "row": a file that fails is a row. "raise": stop at the first file that fails.
        max_failures: Stop after more than this number of failed files; None: never.
        fsync: Return only when the files are on the disk.
        dry_run: Only plan; the rows have the status "planned".
        preserve: Give each local file the permission bits and the time of the last change of its source. If False, or
            if the source had no mode, as in an object store, the umask decides the mode of a new file.
        progress: None shows a bar on a terminal. "lines" does, too, and prints a line every 30 s to a standard error
            that is not a terminal. True always shows a bar, and False nothing. A callable gets rows as they come.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each file, and the version that was read.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow.
        IntegrityError: No version has been committed, or the dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        FileNotFoundError: There is no dataset, or a pattern of `paths` matches no file.
        ValueError: An argument is malformed.
    """
    if missing not in ("error", "drop"):
        raise ValueError(f"missing must be 'error' or 'drop', not {missing!r}")
    options = Options(engine, resume, on_error, max_failures, progress)
    kms = client_for(options.engine, kms, dataset, dst)
    opened, head, entries = Access.of(dataset, kms, key_store, storage_options, version, min_version, pin).load(paths)
    destination = Store(dst, storage_options)
    check_apart(destination, opened.store)
    job_id = new_job_id()
    contents = Contents(opened.id, opened.store, envelope_for(opened, entries))
    context = Context(
        "decrypt",
        job_id,
        opened.id,
        opened.store,
        contents.envelope,
        destination,
        fsync=fsync,
        overwrite=overwrite,
        resume=options.resume,
        without=denied_keys(contents, entries) if missing == "drop" else frozenset(),
        preserve=preserve,
    )
    tasks = [Task(entry) for entry in entries]
    if dry_run:
        rows = [make_row(context, task)._replace(status="planned") for task in tasks]
    else:
        destination.check_writable()
        rows = without_false_alarm(opened, head, run_tasks(context, tasks, options, None))
        if fsync:
            made = {row.src for row in rows if row.status == "ok"}
            destination.sync_folders(e.path for e in entries if opened.store.full_path(e.file) in made)
        destination.sweep()  # of earlier runs too: `sweep` cleans only datasets
    return result_of(opened.store, "decrypt", job_id, head, rows)
