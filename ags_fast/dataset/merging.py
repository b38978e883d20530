"""Which manifests a commit merges, so that there are few, and an entry is written again a few times at most.

A *run* is one manifest, or several that were written together. Runs differ in size: after a commit, each run has at
least RATIO times as many entries as all smaller runs together. So N entries are in at most log3(N) + 1 runs, and an
entry is merged about log1.5(N) times. These are pure functions; `commit.Commits` does what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.dataset.tables import MANIFEST_ENTRIES, TableRef, bound, name_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ags_fast.dataset.entries import FileEntry

RATIO = 2
SMALL_ENTRIES = MANIFEST_ENTRIES // 2  # a manifest with fewer entries is merged with others when it is written again


def path_bytes(entry: FileEntry) -> bytes:
    """Return what the entries of a manifest are sorted by."""
    return name_bytes(entry.path)


def to_merge(runs: Sequence[Sequence[TableRef]], added: int) -> list[int]:
    """Return the places of the runs that a commit of `added` entries merges with them."""
    sizes = [sum(ref.entries for ref in run) for run in runs]
    places = sorted(range(len(runs)), key=lambda place: sizes[place]) if added else []
    count = 0
    for i, place in enumerate(places):
        if sizes[place] < RATIO * added:
            count = i + 1
        added += sizes[place]
    return places[:count]


def apart(refs: Iterable[TableRef], more: Sequence[FileEntry]) -> list[TableRef]:
    """Return the manifests that need not be written again: large, and no other one, nor `more`, lies in their range."""
    spans: list[tuple[bytes, bytes, TableRef | None]] = [(ref.first, ref.last, ref) for ref in refs]
    spans += [(bound(name_bytes(more[0].path)), bound(name_bytes(more[-1].path)), None)] if more else []
    spans.sort(key=lambda span: span[:2])
    found, reach = [], b""
    for i, (first, last, ref) in enumerate(spans):
        alone = (i == 0 or reach < first) and (i + 1 == len(spans) or last < spans[i + 1][0])
        if alone and ref is not None and ref.entries >= SMALL_ENTRIES:
            found.append(ref)
        reach = max(reach, last)
    return found


def to_compact(refs: Sequence[TableRef]) -> list[TableRef]:
    """Return the manifests to merge if all files are to be in one run: small ones, and those that overlap."""
    stay = {ref.path for ref in apart(refs, ())}
    rest = [ref for ref in refs if ref.path not in stay]
    return rest if len(rest) > 1 else []


def lanes(refs: Iterable[TableRef]) -> list[list[TableRef]]:
    """Return the manifests in lanes: those of one lane follow each other without an overlap."""
    made: list[list[TableRef]] = []
    for ref in sorted(refs, key=lambda ref: ref.first):
        lane = next((lane for lane in made if lane[-1].last < ref.first), None)
        if lane is None:
            made.append([ref])
        else:
            lane.append(ref)
    return made
