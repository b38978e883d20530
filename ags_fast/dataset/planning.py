"""The keys and the plan of a job that writes files."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from ags_fast.dataset import decide
from ags_fast.dataset.changes import until_unchanged
from ags_fast.dataset.commit import Committed
from ags_fast.dataset.decide import Change, Wish
from ags_fast.dataset.keks import clock_ms
from ags_fast.dataset.key_material import with_key_material
from ags_fast.dataset.names import object_name
from ags_fast.dataset.open_jobs import claim
from ags_fast.dataset.plan import Plan
from ags_fast.dataset.tables import MANIFEST_ENTRIES
from ags_fast.errors import AgsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.ledger import Ledger
    from ags_fast.dataset.policy import Policy


def column_masters(dataset: Ledger, entry: FileEntry) -> dict[str, str]:
    """Return {column: master key} of the columns that have a key of their own."""
    return {key["column"]: dataset.keys.get(key["key_id"]).wrapping_key_id for key in entry.column_keys or ()}


def reserve_keys(
    dataset: Ledger,
    policy: Policy,
    job_id: str,
    wrapping_key_id: str | None,
    double_wrap: bool,
    entries: list[FileEntry],
    masters: Sequence[Mapping[str, str]],
    *,
    begins: bool = False,
) -> list[FileEntry]:
    """Reserve KEKs for new files, and put the ids of these keys into the entries.

    Args:
        dataset: The dataset.
        policy: How files share KEKs.
        job_id: The id of the job.
        wrapping_key_id: The id of the master key; None: the master key in use.
        double_wrap: Whether a KEK wraps the data keys; else the KMS does.
        entries: The files. The list is changed in place, since two lists of a million files take much memory.
        masters: For each file, {column: master key}.
        begins: Whether the job has not reserved any KEK before.

    Returns:
        The same list, with the ids of the keys that will wrap the data keys.
    """
    paths = [entry.path for entry in entries]

    def reserve(main: str) -> list[FileEntry]:
        kinds, uses = decide.kinds_for_files(paths, masters, main, double_wrap, policy, job_id, clock_ms())
        chosen = dataset.keyring.reserve(uses, policy, new_scopes=begins and policy.scopes_are_jobs)
        for part in _parts(entries):
            entries[part] = decide.with_keys(entries[part], kinds[part], masters[part], chosen)
        return entries

    def look() -> str:
        return wrapping_key_id or dataset.keyring.main_key().wrapping_key_id

    # A rotation may replace the master key meanwhile.
    return until_unchanged(look, reserve, lambda main, made: made, lambda main: look() != main)


def _parts(entries: Sequence[FileEntry]) -> Iterator[slice]:
    """Split a list for work that takes much memory for a file."""
    for begin in range(0, len(entries), MANIFEST_ENTRIES):
        yield slice(begin, begin + MANIFEST_ENTRIES)


def _make_keys(dataset: Ledger, entries: list[FileEntry], dek_length: int) -> None:
    """Put new data keys into the entries, wrapped by the keys that the entries name."""
    envelope = dataset.envelope
    for part in _parts(entries):
        wraps = [entry.wraps(dataset.id) for entry in entries[part]]
        random = memoryview(os.urandom(dek_length * sum(map(len, wraps))))
        deks = [bytes(random[at : at + dek_length]) for at in range(0, len(random), dek_length)]
        todo: dict[str, list[tuple[bytes, bytes]]] = {}  # {KEK: what to wrap}, so that each KEK wraps many at once
        for (key_id, _, bound), dek in zip(chain.from_iterable(wraps), deks, strict=True):
            todo.setdefault(key_id, []).append((dek, bound))
        done = {key_id: iter(envelope.wrap_many(key_id, items)) for key_id, items in todo.items()}
        made = [
            entry.with_wraps([(key_id, next(done[key_id])) for key_id, _, _ in those])
            for entry, those in zip(entries[part], wraps, strict=True)
        ]
        entries[part] = with_key_material(envelope, made, deks)


def wrapped_under(dataset: Ledger, entries: Sequence[FileEntry], wanted: Sequence[FileEntry]) -> list[FileEntry]:
    """Re-wrap the data keys of `entries` by the keys that `wanted` names. Both are the same files in the same order."""
    envelope = dataset.envelope
    done = []
    for entry, new in zip(entries, wanted, strict=True):
        wraps = []
        for old, (key_id, _, _) in zip(entry.wraps(dataset.id), new.wraps(dataset.id), strict=True):
            same = old[0] == key_id
            wraps.append((key_id, old[1] if same else envelope.wrap(key_id, envelope.unwrap(*old), old[2])))
        done.append(entry.with_wraps(wraps))
    return done


def begin_plan(
    dataset: Ledger,
    held: ExitStack,
    job_id: str,
    entries: list[FileEntry],
    dek_length: int,
    **facts: Any,
) -> tuple[Plan, list[FileEntry]]:
    """Make data keys for the entries, and store a plan. A plan without entries claims no names.

    Args:
        dataset: The dataset.
        held: Releases the plan when it is closed.
        job_id: The id of the job.
        entries: The files, with the ids of their KEKs. The list is changed in place.
        dek_length: Bytes of a data key.
        **facts: What a resumed job must know of the first one, as JSON values.

    Returns:
        The plan, and the entries as the plan has them.
    """
    _make_keys(dataset, entries, dek_length)
    plan = Plan.create(dataset, job_id, entries, "claimed" if entries else "running", **facts)
    held.callback(plan.release)
    return plan, claim(plan, entries) if entries else []


def continue_plan(
    dataset: Ledger,
    plan: Plan,
    planned: Sequence[FileEntry],
    entries: Sequence[FileEntry],
    dek_length: int,
) -> list[FileEntry]:
    """Return the entries as the plan has them. Missing entries, and those with a changed source, are added.

    Args:
        dataset: The dataset.
        plan: The plan of a dead job, taken over.
        planned: The entries of the plan.
        entries: The entries that are wanted now.
        dek_length: Bytes of a data key, for entries that are added.
    """
    if not plan.running:  # the job died before its names were its own
        planned = claim(plan, planned)
    known = {entry.path: entry for entry in planned}
    same = []
    added = []
    for entry in entries:
        old = known.get(entry.path)
        if old is not None and _what(dataset, old) == _what(dataset, entry):
            same.append(old)
        else:  # a new name: the object of the old name may exist, under another key
            file = object_name(entry.path, plan.job_id, plan.number, format=entry.format)
            added.append(entry._replace(file=file))
    if added:
        _make_keys(dataset, added, dek_length)
        plan.extend(added)
    return same + added


def _what(dataset: Ledger, entry: FileEntry) -> tuple[Any, ...]:
    """Return what a planned entry and a wanted one must have in common for the planned one to be used."""
    material = entry.key_material is not None
    return entry.format, entry.plain_length, entry.stamp, entry.block_size, material, column_masters(dataset, entry)


def commit_plan(plan: Plan, wish: Wish, *, fsync: bool = False) -> Committed:
    """Commit what a job wants, and end its plan: the one way of jobs and transactions to a version.

    What cannot be removed of the plan after the commit is left to `sweep`.

    Args:
        plan: The plan of the job.
        wish: What the job wants. Without files there is no version.
        fsync: Whether the files are to be on the disk before the version is made.

    Raises:
        ConcurrentChangeError: Another job has changed a path of a wish that is to be committed whole. After this and
            any other error, the plan stays.
    """
    dataset = plan.dataset
    if fsync:
        dataset.store.sync_folders(entry.file for entry in wish.add)
    made = Committed(wish.base, wish.base, Change())
    if wish.add or wish.remove or wish.compact:
        made = dataset.commit(wish)
    with suppress(AgsError, OSError):
        added = set() if made.change.repeats else {entry.file for entry in wish.add}
        plan.end(added.difference(entry.file for entry in made.change.refused))
    return made
