"""Decide what becomes of a wish: pure functions of a wish and of what the head has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ags_fast.dataset.names import folders_above
from ags_fast.dataset.policy import DAY_MS
from ags_fast.errors import ConcurrentChangeError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.policy import Policy


@dataclass(frozen=True)
class Wish:
    """What a job wants of the next entry."""

    operation: str  # what the entry says of the job
    add: Sequence[FileEntry] = ()  # a file takes the place of the file that `remove` has at its path
    remove: Mapping[str, str] = field(default_factory=dict)  # {path: object that the job has seen there}
    whole: bool = True  # commit all of it or nothing; False: leave out the paths that another job has changed
    policy: Policy | None = None  # of the dataset from now on; None: as it was
    batch: tuple[str, int] | None = None  # of a stream, its id and number: nothing is committed if the log has it
    clears: bool = False  # `remove` is all that the job has seen: if that was no file, the head must have none, too
    scoped: bool = False  # new files get the KEKs that the policy has for their paths
    of: int | None = None  # the version whose files come back: it must still be kept

    def new_paths(self) -> set[str]:
        """Return the paths of the files to add."""
        return {row.path for row in self.add}

    def paths_around(self) -> set[str]:
        """Return the paths of all its files, and of the folders above its new files."""
        return self.new_paths().union(self.remove, *(folders_above(row.path) for row in self.add))

    def conflict(self, refused: Sequence[str], there: Mapping[str, FileEntry]) -> ConcurrentChangeError:
        """Return the error for what others have changed in the way, at these paths. there: the head's files there."""
        path, more = refused[0], f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        what = f"changed {path!r}{more}, or a file or folder in that place, meanwhile"
        if self.clears and not self.remove:
            what = "added files to the dataset, which had none, meanwhile"
        error = ConcurrentChangeError(f"another job has {what}: nothing was committed")
        error.path, error.by_job = path, there[path].job_id if path in there else None
        return error


@dataclass(frozen=True)
class Change:
    """What a wish changes."""

    add: tuple[FileEntry, ...] = ()
    remove: frozenset[str] = frozenset()
    refused: tuple[str, ...] = ()  # paths that another job has changed, or with a file or a folder in the way


def next_change(wish: Wish, there: Mapping[str, str], below: Collection[str], *, empty: bool = False) -> Change:
    """Decide what a wish changes (rule 3d: paths are as the wish supposes).

    The head has files `there`, {path: object}, at `Wish.paths_around`, and files `below` new files, which would be
    folders then: at least one for each. `empty`: it has no file.
    """
    new = {row.path: row.file for row in wish.add}
    if wish.clears and not wish.remove and not empty:
        return Change(refused=tuple(sorted(new)))
    changed = {path for path in wish.remove.keys() | new.keys() if there.get(path) != wish.remove.get(path)}
    stays = (there.keys() | set(below)) - (wish.remove.keys() - changed)
    folders = {folder for path in stays for folder in folders_above(path)}
    blocked = {path for path in new if path in folders or not stays.isdisjoint(folders_above(path))}
    skips = changed | blocked
    if wish.whole and skips:
        return Change(refused=tuple(sorted(skips)))
    return Change(
        tuple(row for row in wish.add if row.path not in skips),
        frozenset(wish.remove.keys() - skips),
        tuple(sorted(path for path in skips if path in new or path in there)),  # to remove what is gone is no conflict
    )


def whole_sets(sets: Mapping[str, int], removed: Collection[FileEntry], added: Collection[FileEntry]) -> dict[str, int]:
    """Return the numbered sets that are whole after a change, and how many files each has."""
    members = {(row.set_id, row.part) for row in added}
    broken = {row.set_id for row in removed if row.set_id is not None and (row.set_id, row.part) not in members}
    new = {row.job_id: row.parts for row in added if row.set_id == row.job_id and row.parts}
    return {set_id: parts for set_id, parts in {**sets, **new}.items() if set_id not in broken}


def first_kept(
    policy: Policy, number: int, first: int, same: Collection[int], times_ms: Mapping[int, int], now_ms: int
) -> int:
    """Return the first entry that a policy keeps when entry `number` is made. It counts entries that change files.

    Before, `first` was that entry. Entries that are the `same` have the files of their parent. `times_ms` are of all
    entries that may be expired: only `Policy.keep_days` needs them.
    """
    if policy.keep is None:
        return first
    left, kept = policy.keep, number + 1
    while kept > first and left:
        kept -= 1
        left -= kept not in same
    if policy.keep_days is not None:
        while kept > first and now_ms - times_ms[kept - 1] < policy.keep_days * DAY_MS:
            kept -= 1
    return kept
