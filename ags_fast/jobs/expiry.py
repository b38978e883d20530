"""Remove old versions, and what only old versions need. Nothing else deletes what a version names."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.keks import GRACE_MS, is_idle
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import VERSIONS, new_job_id
from ags_fast.dataset.plan import Plan, open_plans
from ags_fast.dataset.tables import (
    TableRef,
)
from ags_fast.errors import AgsError, ConcurrentChangeError, IntegrityError, KeyAccessError
from ags_fast.fs.numbered import numbered
from ags_fast.jobs.results import JobResult, Row, counted, describe, shown
from ags_fast.jobs.work.manifest import MANIFEST
from ags_fast.keys.entry import REWRAPPED_MS, SUCCESSOR, KeyEntry, retired, retires_ms
from ags_fast.keys.envelope import binding
from ags_fast.keys.kek import check_unwraps
from ags_fast.keys.kms import KmsClient, as_kms
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.versions import Version


def key_counts(opened: Ledger, refs: Iterable[TableRef]) -> Counter[str]:
    """How many DEKs of the files in these manifests each key wraps."""
    counts: Counter[str] = Counter()
    envelope = opened.envelope
    for ref in refs:
        if ref.keys is None:
            counts += wrapped_by(opened.open_table(ref, envelope))
        else:
            counts.update(dict(ref.keys))
    return counts


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
        begun = None if dry_run else Plan.resume(opened, facts, held)
        if begun is not None:
            finish_expiry(opened, begun, rows)
            begun.end()
        head = opened.current()
        versions = list(opened.versions())[::-1]
        youngest = time.time_ns() // 1_000_000 - int((older_than or timedelta(0)) / timedelta(milliseconds=1))
        gone = [version for version in versions[:-keep] if older_than is None or version.time_ms < youngest]
        kept = {ref.path for version in versions if version not in gone for ref in version.manifests}
        refs = {ref.path: ref for version in gone for ref in version.manifests if ref.path not in kept}
        job_id = new_job_id()
        if dry_run:
            numbers = {version.number for version in gone}
            paths = [opened.store.full_path(VERSIONS + numbered(number)) for number in sorted(numbers)]
            rows += [Row(path, None, "planned", format="version") for path in paths]
            for ref, entries in _unneeded(opened, list(refs.values()), numbers):
                rows += [_file_row(opened, entry, "planned") for entry in entries]
                rows.append(manifest_row(opened, ref, "planned"))
            _remove_keys(opened, rows, force, numbers)
        elif gone:
            opened.store.check_writable()
            plan = Plan.create(
                opened,
                job_id,
                [],
                "running",
                base=head.number if head else 0,
                versions=[[version.number, version.sha256] for version in gone],
                manifests=[ref.to_json() for ref in refs.values()],
                **facts,
            )
            held.callback(plan.release)
            finish_expiry(opened, plan, rows)
            plan.end()
        if not dry_run:
            _remove_keys(opened, rows, force, spare=spare)
            for path in opened.chain_orphans():
                opened.store.delete(path)
                rows.append(Row(opened.store.full_path(path), None, "ok", format="chain"))
    number, pinned = (head.number, head.pin) if head else (None, None)
    return JobResult(job_id, "expire", opened.store.url, number, rows, pinned)


def manifest_row(opened: Ledger, ref: TableRef, status: str = "ok") -> Row:
    return Row(
        opened.store.full_path(ref.path), None, status, file_length=ref.length, format=MANIFEST, key_id=ref.key_id
    )


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
        rows.append(manifest_row(opened, ref))


def _unneeded(
    opened: Ledger, refs: Sequence[TableRef], gone: set[int], job_id: str = ""
) -> Iterator[tuple[TableRef, list[FileEntry]]]:
    """Of these manifests those that no version but `gone` needs, each with the files that neither a version nor another
    job needs."""
    if not refs:
        return
    needed: set[str] = set()
    for other in open_plans(opened.store):
        if other != job_id:
            needed |= Plan.names(opened, other)
    opened.keys.refresh()
    envelope = opened.envelope
    seen: set[str] = set()
    for version in opened.versions():
        with _unless_expired(opened, version):
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


@contextmanager
def _unless_expired(opened: Ledger, version: Version) -> Iterator[None]:
    """What is missing of a version is no fault if the version is gone, too."""
    try:
        yield
    except IntegrityError:
        if opened.has_version(version.number):
            raise


def _remove_keys(
    opened: Ledger, rows: list[Row], force: bool, planned: set[int] | None = None, spare: float = 0.0
) -> None:
    """Take retired keys that nothing names out of the key store, and its past with them.

    planned: of a dry run, the versions that would be gone by then. spare: seconds, as `DatasetKeyStore.prune` has it.
    """
    keys = opened.keys
    while True:
        # In this order: who commits after the keys were read does not use one that is retired in them.
        version = keys.refresh()
        entries = keys.list()
        known = {entry.key_id: entry for entry in entries}
        used = _used_keys(opened, planned or set())
        changes: dict[str, KeyEntry | None] = {}
        stay: list[Row] = []
        rewrapped = {entry.key_id for entry in entries if REWRAPPED_MS in entry.properties}
        witnesses = _witnesses(opened, rewrapped) if planned is None else {}
        now = time.time_ns() // 1_000_000
        for entry in entries:
            if entry.state == "active" and is_idle(entry, used):
                if force:
                    changes[entry.key_id] = None
                elif now - entry.created_ms > GRACE_MS:
                    changes[entry.key_id] = retired(entry, None, GRACE_MS, now)  # to go with a later expiry
            if entry.state == "retired":
                why = used.get(entry.key_id)
                if why is None and not force and now < retires_ms(entry):
                    days = (retires_ms(entry) - now) / 86_400_000
                    why = f"its grace is over in {days:.1f} days"
                if why is None:
                    changes[entry.key_id] = None
                else:
                    stay.append(Row(entry.key_id, None, "skipped", "InUse", why, format="key", key_id=entry.key_id))
        gone = {entry.key_id: entry for entry in entries if changes.get(entry.key_id, entry) is None}
        unsure = False
        for key_id in () if planned is not None else [entry.key_id for entry in entries]:
            if key_id in gone:
                continue
            entry = changes.get(key_id) or known[key_id]
            properties = dict(entry.properties)
            if REWRAPPED_MS in properties:
                # What it was wrapped by goes now, so this is the last moment to find out that the new wrap is no good.
                try:
                    check_unwraps(opened.kms, entry, witnesses.get(key_id))
                    del properties[REWRAPPED_MS]
                except KeyAccessError as error:  # as it is for who may not use the master keys of all columns
                    unsure = True
                    row = Row(entry.key_id, None, "skipped", "KeyAccessError", str(error), format="key")
                    stay.append(row._replace(key_id=entry.key_id))
            while (successor := properties.get(SUCCESSOR)) in gone:  # so that the way to it goes on
                properties[SUCCESSOR] = gone[successor].properties.get(SUCCESSOR, "")
            if properties != entry.properties:
                changes[entry.key_id] = entry.replace(properties=properties)
        if planned is not None:
            rows += [Row(key_id, None, "planned", format="key", key_id=key_id) for key_id in gone] + stay
            return
        try:
            if changes:
                keys.compare_and_swap(changes, version, operation="expire")
        except ConcurrentChangeError:
            continue
        break
    # A job may have made its plan after we looked, and then seen that its keys were there: they come back.
    while wanted := {key_id: gone.pop(key_id) for key_id in gone.keys() & _keys_of_jobs(opened).keys()}:
        opened.keyring.change(wanted.copy, "restore")
    # And one may have done so while an expiry ran that died then. What has that job's key stays, or nobody could tell
    # any more which files are that job's.
    of_jobs = _keys_of_jobs(opened)
    lost = keys.removed(of_jobs.keys() - {e.key_id for e in keys.list()}) if isinstance(keys, DatasetKeyStore) else {}
    stay += [Row(i, None, "skipped", "InUse", of_jobs[i], format="key", key_id=i) for i in lost]
    rows += [Row(key_id, None, "ok", format="key", key_id=key_id) for key_id in gone] + stay
    # Where it cannot be seen that a KEK opens as it is wrapped now, what has it as it was wrapped stays.
    pruned = keys.prune(spare) if isinstance(keys, DatasetKeyStore) and not (unsure or lost) else ()
    rows += [Row(path, None, "ok", format="keys") for path in pruned]


def _witnesses(opened: Ledger, key_ids: set[str]) -> dict[str, tuple[bytes, bytes]]:
    """For each of these KEKs a key that it has wrapped, and its binding, if there is one."""
    found: dict[str, tuple[bytes, bytes]] = {}
    seen: set[str] = set()
    envelope = opened.envelope
    for version in opened.versions() if key_ids else ():
        with _unless_expired(opened, version):
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


def _keys_of_jobs(opened: Ledger) -> dict[str, str]:
    return {
        key_id: f"the open job {job_id} needs it: resume the job, or sweep it away"
        for job_id in open_plans(opened.store)
        for key_id in Plan.key_ids(opened, job_id)
    }


def _used_keys(opened: Ledger, gone: set[int]) -> dict[str, str]:
    """The keys that versions, but for `gone`, and open jobs need, and which of them."""
    used = _keys_of_jobs(opened)
    opened_already: dict[str, Counter[str]] = {}
    for version in opened.versions():
        if version.number in gone:
            continue
        used.setdefault(version.key_id, f"version {version.number} needs it")
        with _unless_expired(opened, version):
            for ref in version.manifests:
                if ref.path not in opened_already:
                    opened_already[ref.path] = key_counts(opened, [ref])
                    for key_id in (ref.key_id, *opened_already[ref.path]):
                        used.setdefault(key_id, f"version {version.number} needs it")
    return used
