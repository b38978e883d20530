"""Rotation of the keys above the data keys, and the end of what only old ones open. No file of data is written.

A KEK is replaced in the key store first: the new one is there, and the old one retired in its favour, before the first
manifest is rewritten. So whoever commits from then on wraps by the new one, and a rotation has an end. What it writes
are manifests with the same files, each DEK wrapped anew: the work of tasks, planned, retried and resumed as files are.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.dataset.entries import FileEntry
from ags_fast.dataset.keks import SLACK_USES, Want, clock_ms, is_idle
from ags_fast.dataset.ledger import Ledger
from ags_fast.dataset.names import manifest_name, new_job_id
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import (
    ENTRY_NBYTES,
    MANIFEST_NBYTES,
    TableRef,
    named_keys,
)
from ags_fast.dataset.versions import Version
from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.jobs.engines.local import LocalEngine, client_for
from ags_fast.jobs.expiry import apply_retention, expire_versions, key_counts, manifest_row
from ags_fast.jobs.results import JobResult, Row, counted, shown
from ags_fast.jobs.work.context import Context, Task
from ags_fast.jobs.work.manifest import MANIFEST
from ags_fast.keys.entry import MASTER_VERSION, REWRAPPED_MS, SUCCESSOR, KeyEntry, moved, retired, with_version
from ags_fast.keys.envelope import Envelope, binding, in_threads
from ags_fast.keys.kek import rewrap_kek
from ags_fast.keys.kms import KmsClient, as_kms, check_key_id

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from ags_fast.jobs.engines.base import Engine


WHATS = ("kek", "mek", "double-wrap")
GRACE = timedelta(days=7)
CONCURRENCY = 8  # calls of a KMS at once
BATCH = 1000  # KEKs, at least, whose new wraps a plan keeps at a time
NOTES = 10  # times at most: each writes down all that there are by then
LOCAL_WORK, KMS_WORK = 1 << 8, 1 << 18  # bytes that could be done in the time that a DEK takes


@counted
def rotate(
    dataset: Any,
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
    progress: Any = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Replace the keys above the data keys of `dataset`. The files of data stay as they are, to the last byte.

    what:

    - ``"kek"``: what wraps the DEKs. In double wrap, new KEKs, and a version whose manifests have every DEK wrapped by
      them: a wrap for each new KEK, and an unwrap for each old one unless this process knows it. In single wrap, every
      DEK is wrapped anew by the KMS: a rewrap for each where the service can, else an unwrap and a wrap; `concurrency`
      calls at once.
    - ``"mek"``: only what wraps the KEKs, after their master key was rotated in the KMS: each KEK is wrapped by its
      current version, in the key store, and nothing else is touched. A rewrap for each, or an unwrap and a wrap; none
      for those of which the KMS tells that they are.
    - ``"double-wrap"``: DEKs that the KMS wraps get under a new KEK: an unwrap for each, and one wrap.

    wrapping_key_id: the master key to use from now on, in place of `from_key_id`, by default the one of the dataset's
    own key. from_key_id: only what is under this master key, such as that of some columns; with new_kms all KEKs move,
    and this says which get under `wrapping_key_id`. documents: in single wrap, replace the KEK of manifests and
    documents, too, which else stays, for it opens no file. new_kms: for ``"mek"``, the KMS to move to; from then on the
    dataset is opened with that. grace: how long a retired KEK stays at least, also when no version needs it: longer
    than the longest writing job. force_expire: then do `expire(keep=1, force=True)`; its result is the result's
    `expired`. engine: what rewrites manifests; None: this process. concurrency: KMS calls at once, in each worker.
    resume: take up a rotation with the same arguments that died: True, False, or None: if the storage shows that it
    did, as local files do; in an object store, if nothing happened for a day. progress: None shows a bar on a terminal,
    False none, and a callable gets rows as they come. dry_run: say what would be done.

    Each new wrap of a KEK is unwrapped once before the key store names it, and in single wrap the first DEK that is
    wrapped for each key: KeyAccessError or IntegrityError, with nothing changed, if it does not open.

    A row for each key and for each manifest. If a manifest fails, nothing is committed, and the next call goes on from
    there. KeyAccessError if the KMS refuses: then nothing was written.
    """
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
    for key_id in (wrapping_key_id, from_key_id):
        if key_id is not None:
            check_key_id(key_id)
    engine = LocalEngine(0) if engine is None else engine
    opened = Ledger.open(
        dataset, client_for(engine, kms, dataset), storage_options, key_store, pin=pin, min_version=min_version
    )
    if from_key_id is not None:
        masters = {entry.wrapping_key_id for entry in opened.keys.list()}
        if from_key_id not in masters:
            under = ", ".join(map(repr, sorted(masters)))
            raise PolicyError(f"no key of {opened.store.url} is under {from_key_id!r}, but under {under}")
    job = _Rotation(opened, what, wrapping_key_id, from_key_id, documents, concurrency, resume, dry_run, progress)
    if what == "mek":
        result = job.rotate_mek(None if new_kms is None else as_kms(new_kms).for_dataset(opened.id))
    else:
        result = job.rotate_kek(engine, grace)
    if dry_run or result.failed:
        return result
    if force_expire:
        result.expired = expire_versions(opened, 1, None, True)
    else:
        apply_retention(opened, result)
    return result


def to_replace(
    active: Sequence[KeyEntry],
    what: str,
    used: Container[str],
    master_of: Callable[[KeyEntry], str],
    documents: bool = False,
) -> list[KeyEntry]:
    """Of the active keys those that a rotation replaces. used: those that wrap data keys of the newest version."""
    singles = [entry for entry in active if not entry.double_wrap]
    doubles = [entry for entry in active if entry.double_wrap]
    if what == "double-wrap":  # the new KEK seals the documents, too
        return singles and singles + [e for e in doubles if Want.of(e) == Want(e.wrapping_key_id)]
    # In single wrap, the KEK of the documents opens no file, and is let be: there, every call is to be a file's.
    in_use = documents or not singles or any(entry.key_id in used for entry in doubles)
    return singles + [entry for entry in doubles if in_use or master_of(entry) != entry.wrapping_key_id]


class _Rotation:
    """What the rotations of a dataset have in common."""

    def __init__(
        self,
        opened: Ledger,
        what: str,
        master: str | None,
        from_master: str | None,
        documents: bool,
        concurrency: int,
        resume: bool | None,
        dry_run: bool,
        progress: Any,
    ) -> None:
        self.opened = opened
        self.what = what
        self.head = opened.current(writes=True)
        self.master = master
        # What is replaced by another master key: without from_key_id the dataset's own, and columns keep theirs.
        self.replaced = from_master or opened.keyring.main_key().wrapping_key_id
        self.from_master = from_master
        self.documents = documents
        self.concurrency = concurrency
        self.resume = resume
        self.dry_run = dry_run
        self.progress = progress
        self.rows: list[Row] = []
        self.current: dict[str, str | None] = {}  # versions of master keys, of the KMS that KEKs are to be wrapped by
        # DEKs that the KMS has wrapped anew already, by the key that this is for, and what they were.
        self.ready: dict[tuple[str, bytes], bytes] = {}
        self.facts = {
            "operation": "rotate",
            "what": what,
            "source": shown(opened.store.url),
            "wrapping_key_id": master,
            "from_key_id": from_master,
            "documents": documents,
        }

    def _resumed(self, facts: Mapping[str, Any], held: ExitStack) -> Plan | None:
        if self.dry_run or self.resume is False:
            return None
        return Plan.resume(self.opened, facts, held, sure=bool(self.resume))

    def _result(self, job_id: str, version: Version | None) -> JobResult:
        number, pinned = (version.number, version.pin) if version else (None, None)
        return JobResult(job_id, "rotate", self.opened.store.url, number, self.rows, pinned)

    def _in_question(self, entry: KeyEntry) -> bool:
        return self.from_master in (None, entry.wrapping_key_id)

    def _master_of(self, entry: KeyEntry) -> str:
        """The master key that it, or its successor, gets under."""
        return self.master if self.master and entry.wrapping_key_id == self.replaced else entry.wrapping_key_id

    def _key_row(self, old: str, new: str | None, status: str = "ok", why: tuple[str, str] | None = None) -> None:
        error_class, error = why or (None, None)
        self._report(Row(old, new, status, error_class, error, format="key", key_id=new))

    def _report(self, row: Row) -> None:
        self.rows.append(row)
        if callable(self.progress):
            self.progress([row])

    # ---- R1, R2, and from single to double wrap

    def rotate_kek(self, engine: Engine, grace: timedelta) -> JobResult:
        opened = self.opened
        with ExitStack() as held:
            plan = self._resumed(self.facts, held)
            if plan is not None and (made := plan.committed()) is not None:  # it died between its commit and its end
                plan.end()
                return self._result(plan.job_id, made)
            if plan is not None and not self._opens(plan):
                plan.end()
                plan = None
            job_id = plan.job_id if plan is not None else new_job_id()
            if plan is None:
                while True:
                    try:
                        new = self._new_keys()
                        break
                    except IntegrityError:
                        if opened.is_newest(self.head):
                            raise
                        self.head = opened.current()  # what it had was expired meanwhile
                if self.dry_run or not (new or self._moves(self.head)):
                    for old in new:
                        self._key_row(old, None, "planned")
                    self.rows += [manifest_row(opened, ref, "planned") for ref in self._todo(self.head, set(new))]
                    return self._result(job_id, self.head)
                opened.store.check_writable()
                keys = {old: entry and entry.to_json() for old, entry in new.items()}
                plan = Plan.create(
                    opened, job_id, [], "running", base=self.head.number if self.head else 0, keys=keys, **self.facts
                )
                held.callback(plan.release)
            else:
                new = {old: entry and KeyEntry.from_json(entry) for old, entry in plan.body["keys"].items()}
            self._install(new, int(grace / timedelta(milliseconds=1)))
            version = self._rewrite(plan, engine)
            return self._result(job_id, version)

    def _opens(self, plan: Plan) -> bool:
        """Whether the KMS opens the keys that a plan would put in: what wrapped them may have been left since."""
        known = self.opened.envelope.entries
        new = [KeyEntry.from_json(entry) for entry in plan.body["keys"].values() if entry is not None]
        envelope = Envelope(self.opened.kms, {key.key_id: key for key in new if key.key_id not in known})
        try:
            for key_id in envelope.entries:
                envelope.prepare(key_id)
        except (FormatError, IntegrityError, KeyAccessError):
            return False
        return True

    def _new_keys(self) -> dict[str, KeyEntry | None]:
        """For each key to replace, its successor: made by the KMS, not in the key store yet. None: it needs none."""
        opened = self.opened
        used = key_counts(opened, self.head.manifests if self.head else ())
        active = opened.keys.list("active")
        old = [e for e in to_replace(active, self.what, used, self._master_of, self.documents) if self._in_question(e)]
        wants = {}
        for entry in old:
            # One that is younger than the version may be for what somebody is about to commit.
            if is_idle(entry, used) and self.head is not None and entry.created_ms < self.head.time_ms:
                continue  # a writer that still wants it gets one of the kind
            want = Want.of(entry)._replace(wrapping_key_id=self._master_of(entry))
            wants[entry.key_id] = want if self.what == "kek" else want._replace(double_wrap=True, scope=None)
        if self.dry_run:
            return {entry.key_id: entry if entry.key_id in wants else None for entry in old}
        made: dict[Want, KeyEntry] = {}
        for entry in sorted(old, key=lambda entry: repr(wants.get(entry.key_id))):
            kind = wants.get(entry.key_id)
            if kind is not None:
                made[kind] = moved(made.get(kind) or kind.new_kek(opened.kms), entry)
        self._try({key_id: made[want] for key_id, want in wants.items()})
        uses = dict.fromkeys(made, 0)
        for key_id, count in used.items():
            successor = opened.keyring.active(key_id)
            if successor in wants:
                uses[wants[successor]] += count
        unused = {entry.key_id: None for entry in old if entry.key_id not in wants}
        policy = self.head.policy if self.head else Policy()
        reserved = {want: made[want].replace(uses=policy.reserved(0, uses[want], SLACK_USES)) for want in made}
        return {**{key_id: reserved[want] for key_id, want in wants.items()}, **unused}

    def _try(self, new: Mapping[str, KeyEntry]) -> None:
        """Ask the KMS for each old key, or for one DEK of it: a refusal is to come before anything is written."""
        opened = self.opened
        todo = set()
        for old_id in new:
            if opened.keys.get(old_id).double_wrap:
                opened.envelope.prepare(old_id)
            else:
                todo.add(old_id)
        refs = self._todo(self.head, todo) if todo else []
        known = opened.envelope.subset({*todo, *(ref.key_id for ref in refs)}).entries
        envelope = Envelope(opened.kms, {**known, **{key.key_id: key for key in new.values()}}, opened.keyring.proven)
        for ref in refs:
            for entry in opened.open_table(ref, envelope) if todo else ():
                for key_id, wrapped, bound in entry.wraps(opened.id):
                    if key_id in todo:
                        todo.remove(key_id)
                        key = new[key_id].key_id
                        (self.ready[key, wrapped],) = envelope.rewrap_many(key_id, key, [(wrapped, bound)])

    def _install(self, new: Mapping[str, KeyEntry | None], grace_ms: int) -> None:
        """Have the key store name the new keys, and retire the old ones. What somebody else has retired is let be."""
        entries = self.opened.envelope.entries

        def changes() -> dict[str, KeyEntry | None]:
            made: dict[str, KeyEntry | None] = {}
            for old_id, entry in new.items():
                old = entries.get(old_id)
                if old is not None and old.state == "active":
                    made[old_id] = retired(old, None if entry is None else entry.key_id, grace_ms, clock_ms())
                    if entry is not None:
                        made[entry.key_id] = entry
            return made

        self.opened.keyring.change(changes, f"rotate-{self.what}")
        for old_id, entry in new.items():
            if old_id in entries:  # it may have been expired since a rotation died that is resumed
                self._key_row(old_id, None if entry is None else self.opened.keyring.active(old_id))

    def _moves(self, version: Version | None) -> dict[str, str]:
        """The retired keys that wrap something in a version, and those that took their places."""
        opened = self.opened
        refs = version.manifests if version else ()
        used = {ref.key_id for ref in refs}.union(*(dict(ref.keys) for ref in refs if ref.keys is not None))
        known = all(ref.keys is not None for ref in refs)
        return {
            entry.key_id: opened.keyring.active(entry.key_id)
            for entry in opened.keys.list("retired")
            if entry.key_id in used or (not known and SUCCESSOR in entry.properties)
        }

    def _todo(self, version: Version | None, moved: set[str]) -> list[TableRef]:
        """The manifests that one of these keys is needed for, or may be."""
        return [
            ref
            for ref in (version.manifests if version else ())
            if ref.key_id in moved or ref.keys is None or not moved.isdisjoint(dict(ref.keys))
        ]

    def _rewrite(self, plan: Plan, engine: Engine) -> Version | None:
        """Commit a version whose manifests need no retired key, and return it; or the newest one if there is no need.

        None if manifests have failed: their rows say why, and the plan stays.
        """
        opened = self.opened
        done: dict[str, list[TableRef]] = {}  # by the path of the manifest that they take the place of
        counted = {ref.path for ref in self.head.manifests} if self.head else set()  # when the keys were made
        while True:
            head = opened.current(writes=True)
            moves = self._moves(head)
            todo = [ref for ref in self._todo(head, set(moves)) if ref.path not in done]
            if todo:
                rows = len(self.rows)
                refs = self._do(plan, engine, todo, moves)
                if refs is None:
                    if opened.is_newest(head) and self._moves(opened.current()) == moves:
                        return None
                    del self.rows[rows:]  # others have expired what was to be read, or retired what was to wrap
                    continue
                done |= refs
            assert head is not None or not done
            if not head or not any(ref.path in done for ref in head.manifests):
                plan.end()
                return head
            self._count_uses(head, done, moves, counted)
            try:
                refs_now = [new for ref in head.manifests for new in done.get(ref.path, [ref])]
                made = opened.succeed(head, f"rotate-{self.what}", plan.job_id, refs_now)
            except FileExistsError:
                continue
            plan.end({ref.path for ref in refs_now})
            return made

    def _count_uses(
        self, head: Version, done: Mapping[str, object], moves: Mapping[str, str], counted: set[str]
    ) -> None:
        uses: dict[str, int] = {}
        for ref in head.manifests:
            if ref.path in done and ref.path not in counted:
                counted.add(ref.path)
                for old, count in key_counts(self.opened, [ref]).items():
                    if old in moves:
                        uses[moves[old]] = uses.get(moves[old], 0) + count
        if uses:
            self.opened.keyring.add_uses(uses)

    def _do(
        self, plan: Plan, engine: Engine, todo: Sequence[TableRef], moves: Mapping[str, str]
    ) -> dict[str, list[TableRef]] | None:
        """Rewrite these manifests, as planned before where a plan has them: by the path of each what takes its place.

        That is one, or several if the KMS wraps to so many more bytes. None if some have failed.
        """
        opened = self.opened
        key_id = opened.keyring.document_key()
        envelope = opened.envelope
        planned = {entry.path: entry for entry in plan.entries()}
        kms_bound = any(not envelope.entries[old].double_wrap for old in moves)
        wrap_nbytes = max([plan.body.get("wrap_nbytes", 0), *map(len, self.ready.values())])
        tasks, anew = [], []
        for ref in todo:
            old = _as_file(ref, plan.job_id, KMS_WORK if kms_bound else LOCAL_WORK)
            for part in _parts(old, wrap_nbytes):
                new = planned.get(part.path)
                if new is None or new.key_id != key_id or new.part != part.part or plan.body.get("moves") != moves:
                    file = manifest_name(plan.job_id)
                    wrapped = envelope.wrap(key_id, os.urandom(16), binding(opened.id, "dek", file))
                    new = part._replace(file=file, key_id=key_id, wrapped_dek=wrapped, file_length=0)
                    anew.append(new)
                tasks.append(Task(new, old))
        if anew:
            plan.extend(anew, moves=moves, wrap_nbytes=wrap_nbytes)
        needed = {key_id, *moves, *moves.values(), *(ref.key_id for ref in todo)}
        context = Context(
            "rotate",
            plan.job_id,
            opened.id,
            opened.store,
            envelope.subset(needed),
            resume="verify" if plan.taken else None,
            moves=dict(moves),
            ready=self.ready,
            concurrency=self.concurrency,
        )
        refs = {ref.path: ref for ref in todo}
        by_name = {opened.store.full_path(task.entry.file): task.entry for task in tasks}
        made: dict[str, TableRef] = {}
        failed = False
        with self._bar(sum(ref.entries for ref in todo), " keys") as bar:

            def report(rows: list[Row]) -> None:
                nonlocal failed
                for row in rows:
                    entry = by_name[row.dst or ""]
                    ref, count_of = refs[entry.source], entry.part or 0
                    self._report(row._replace(plain_length=None, block_size=None))
                    bar.update(count_of)
                    if row.status == "failed":
                        failed = True
                        continue
                    counts: dict[str, int] = {}
                    for key, count in ref.keys or ():
                        counts[moves.get(key, key)] = counts.get(moves.get(key, key), 0) + count
                    # Of a part it is not known here which of the keys wrap something in it.
                    keys = None if ref.keys is None or entry.parts is not None else named_keys(counts)
                    made[entry.path] = ref._replace(
                        path=entry.file,
                        length=row.file_length or 0,
                        entries=count_of,
                        key_id=entry.key_id,
                        wrapped_key=entry.wrapped_dek,
                        keys=keys,
                        run=ref.run or (ref.path if entry.parts is not None else ""),
                    )

            engine.run(context, tasks, 0, report)
        if failed:
            return None
        places: dict[str, list[TableRef]] = {}
        for task in tasks:
            places.setdefault(task.entry.source, []).append(made[task.entry.path])
        return places

    def _bar(self, total: int, unit: str) -> Any:
        from tqdm import tqdm

        disable = None if self.progress is None else not self.progress or callable(self.progress)
        return tqdm(total=total, unit=unit, unit_scale=True, desc=f"rotate {self.what}", disable=disable)

    # ---- R3

    def rotate_mek(self, new_kms: KmsClient | None) -> JobResult:
        opened, keys = self.opened, self.opened.keys
        if new_kms is not None or self.master not in (None, self.replaced):
            self._refuse_single_wrap(new_kms)
        facts = {**self.facts, "to": None if new_kms is None else hashlib.sha256(new_kms.identity).hexdigest()}
        with ExitStack() as held:
            plan = self._resumed(facts, held)
            job_id = plan.job_id if plan is not None else new_job_id()
            # KEKs as wrapped anew, by what they were made of: who comes second in the key store needs them, too.
            ready = {digest: KeyEntry.from_json(key) for digest, key in plan.body["ready"]} if plan is not None else {}
            # Not those of a version that is no longer current; and none where that cannot be told.
            ready = {digest: entry for digest, entry in ready.items() if self._is_current(entry, new_kms or opened.kms)}
            while True:
                version = keys.refresh()
                todo, rest = self._to_rewrap(new_kms)
                if self.dry_run or not todo:
                    break
                opened.store.check_writable()
                missing = [entry for entry in todo if _digest(entry) not in ready]
                size = max(BATCH, -(-len(missing) // NOTES))
                with self._bar(len(missing), " KEKs") as bar:
                    for at in range(0, len(missing), size):
                        batch = missing[at : at + size]
                        made = in_threads(lambda entry: self._rewrapped(entry, new_kms), batch, self.concurrency)
                        ready |= {_digest(entry): new for entry, new in zip(batch, made, strict=True)}
                        bar.update(len(batch))
                        told = self._is_current(made[0], new_kms or opened.kms)
                        if len(missing) > BATCH and told:  # so many calls of a KMS are worth to be kept
                            noted = {"ready": [(digest, entry.to_json()) for digest, entry in ready.items()]}
                            if plan is None:
                                plan = Plan.create(opened, job_id, [], "running", **facts, **noted)
                                held.callback(plan.release)
                            else:
                                plan.extend([], **noted)
                now = str(time.time_ns() // 1_000_000)
                changes: dict[str, KeyEntry | None] = {}
                for entry in todo:
                    new = ready[_digest(entry)]
                    properties = with_version(entry.properties, new.properties.get(MASTER_VERSION))
                    properties[REWRAPPED_MS] = now
                    new = new.replace(properties=properties, state=entry.state, uses=entry.uses)
                    changes[entry.key_id] = moved(new, entry)
                before = opened.kms
                try:
                    if new_kms is not None:
                        opened.keyring.use_kms(new_kms)  # which seals the version of the key store that it can open
                    keys.compare_and_swap(changes, version, operation="rotate-mek")
                    break
                except BaseException as error:
                    opened.keyring.use_kms(before)
                    if not isinstance(error, ConcurrentChangeError):
                        raise
            for entry in todo:
                self._key_row(entry.key_id, entry.key_id, "planned" if self.dry_run else "ok")
            for entry in rest:
                why = ("Current", "the current version of its master key wraps it")
                self._key_row(entry.key_id, entry.key_id, "skipped", why)
            if plan is not None:
                plan.end()
            return self._result(job_id, self.head)

    def _refuse_single_wrap(self, new_kms: KmsClient | None) -> None:
        """PolicyError if data keys that a KMS wraps itself would be left behind."""
        opened = self.opened
        singles = {
            entry.key_id
            for entry in opened.keys.list()
            if not entry.double_wrap and (new_kms is not None or entry.wrapping_key_id == self.replaced)
        }
        for version in opened.versions() if singles else ():  # the newest first
            used = key_counts(opened, version.manifests)
            if count := sum(used[key_id] for key_id in singles & used.keys()):
                raise PolicyError(
                    f"the KMS itself wraps {count} data keys of version {version.number}, so its master key cannot be "
                    "left by wrapping KEKs anew: rotate(what='double-wrap') or rotate(what='kek', wrapping_key_id=...) "
                    "first, and expire the versions before that"
                )
            if new_kms is None:
                return

    def _to_rewrap(self, new_kms: KmsClient | None) -> tuple[list[KeyEntry], list[KeyEntry]]:
        """The KEKs to wrap anew, and those in question of which the KMS tells that they need not be."""
        todo: list[KeyEntry] = []
        rest: list[KeyEntry] = []
        for entry in self.opened.keys.list():
            master = self._master_of(entry)
            if not entry.double_wrap or not (new_kms is not None or self._in_question(entry)):
                continue
            is_there = new_kms is None and master == entry.wrapping_key_id and self._is_current(entry, self.opened.kms)
            (rest if is_there else todo).append(entry)
        return todo, rest

    def _is_current(self, entry: KeyEntry, kms: KmsClient) -> bool:
        """Whether the KMS tells that the current version of its master key wraps it."""
        master, version = entry.wrapping_key_id, kms.key_version(entry.wrapped or b"")
        if version is not None and master not in self.current:
            self.current[master] = kms.current_version(master)
        return version is not None and version == self.current[master]

    def _rewrapped(self, entry: KeyEntry, new_kms: KmsClient | None) -> KeyEntry:
        return rewrap_kek(self.opened.kms, entry, new_kms, self._master_of(entry))


def _digest(entry: KeyEntry) -> str:
    return hashlib.sha256(entry.wrapped or b"").hexdigest()


def _as_file(ref: TableRef, job_id: str, work: int) -> FileEntry:
    """A manifest as a file that tasks and plans know how to deal with. work: bytes that it is like, for each entry."""
    return FileEntry(
        path=ref.path,
        file=ref.path,
        format=MANIFEST,
        plain_length=ref.entries * work,
        file_length=ref.length,
        block_size=DEFAULT_BLOCK_SIZE,
        key_id=ref.key_id,
        wrapped_dek=ref.wrapped_key,
        column_keys=None,
        aad_prefix=b"",
        job_id=job_id,
        set_id=None,
        part=ref.entries,
        parts=None,
        source=ref.path,
        stamp="",
    )


def _parts(manifest: FileEntry, wrap_nbytes: int) -> Iterator[FileEntry]:
    """The manifest, or as many parts of it as it takes if each DEK is wrapped to so many bytes.

    Of a part, `part` is the number of its entries, and `parts` how many come before it.
    """
    count, size = manifest.part or 0, ENTRY_NBYTES + wrap_nbytes
    if count * size <= MANIFEST_NBYTES:
        yield manifest
        return
    each = max(1, MANIFEST_NBYTES // size)
    for first in range(0, count, each):
        rows = min(each, count - first)
        length = manifest.plain_length // count * rows
        yield manifest._replace(path=f"{manifest.path}#{first}", part=rows, parts=first, plain_length=length)
