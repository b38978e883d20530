"""Decrypt a version of a dataset into a folder."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Unpack

from ags_fast._types import FilePath, OnError, OrDrop, Resume, check_choice
from ags_fast.dataset.access import Access
from ags_fast.dataset.files.contents import denied_keys
from ags_fast.dataset.names import new_job_id
from ags_fast.engines.base import Engine
from ags_fast.engines.local import client_for
from ags_fast.fs import Store
from ags_fast.jobs.results import JobResult, Row, counted
from ags_fast.jobs.run import Options, check_apart, run_tasks, unless_expired
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.rows import failed_row, make_row

if TYPE_CHECKING:
    from ags_fast.dataset.access import Folder
    from ags_fast.dataset.entries import Patterns
    from ags_fast.jobs.arguments import Reach
    from ags_fast.jobs.results import Progress

PROBE = ".ags_fast-case-"


@counted
def decrypt_files(  # noqa: PLR0913 the contract's arguments
    dataset: Folder,
    dst: FilePath,
    *,
    engine: Engine | None = None,
    version: int | None = None,
    paths: Patterns = None,
    exclude: Patterns = None,
    overwrite: bool = False,
    missing: OrDrop = "error",
    resume: Resume | None = None,
    on_error: OnError = "row",
    max_failures: int | None = None,
    fsync: bool = True,
    dry_run: bool = False,
    preserve: bool = True,
    progress: Progress = None,
    **at: Unpack[Reach],
) -> JobResult:
    """Decrypt a version of `dataset` into the folder `dst`, with the tree as it was.

    A file appears in `dst` only when all its tags have passed. Until then the file has mode 0600 and a temporary name.
    Links in `dst` that lead out of `dst` are not followed (PolicyError), even if they appear while the job runs.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        dst: The folder to write into: a local path or an fsspec URL.
        engine: What runs the tasks; None: `LocalEngine`.
        version: The number of the version; None: the newest.
        paths: Take only files whose path matches one of these patterns of `fnmatch`; None: all files.
        exclude: Leave out the files whose path matches one of these patterns.
        overwrite: Replace files that exist in `dst`; otherwise such a file is a failed row. So is, in any case, the
            second of two files whose paths `dst` takes for one, as disks do that do not tell upper from lower case.
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
        progress: How the progress is shown: see `encrypt_files`.
        **at: How the dataset is reached, and the errors if it is not: see `Reach`.

    Returns:
        A row for each file, and the version that was read.

    Raises:
        JobError: More files failed than `on_error` and `max_failures` allow.
        ExpiredError: The version that `version` names was expired.
        FileNotFoundError: A pattern of `paths` matches no file.
        ValueError: An argument is malformed.
    """
    check_choice("missing", missing, OrDrop)
    options = Options(engine, progress, on_error, max_failures, resume)
    at["kms"] = client_for(options.engine, at["kms"], dataset, dst)
    access = Access.of(dataset, version=version, **at)
    snapshot, entries = access.files(paths, exclude)
    destination = Store(dst, at.get("storage_options"))
    check_apart(destination, access.store)
    contents = snapshot.holding({key_id for entry in entries for key_id in entry.key_ids()})
    context = Context(
        "decrypt",
        new_job_id(),
        contents.dataset_id,
        contents.store,
        contents.envelope,
        destination,
        fsync=fsync,
        overwrite=overwrite,
        resume=options.resume,
        without=denied_keys(contents, entries) if missing == "drop" else frozenset(),
        preserve=preserve,
        checksums=frozenset(entry.path for entry in entries if entry.path.endswith(".crc")),
    )
    tasks = [Task(entry) for entry in entries]
    if dry_run:
        rows = [make_row(context, task)._replace(status="planned") for task in tasks]
    else:
        destination.check_writable()
        tasks, refused = _without_doubles(context, destination, tasks)
        rows = unless_expired(snapshot, run_tasks(context, tasks, options)) + refused
        if fsync:
            made = {row.src for row in rows if row.status == "ok"}
            destination.sync_folders(made)
        destination.sweep()  # of earlier runs too: `sweep` cleans only datasets
    entry = snapshot.entry
    return JobResult(context.job_id, "decrypt", access.store.url, entry.number, rows, entry.pin)


def _without_doubles(context: Context, destination: Store, tasks: list[Task]) -> tuple[list[Task], list[Row]]:
    """Split off files whose path the destination takes for that of another one. Returns the others, and their rows."""
    first: dict[str, str] = {}
    doubles = {
        task.path: as_one for task in tasks if first.setdefault(as_one := _folded(task.path), task.path) != task.path
    }
    if not doubles or not takes_for_one(destination, context.job_id):
        return tasks, []
    rows = [
        failed_row(
            context, task, 0, "FileExistsError",
            f"{destination.url} takes this path and {first[doubles[task.path]]!r} for one: rename one of them",
        )
        for task in tasks
        if task.path in doubles
    ]  # fmt: skip
    return [task for task in tasks if task.path not in doubles], rows


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def takes_for_one(destination: Store, tag: str) -> bool:
    """Whether a folder takes names of different case, or of different Unicode forms, for one: try it."""
    probe = f"{PROBE}{tag}-\u00e9"
    others = probe.upper(), unicodedata.normalize("NFD", probe)
    destination.write_small(probe, b"")
    try:
        return any(destination.stat(other) is not None for other in others)
    finally:
        destination.delete(probe)
