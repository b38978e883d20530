"""Decrypt a version of a dataset into a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.contents import Contents, denied_keys
from ags_fast.dataset.names import new_job_id
from ags_fast.fs import Store
from ags_fast.jobs.engines.base import Engine
from ags_fast.jobs.engines.local import client_for
from ags_fast.jobs.results import JobResult, counted
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
def decrypt_files(
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
    """Decrypt a version of `dataset` into the folder `dst`, the tree as it was.

    version: None is the newest. min_version: refuse (PolicyError) a dataset whose newest is older, for storage alone
    does not show that somebody took newer ones away. pin: refuse (IntegrityError) a dataset whose newest version does
    not descend from the one that `JobResult.pin` named, whatever its number. paths: only files whose path matches one
    of these patterns; FileNotFoundError if a pattern matches none. overwrite: replace what is there, else such a file
    is a failed row. IntegrityError if no version has been committed. resume: leave what is there and has the right
    length ("length"), or the right bytes ("verify"); of Parquet the bytes count always, since the length of what it
    decrypts to is not known. missing: a Parquet file with a column whose master key the KMS does not give is a failed
    row ("error"), or is decrypted without these columns ("drop"), and its row says so. The other arguments are those
    of `encrypt_files`.

    preserve: give each local file the permission bits and the time of the last change that its source had. Without it,
    and where the source had no mode, as in an object store, the umask says the mode of a new file.

    A file appears in `dst` only when every tag of it has passed; before that it has mode 0600 and a temporary name.
    Links in `dst` that lead out of it are not followed (PolicyError), also if they come while the job runs.
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
        destination.sweep()  # of earlier runs too: this is no dataset, whose sweep would do it
    return JobResult(job_id, "decrypt", opened.store.url, head.number, rows, head.pin)
