"""Choose the files of the next version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ags_fast.dataset.decide.change import Change
from ags_fast.dataset.entries import without_set
from ags_fast.dataset.merging import to_compact
from ags_fast.dataset.names import folders_above
from ags_fast.dataset.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.versions import Version


@dataclass(frozen=True)
class Wish:
    """What a job wants of the next version.

    Attributes:
        operation: What the version says of the job.
        job_id: The id of the job.
        add: Files to add. A file takes the place of the file that `remove` has at its path.
        remove: Files to take out, as `base` has them.
        base: The version that the job has looked at; None: there was no version.
        whole: Commit the whole wish or nothing. False: leave out the paths that another job has changed.
        compact: Merge the manifests into one run. Then `add` and `remove` are empty.
        policy: The policy of the dataset from now on; None: as it was.
        clears: Whether `remove` is all files of `base`. Then a wish that began without files needs a version without.
        once: The id of a stream and the number of its batch, to commit nothing that a version has recorded; None: none.
    """

    operation: str
    job_id: str
    add: Sequence[FileEntry] = ()
    remove: Sequence[FileEntry] = ()
    base: Version | None = None
    whole: bool = False
    compact: bool = False
    policy: Policy | None = None
    clears: bool = False
    once: tuple[str, int] | None = None

    def paths(self) -> set[str]:
        """Return the paths of its files."""
        return {entry.path for files in (self.add, self.remove) for entry in files}

    def paths_around(self) -> set[str]:
        """Return the paths of its files, and of the folders above its new files."""
        return self.paths().union(*(folders_above(entry.path) for entry in self.add))


def next_version(wish: Wish, head: Version | None, there: Mapping[str, str] | None) -> Change:
    """Decide what a wish changes in the newest version.

    Args:
        wish: What the job wants.
        head: The newest version.
        there: {path: object} of the files that the newest version has at `Wish.paths_around`, and of at least one file
            below each new file that would be a folder. None: the files that the job has seen.
    """
    if wish.once is not None and head is not None and head.has_batch(*wish.once):
        return Change(repeats=True)
    if wish.clears and not wish.remove and head is not None and head.files:
        return Change(refused=tuple(wish.add))
    if wish.compact:
        return Change(merges=tuple(to_compact(head.manifests if head else ())))
    old = {entry.path: entry.file for entry in wish.remove}
    skips: set[str] = set()
    refused: tuple[FileEntry, ...] = ()
    if there is not None:
        new = {entry.path: entry.file for entry in wish.add}
        skips = {path for path in old.keys() | new.keys() if there.get(path) != old.get(path)}
        late = skips if wish.whole else {path for path in skips if there.get(path) != new.get(path)}
        blocked = _blocked(new, there.keys() - (old.keys() - skips))
        skips, late = skips | blocked, late | blocked
        refused = tuple(
            [entry for entry in wish.add if entry.path in late]
            + [entry for entry in wish.remove if entry.path in late - new.keys()]
        )
        if wish.whole and refused:
            return Change(refused=refused)
    adds = tuple(entry for entry in wish.add if entry.path not in skips)
    removes = {path: file for path, file in old.items() if path not in skips}
    policy = wish.policy if adds or removes or not (wish.add or wish.remove) else None
    breaks = _broken(wish.remove, adds, removes)
    adds = tuple(entry if entry.set_id not in breaks else without_set(entry) for entry in adds)
    return Change(adds=adds, removes=removes, breaks=breaks, refused=refused, policy=policy)


def _blocked(new: Collection[str], there: Collection[str]) -> set[str]:
    """Return the new paths at which the version has a folder, or above which it has a file."""
    folders = {folder for path in there for folder in folders_above(path)}
    return {path for path in new if path in folders or any(folder in there for folder in folders_above(path))}


def _broken(remove: Iterable[FileEntry], adds: Iterable[FileEntry], removes: Container[str]) -> frozenset[str]:
    """Return the numbered sets that lose a member which no file with its number replaces."""
    members = {(entry.set_id, entry.part) for entry in remove if entry.path in removes}
    left = members.difference((entry.set_id, entry.part) for entry in adds)
    return frozenset(set_id for set_id, _ in left if set_id is not None)
