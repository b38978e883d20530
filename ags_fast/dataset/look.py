"""Look at a dataset once: read what a decision needs into a `Snapshot`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ags_fast.dataset.entries import wrapped_by
from ags_fast.dataset.open_jobs import keys_of, open_plans
from ags_fast.dataset.snapshot import Job, Snapshot
from ags_fast.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.versions import Version


def read_newest(opened: Ledger, head: Version | None, counts: dict[str, Mapping[str, int]]) -> Snapshot:
    """Read the keys and the newest version.

    Args:
        opened: The dataset.
        head: The newest version.
        counts: {manifest: data keys that each key wraps} of manifests that do not name their keys, as far as they were
            opened before. The others are added.
    """
    for ref in head.manifests if head else ():
        if ref.keys is None and ref.path not in counts:
            counts[ref.path] = wrapped_by(opened.open_table(ref, opened.envelope))
    number = opened.keys.version
    keys = {entry.key_id: entry for entry in opened.keys.list()}
    return Snapshot(keys, (head,) if head else (), counts=counts, number=number)


def read_jobs(opened: Ledger) -> tuple[Job, ...]:
    """Read the open jobs, and the keys that they need."""
    return tuple(Job(job_id, frozenset(keys_of(opened, job_id))) for job_id in open_plans(opened.store))


def read_all(opened: Ledger, counts: dict[str, Mapping[str, int]]) -> Snapshot:
    """Read everything that may need a key. counts: as for `read_newest`.

    The keys are read first: a job that commits afterwards does not use a key that is retired in them.
    """
    number = opened.keys.refresh()
    keys = {entry.key_id: entry for entry in opened.keys.list()}
    jobs = read_jobs(opened)
    versions = []
    for version in opened.versions():
        with unless_expired(opened, version):
            for ref in version.manifests:
                if ref.keys is None and ref.path not in counts:
                    counts[ref.path] = wrapped_by(opened.open_table(ref, opened.envelope))
            versions.append(version)
    return Snapshot(keys, tuple(versions[::-1]), jobs, counts, number)


@contextmanager
def unless_expired(opened: Ledger, version: Version) -> Iterator[None]:
    """Ignore an IntegrityError if the version is gone: an expiry has removed what is missing."""
    try:
        yield
    except IntegrityError:
        if opened.has_version(version.number):
            raise
