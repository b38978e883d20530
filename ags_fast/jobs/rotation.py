"""Rotation of the keys above the data keys, and the end of what only old ones open. No file of data is written.

A KEK is replaced in the key store first: the new one is there, and the old one retired in its favour, before the first
manifest is rewritten. So whoever commits from then on wraps by the new one, and a rotation has an end. What it writes
are manifests with the same files, each DEK wrapped anew: the work of tasks, planned, retried and resumed as files are.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ags_fast.ags1 import DEFAULT_BLOCK_SIZE
from ags_fast.errors import AgsError, ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.fs import Store
from ags_fast.jobs.dataset import (
    ENTRY_NBYTES,
    GRACE_MS,
    MANIFEST_NBYTES,
    SCOPE,
    SLACK_USES,
    SUCCESSOR,
    VERSIONS,
    Dataset,
    FileEntry,
    TableRef,
    Version,
    Want,
    column_binding,
    decode_entries,
    encode_table,
    manifest_name,
    moved,
    named_keys,
    numbered,
    open_table,
    retired,
    retires_ms,
    seal_table,
    version_numbers,
    wrapped_by,
)
from ags_fast.jobs.local import LocalEngine, client_for
from ags_fast.jobs.plan import Plan, Task, new_job_id, open_plans
from ags_fast.jobs.policy import Policy
from ags_fast.jobs.results import JobResult, Row, counted, shown
from ags_fast.jobs.task import Context, describe
from ags_fast.keys.envelope import (
    MASTER_VERSION,
    Envelope,
    KeyEntry,
    binding,
    check_unwraps,
    clear_cache,
    in_threads,
    rewrap_kek,
    with_version,
)
from ags_fast.keys.kms import KmsClient, as_kms, check_key_id
from ags_fast.keys.resolver import DatasetKeyStore, MemoryKeyStore, for_columns, open_key_store

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from ags_fast.jobs import Engine

__all__ = [
    "apply_retention",
    "expire",
    "finish_expiry",
    "is_idle",
    "key_counts",
    "restore_keys",
    "rewrite_manifest",
    "rotate",
    "to_replace",
]

WHATS = ("kek", "mek", "double-wrap")
GRACE = timedelta(days=7)
CONCURRENCY = 8  # calls of a KMS at once
BATCH = 1000  # KEKs, at least, whose new wraps a plan keeps at a time
NOTES = 10  # times at most: each writes down all that there are by then
REWRAPPED_MS = "rewrapped-ms"  # a property of KEKs that R3 has wrapped, until `expire` has seen that they open
MANIFEST = "manifest"  # the format of such a file
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
    opened = Dataset.open(
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
        result.expired = _expire(opened, 1, None, True)
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


def is_idle(entry: KeyEntry, used: Container[str]) -> bool:
    """Whether a KEK is for some files only, and none of them is there: of a folder, day or job that is over."""
    return SCOPE in entry.properties and entry.key_id not in used


class _Rotation:
    """What the rotations of a dataset have in common."""

    def __init__(
        self,
        opened: Dataset,
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
        self.replaced = from_master or opened.main_key().wrapping_key_id
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
                    self.rows += [_manifest_row(opened, ref, "planned") for ref in self._todo(self.head, set(new))]
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
            successor = opened.active(key_id)
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
        envelope = Envelope(opened.kms, {**known, **{key.key_id: key for key in new.values()}}, opened.proven)
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
                    made[old_id] = retired(old, None if entry is None else entry.key_id, grace_ms)
                    if entry is not None:
                        made[entry.key_id] = entry
            return made

        self.opened.change_keys(changes, f"rotate-{self.what}")
        for old_id, entry in new.items():
            if old_id in entries:  # it may have been expired since a rotation died that is resumed
                self._key_row(old_id, None if entry is None else self.opened.active(old_id))

    def _moves(self, version: Version | None) -> dict[str, str]:
        """The retired keys that wrap something in a version, and those that took their places."""
        opened = self.opened
        refs = version.manifests if version else ()
        used = {ref.key_id for ref in refs}.union(*(dict(ref.keys) for ref in refs if ref.keys is not None))
        known = all(ref.keys is not None for ref in refs)
        return {
            entry.key_id: opened.active(entry.key_id)
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
            self.opened.add_uses(uses)

    def _do(
        self, plan: Plan, engine: Engine, todo: Sequence[TableRef], moves: Mapping[str, str]
    ) -> dict[str, list[TableRef]] | None:
        """Rewrite these manifests, as planned before where a plan has them: by the path of each what takes its place.

        That is one, or several if the KMS wraps to so many more bytes. None if some have failed.
        """
        opened = self.opened
        key_id = opened.document_key()
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
                    made[entry.path] = TableRef(
                        entry.file, row.file_length or 0, count_of, entry.key_id, entry.wrapped_dek, keys
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
                        opened.use_kms(new_kms)  # which seals the version of the key store that it can open
                    keys.compare_and_swap(changes, version, operation="rotate-mek")
                    break
                except BaseException as error:
                    opened.use_kms(before)
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


def _as_ref(file: FileEntry) -> TableRef:
    return TableRef(file.file, file.file_length, file.part or 0, file.key_id, file.wrapped_dek)


def key_counts(opened: Dataset, refs: Iterable[TableRef]) -> Counter[str]:
    """How many DEKs of the files in these manifests each key wraps."""
    counts: Counter[str] = Counter()
    envelope = opened.envelope
    for ref in refs:
        if ref.keys is None:
            counts += wrapped_by(opened.open_table(ref, envelope))
        else:
            counts.update(dict(ref.keys))
    return counts


# ---------------------------------------------------------------------------------------------------------- in a worker


def rewrite_manifest(context: Context, task: Task, attempt: int) -> int:
    """Write the manifest `task.entry` with what `task.old` has, no DEK of it wrapped by a retired key; its length."""
    assert task.old is not None
    if (attempt or context.resume) and (length := _is_finished(context, task.entry)) is not None:
        return length
    file = task.entry.file
    table = open_table(context.dataset, context.dataset_id, _as_ref(task.old), context.envelope)
    if task.entry.parts is not None:
        table = table.slice(task.entry.parts, task.entry.part)
    table = _rewrapped_column(context, table)
    table = _rewrapped_column_keys(context, table)
    data = seal_table(encode_table(table), context.dek(task.entry), context.dataset_id, file)
    try:
        context.dataset.create(file, data)
    except FileExistsError:
        # Of another attempt, which may run beside this one. The first stays: the length of what they make can differ.
        if (length := _is_finished(context, task.entry)) is None:
            raise
        return length
    return len(data)


def _is_finished(context: Context, entry: FileEntry) -> int | None:
    """The length of a manifest that an earlier attempt has written, if it is whole and as it is to be now."""
    there = context.dataset.stat(entry.file)
    if there is None:
        return None
    try:
        ref = _as_ref(entry._replace(file_length=there.size))
        entries = decode_entries(open_table(context.dataset, context.dataset_id, ref, context.envelope), entry.file)
    except AgsError:
        return None
    return there.size if context.moves.keys().isdisjoint(wrapped_by(entries)) else None


def _rewrapped_column(context: Context, table: Any) -> Any:
    """The table with the DEKs of its files wrapped anew."""
    import pyarrow.compute as pc

    key_ids = table.column("key_id").combine_chunks()
    names = table.column("file").combine_chunks()
    wrapped = table.column("wrapped_dek").combine_chunks()
    prefix = binding(context.dataset_id, "dek", "")
    for old in pc.unique(key_ids).to_pylist():
        new = context.moves.get(old)
        if new is None:
            continue
        mine = pc.equal(key_ids, old)
        some = not pc.all(mine).as_py()
        those = (names.filter(mine), wrapped.filter(mine)) if some else (names, wrapped)
        fresh = context.envelope.rewrap_column(old, new, prefix, *those, context.ready, context.concurrency)
        wrapped = pc.replace_with_mask(wrapped, mine, fresh) if some else fresh
        key_ids = pc.if_else(mine, new, key_ids)
    table = table.set_column(table.column_names.index("key_id"), table.schema.field("key_id"), key_ids)
    return table.set_column(table.column_names.index("wrapped_dek"), table.schema.field("wrapped_dek"), wrapped)


def _rewrapped_column_keys(context: Context, table: Any) -> Any:
    """The table with the DEKs of columns wrapped anew."""
    import pyarrow as pa

    at = table.column_names.index("column_keys")
    rows = table.column(at).to_pylist() if table.column(at).null_count < table.num_rows else []
    names = table.column("file").to_pylist() if rows else []
    todo: dict[str, list[tuple[dict[str, Any], bytes]]] = {}
    for name, keys in zip(names, rows, strict=True):
        for key in keys or ():
            if key["key_id"] in context.moves:
                bound = column_binding(context.dataset_id, key["column"], name)
                todo.setdefault(key["key_id"], []).append((key, bound))
    for old, keys in todo.items():
        new = context.moves[old]
        items = [(key["wrapped_dek"], bound) for key, bound in keys]
        fresh = context.envelope.rewrap_many(old, new, items, context.ready, context.concurrency)
        for (key, _), wrapped in zip(keys, fresh, strict=True):
            key |= {"key_id": new, "wrapped_dek": wrapped}
    if not todo:
        return table
    return table.set_column(at, table.schema.field(at), pa.array(rows, table.schema.field(at).type))


# -------------------------------------------------------------------------------------------------------------- restore


def restore_keys(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    version: int | None = None,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> JobResult:
    """Go back to an older document of the key store of `dataset`, where the newest does not open with this KMS.

    version: of the key store, the number in ``_ags/keys``; None takes the newest one before the current one whose
    active KEKs the KMS unwraps, but for those of columns, and only if it does not unwrap those of the current one.

    The new document has the content of the old one, and comes after the current one. Nothing is removed, so this can
    be taken back in the same way. Keys that were made since are not in it; those that were retired since wrap again.

    A row for each KEK, and for each version of the dataset that these keys do not open any more ("failed"). In a
    result's `version` is that of the dataset. If the newest keys open, nothing is done, and the rows are "skipped".
    dry_run: look only. PolicyError if the keys are in a database, which has a past of its own. KeyAccessError if no
    document opens.
    """
    client = as_kms(kms)
    store = dataset if isinstance(dataset, Store) else Store(dataset, storage_options)
    keys = open_key_store(key_store, client, store=store, storage_options=storage_options)
    if not isinstance(keys, DatasetKeyStore):
        raise PolicyError(f"{keys!r} keeps no documents: put the database back, or rows of it, by its own means")
    clear_cache()  # whether the KMS opens a key is not what this process remembers
    if version is None:
        try:
            there = _needed(keys.list())
            _check_unwraps_all(client.for_dataset(keys.dataset_id), there)
        except AgsError:
            pass
        else:
            Dataset.open(store, client, key_store=keys, pin=pin, min_version=min_version)
            row = Row(
                "", None, "skipped", "Current", "the newest keys open: name a version to go back anyway", format="key"
            )
            rows = [row._replace(src=entry.key_id, key_id=entry.key_id) for entry in there]
            return JobResult(new_job_id(), "restore", store.url, max(version_numbers(store), default=None), rows)
    found, why = None, ""
    for number in [version] if version is not None else keys.earlier_numbers():
        try:
            earlier = keys.earlier(number)
            if version is None:
                _check_unwraps_all(client.for_dataset(earlier.dataset_id), _needed(earlier.entries.values()))
            found = earlier
            break
        except (AgsError, FileNotFoundError) as error:
            if version is not None:
                raise
            why = why or f": version {number}: {describe(error)}"
    if found is None:
        raise KeyAccessError(f"no older document in _ags/keys of {store.url} opens with this KMS{why}")
    preview = MemoryKeyStore(found.dataset_id, found.entries, found.newest + 1)
    opened = Dataset(store, client, preview, pin, min_version)
    if pin is not None or min_version:
        opened.current()
    own, done = client.for_dataset(found.dataset_id), "planned" if dry_run else "ok"
    rows = [_unwrap_row(own, entry, done) for entry in found.entries.values()]
    numbers, seen = opened.version_numbers(), None
    for n in numbers:
        try:
            seen = opened.version(n)
            for ref in seen.manifests:
                opened.open_table(ref, opened.envelope)
        except AgsError as error:
            path = store.full_path(VERSIONS + numbered(n))
            rows.append(Row(path, None, "failed", type(error).__name__, describe(error), format="version"))
    if not dry_run:
        store.check_writable()
        keys.restore(found)
    pinned = seen.pin if seen is not None and seen.number == numbers[-1] else None
    return JobResult(new_job_id(), "restore", store.url, numbers[-1] if numbers else None, rows, pinned)


def _needed(entries: Iterable[KeyEntry]) -> list[KeyEntry]:
    return [entry for entry in entries if entry.state == "active" and not for_columns(entry)]


def _check_unwraps_all(kms: KmsClient, entries: Iterable[KeyEntry]) -> None:
    for entry in entries:
        if entry.double_wrap:
            check_unwraps(kms, entry, None)


def _unwrap_row(kms: KmsClient, entry: KeyEntry, status: str) -> Row:
    try:
        _check_unwraps_all(kms, [entry])
    except AgsError as error:
        return Row(
            entry.key_id, None, "failed", type(error).__name__, describe(error), format="key", key_id=entry.key_id
        )
    return Row(entry.key_id, None, status, format="key", key_id=entry.key_id)


# --------------------------------------------------------------------------------------------------------------- expire


@counted
def expire(
    dataset: Any,
    *,
    kms: KmsClient | Mapping[str, str],
    keep: int = 1,
    older_than: timedelta | None = None,
    force: bool = False,
    dry_run: bool = False,
    min_version: int | None = None,
    pin: str | None = None,
    key_store: Any = None,
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
    opened = Dataset.open(dataset, as_kms(kms), storage_options, key_store, pin=pin, min_version=min_version)
    return _expire(opened, keep, older_than, force, dry_run)


def apply_retention(opened: Dataset, result: JobResult) -> None:
    """After a job: expire what the dataset's policy does not keep."""
    try:
        head = opened.current()
        if head is None or head.policy.keep is None:
            return
        days = head.policy.keep_days
        older_than = None if days is None else timedelta(days=days)
        result.expired = _expire(opened, head.policy.keep, older_than, False, spare=GRACE_MS / 1000)
    except (AgsError, OSError) as error:  # the job itself has done what it had to do
        row = Row(opened.store.url, None, "failed", type(error).__name__, describe(error))
        result.expired = JobResult(new_job_id(), "expire", opened.store.url, result.version, [row], result.pin)


def _expire(
    opened: Dataset,
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
                rows.append(_manifest_row(opened, ref, "planned"))
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


def _manifest_row(opened: Dataset, ref: TableRef, status: str = "ok") -> Row:
    return Row(
        opened.store.full_path(ref.path), None, status, file_length=ref.length, format=MANIFEST, key_id=ref.key_id
    )


def _file_row(opened: Dataset, entry: FileEntry, status: str = "ok") -> Row:
    name = opened.store.full_path(entry.file)
    return Row(name, None, status, file_length=entry.file_length, format="file", key_id=entry.key_id)


def finish_expiry(opened: Dataset, plan: Plan, rows: list[Row]) -> None:
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
        rows.append(_manifest_row(opened, ref))


def _unneeded(
    opened: Dataset, refs: Sequence[TableRef], gone: set[int], job_id: str = ""
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
def _unless_expired(opened: Dataset, version: Version) -> Iterator[None]:
    """What is missing of a version is no fault if the version is gone, too."""
    try:
        yield
    except IntegrityError:
        if version.number in opened.version_numbers():
            raise


def _remove_keys(
    opened: Dataset, rows: list[Row], force: bool, planned: set[int] | None = None, spare: float = 0.0
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
                    changes[entry.key_id] = retired(entry, None, GRACE_MS)  # to go with a later expiry
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
        opened.change_keys(wanted.copy, "restore")
    # And one may have done so while an expiry ran that died then. What has that job's key stays, or nobody could tell
    # any more which files are that job's.
    of_jobs = _keys_of_jobs(opened)
    lost = keys.removed(of_jobs.keys() - {e.key_id for e in keys.list()}) if isinstance(keys, DatasetKeyStore) else {}
    stay += [Row(i, None, "skipped", "InUse", of_jobs[i], format="key", key_id=i) for i in lost]
    rows += [Row(key_id, None, "ok", format="key", key_id=key_id) for key_id in gone] + stay
    # Where it cannot be seen that a KEK opens as it is wrapped now, what has it as it was wrapped stays.
    pruned = keys.prune(spare) if isinstance(keys, DatasetKeyStore) and not (unsure or lost) else ()
    rows += [Row(path, None, "ok", format="keys") for path in pruned]


def _witnesses(opened: Dataset, key_ids: set[str]) -> dict[str, tuple[bytes, bytes]]:
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


def _keys_of_jobs(opened: Dataset) -> dict[str, str]:
    return {
        key_id: f"the open job {job_id} needs it: resume the job, or sweep it away"
        for job_id in open_plans(opened.store)
        for key_id in Plan.key_ids(opened, job_id)
    }


def _used_keys(opened: Dataset, gone: set[int]) -> dict[str, str]:
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
