"""What there is of a dataset's keys, and of all that names them, at one moment: what decisions are made from."""

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
    """An open job: one that runs, or has died."""

    job_id: str
    keys: frozenset[str]  # that it needs for anything
    operation: str = ""
    lives: bool | None = None  # None: the storage does not tell
    opened_by: frozenset[str] = frozenset()  # the keys that seal its plan
    keks: tuple[KeyEntry, ...] = ()  # that it has made, and that may not be in the key store yet
    tables: tuple[TableRef, ...] = ()  # of its plan


@dataclass(frozen=True)
class Snapshot:
    """What there is of a dataset's keys, and of all that names them, at one moment."""

    keys: Mapping[str, KeyEntry]
    versions: tuple[Version, ...] = ()  # the oldest first; of a rotation the newest only
    jobs: tuple[Job, ...] = ()  # the open ones
    counts: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # by the path of a manifest, if its reference does not
    number: int = 0  # the version of the key store

    @property
    def head(self) -> Version | None:
        """The newest version."""
        return self.versions[-1] if self.versions else None

    @property
    def policy(self) -> Policy:
        return self.head.policy if self.head else Policy()

    def wraps(self, ref: TableRef) -> Mapping[str, int]:
        """How many DEKs in a manifest each key wraps."""
        return self.counts.get(ref.path, {}) if ref.keys is None else dict(ref.keys)

    def used(self) -> Counter[str]:
        """How many DEKs of the newest version each key wraps."""
        counts: Counter[str] = Counter()
        for ref in self.head.manifests if self.head else ():
            counts.update(self.wraps(ref))
        return counts

    def manifests(self) -> dict[str, TableRef]:
        """The manifests of all versions, by path."""
        return {ref.path: ref for version in self.versions for ref in version.manifests}

    def keys_of(self, version: Version) -> set[str]:
        """The keys that a version needs."""
        keys = {version.key_id, *(ref.key_id for ref in version.manifests)}
        return keys.union(*(self.wraps(ref) for ref in version.manifests))

    def needed(self) -> dict[str, str]:
        """The keys that open jobs and versions need, and what needs each."""
        found = of_jobs(self.jobs)
        for version in reversed(self.versions):
            for key_id in self.keys_of(version):
                found.setdefault(key_id, f"version {version.number} needs it")
        return found


def of_jobs(jobs: tuple[Job, ...]) -> dict[str, str]:
    """The keys that open jobs need, and which job needs each."""
    return {
        key_id: f"the open job {job.job_id} needs it: resume the job, or sweep it away"
        for job in jobs
        for key_id in job.keys
    }
