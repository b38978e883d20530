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
    """Read the keys as they are known, and what a version needs of them, for a rotation.

    The version and the keys may be of different moments. That is harmless: a rotation changes the keys by a
    compare-and-swap on `number`, and makes its version by a compare-and-swap on `head`. If another job has committed in
    between, the manifests of that job are looked at before the rotation's version is made. A key that seems to wrap
    nothing, and that a newer version uses, retires without a successor; then the rotation makes a key of its kind.

    Args:
        opened: The dataset.
        head: The newest version, or None.
        counts: By the path of a manifest how many DEKs each key wraps, of manifests whose references do not tell. Those
            that are missing are added.
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
    """Read everything that may need a key, for an expiry.

    The keys are read first, then the open jobs, then the versions, and an expiry removes only keys that are retired in
    what was read. So it needs no check that nothing has changed meanwhile: a job looks at the keys when it commits,
    after it has stored its plan, and puts nothing under a retired key. If the job has looked before the key retired,
    then its plan is found here, or its version. If it stores its plan after that, it finds the key retired. The
    compare-and-swap on `number` sees to it that the keys are still as they were read.

    Args:
        opened: The dataset.
        counts: As `read_newest` has it.
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
    """Ignore an IntegrityError if the version was expired meanwhile."""
    try:
        yield
    except IntegrityError:
        if opened.has_version(version.number):
            raise
