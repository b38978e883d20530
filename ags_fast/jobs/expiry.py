"""Remove old versions, and what only old versions need. Nothing else deletes what a version names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ags_fast.dataset import decide
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.keks import GRACE_MS, clock_ms
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import VERSIONS, new_job_id
from ags_fast.dataset.open_jobs import claimed_files, resume_plan
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.snapshot import Snapshot, of_jobs
from ags_fast.dataset.tables import TableRef
from ags_fast.errors import AgsError, IntegrityError, KeyAccessError
from ags_fast.fs.numbered import numbered
from ags_fast.jobs.look import read_all, read_jobs, unless_expired
from ags_fast.jobs.results import JobResult, Row, counted, describe, shown
from ags_fast.jobs.work.rows import manifest_row
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.envelope import binding
from ags_fast.keys.kek import check_unwraps
from ags_fast.keys.kms import KmsClient, as_kms
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.decide import Change
    from ags_fast.dataset.versions import Version


@counted
def expire(
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    keep: int = 1,
    older_than: timedelta | None = None,
    force: bool = False,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Remove old versions of `dataset`, and then whatever no version needs: manifests, files, keys.

    keep: how many of the newest versions stay, at least 1. older_than: and those that are younger. Then go manifests
    and files of no other version; retired KEKs that nothing names and whose grace is over, or with `force` at once; and
    what the key store has of its past, where KEKs are still wrapped by old versions of master keys. Before that, each
    KEK that was wrapped anew since the last time is unwrapped once, to see that it opens.

    What open jobs may need stays. A row for each thing that was removed, and one with the status "skipped" for each KEK
    that is retired and stays. A run that died is finished by the next one. This is final: what was removed and not
    copied elsewhere cannot be read again, and of what was copied, old KEKs that are removed here open nothing more.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}: the newest version stays")
    opened = Ledger.open(dataset, as_kms(kms), storage_options, key_store, pin=pin, min_version=min_version)
    return expire_versions(opened, keep, older_than, force, dry_run)


def apply_retention(opened: Ledger, result: JobResult) -> None:
    """After a job: expire what the dataset's policy does not keep."""
    try:
        head = opened.current()
        if head is None or head.policy.keep is None:
            return
        days = head.policy.keep_days
        older_than = None if days is None else timedelta(days=days)
        result.expired = expire_versions(opened, head.policy.keep, older_than, False, spare=GRACE_MS / 1000)
    except (AgsError, OSError) as error:  # the job itself has done what it had to do
        row = Row(opened.store.url, None, "failed", type(error).__name__, describe(error))
        result.expired = JobResult(new_job_id(), "expire", opened.store.url, result.version, [row], result.pin)


def expire_versions(
    opened: Ledger,
    keep: int,
    older_than: timedelta | None,
    force: bool,
    dry_run: bool = False,
    spare: float = 0.0,
) -> JobResult:
    rows: list[Row] = []
    facts = {"operation": "expire", "source": shown(opened.store.url)}
    opened.committed(opened.current())  # without a version, no key and no manifest would be seen to be needed
    opened.check_history()
    with ExitStack() as held:
        begun = None if dry_run else resume_plan(opened, facts, held)
        if begun is not None:
            finish_expiry(opened, begun, rows)
            begun.end()
        head = opened.current()
        versions = Snapshot({}, tuple(opened.versions())[::-1])
        keep_ms = None if older_than is None else older_than / timedelta(milliseconds=1)
        change = decide.expire_versions(versions, keep, keep_ms, clock_ms())
        job_id = new_job_id()
        if dry_run:
            return _planned(opened, change, force, job_id, head)
        if change.versions:
            opened.store.check_writable()
            plan = Plan.create(
                opened,
                job_id,
                [],
                "running",
                base=head.number if head else 0,
                versions=[[version.number, version.sha256] for version in change.versions],
                manifests=[ref.to_json() for ref in change.manifests],
                **facts,
            )
            held.callback(plan.release)
            finish_expiry(opened, plan, rows)
            plan.end()
        _remove_keys(opened, rows, force, spare)
        for path in opened.chain_orphans():
            opened.store.delete(path)
            rows.append(Row(opened.store.full_path(path), None, "ok", format="chain"))
    return _result(opened, job_id, head, rows)


def _result(opened: Ledger, job_id: str, head: Version | None, rows: list[Row]) -> JobResult:
    number, pinned = (head.number, head.pin) if head else (None, None)
    return JobResult(job_id, "expire", opened.store.url, number, rows, pinned)


def _planned(opened: Ledger, change: Change, force: bool, job_id: str, head: Version | None) -> JobResult:
    """What an expiry would remove."""
    store = opened.store
    rows = [
        Row(store.full_path(VERSIONS + numbered(version.number)), None, "planned", format="version")
        for version in change.versions
    ]
    gone = {version.number for version in change.versions}
    for ref, entries in _unneeded(opened, change.manifests, gone):
        rows += [_file_row(opened, entry, "planned") for entry in entries]
        rows.append(manifest_row(opened.store, ref, "planned"))
    snapshot = read_all(opened, {})
    versions = tuple(version for version in snapshot.versions if version.number not in gone)
    keys = decide.expire_keys(replace(snapshot, versions=versions), force, clock_ms())
    removed = [key_id for key_id, entry in keys.keys.items() if entry is None]
    rows += [Row(key_id, None, "planned", format="key", key_id=key_id) for key_id in removed]
    return _result(opened, job_id, head, rows + _stay_rows(keys.stay))


def _file_row(opened: Ledger, entry: FileEntry, status: str = "ok") -> Row:
    name = opened.store.full_path(entry.file)
    return Row(name, None, status, file_length=entry.file_length, format="file", key_id=entry.key_id)


def finish_expiry(opened: Ledger, plan: Plan, rows: list[Row]) -> None:
    """Do what the plan of an expiry says, as far as it has not been done; of another job's, nothing.

    The versions go first, so that none is seen that lacks something; then of each manifest the files and it itself:
    whoever takes up the plan finds what is left by the manifests that are there.
    """
    if plan.body.get("operation") != "expire":
        return
    store = opened.store
    removed = [number for number, digest in sorted(plan.body["versions"]) if opened.remove_version(number, digest)]
    rows += [Row(store.full_path(VERSIONS + numbered(n)), None, "ok", format="version") for n in removed]
    refs = [TableRef.from_json(ref) for ref in plan.body["manifests"]]
    left = [ref for ref in refs if store.stat(ref.path) is not None]
    for ref, entries in _unneeded(opened, left, set(), plan.job_id):
        for entry in entries:
            if store.stat(entry.file) is not None:
                store.delete(entry.file)
                rows.append(_file_row(opened, entry))
        store.delete(ref.path)
        rows.append(manifest_row(opened.store, ref))


def _unneeded(
    opened: Ledger, refs: Sequence[TableRef], gone: set[int], job_id: str = ""
) -> Iterator[tuple[TableRef, list[FileEntry]]]:
    """Of these manifests those that no version but `gone` needs, each with the files that neither a version nor another
    job needs."""
    if not refs:
        return
    needed = claimed_files(opened, job_id)
    opened.keys.refresh()
    envelope = opened.envelope
    seen: set[str] = set()
    for version in opened.versions():
        with unless_expired(opened, version):
            for ref in version.manifests if version.number not in gone else ():
                if ref.path not in seen:
                    needed.update(entry.file for entry in opened.open_table(ref, envelope))
                    seen.add(ref.path)
    for ref in refs:
        try:
            entries = opened.open_table(ref, envelope) if ref.path not in seen else []
        except IntegrityError:
            if opened.store.stat(ref.path) is None:
                continue  # another expiry was first
            raise
        if ref.path not in seen:
            yield ref, [entry for entry in entries if entry.file not in needed]


def _remove_keys(opened: Ledger, rows: list[Row], force: bool, spare: float = 0.0) -> None:
    """Take retired keys that nothing names out of the key store, and its past with them.

    spare: seconds, as `DatasetKeyStore.prune` has it.
    """
    keys = opened.keys
    counts: dict[str, Mapping[str, int]] = {}

    def decided(snapshot: Snapshot) -> tuple[Change, list[Row]]:
        change = decide.expire_keys(snapshot, force, clock_ms())
        # What these KEKs were wrapped by goes now: the last moment to find out that a new wrap does not open.
        refused = _see_unwrapped(opened, [change.keys.get(i) or snapshot.keys[i] for i in change.checks])
        if refused:  # as for a caller who may not use the master keys of all columns
            change = decide.expire_keys(snapshot, force, clock_ms(), [row.src for row in refused])
        return change, refused

    def applied(snapshot: Snapshot, made: tuple[Change, list[Row]]) -> tuple[Snapshot, Change, list[Row]]:
        opened.keyring.swap(made[0].keys, snapshot.number, "expire")
        return snapshot, *made

    before, change, refused = until_unchanged(lambda: read_all(opened, counts), decided, applied)
    stay = [*_stay_rows(change.stay), *refused]
    gone = {key_id: before.keys[key_id] for key_id, entry in change.keys.items() if entry is None}
    # A job may have made its plan after we looked, and then seen that its keys were there: they come back.
    while wanted := {key_id: gone.pop(key_id) for key_id in gone.keys() & of_jobs(read_jobs(opened)).keys()}:
        opened.keyring.change(wanted.copy, "restore")
    # And a job may have done so while an expiry ran that died then. What has that job's key stays, or nobody could
    # tell any more which files are that job's.
    needed = of_jobs(read_jobs(opened))
    lost = keys.removed(needed.keys() - {e.key_id for e in keys.list()}) if isinstance(keys, DatasetKeyStore) else {}
    stay += _stay_rows({key_id: needed[key_id] for key_id in lost})
    rows += [Row(key_id, None, "ok", format="key", key_id=key_id) for key_id in gone] + stay
    # Where it cannot be seen that a KEK opens as it is wrapped now, what has it as it was wrapped stays.
    pruned = keys.prune(spare) if isinstance(keys, DatasetKeyStore) and not (refused or lost) else ()
    rows += [Row(path, None, "ok", format="keys") for path in pruned]


def _stay_rows(stay: Mapping[str, str]) -> list[Row]:
    return [Row(i, None, "skipped", "InUse", why, format="key", key_id=i) for i, why in stay.items()]


def _see_unwrapped(opened: Ledger, entries: Sequence[KeyEntry]) -> list[Row]:
    """Have the KMS unwrap these KEKs; the rows of those that the caller may not unwrap."""
    witnesses = _witnesses(opened, {entry.key_id for entry in entries})
    refused = []
    for entry in entries:
        try:
            check_unwraps(opened.kms, entry, witnesses.get(entry.key_id))
        except KeyAccessError as error:
            row = Row(entry.key_id, None, "skipped", "KeyAccessError", str(error), format="key")
            refused.append(row._replace(key_id=entry.key_id))
    return refused


def _witnesses(opened: Ledger, key_ids: set[str]) -> dict[str, tuple[bytes, bytes]]:
    """For each of these KEKs a key that it has wrapped, and its binding, if there is one."""
    found: dict[str, tuple[bytes, bytes]] = {}
    seen: set[str] = set()
    envelope = opened.envelope
    for version in opened.versions() if key_ids else ():
        with unless_expired(opened, version):
            for ref in version.manifests:
                if ref.path in seen or key_ids <= found.keys():
                    continue
                seen.add(ref.path)
                found.setdefault(ref.key_id, (ref.wrapped_key, binding(opened.id, "dek", ref.path)))
                missing = key_ids - found.keys()
                if ref.keys is None or not missing.isdisjoint(dict(ref.keys)):
                    for entry in opened.open_table(ref, envelope):
                        for key_id, wrapped, bound in entry.wraps(opened.id):
                            found.setdefault(key_id, (wrapped, bound))
    return found
