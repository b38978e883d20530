"""Plans: what a job will do, decided and made durable before its first data byte.

A plan holds the wrapped DEK of every file, so each attempt writes a file under the same DEK. What a killed attempt has
published is then as good as what a retry would publish.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from ags_fast.dataset.changes import until_read
from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.manifest_task import ManifestTask
from ags_fast.dataset.names import JOB_ID, MANIFESTS, PLANS, job_in_name
from ags_fast.dataset.tables import TABLE_NBYTES, TableRef, chunks, whole
from ags_fast.errors import ConcurrentChangeError, FormatError
from ags_fast.fs.numbered import Numbered, numbered
from ags_fast.keys.document import DOCUMENT_NBYTES, Document
from ags_fast.keys.entry import KeyEntry, UnknownKeyError
from ags_fast.keys.envelope import Envelope
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

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

    def __init__(self, dataset: Ledger, job_id: str, body: dict[str, Any] | None = None) -> None:
        self.dataset = dataset
        self.job_id = job_id
        self.body: dict[str, Any] = body or {}
        self.number = 0  # of the document; 0: none is written yet
        self.refs: list[TableRef] = []
        self.key_id = ""  # the key that seals the document
        self.no_writer_died = False  # known for sure: then no temporary files are left
        self.taken = False  # whether it was taken over from a dead job, or given up by its own job
        self.beside: list[str] = []  # the other jobs that were open when its names were claimed
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
        plan = cls(dataset, job_id, facts)
        plan.wrote(())
        plan.hold()
        plan.write(entries, state)
        return plan

    def hold(self) -> bool:
        """Lock the plan for the life of this process, where the storage has locks. False if another process has it."""
        try:
            self._lock = self.dataset.store.lock(self.folder + "lock")
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
        self.write(entries, "running", self.refs)

    def write(self, entries: Sequence[FileEntry], state: str, refs: Sequence[TableRef] = ()) -> None:
        """Write a document that has these tables, and tables of these entries.

        Raises:
            ConcurrentChangeError: A key that the plan needs was removed before the plan was stored.
        """
        key_id = self.dataset.keyring.document_key()
        envelope = self.dataset.envelope
        if self._files is not None:
            self._files = {*(self._files if refs else ()), *(entry.file for entry in entries)}
        has_run = self.body.get("state") == "running"
        refs, before = [*refs], len(refs)
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
        named = {key_id, *(ref.key_id for ref in refs[before:]), *wrapped_by(entries)}
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
        plan = cls(dataset, job_id)
        return plan if plan.read() else None

    @classmethod
    def take(cls, dataset: Ledger, job_id: str) -> Plan | None:
        """Lock and return the plan of a dead job.

        Returns None if the job lives or has ended, or if its plan cannot be used: such a plan is removed.
        """
        plan = cls(dataset, job_id)
        if not plan.hold():
            return None
        try:
            there = plan.read()
            if there and plan.body.get("base", 0) and not dataset.newest_number():
                dataset.committed(None)  # raises: its files may belong to versions that somebody took away
        except BaseException:
            plan.release()
            raise
        if not there:
            plan.remove()
            return None
        plan.taken = True
        return plan

    def read(self) -> bool:
        """Read the newest document. Returns False if there is none that can be used."""
        documents = Numbered(self.dataset.store, self.folder)
        found = until_read(documents.newest, self._open)
        if not found:
            return False
        number, body, key_id = found
        if body.get("job_id") != self.job_id:
            raise FormatError(f"{self.folder} holds the plan of another job")
        try:
            _check(body)
            self.body, self.number, self.key_id = body, number, key_id
            self.refs = [TableRef.from_json(ref) for ref in body["tables"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self.folder} lacks or garbles {error}") from None
        return True

    def _open(self, number: int) -> tuple[int, dict[str, Any], str] | None:
        """Return the number of a document, the document, and the key that seals it.

        Raises:
            ConcurrentChangeError: The job has removed the document meanwhile.
        """
        if number == 0:
            return None
        dataset, path = self.dataset, self.folder + numbered(number)
        dataset.keys.refresh()  # after the listing: a plan is stored after the keys that it needs
        self.lost = {}
        try:
            return number, *dataset.open_body(path, "ags-plan", dataset.envelope)
        except FileNotFoundError:
            raise ConcurrentChangeError(f"{path} is gone") from None
        except UnknownKeyError:
            sealers = sealed_by(dataset, self.job_id)
            if not _were_removed(dataset, sealers):
                raise
            self.lost = _lost(dataset, sealers)
        try:  # without a key, it was stored too late: its writer noticed, or died, and no file was written
            envelope = Envelope(dataset.kms, self.lost)
            return (number, *dataset.open_body(path, "ags-plan", envelope)) if self.lost else None
        except FileNotFoundError:
            raise ConcurrentChangeError(f"{path} is gone") from None
        except UnknownKeyError:
            return None

    def _new_key_ids(self) -> set[str]:
        """Return the keys that a rotation has made, and adds to the key store after its plan is stored."""
        return {str(key["key-id"]) for key in self.body.get("keys", {}).values() if key is not None}

    def needed_keys(self, entries: Iterable[FileEntry]) -> set[str]:
        """Return the keys that the plan, these entries, and the manifests and keys of a rotation or expiry need."""
        refs = [*self.refs, *map(TableRef.from_json, self.body.get("manifests", ()))]
        used = {self.key_id, *(ref.key_id for ref in refs), *self.body.get("keys", ()), *self.body.get("moves", ())}
        used |= {str(key_id) for key_id in self.body.get("wraps", ())}
        used |= self._new_key_ids() | {task.key_id for task in self.rewrites()}
        return used.union(*(dict(ref.keys or ()) for ref in refs), wrapped_by(entries))

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

    def wrote(self, files: Iterable[str] | None) -> None:
        """Set the complete list of the files that the job has written; None: find them by name at the end."""
        self._files = None if files is None else set(files)

    def files(self) -> set[str]:
        """Return the files that the job may have written."""
        if self._files is None:
            return self.named_files()
        rewritten = {task.file for task in self.rewrites()}
        return self._files | rewritten if rewritten else self._files  # no copy of a million names

    def named_files(self) -> set[str]:
        """Return the files of its tables and its new manifests; of a transaction, the objects with its job id."""
        if self.body.get("operation") == WRITE:
            return {entry.path for entry in self.dataset.store.list() if job_in_name(entry.path) == self.job_id}
        return {entry.file for entry in self.known_entries()} | {task.file for task in self.rewrites()}

    def known_entries(self) -> list[FileEntry]:
        """Return all entries; none if a key that they need was removed."""
        try:
            return self.entries(superseded=True)
        except UnknownKeyError:
            known = self.dataset.envelope.entries
            missing = {ref.key_id for ref in self.refs if ref.key_id not in known} - self.lost.keys()
            if found := _lost(self.dataset, missing):
                self.lost |= found
                return self.known_entries()
            if _were_removed(self.dataset, {ref.key_id for ref in self.refs}):
                return []
            raise

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
            files = self.files()
            if self.taken and store.local:  # tasks that died may have written files that nothing tells of
                store.sweep(self.job_id)
            elif files and not self.no_writer_died:  # lists the folders of the files
                store.sweep(self.job_id, paths=files)
            ours = {file for file in files if file not in committed}
            for version in dataset.versions(after=self.body.get("base", 0)) if ours else ():
                ours.difference_update(ref.path for ref in version.manifests)
                ours.difference_update(entry.file for entry in dataset.entries(version))
            for file in sorted(ours):
                if store.stat(file) is not None:
                    store.delete(file)
                    removed.append(file)
        # Before the plan goes: manifests without a version and a plan mean that versions were taken away.
        if self.taken or not dataset.newest_number():
            listed = [entry.path for entry in store.list(MANIFESTS)]
            for path in unnamed_manifests(dataset, [path for path in listed if job_of_manifest(path) == self.job_id]):
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


def _lost(dataset: Ledger, key_ids: set[str]) -> dict[str, KeyEntry]:
    """Return removed keys that the key store still has: an expiry died before it could restore them."""
    return dataset.keys.removed(key_ids) if isinstance(dataset.keys, DatasetKeyStore) else {}


def _were_removed(dataset: Ledger, key_ids: set[str]) -> bool:
    """Return whether one of these keys was once in the key store."""
    removed = {key_id for change in dataset.keys.history() for key_id in change.changes["removed"]}
    return not removed.isdisjoint(key_ids)


def sealed_by(dataset: Ledger, job_id: str) -> set[str]:
    """Return the keys that the documents of a job claim to be sealed with."""
    found = set()
    for entry in dataset.store.list(f"{PLANS}{job_id}/"):
        if entry.path.endswith(".json"):
            try:
                found.add(Document(dataset.store.read_small(entry.path, DOCUMENT_NBYTES), entry.path).key_id)
            except (FileNotFoundError, FormatError):
                pass
    return found


def unnamed_manifests(dataset: Ledger, paths: Sequence[str]) -> list[str]:
    """Return those of these manifests that no version names."""
    named = {ref.path for version in dataset.versions() for ref in version.manifests} if paths else set()
    return [path for path in paths if path not in named]


def job_of_manifest(path: str) -> str | None:
    """Return the id of the job in a manifest's name, or None."""
    found = JOB_ID.match(path.removeprefix(MANIFESTS))
    return found[0] if found else None
