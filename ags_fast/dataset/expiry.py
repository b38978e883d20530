"""Remove old versions, and what only old versions need. Nothing else deletes what a version names."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset import decide
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.keks import GRACE_MS, clock_ms
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.look import read_all, read_jobs, unless_expired
from ags_fast.dataset.names import VERSIONS, new_job_id
from ags_fast.dataset.open_jobs import claimed_files, resume_plan
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.rows import Row, manifest_row, shown
from ags_fast.dataset.snapshot import Snapshot, of_jobs
from ags_fast.dataset.tables import TableRef
from ags_fast.errors import IntegrityError, KeyAccessError
from ags_fast.fs.numbered import numbered
from ags_fast.keys.entry import KeyEntry, retired
from ags_fast.keys.envelope import binding
from ags_fast.keys.kek import check_unwraps
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ags_fast.dataset.decide import Change
    from ags_fast.dataset.versions import Version


class Expired(NamedTuple):
    """What an expiry has done: its id, the newest version, and a row for each thing that it removed or kept."""

    job_id: str
    version: Version | None
    rows: list[Row]


def expire_by_policy(opened: Ledger, head: Version | None) -> Expired | None:
    """Expire what the policy of a version does not keep. Returns None if the policy keeps everything."""
    if head is None or head.policy.keep is None:
        return None
    days = head.policy.keep_days
    older_than = None if days is None else timedelta(days=days)
    return expire_versions(opened, head.policy.keep, older_than, False, spare=GRACE_MS / 1000)


def expire_versions(
    opened: Ledger,
    keep: int,
    older_than: timedelta | None,
    force: bool,
    dry_run: bool = False,
    spare: float = 0.0,
) -> Expired:
    """Remove old versions, and then whatever no version needs. The arguments are those of `ags_fast.jobs.expire`.

    Args:
        opened: The dataset.
        keep: How many of the newest versions stay.
        older_than: The age of versions to remove; None: any.
        force: Remove retired KEKs before their grace is over.
        dry_run: Remove nothing.
        spare: Keep documents of the key store that are younger than this, in seconds.
    """
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
    return Expired(job_id, head, rows)


def _planned(opened: Ledger, change: Change, force: bool, job_id: str, head: Version | None) -> Expired:
    """Return what an expiry would remove."""
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
    return Expired(job_id, head, rows + _stay_rows(keys.stay))


def _file_row(opened: Ledger, entry: FileEntry, status: str = "ok") -> Row:
    name = opened.store.full_path(entry.file)
    return Row(name, None, status, file_length=entry.file_length, format="file", key_id=entry.key_id)


def finish_expiry(opened: Ledger, plan: Plan, rows: list[Row]) -> None:
    """Do what is left to do of the plan of an expiry. The plan of another job is left alone.

    The versions go first, so that nobody sees a version that lacks something. Then go, manifest by manifest, the files
    and the manifest: if the job dies, the remaining manifests tell what is left.

    Args:
        opened: The dataset.
        plan: The plan.
        rows: Gets a row for each thing that was removed.
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
    """Find what may be removed.

    Args:
        opened: The dataset.
        refs: Manifests of versions that go.
        gone: The numbers of these versions, as far as they are still there.
        job_id: The id of the expiry.

    Returns:
        The manifests that no other version needs, each with its files that neither a version nor another job needs. A
        file of several manifests is named once.
    """
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
            entries = [entry for entry in entries if entry.file not in needed]
            needed.update(entry.file for entry in entries)
            yield ref, entries


def _remove_keys(opened: Ledger, rows: list[Row], force: bool, spare: float = 0.0) -> None:
    """Remove retired keys that nothing names from the key store, and with them the past of the key store."""
    keys = opened.keys
    counts: dict[str, Mapping[str, int]] = {}
    if force:
        _retire_idle(opened, counts)

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


def _retire_idle(opened: Ledger, counts: dict[str, Mapping[str, int]]) -> None:
    """Retire the KEKs for some files only, none of which is there. Only retired keys may be removed: see `read_all`."""

    def decided(snapshot: Snapshot) -> dict[str, KeyEntry | None]:
        now = clock_ms()
        removed = [key_id for key_id, entry in decide.expire_keys(snapshot, True, now).keys.items() if entry is None]
        active = [snapshot.keys[key_id] for key_id in removed if snapshot.keys[key_id].state == "active"]
        return {entry.key_id: retired(entry, None, 0, now) for entry in active}

    def applied(snapshot: Snapshot, keys: dict[str, KeyEntry | None]) -> None:
        opened.keyring.swap(keys, snapshot.number, "expire")

    until_unchanged(lambda: read_all(opened, counts), decided, applied)


def _stay_rows(stay: Mapping[str, str]) -> list[Row]:
    return [Row(i, None, "skipped", "InUse", why, format="key", key_id=i) for i, why in stay.items()]


def _see_unwrapped(opened: Ledger, entries: Sequence[KeyEntry]) -> list[Row]:
    """Have the KMS unwrap these KEKs. Returns rows of the KEKs that the caller may not unwrap."""
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
    """Find for each of these KEKs a key that it has wrapped, and the binding of that key."""
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
