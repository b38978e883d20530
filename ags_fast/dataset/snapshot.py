"""What decisions are made from: a dataset's keys, and all that needs them, read once.

A snapshot is not one moment of the storage. Its reader reads the keys first: a job that commits afterwards does not use
a key that has retired in them. `Snapshot.number` is the version of these keys, for the compare-and-swap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.policy import Policy

if TYPE_CHECKING:
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version
    from ags_fast.keys.entry import KeyEntry


class Job(NamedTuple):
    """An open job: one that runs, or has died.

    Attributes:
        job_id: The id of the job.
        keys: The keys that the job needs.
        operation: What the job does, as its plan names it.
        lives: Whether the job runs; None: the storage does not tell.
        opened_by: The keys that seal the plan.
        keks: KEKs that the job has made, and that may not be in the key store yet.
        tables: The tables of the plan.
    """

    job_id: str
    keys: frozenset[str]
    operation: str = ""
    lives: bool | None = None
    opened_by: frozenset[str] = frozenset()
    keks: tuple[KeyEntry, ...] = ()
    tables: tuple[TableRef, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A dataset's keys, and all that needs them.

    Attributes:
        keys: The keys, by id.
        versions: The versions, the oldest first. A rotation needs the newest only.
        jobs: The open jobs.
        counts: {path of a manifest: {key: DEKs that it wraps}}, for manifests whose references do not say it.
        number: The version of the key store.
    """

    keys: Mapping[str, KeyEntry]
    versions: tuple[Version, ...] = ()
    jobs: tuple[Job, ...] = ()
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    number: int = 0

    @property
    def head(self) -> Version | None:
        """The newest version; None without versions."""
        return self.versions[-1] if self.versions else None

    @property
    def policy(self) -> Policy:
        """The policy of the newest version."""
        return self.head.policy if self.head else Policy()

    def wraps(self, ref: TableRef) -> Mapping[str, int]:
        """Return how many DEKs in a manifest each key wraps."""
        return self.counts.get(ref.path, {}) if ref.keys is None else dict(ref.keys)

    def used(self) -> Counter[str]:
        """Return how many DEKs of the newest version each key wraps."""
        counts: Counter[str] = Counter()
        for ref in self.head.manifests if self.head else ():
            counts.update(self.wraps(ref))
        return counts

    def manifests(self) -> dict[str, TableRef]:
        """Return the manifests of all versions, by path."""
        return {ref.path: ref for version in self.versions for ref in version.manifests}

    def keys_of(self, version: Version) -> set[str]:
        """Return the ids of the keys that a version needs: for its document, manifests and DEKs."""
        keys = {version.key_id, *(ref.key_id for ref in version.manifests)}
        return keys.union(*(self.wraps(ref) for ref in version.manifests))

    def needed(self) -> dict[str, str]:
        """Return the ids of the keys that open jobs and versions need, with what needs each."""
        found = of_jobs(self.jobs)
        for version in reversed(self.versions):
            for key_id in self.keys_of(version):
                found.setdefault(key_id, f"version {version.number} needs it")
        return found


def of_jobs(jobs: tuple[Job, ...]) -> dict[str, str]:
    """Return the ids of the keys that open jobs need, with the job that needs each."""
    return {
        key_id: f"the open job {job.job_id} needs it: resume the job, or sweep it away"
        for job in jobs
        for key_id in job.keys
    }
