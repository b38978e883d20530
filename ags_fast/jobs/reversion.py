"""Commit a version with the files of an older one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast.dataset.access import Access
from ags_fast.dataset.decide import Wish
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.planning import commit_plan
from ags_fast.errors import ConcurrentChangeError
from ags_fast.jobs.results import JobResult, counted, result_of
from ags_fast.jobs.retention import apply_retention
from ags_fast.jobs.work.rows import planned_row
from ags_fast.keys.kms import KmsClient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version
    from ags_fast.jobs.results import Progress


@counted
def restore_version(
    dataset: Folder,
    version: int,
    *,
    kms: KmsClient | Mapping[str, str],
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Commit a version of `dataset` that has the files of an older version.

    No version is taken back, and no file is read or written: the new version names the objects of the older one. Their
    data keys are wrapped by the KEKs in use, so a rotation in between stays in force. The policy stays as it is. The
    job holds the files while it works, so that no expiry removes them. If the job dies, nothing has changed, and
    `sweep` removes its plan.

    Args:
        dataset: The folder of the dataset: a local path, an fsspec URL, or a `Store`.
        version: The number of the version whose files come back. `expire` removes old versions.
        kms: The properties of a KMS, or a client: see `encrypt_files`.
        dry_run: Only plan; the rows have the status "planned".
        min_version: Refuse a dataset whose newest version is older.
        pin: Refuse a dataset whose newest version does not descend from the version that this pin (see
            `JobResult.pin`) names.
        progress: A callable gets the rows.
        key_store: Where the dataset's keys are; None: in the dataset.
        storage_options: Options for fsspec.

    Returns:
        A row for each file that comes back (`dst` is its object) or goes (`src` is its object), and the version. If the
        newest version has these files already, there are no rows, and no version is made.

    Raises:
        ConcurrentChangeError: Another job has changed these files meanwhile, or removed the version. Nothing is done.
        FileNotFoundError: There is no dataset, no such version, or an object of it is gone. Nothing is done.
        IntegrityError: The dataset does not descend from the pin.
        PolicyError: The dataset is older than `min_version`.
        ValueError: The pin is malformed.
    """
    access = Access.of(dataset, kms, key_store, storage_options, None, min_version, pin)
    opened, head, now = access.load(writes=True)
    wanted, then = opened.load(version)
    found = opened.committed(wanted)
    there, here = set(map(_identity, now)), set(map(_identity, then))
    comes = [entry for entry in then if _identity(entry) not in there]
    goes = [entry for entry in now if _identity(entry) not in here]
    _check_objects(opened, found, comes)
    job_id, store = new_job_id(), opened.store
    if not dry_run and (comes or goes):
        head = _commit(opened, found, Wish("restore", job_id, add=comes, remove=goes, base=head, whole=True))
    status = "planned" if dry_run else "ok"
    rows = [planned_row(store.full_path(entry.file), None, entry, status) for entry in goes]
    rows += [planned_row(entry.path, store.full_path(entry.file), entry, status) for entry in comes]
    if callable(progress):
        progress(rows)
    result = result_of(store, "restore", job_id, head, rows)
    if not dry_run and rows:
        apply_retention(opened, result)
    return result


def _identity(entry: FileEntry) -> tuple[str, str, str | None, int | None]:
    """Return what makes a file another one. A file that is no longer of a whole set has lost its place in the set."""
    return entry.path, entry.file, entry.set_id, entry.part


def _check_objects(opened: Ledger, version: Version, entries: Sequence[FileEntry]) -> None:
    """Raise FileNotFoundError if an object is gone, which somebody else must have deleted."""
    if not entries:
        return
    sizes = {entry.path: entry.size for entry in opened.store.list()}
    gone = [entry for entry in entries if sizes.get(entry.file) != entry.file_length]
    if gone:
        more = f", and {len(gone) - 1:,} more" if len(gone) > 1 else ""
        raise FileNotFoundError(
            f"version {version.number} of {opened.store.url} cannot come back: {gone[0].file} is gone, or has another "
            f"length{more}. verify_files lists all such files of the version; nothing was changed"
        )


def _commit(opened: Ledger, found: Version, wish: Wish) -> Version:
    """Commit the wish under a plan that claims the files, so that an expiry that begins meanwhile leaves them.

    The plan never reaches the state "running": its files are a version's, and whoever ends the plan must not remove
    them.
    """
    assert wish.base is not None
    opened.store.check_writable()
    facts = {"operation": wish.operation, "source": opened.store.url, "base": wish.base.number}
    plan = Plan.create(opened, wish.job_id, wish.add, "claimed", **facts)
    try:
        if not opened.has_version(found.number):  # its files may be gone: the expiry did not know the claim
            raise ConcurrentChangeError(f"version {found.number} was expired meanwhile; nothing was changed")
        made = commit_plan(plan, wish)
    except ConcurrentChangeError:
        plan.end()
        raise
    finally:
        plan.release()
    return opened.committed(made.version)
