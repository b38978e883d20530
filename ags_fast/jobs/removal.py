"""Commit a version without some files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.names import new_job_id
from ags_fast.errors import IntegrityError
from ags_fast.jobs.results import JobResult, counted, result_of
from ags_fast.jobs.retention import apply_retention
from ags_fast.jobs.run import commit_without_files
from ags_fast.jobs.work.rows import planned_row
from ags_fast.keys.entry import UnknownKeyError
from ags_fast.keys.kms import KmsClient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.jobs.results import Progress


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
        ValueError: `paths` is empty, or the pin is malformed.
    """
    opened, head, chosen = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin).load(
        paths, writes=True
    )
    store, job_id = opened.store, new_job_id()
    stays: set[str] = set()
    if not dry_run:
        made = commit_without_files(opened, Wish("remove", job_id, remove=chosen, base=head))
        head = opened.committed(made.version)
        stays = {entry.path for entry in made.change.refused}
    rows = [planned_row(store.full_path(entry.file), None, entry, "planned" if dry_run else "ok") for entry in chosen]
    why = "another job has put another file of this path into the dataset meanwhile: run the job again"
    rows = [
        row._replace(status="failed", error_class="ConcurrentChangeError", error=why) if entry.path in stays else row
        for entry, row in zip(chosen, rows, strict=True)
    ]
    if callable(progress):
        progress(rows)
    result = result_of(opened.store, "remove", job_id, head, rows)
    if not dry_run:
        apply_retention(opened, result)
    gone = [entry for entry in chosen if entry.path not in stays]
    result.still_in = _versions_with(opened, gone, 0 if dry_run else head.number)
    text = "Copies of the dataset, and what the storage keeps of deleted objects, still have the files."
    if result.still_in:
        text = f"Still in {_numbers(result.still_in)}, until expire removes that. {text}"
    result.warnings.append(text)
    return result


def _versions_with(opened: Ledger, gone: Sequence[FileEntry], but: int) -> list[int]:
    """Return the numbers of the versions, except `but`, that have a file at a path of these, or one renamed to it."""
    paths, files = {entry.path for entry in gone}, {entry.file for entry in gone}
    opened.keys.refresh()
    known: dict[str, bool] = {}  # {manifest: whether it has such a file}
    found = []
    for version in opened.versions():
        if version.number == but or not gone:
            continue
        try:
            for ref in version.manifests:
                if ref.path not in known:
                    entries = opened.open_table(ref, opened.envelope)
                    known[ref.path] = any(entry.path in paths or entry.file in files for entry in entries)
        except (IntegrityError, UnknownKeyError):
            if opened.has_version(version.number):
                raise
            continue  # the version was expired meanwhile
        if any(known[ref.path] for ref in version.manifests):
            found.append(version.number)
    return sorted(found)


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"version {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"versions {numbers[0]} to {numbers[-1]}"
    return f"versions {', '.join(map(str, numbers))}"
