"""Read what an audit needs of a dataset: a snapshot, and what the KMS tells of the master keys."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ags_fast.dataset.entries import FileEntry, wrapped_by
from ags_fast.dataset.history import lost_versions
from ags_fast.dataset.open_jobs import files_of, lives, open_plans
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.snapshot import Job, Snapshot
from ags_fast.errors import AgsError, ConcurrentChangeError, FormatError, IntegrityError, KeyAccessError
from ags_fast.keys.document import DOCUMENT_NBYTES, Document
from ags_fast.keys.encoding import parse_object, unbase64
from ags_fast.keys.entry import MASTER_VERSION, KeyEntry
from ags_fast.keys.stores import DatasetKeyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version
    from ags_fast.keys.kms import KeyVersion


ATTEMPTS = 5  # to find a dataset that nobody changes meanwhile


class Master(NamedTuple):
    """A version of a master key. None: the KMS does not tell which."""

    key_id: str
    version: str | None


class Survey:
    """A dataset's versions, open jobs and keys, as they were at one moment, and what the KMS tells of its master keys.

    The keys that a version names, the versions and the jobs go into one report. So what was read is read again until
    nothing has changed meanwhile. What a job decides needs no such check: see `ags_fast.dataset.look`.

    Args:
        opened: The dataset.
        deep: Also find out by which version of its master key the KMS has wrapped each DEK. That opens all manifests
            that name keys in single wrap.

    Raises:
        ConcurrentChangeError: The dataset has changed during each of several attempts.
    """

    def __init__(self, opened: Ledger, *, deep: bool = False) -> None:
        self.opened = opened
        self.opened_tables: set[str] = set()
        self.unread: list[str] = []  # what could not be: whatever depends on it is not known
        self.closed: set[str] = set()  # the tables among it
        self._wraps: dict[str, Counter[str]] = {}
        self._kms_wraps: dict[str, Counter[Master]] = {}
        self._key_material: dict[str, Counter[Master]] = {}
        for _ in range(ATTEMPTS):
            before = self._stamp()
            try:
                self.look(deep)
            except (IntegrityError, FormatError):
                if before == self._stamp():
                    raise
                continue
            if before == self._stamp():
                break
        else:
            raise ConcurrentChangeError("the dataset changes faster than it can be looked at: let its jobs end")
        self.current: dict[str, str | None] = {}  # master key: the version that wraps now, where the KMS tells
        self.refused: dict[str, str] = {}  # master key: why the KMS does not even say that
        self.listed: dict[str, list[KeyVersion]] = {}  # master key: its versions, where the KMS lists them; if deep
        left = {master.key_id for counts in self._key_material.values() for master in counts}
        for key_id in sorted(left.union(entry.wrapping_key_id for entry in self.all_keks())):
            try:
                self.current[key_id] = opened.kms.current_version(key_id)
                if deep:
                    self.listed[key_id] = opened.kms.versions(key_id)
            except KeyAccessError as error:
                self.current.setdefault(key_id, None)
                self.refused[key_id] = str(error)

    def _stamp(self) -> tuple[Any, ...]:
        opened = self.opened
        return tuple(opened.version_numbers()), opened.keys.refresh(), tuple(open_plans(opened.store))

    def look(self, deep: bool) -> None:
        """Read everything once."""
        opened = self.opened
        self.unread.clear()
        self.closed.clear()
        # The order matters: if a job has ended, its files are in a version, and a job that commits has put its keys in.
        self.jobs = [job for job_id in open_plans(opened.store) if (job := self._job(job_id)) is not None]
        self.versions: list[Version] = []  # the oldest first
        with suppress(KeyAccessError):  # which is said below
            opened.current()  # all others must be of its history
        numbers = opened.version_numbers()
        if not numbers and lost_versions(opened.store):
            opened.committed(None)  # what depends on which key cannot be told
        for number in numbers:
            if (version := self._try(f"version {number}", partial(opened.version, number))) is not None:
                self.versions.append(version)
        self.keys = {entry.key_id: entry for entry in opened.keys.list()}
        tables = [ref for version in self.versions for ref in version.manifests]
        tables += [ref for job in self.jobs for ref in job.tables]
        for ref in tables:  # now, so that what cannot be opened is known
            self._try(ref.path, partial(self.kms_wraps if deep else self.wraps, ref))
            self._try(ref.path, partial(self.key_material, ref))

    def _try(self, what: str, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except KeyAccessError as error:
            self.unread.append(f"{what}: {error}")
            self.closed.add(what)
            return None

    def _job(self, job_id: str) -> Job | None:
        opened = self.opened
        plan: Plan | None = self._try(f"the plan of the job {job_id}", partial(Plan.load, opened, job_id))
        if plan is None:
            return None
        keks = tuple(map(KeyEntry.from_json, plan.body.get("keys", {}).values()))
        sealers = frozenset((plan.key_id, *(ref.key_id for ref in plan.refs)))
        keys = sealers | plan.needed_keys(())
        for ref in plan.refs:
            keys |= set(self._try(ref.path, partial(self.wraps, ref)) or ())
        operation = str(plan.body.get("operation"))
        alive = lives(opened.store, job_id)
        return Job(job_id, frozenset(keys), operation, alive, sealers, keks, tuple(plan.refs))

    def files_of(self, job: Job) -> set[str]:
        """Return the files that an open job may have written."""
        return files_of(self.opened, job.job_id)

    # ---- what tables say

    def entries(self, ref: TableRef) -> list[FileEntry]:
        """Open a table and return its entries."""
        self.opened_tables.add(ref.path)
        return self.opened.open_table(ref, self.opened.envelope)

    def wraps(self, ref: TableRef) -> Counter[str]:
        """Count the DEKs in a table that each key wraps. The table is opened if the reference does not tell."""
        if ref.path not in self._wraps:
            if ref.keys is None and ref.path in self.closed:
                return Counter()
            self._wraps[ref.path] = wrapped_by(self.entries(ref)) if ref.keys is None else Counter(dict(ref.keys))
        return self._wraps[ref.path]

    def kms_wraps(self, ref: TableRef) -> Counter[Master]:
        """Count the DEKs in a table that each version of a master key wraps itself, without a KEK."""
        if ref.path not in self._kms_wraps:
            counts: Counter[Master] = Counter()
            singles = {key_id for key_id in self.wraps(ref) if not self._kek(key_id).double_wrap}
            for entry in self.entries(ref) if singles else ():
                for key_id, wrapped, _ in entry.wraps(""):
                    if key_id in singles:
                        counts[self._master(key_id, wrapped)] += 1
            self._kms_wraps[ref.path] = counts
        return self._kms_wraps[ref.path]

    def key_material(self, ref: TableRef) -> Counter[Master]:
        """Count the DEKs that each version of a master key opens by the key material in the files of a table."""
        if not ref.key_material or (ref.path in self.closed and ref.path not in self._key_material):
            return Counter()
        if ref.path not in self._key_material:
            self._key_material[ref.path] = Counter(
                Master(one["wrapping_key_id"], self.version_of_bytes(one["wrapped_dek"]) or one["master_version"])
                for entry in self.entries(ref)
                for one in entry.key_material or ()
            )
        return self._key_material[ref.path]

    def _kek(self, key_id: str) -> KeyEntry:
        return self.opened.keys.get(key_id)

    def _master(self, key_id: str, wrapped: bytes) -> Master:
        return Master(self._kek(key_id).wrapping_key_id, self.version_of_bytes(wrapped))

    def version_of(self, entry: KeyEntry) -> str | None:
        """Return the version of its master key that wraps a KEK; None if it is not known."""
        if entry.wrapped is None:
            return None
        return self.version_of_bytes(entry.wrapped) or entry.properties.get(MASTER_VERSION)

    def version_of_bytes(self, wrapped: bytes) -> str | None:
        """Return the version of the master key that wrapped a key, as the wrapped key tells; None if it does not."""
        with suppress(AgsError):  # another KMS's, from before the dataset moved
            return self.opened.kms.key_version(wrapped)
        return None

    # ---- what there is

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that decisions are made from."""
        counts: dict[str, Mapping[str, int]] = dict(self._wraps)
        return Snapshot(self.keys, tuple(self.versions), tuple(self.jobs), counts)

    def all_keks(self) -> Iterable[KeyEntry]:
        """Return the keys of the key store, and the keys that open jobs hold."""
        return [*self.keys.values(), *(key for job in self.jobs for key in job.keks)]

    def superseded(self) -> Counter[Master]:
        """Count the KEKs in documents that the key store no longer needs, except documents that are not authentic.

        A KEK that several documents have under the same version of a master key counts once.
        """
        wraps: set[tuple[Master, str]] = set()
        keys = self.opened.keys
        if not isinstance(keys, DatasetKeyStore):
            return Counter()
        for path in keys.superseded():
            with suppress(FileNotFoundError, AgsError):  # somebody removes it; or it is a part, which documents name
                body = Document(keys.store.read_small(path, DOCUMENT_NBYTES), path).authentic(
                    self.opened.envelope, self.opened.id
                )
                found = list(body["keys"] if "keys" in body else [body["sealer"]])
                for part in filter(None, body.get("buckets", ())):
                    data = keys.store.read_small(part["path"], DOCUMENT_NBYTES)
                    if hashlib.sha256(data).digest() == unbase64(part["sha256"]):
                        found += parse_object(data, part["path"])["keys"]
                entries = map(KeyEntry.from_json, found)
                wraps.update(
                    (Master(e.wrapping_key_id, self.version_of(e)), e.key_id) for e in entries if e.double_wrap
                )
        return Counter(master for master, _ in wraps)
