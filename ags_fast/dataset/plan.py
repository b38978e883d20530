"""Plans: what a job will do, decided and made durable before its first data byte.

A plan holds the wrapped DEK of every file, so each attempt writes a file under the same DEK. What a killed attempt has
published is then as good as what a retry would publish.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.manifest_task import ManifestTask
from ags_fast.dataset.names import HIDDEN, JOB_ID, MANIFESTS, PLANS, job_in_name, object_name
from ags_fast.dataset.tables import MANIFEST_ENTRIES, TABLE_NBYTES, TableRef, chunks, whole
from ags_fast.errors import ConcurrentChangeError, FormatError, IntegrityError, PolicyError
from ags_fast.fs import NO_LOCK_SECONDS, Store
from ags_fast.fs.numbered import Numbered, numbered
from ags_fast.keys.document import DOCUMENT_NBYTES, Document
from ags_fast.keys.entry import KeyEntry, UnknownKeyError
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from contextlib import ExitStack

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version

WRITE = "write"  # the operation of a transaction; its files have the job's id in their names


class Plan:
    """The durable plan of one job: ``_ags/plans/<job id>/``, numbered documents over tables of entries.

    A document either claims names ("claimed") or states that the names are the job's own ("running"). Data is written
    only in the state "running". The document with the highest number counts. An entry of a later table replaces an
    earlier entry of the same path.
    """

    def __init__(
        self,
        dataset: Ledger,
        job_id: str,
        body: dict[str, Any],
        number: int,
        refs: list[TableRef],
        key_id: str = "",
    ) -> None:
        self.dataset = dataset
        self.job_id = job_id
        self.body = body
        self.number = number
        self.refs = refs
        self.key_id = key_id  # the key that seals the document
        self.taken = False  # whether it was taken over from a dead job, or given up by its own job
        self.lost: dict[str, KeyEntry] = {}  # keys of this plan that were removed since: it cannot be resumed
        self._lock: Any = None
        self._files: set[str] | None = None  # the files of its tables, if this process wrote all tables

    @property
    def folder(self) -> str:
        """The folder of the plan in the dataset."""
        return f"{PLANS}{self.job_id}/"

    @property
    def running(self) -> bool:
        """Whether the names of the plan are the job's own, so that data may be written."""
        return bool(self.body["state"] == "running")

    @classmethod
    def create(
        cls, dataset: Ledger, job_id: str, entries: Sequence[FileEntry], state: str = "claimed", **facts: Any
    ) -> Plan:
        """Write a new plan that claims the names of `entries`.

        Args:
            dataset: The dataset.
            job_id: The id of the job.
            entries: The files that the job will write.
            state: "claimed", or "running" if no other job can have these names.
            **facts: What a resumed job must know of the first one, as JSON values.
        """
        plan = cls(dataset, job_id, facts, 0, [])
        plan._files = set()
        plan.hold()
        plan._write(entries, state, [])
        return plan

    def hold(self) -> bool:
        """Lock the plan for the life of this process, where the storage has locks. False if another process has it."""
        try:
            self._lock = self.dataset.store.hold(self.folder + "lock")
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock: the job is over, although its process may live on."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def extend(self, entries: Sequence[FileEntry], rewrites: Sequence[ManifestTask] = (), **facts: Any) -> None:
        """Add entries and rewritings of manifests, under names that no other job can have, and write the plan."""
        self.body = {**self.body, **facts}
        if rewrites:
            self.body["rewrites"] = [*self.body.get("rewrites", ()), *(task.to_json() for task in rewrites)]
        self._write(entries, "running", self.refs)

    def _write(self, entries: Sequence[FileEntry], state: str, refs: list[TableRef]) -> None:
        key_id = self.dataset.keyring.document_key()
        envelope = self.dataset.envelope
        if self._files is not None:
            self._files = {*(self._files if refs else ()), *(entry.file for entry in entries)}
        has_run = self.body.get("state") == "running"
        refs, before = list(refs), len(refs)
        for chunk in chunks(entries):
            path = f"{self.folder}{len(refs):06d}-{secrets.token_hex(4)}.arrow.ags"
            refs.append(self.dataset.seal_table(path, chunk, key_id, envelope))
        self.body = {
            **self.body,
            "format": "ags-plan",
            "dataset_id": self.dataset.id,
            "job_id": self.job_id,
            "state": state,
            "time_ms": time.time_ns() // 1_000_000,
            "tables": [ref.to_json() for ref in refs],
        }
        self.dataset.seal_body(self.folder + numbered(self.number + 1), self.body, key_id, envelope)
        self.number += 1
        self.refs, self.key_id = refs, key_id
        # Keys that a stored plan names are not removed. Check that none was removed before the plan was stored.
        self.dataset.keys.refresh()
        named = {key_id, *(ref.key_id for ref in refs[before:])}.union(*(entry.key_ids() for entry in entries))
        if self.number == 1:
            named |= self.needed_keys(())
        missing = [key_id for key_id in named - self._new_key_ids() - {""} if key_id not in envelope.entries]
        if missing:
            if not has_run:
                self.remove()
            raise ConcurrentChangeError(
                f"the dataset's key {missing[0]!r} was retired and removed while the job was planned: run it again"
            )

    @classmethod
    def load(cls, dataset: Ledger, job_id: str) -> Plan | None:
        """Read the plan of a job. None if the job has no plan that can be used."""
        folder = f"{PLANS}{job_id}/"
        lost: dict[str, KeyEntry] = {}
        while True:
            number = Numbered(dataset.store, folder).newest()
            if number == 0:
                return None
            dataset.keys.refresh()  # after the listing: a plan is stored after the keys that it needs
            envelope = Envelope(dataset.kms, lost) if lost else dataset.envelope
            try:
                body, key_id = dataset.open_body(folder + numbered(number), "ags-plan", envelope)
                break
            except FileNotFoundError:  # the job ended meanwhile
                continue
            except UnknownKeyError:
                sealers = cls._sealed_by(dataset, job_id)
                if not _were_removed(dataset, sealers):
                    raise
                if not lost and (lost := _lost(dataset, sealers)):
                    continue
                return None  # stored too late: its writer noticed, or died; no file was written
        if body.get("job_id") != job_id:
            raise FormatError(f"{folder} holds the plan of another job")
        try:
            _check(body)
            plan = cls(dataset, job_id, body, number, [TableRef.from_json(ref) for ref in body["tables"]], key_id)
            plan.lost = lost
            return plan
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{folder} lacks or garbles {error}") from None

    @classmethod
    def take(cls, dataset: Ledger, job_id: str) -> Plan | None:
        """Lock and return the plan of a dead job.

        Returns None if the job lives or has ended, or if its plan cannot be used: such a plan is removed.
        """
        plan = cls(dataset, job_id, {}, 0, [])
        if not plan.hold():
            return None
        try:
            found = cls.load(dataset, job_id)
            if found is not None and found.body.get("base", 0) and not dataset.newest_number():
                dataset.committed(None)  # raises: its files may belong to versions that somebody took away
        except BaseException:
            plan.release()
            raise
        if found is None:
            plan.remove()
            return None
        found.taken, found._lock = True, plan._lock
        return found

    @classmethod
    def resume(cls, dataset: Ledger, facts: Mapping[str, Any], held: ExitStack, *, sure: bool = True) -> Plan | None:
        """Take over the newest plan of a dead job with the same facts; None if there is none.

        What dead jobs have left without a plan, or with a plan that cannot be resumed, is removed.

        Args:
            dataset: The dataset.
            facts: What the plan must say of its job.
            held: Releases the plan when it is closed.
            sure: Whether the caller knows that such a job is dead, for storage without locks.
        """
        clear(dataset)
        for job_id in reversed(open_plans(dataset.store)):
            if dataset.store.held(f"{PLANS}{job_id}/lock") or not (sure or is_dead(dataset.store, job_id, None)):
                continue
            plan = cls.load(dataset, job_id)
            if plan is None or any(plan.body.get(name) != value for name, value in facts.items()):
                continue
            plan = cls.take(dataset, job_id)  # read again: until now another process could have taken the plan
            if plan is not None and plan.is_lost():
                plan.end()
            elif plan is not None:
                held.callback(plan.release)
                return plan
        return None

    @classmethod
    def names(cls, dataset: Ledger, job_id: str) -> set[str]:
        """Return the files that an open job may write; none if the job has ended."""
        plan = cls.load(dataset, job_id)
        try:
            return plan._named() if plan is not None else set()
        except IntegrityError:  # a table of it is gone
            if cls.load(dataset, job_id) is not None:
                raise
            return set()

    def _new_key_ids(self) -> set[str]:
        """Return the keys that a rotation has made, and adds to the key store after its plan is stored."""
        return {str(key["key-id"]) for key in self.body.get("keys", {}).values() if key is not None}

    def needed_keys(self, entries: Iterable[FileEntry]) -> set[str]:
        """Return the keys that the plan, these entries, and the manifests and keys of a rotation or expiry need."""
        refs = [*self.refs, *map(TableRef.from_json, self.body.get("manifests", ()))]
        used = {self.key_id, *(ref.key_id for ref in refs), *self.body.get("keys", ()), *self.body.get("moves", ())}
        used |= {str(key_id) for key_id in self.body.get("wraps", ())}
        used |= self._new_key_ids() | {task.key_id for task in self.rewrites()}
        return used.union(*(dict(ref.keys or ()) for ref in refs), *(entry.key_ids() for entry in entries))

    @classmethod
    def key_ids(cls, dataset: Ledger, job_id: str) -> set[str]:
        """Return the keys that an open job may need; none if the job has ended."""
        claimed = cls._sealed_by(dataset, job_id)  # counts even if that key is gone and the plan cannot be read
        plan = cls.load(dataset, job_id)
        try:
            return claimed if plan is None else claimed | plan.needed_keys(plan._known())
        except IntegrityError:  # a table of it is gone
            if cls.load(dataset, job_id) is not None:
                raise
            return set()

    @classmethod
    def _sealed_by(cls, dataset: Ledger, job_id: str) -> set[str]:
        """Return the keys that the documents of a job claim to be sealed with."""
        found = set()
        for entry in dataset.store.list(f"{PLANS}{job_id}/"):
            if entry.path.endswith(".json"):
                try:
                    found.add(Document(dataset.store.read(entry.path, DOCUMENT_NBYTES), entry.path).key_id)
                except (FileNotFoundError, FormatError):
                    pass
        return found

    def entries(self, *, superseded: bool = False) -> list[FileEntry]:
        """Return the files of the plan.

        Args:
            superseded: Also return entries that a later entry of the same path replaced. The job may have written
                their files before a source changed.
        """
        envelope = self.dataset.envelope
        if self.lost:
            known = {ref.key_id: envelope.entries[ref.key_id] for ref in self.refs if ref.key_id in envelope.entries}
            envelope = Envelope(self.dataset.kms, known | self.lost)
        entries = [entry for ref in self.refs for entry in self.dataset.open_table(ref, envelope)]
        return entries if superseded else list({entry.path: entry for entry in entries}.values())

    def rewrites(self) -> list[ManifestTask]:
        """Return the rewritings of manifests. A later one replaces an earlier one of the same path."""
        return [ManifestTask.from_json(task) for task in self.body.get("rewrites", ())]

    def is_lost(self) -> bool:
        """Return whether a key that seals its documents or tables was removed, so that it cannot be resumed."""
        known = self.dataset.envelope.entries
        return bool(self.lost) or any(key_id not in known for key_id in {ref.key_id for ref in self.refs})

    def wrote(self, files: Collection[str] | None) -> None:
        """Set the complete list of the files that the job has written; None: find them by name at the end."""
        self._files = None if files is None else set(files)

    def files(self) -> set[str]:
        """Return the files that the job may have written."""
        return self._named() if self._files is None else self._files | {task.file for task in self.rewrites()}

    def _named(self) -> set[str]:
        """Return the files of its tables and its new manifests; of a transaction, the objects with its job id."""
        if self.body.get("operation") == WRITE:
            return {entry.path for entry in self.dataset.store.list() if job_in_name(entry.path) == self.job_id}
        return {entry.file for entry in self._known()} | {task.file for task in self.rewrites()}

    def _known(self) -> list[FileEntry]:
        """Return all entries; none if a key that they need was removed."""
        try:
            return self.entries(superseded=True)
        except UnknownKeyError:
            known = self.dataset.envelope.entries
            missing = {ref.key_id for ref in self.refs if ref.key_id not in known} - self.lost.keys()
            if found := _lost(self.dataset, missing):
                self.lost |= found
                return self._known()
            if _were_removed(self.dataset, {ref.key_id for ref in self.refs}):
                return []
            raise

    def claim(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Make the claimed names of `entries` the job's own. Returns the entries with their final names.

        A name that another open plan has claimed, or that exists in the tree, is replaced by a name with the job's id.
        The order matters: this job's claim is durable before it reads other claims. So of two jobs at least one sees
        the other, and a job that ended before this look has left its files in the tree.
        """
        store = self.dataset.store
        taken: set[str] = set()
        for job_id in open_plans(store):
            if job_id != self.job_id:
                taken |= Plan.names(self.dataset, job_id)
        if len(entries) < MANIFEST_ENTRIES // 10:
            taken.update(entry.file for entry in entries if _is_taken(store, entry.file))
        else:
            taken.update(entry.path for entry in store.list() if not entry.path.startswith("_ags/"))
        ours = [self.renamed(entry) if entry.file in taken else entry for entry in entries]
        if taken.isdisjoint(entry.file for entry in entries):
            self._write([], "running", self.refs)
        else:  # write all entries: every name in a running plan must be the job's own
            self._write(ours, "running", [])
        return ours

    def renamed(self, entry: FileEntry) -> FileEntry:
        """Return the entry with a name that no other job can have. Its DEKs are bound to the name, so re-wrapped."""
        file = object_name(entry.path, self.job_id, format=entry.format)
        dataset_id = self.dataset.id
        renamed = entry._replace(file=file)
        wraps = [
            (self.dataset.keyring.active(key_id), wrap, bound)
            for wrap, (key_id, _, bound) in zip(entry.wraps(dataset_id), renamed.wraps(dataset_id), strict=True)
        ]
        envelope = self.dataset.envelope
        return renamed.with_wraps(
            [(key_id, envelope.wrap(key_id, envelope.unwrap(*old), bound)) for key_id, old, bound in wraps]
        )

    def committed(self) -> Version | None:
        """Return the version that the job has committed, or None."""
        versions = self.dataset.versions(after=self.body.get("base", 0))
        return next((version for version in versions if version.job_id == self.job_id), None)

    def end(self, committed: Collection[str] = ()) -> list[str]:
        """Remove the plan, the job's temporary files, and its files that no version has.

        The manifests of a commit that a dead job began are removed too.

        Args:
            committed: Files that are known to belong to a version.

        Returns:
            The files and manifests that were removed.
        """
        removed = []
        dataset, store = self.dataset, self.dataset.store
        ours: set[str] = set()
        if self.running:
            ours = self.files()
            if self.taken and store.local:  # tasks that died may have written files that nothing tells of
                store.sweep(self.job_id)
            elif ours:
                store.sweep(self.job_id, paths=ours)
            ours.difference_update(committed)
            for version in dataset.versions(after=self.body.get("base", 0)) if ours else ():
                ours.difference_update(ref.path for ref in version.manifests)
                ours.difference_update(entry.file for entry in dataset.entries(version))
            for file in sorted(ours):
                if store.stat(file) is not None:
                    store.delete(file)
                    removed.append(file)
        # Before the plan goes: manifests without a version and a plan mean that versions were taken away.
        alone = self.taken or not dataset.newest_number()
        for path in orphan_manifests(dataset, None, self.job_id) if alone else ():
            store.delete(path)
            removed.append(path)
        self.remove()
        return removed

    def remove(self) -> None:
        """Delete the plan. Documents go first, the newest last: a partly deleted plan still shows its claims."""
        names = [entry.path for entry in self.dataset.store.list(self.folder)]
        documents = sorted(name for name in names if name.endswith(".json"))
        for name in [*documents, *(name for name in names if not name.endswith(".json"))]:
            self.dataset.store.delete(name)
        self.release()
        self.dataset.store.remove_folder(self.folder)


def _check(body: Mapping[str, Any]) -> None:
    """Raise ValueError, or the error of a field, if a plan is impossible."""
    if body["state"] not in ("claimed", "running"):
        raise ValueError(f"the state {body['state']!r}")
    whole(body.get("base", 0))
    whole(body.get("wrap_nbytes", 0), TABLE_NBYTES)
    if body["operation"] == "expire":
        for number, digest in body["versions"]:
            whole(number, least=1)
            if not isinstance(digest, str):
                raise ValueError("the digest of a version")
    for ref in body.get("manifests", ()):
        TableRef.from_json(ref)
    for entry in body.get("keys", {}).values():
        if entry is not None:
            KeyEntry.from_json(entry)
    for task in body.get("rewrites", ()):
        ManifestTask.from_json(task)
    if not all(isinstance(new, str) for new in body.get("moves", {}).values()):
        raise ValueError("moves")


def _is_taken(store: Store, file: str) -> bool:
    try:
        return store.stat(file) is not None
    except PolicyError:  # a link that leads out of the dataset: another name may work
        return True


def _lost(dataset: Ledger, key_ids: set[str]) -> dict[str, KeyEntry]:
    """Return removed keys that the key store still has: an expiry died before it could restore them."""
    return dataset.keys.removed(key_ids) if isinstance(dataset.keys, DatasetKeyStore) else {}


def _were_removed(dataset: Ledger, key_ids: set[str]) -> bool:
    """Return whether one of these keys was once in the key store."""
    removed = {key_id for change in dataset.keys.history() for key_id in change.changes["removed"]}
    return not removed.isdisjoint(key_ids)


def is_dead(store: Store, job_id: str, age: float | None) -> bool:
    """Return whether a job is dead.

    Args:
        store: The folder of the dataset.
        job_id: The id of the job.
        age: Seconds without a change of the plan after which the job counts as dead, on top of the lock. None: a day
            where the storage has no locks, else none.
    """
    folder = f"{PLANS}{job_id}/"
    held = store.held(folder + "lock")
    if held:
        return False
    newest = max((entry.modified for entry in store.list(folder)), default=0.0)
    return time.time() - newest >= (age if age is not None else NO_LOCK_SECONDS if held is None else 0)


def open_plans(store: Store, *, begun: bool = False) -> list[str]:
    """Return the ids of jobs that have a plan: running or dead jobs. begun: also jobs with only a part of a plan."""
    ids = set()
    for entry in store.list(PLANS):
        job_id, _, name = entry.path.removeprefix(PLANS).partition("/")
        if JOB_ID.fullmatch(job_id) and (begun or name.endswith(".json")):
            ids.add(job_id)
    return sorted(ids)


def clear(dataset: Ledger, age: float | None = None) -> None:
    """Remove what dead jobs have left in `_ags/` outside of plans.

    That is temporary files, and folders of plans that were incomplete or being removed. Locks show what lives. Where
    the storage has no locks, only what is a day old is removed.

    Args:
        dataset: The dataset.
        age: Remove only what is at least this many seconds old; None: as above.
    """
    stores = [dataset.store]
    if isinstance(dataset.keys, DatasetKeyStore) and isinstance(dataset.keys.store, Store):
        stores += [dataset.keys.store] if dataset.keys.store.url != dataset.store.url else []
    for store in stores:
        if store.local:
            store.sweep(older_than=age, below=HIDDEN)
    store, planned = dataset.store, open_plans(dataset.store)
    for job_id in open_plans(store, begun=True):
        if job_id not in planned and is_dead(store, job_id, age):
            Plan.take(dataset, job_id)
    store.remove_empty_folders(PLANS)


def orphan_files(dataset: Ledger) -> list[str]:
    """Return objects with the id of an ended job in their names that no version names.

    The order matters: an object that was listed while its job ran is still in the job's plan, or by now in a version,
    or will never be in a version.
    """
    listed = [entry.path for entry in dataset.store.list() if job_in_name(entry.path) is not None]
    listed = [path for path in listed if not path.startswith(HIDDEN)]
    if not listed:
        return []
    running = open_plans(dataset.store)
    known = set[str]().union(*(Plan.names(dataset, job_id) for job_id in running))
    ended = [path for path in listed if path not in known and job_in_name(path) not in running]
    named = named_files(dataset) if ended else set()
    return [path for path in ended if path not in named]


def named_files(dataset: Ledger) -> set[str]:
    """Return the objects of all files of all versions."""
    named: set[str] = set()
    seen: set[str] = set()
    for version in dataset.versions():
        try:
            for ref in version.manifests:
                if ref.path not in seen:
                    named.update(entry.file for entry in dataset.open_table(ref, dataset.envelope))
                    seen.add(ref.path)
        except (IntegrityError, UnknownKeyError):
            if version.number in dataset.version_numbers():
                raise  # otherwise the version was expired meanwhile
    return named


def orphan_manifests(dataset: Ledger, age: float | None, job_id: str | None = None) -> list[str]:
    """Return manifests that no version names.

    A job that is about to commit has an open plan, and its id is in the names of its manifests. A manifest without an
    id in its name is not reported while any plan is open. The order matters: a listed manifest whose plan has ended is
    by now in a version, or will never be in a version.

    Args:
        dataset: The dataset.
        age: Return only manifests that are at least this many seconds old; None: all.
        job_id: Return only the manifests of this job, which has ended; None: of every job.
    """
    listed = [entry.path for entry in dataset.store.list(MANIFESTS) if time.time() - entry.modified >= (age or 0)]
    if job_id is not None:
        ended = [path for path in listed if _job_of(path) == job_id]
    else:
        planned = open_plans(dataset.store) if listed else []
        ended = [path for path in listed if not planned or _job_of(path) not in (None, *planned)]
    named = {ref.path for version in dataset.versions() for ref in version.manifests} if ended else set()
    return [path for path in ended if path not in named]


def _job_of(manifest: str) -> str | None:
    """Return the id of the job in a manifest's name, or None."""
    found = JOB_ID.match(manifest.removeprefix(MANIFESTS))
    return found[0] if found else None
