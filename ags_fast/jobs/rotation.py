"""Rotation of the keys above the data keys. No file of data is written.

A KEK is replaced in the key store first: the new KEK is there, and the old KEK has retired in its favour, before the
first manifest is rewritten. So each commit from then on wraps by the new KEK, and a rotation has an end. A rotation
writes manifests with the same files, and with each DEK wrapped again (`ags_fast.jobs.rewriting`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ags_fast.dataset import decide
from ags_fast.dataset.access import Access
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.keks import clock_ms
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.look import read_newest
from ags_fast.dataset.names import new_job_id
from ags_fast.dataset.open_jobs import clear, open_plans, resume_plan
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.rows import manifest_row
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.jobs.engines.base import checked
from ags_fast.jobs.engines.local import LocalEngine, client_for
from ags_fast.jobs.results import counted, shown
from ags_fast.jobs.retention import apply_retention, expire_versions
from ags_fast.jobs.rewriting import Work, rewrite
from ags_fast.jobs.run import warn_of_dead
from ags_fast.keys.entry import KeyEntry
from ags_fast.keys.envelope import Envelope, in_threads
from ags_fast.keys.kek import rewrap_kek
from ags_fast.keys.kms import KmsClient, as_kms, check_key_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ags_fast.dataset.access import Folder, KeyPlace
    from ags_fast.dataset.decide import Change, Rotation
    from ags_fast.dataset.keks import Want
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.dataset.versions import Version
    from ags_fast.jobs.engines.base import Engine
    from ags_fast.jobs.results import JobResult, Progress


WHATS = ("kek", "mek", "double-wrap")
GRACE = timedelta(days=7)
CONCURRENCY = 8  # calls of a KMS at once
BATCH = 1000  # KEKs, at least, whose new wraps go into the key store at once
BATCHES = 10  # changes of the key store, at most, for all KEKs


@counted
def rotate(  # noqa: PLR0913 the contract's arguments
    dataset: Folder,
    *,
    kms: KmsClient | Mapping[str, str],
    what: str = "kek",
    wrapping_key_id: str | None = None,
    new_kms: KmsClient | Mapping[str, str] | None = None,
    from_key_id: str | None = None,
    documents: bool = False,
    grace: timedelta = GRACE,
    force_expire: bool = False,
    engine: Engine | None = None,
    concurrency: int = CONCURRENCY,
    resume: bool | None = None,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    progress: Progress = None,
    key_store: KeyPlace = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Replace the keys above the data keys of `dataset`. The files of data stay as they are, to the last byte.

    Each new wrap of a KEK is unwrapped once before the key store names it, and in single wrap the first DEK that is
    wrapped for each key. If a wrap does not open, nothing has changed, except that with more than 1,000 KEKs those of
    earlier batches have their new wraps.

    If a manifest fails, nothing is committed, and the next call goes on from there.

    Args:
        dataset: The dataset: a path, a URL or a `Store`.
        kms: A KMS client or its properties.
        what: ``"kek"``, ``"mek"`` or ``"double-wrap"``.

            ``"kek"`` replaces what wraps the DEKs. In double wrap: new KEKs, and a version whose manifests have every
            DEK wrapped by them. It takes one wrap for each new KEK, and one unwrap for each old KEK that this process
            does not know. In single wrap, the KMS wraps every DEK again: one rewrap for each where the service can,
            else one unwrap and one wrap.

            ``"mek"`` replaces only what wraps the KEKs, after their master key was rotated in the KMS: the current
            version of the master key wraps each KEK, in the key store, and nothing else changes. It takes one rewrap,
            or one unwrap and one wrap, for each KEK, and none where the KMS tells that the current version wraps it.

            ``"double-wrap"`` puts DEKs that the KMS wraps under a new KEK: one unwrap for each, and one wrap.
        wrapping_key_id: The master key to use from now on, in place of `from_key_id`.
        new_kms: For ``"mek"``: the KMS to move to. From then on the dataset is opened with this KMS.
        from_key_id: Replace only what is under this master key, such as the key of some columns. None: the master key
            of the dataset's own key. With `new_kms` all KEKs move, and this names those that get under
            `wrapping_key_id`.
        documents: In single wrap, replace the KEK of manifests and documents, too. That KEK opens no file, and stays
            otherwise.
        grace: How long a retired KEK stays at least, also when no version needs it. Choose more than the longest
            writing job takes.
        force_expire: Then do `expire(keep=1, force=True)`. Its result is the result's `expired`.
        engine: What rewrites manifests. None: this process.
        concurrency: The number of KMS calls at once, in each worker.
        resume: Take up a rotation with the same arguments that died. None: if the storage shows that it died, as local
            files do; in an object store, if nothing happened for a day.
        dry_run: Return what would be done, and do nothing.
        min_version: The dataset's newest version must have at least this number.
        pin: The dataset's newest version must be the pinned one or descend from it.
        progress: None shows a bar on a terminal. "lines" does, too, and prints a line every 30 s to a standard error
            that is not a terminal. True always shows a bar, and False nothing. A callable gets rows as they come.
        key_store: Where the keys are, if they are not in the dataset.
        storage_options: Options of fsspec.

    Returns:
        A row for each key and for each manifest.

    Raises:
        KeyAccessError: The KMS refuses, or a new wrap does not open. Then nothing was written.
        IntegrityError: A new wrap opens to another key, something in the dataset was changed, or the dataset does not
            descend from the pin.
        PolicyError: The rotation would leave data keys behind, or the dataset is older than `min_version`.
        FileNotFoundError: There is no dataset.
        ValueError: An argument is malformed.
    """
    _check_arguments(what, new_kms, concurrency, grace, (wrapping_key_id, from_key_id))
    engine = checked(engine) or LocalEngine(0)
    client = client_for(engine, kms, dataset)
    opened = Access.of(dataset, client, key_store, storage_options, min_version=min_version, pin=pin).open()
    if from_key_id is not None:
        masters = {entry.wrapping_key_id for entry in opened.keys.list()}
        if from_key_id not in masters:
            under = ", ".join(map(repr, sorted(masters)))
            raise PolicyError(f"no key of {opened.store.url} is under {from_key_id!r}, but under {under}")
    head = opened.current(writes=True)
    # Without from_key_id, another master key replaces the dataset's own, and columns keep theirs.
    left = from_key_id or opened.keyring.main_key().wrapping_key_id
    asked = decide.Rotation(what, wrapping_key_id, from_key_id, left, documents)
    work = Work(opened, what, engine, concurrency, progress)
    if what == "mek":
        if not dry_run and resume is not False:
            clear(opened)  # what a rotation that died has left
        other = None if new_kms is None else as_kms(new_kms).for_dataset(opened.id)
        result = _rotate_mek(work, asked, head, other, dry_run)
    else:
        result = _rotate_kek(work, asked, head, int(grace / timedelta(milliseconds=1)), resume, dry_run)
    if dry_run or result.failed:
        return result
    if force_expire:
        result.expired = expire_versions(opened, 1, None, True)
    else:
        apply_retention(opened, result)
    return result


def _check_arguments(
    what: str, new_kms: object, concurrency: int, grace: timedelta, key_ids: Sequence[str | None]
) -> None:
    if what not in WHATS:
        raise ValueError(f"what must be {', '.join(map(repr, WHATS))}, not {what!r}")
    if new_kms is not None and what != "mek":
        raise ValueError(
            "new_kms is for what='mek': a dataset moves as a whole, by its KEKs. In single wrap, rotate to "
            "'double-wrap' first"
        )
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    if grace < timedelta(0):
        raise ValueError("grace must not be negative")
    for key_id in key_ids:
        if key_id is not None:
            check_key_id(key_id)


# ---------------------------------------------------------------------------------------------------------- KEKs


def _rotate_kek(
    work: Work, asked: Rotation, head: Version | None, grace_ms: int, resume: bool | None, dry_run: bool
) -> JobResult:
    """Replace KEKs (R2), wrap DEKs of single wrap again (R1), or put those under a KEK."""
    opened = work.opened
    facts = {
        "operation": "rotate",
        "what": asked.what,
        "source": shown(opened.store.url),
        "wrapping_key_id": asked.master,
        "from_key_id": asked.from_master,
        "documents": asked.documents,
    }
    with ExitStack() as held:
        plan = None if dry_run or resume is False else resume_plan(opened, facts, held, sure=bool(resume))
        if plan is not None and (made := plan.committed()) is not None:  # it died between its commit and its end
            plan.end()
            return work.result(plan.job_id, made)
        if plan is not None and not _opens(opened, plan):
            plan.end()
            plan = None
        if plan is None:
            snapshot, change = _decide(work, asked, head, grace_ms, dry_run)
            later = decide.rewrite_manifests(change.apply_to(snapshot, clock_ms()), {}, clock_ms())
            if dry_run or not (change or later):
                for old_id in change.successors:
                    work.key_row(old_id, None, "planned")
                work.rows += [manifest_row(opened.store, ref, "planned") for ref in later.rewrites]
                return work.result(new_job_id(), snapshot.head)
            opened.store.check_writable()
            keys = {old_id: entry and entry.to_json() for old_id, entry in change.successors.items()}
            base = snapshot.head.number if snapshot.head else 0
            plan = Plan.create(opened, new_job_id(), [], "running", base=base, keys=keys, **facts)
            held.callback(plan.release)
            counted = decide.counted_moves(snapshot, change)
        else:
            counted = set()  # others may have committed since: what is counted twice is lost, as when a job dies
        beside = [job_id for job_id in open_plans(opened.store) if job_id != plan.job_id]
        _install(work, plan, grace_ms)
        result = work.result(plan.job_id, rewrite(work, plan, counted))
        warn_of_dead(opened, beside, result)
        return result


def _opens(opened: Ledger, plan: Plan) -> bool:
    """Return whether the KMS opens the keys that a plan would put in. Their master key may have been left since."""
    known = opened.keyring.entries
    new = [KeyEntry.from_json(entry) for entry in plan.body["keys"].values() if entry is not None]
    envelope = Envelope(opened.kms, {key.key_id: key for key in new if key.key_id not in known})
    try:
        for key_id in envelope.entries:
            envelope.prepare(key_id)
    except (FormatError, IntegrityError, KeyAccessError):
        return False
    return True


def _decide(work: Work, asked: Rotation, head: Version | None, grace_ms: int, dry_run: bool) -> tuple[Snapshot, Change]:
    """Return what the rotation changes, with the KEKs that the KMS has made; for a dry run, with provisional KEKs."""
    opened = work.opened
    made: dict[Want, KeyEntry] = {}
    heads = [head]

    def read(head: Version | None) -> tuple[Snapshot, Change]:
        snapshot = read_newest(opened, head, work.counts)

        def decision() -> Change:
            return decide.replace_keks(snapshot, asked, made, grace_ms, clock_ms())

        return snapshot, decision() if dry_run else opened.keyring.completed(decision, made)

    def tried(head: Version | None, decided: tuple[Snapshot, Change]) -> tuple[Snapshot, Change]:
        if not dry_run:
            _try(work, decided[0], decided[1].successors)
        return decided

    # What the version has may be expired meanwhile.
    return until_unchanged(
        lambda: heads.pop() if heads else opened.current(), read, tried, lambda head: not opened.is_newest(head)
    )


def _try(work: Work, snapshot: Snapshot, successors: Mapping[str, KeyEntry | None]) -> None:
    """Unwrap each old key, or one DEK that it wraps, so that a refusal comes before anything is written."""
    opened = work.opened
    new = {old_id: entry for old_id, entry in successors.items() if entry is not None}
    todo = {old_id for old_id in new if not snapshot.keys[old_id].double_wrap}
    for old_id in new.keys() - todo:
        opened.envelope.prepare(old_id)
    refs = [ref for ref in (snapshot.head.manifests if snapshot.head else ()) if todo & snapshot.wraps(ref).keys()]
    known = opened.envelope.subset({*todo, *(ref.key_id for ref in refs)}).entries
    entries = {**known, **{key.key_id: key for key in new.values()}}
    envelope = Envelope(opened.kms, entries, opened.keyring.proven)
    for ref in refs:
        for entry in opened.open_table(ref, envelope) if todo else ():
            for old_id, wrapped, bound in entry.wraps(opened.id):
                if old_id in todo:
                    todo.remove(old_id)
                    key_id = new[old_id].key_id
                    (work.ready[key_id, wrapped],) = envelope.rewrap_many(old_id, key_id, [(wrapped, bound)])


def _install(work: Work, plan: Plan, grace_ms: int) -> None:
    """Put the new keys into the key store, and retire the old keys. Keys that others have retired stay as they are."""
    keyring = work.opened.keyring
    new = {old_id: entry and KeyEntry.from_json(entry) for old_id, entry in plan.body["keys"].items()}
    keyring.change(lambda: decide.install(keyring.entries, new, grace_ms, clock_ms()), f"rotate-{work.what}")
    for old_id, entry in new.items():
        if old_id in keyring.entries:  # it may have been expired since a rotation died that is resumed
            work.key_row(old_id, None if entry is None else keyring.active(old_id))


# ---------------------------------------------------------------------------------------------------------- master keys


def _rotate_mek(
    work: Work, asked: Rotation, head: Version | None, new_kms: KmsClient | None, dry_run: bool
) -> JobResult:
    """Have the current version of the master key, another master key or another KMS wrap the KEKs (R3).

    Where a rotation dies, the next one passes over what the current version wraps already.
    """
    opened, keyring = work.opened, work.opened.keyring
    if new_kms is not None or asked.master not in (None, asked.left):
        _refuse_single_wrap(opened, asked, new_kms is not None)
    before = opened.kms
    is_current = _current_by(before)
    wrapped: dict[bytes | None, KeyEntry] = {}  # KEKs as the KMS has wrapped them, by the wraps that they had
    size = 0
    done: dict[str, str] = {}

    def decided(version: int) -> list[KeyEntry]:
        """Return the next KEKs to wrap."""
        nonlocal size
        todo, rest = decide.rewrap_keks(opened.keys.list(), asked, is_current, new_kms is not None)
        todo = [entry for entry in todo if entry.key_id not in done]
        for entry in rest:
            done.setdefault(entry.key_id, "skipped")
        size = size or max(BATCH, -(-len(todo) // BATCHES))
        return todo if dry_run or new_kms is not None else todo[:size]

    def applied(version: int, todo: list[KeyEntry]) -> int:
        if todo and not dry_run:
            opened.store.check_writable()
            missing = [entry for entry in todo if entry.wrapped not in wrapped]
            with work.bar(len(missing), " KEKs") as bar:
                made = in_threads(
                    lambda entry: rewrap_kek(before, entry, new_kms, asked.master_of(entry)), missing, work.concurrency
                )
                bar.update(len(made))
            wrapped.update((entry.wrapped, new) for entry, new in zip(missing, made, strict=True))
            changes = decide.put_in_wraps(todo, wrapped, clock_ms())
            try:
                if new_kms is not None:
                    keyring.use_kms(new_kms)  # which seals the version of the key store that it can open
                keyring.keys.compare_and_swap(changes, version, operation="rotate-mek")
            except BaseException:
                keyring.use_kms(before)
                raise
        done.update((entry.key_id, "planned" if dry_run else "ok") for entry in todo)
        return len(todo)

    while until_unchanged(opened.keys.refresh, decided, applied):
        if new_kms is not None:
            break  # all KEKs at once: one KMS opens the key store
    why = ("Current", "the current version of its master key wraps it")
    for key_id, status in sorted(done.items(), key=lambda item: item[1] == "skipped"):
        work.key_row(key_id, key_id, status, why if status == "skipped" else None)
    _report_key_material(work, head, before, None if asked.master in (None, asked.left) else asked.left, new_kms)
    return work.result(new_job_id(), head)


def _report_key_material(
    work: Work, head: Version | None, kms: KmsClient, left: str | None, new_kms: KmsClient | None
) -> None:
    """Add a row for each master key that opens files of the newest version by key material which this job leaves.

    The job writes no data file, so what files store stays as it is.

    Args:
        work: What the steps of the rotation have in common.
        head: The newest version.
        kms: The client that has wrapped the key material.
        left: The master key that the dataset leaves, if it leaves one.
        new_kms: The client of the KMS that the dataset moves to, if it moves.
    """
    opened = work.opened
    envelope = opened.envelope
    old: Counter[str] = Counter()
    current: dict[str, str | None] = {}
    for ref in head.manifests if head else ():
        for entry in opened.open_table(ref, envelope) if ref.key_material else ():
            for one in entry.key_material or ():
                master = one["wrapping_key_id"]
                if new_kms is None and master != left:
                    if master not in current:
                        current[master] = kms.current_version(master)
                    version = kms.key_version(one["wrapped_dek"]) or one["master_version"]
                    if version is not None and version == current[master]:
                        continue
                old[master] += 1
    for master, count in sorted(old.items()):
        why = (
            f"{count:,} data key{'s' * (count != 1)} in the key material of files stay as this master key has wrapped "
            "them: rekey_files renews key material"
        )
        work.key_row(master, None, "skipped", ("KeyMaterial", why))


def _current_by(kms: KmsClient) -> Callable[[KeyEntry], bool]:
    """Return a function that tells whether the current version of its master key wraps a KEK."""
    current: dict[str, str | None] = {}  # the current versions of master keys

    def is_current(entry: KeyEntry) -> bool:
        master, version = entry.wrapping_key_id, kms.key_version(entry.wrapped or b"")
        if version is not None and master not in current:
            current[master] = kms.current_version(master)
        return version is not None and version == current[master]

    return is_current


def _refuse_single_wrap(opened: Ledger, asked: Rotation, leaves_kms: bool) -> None:
    """Raise PolicyError if data keys that a KMS wraps itself would be left behind."""
    singles = {
        entry.key_id
        for entry in opened.keys.list()
        if not entry.double_wrap and (leaves_kms or entry.wrapping_key_id == asked.left)
    }
    for version in opened.versions() if singles else ():  # the newest first
        used = read_newest(opened, version, {}).used()
        if count := sum(used[key_id] for key_id in singles & used.keys()):
            raise PolicyError(
                f"the KMS itself wraps {count} data keys of version {version.number}, so its master key cannot be "
                "left by wrapping KEKs again: rotate(what='double-wrap') or rotate(what='kek', wrapping_key_id=...) "
                "first, and expire the versions before that"
            )
        if not leaves_kms:
            return
