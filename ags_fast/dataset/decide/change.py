"""What a decision changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ags_fast.dataset.decide.keys import main_key
from ags_fast.dataset.keks import Want
from ags_fast.dataset.policy import Policy
from ags_fast.dataset.tables import named_keys
from ags_fast.keys.entry import (
    KeyEntry,
)
from ags_fast.keys.stores.base import changed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.dataset.snapshot import Snapshot
    from ags_fast.dataset.tables import TableRef
    from ags_fast.dataset.versions import Version


@dataclass(frozen=True)
class Change:
    """What a decision changes. A job applies it, a dry run prints it, and an audit counts it."""

    keys: Mapping[str, KeyEntry | None] = field(default_factory=dict)  # to put into the key store; None: to take out
    makes: tuple[Want, ...] = ()  # KEKs that the KMS is still to make; `keys` has provisional entries in their places
    chosen: Mapping[Want, KeyEntry] = field(default_factory=dict)  # the key to use of each kind that was wanted
    successors: Mapping[str, KeyEntry | None] = field(default_factory=dict)  # by the id of each KEK that retires
    moves: Mapping[str, str] = field(default_factory=dict)  # retired keys, and those that wrap in their places
    rewrites: tuple[TableRef, ...] = ()  # manifests of the newest version, in which those keys wrap something
    reseals: bool = False  # the newest version is to be sealed by another key
    versions: tuple[Version, ...] = ()  # to remove
    manifests: tuple[TableRef, ...] = ()  # to remove with them
    stay: Mapping[str, str] = field(default_factory=dict)  # retired keys that stay, and why
    checks: tuple[str, ...] = ()  # KEKs whose newest wraps must be seen to open before older wraps are removed
    adds: tuple[FileEntry, ...] = ()  # files to put into the next version
    removes: Mapping[str, str] = field(default_factory=dict)  # files to take out: {path: object}
    breaks: frozenset[str] = frozenset()  # numbered sets that lose a member: not checked for completeness
    refused: tuple[FileEntry, ...] = ()  # files of a wish whose paths another job has changed
    merges: tuple[TableRef, ...] = ()  # manifests to merge into one run
    policy: Policy | None = None  # of the next version; None: as it was
    repeats: bool = False  # the batch of a stream was committed before, so nothing is to be done

    def __bool__(self) -> bool:
        files = self.adds or self.removes or self.merges or self.policy is not None
        return bool(self.keys or self.rewrites or self.reseals or self.versions or self.manifests or files)

    def apply_to(self, snapshot: Snapshot, now_ms: int) -> Snapshot:
        """Return the snapshot after the change, as far as the change is of keys, rewrites and removals.

        Args:
            snapshot: What the change was decided on.
            now_ms: The time of a version that is made, in milliseconds since the epoch. Its manifests keep their
                lengths in bytes.
        """
        keys = changed(snapshot.keys, self.keys)
        versions = [version for version in snapshot.versions if version not in self.versions]
        counts = dict(snapshot.counts)
        if (self.rewrites or self.reseals) and snapshot.head is not None:
            head, sealer, refs = snapshot.head, main_key(keys.values()).key_id, []
            for ref in head.manifests:
                if ref in self.rewrites:
                    wraps = moved_counts(snapshot.wraps(ref), self.moves)
                    named = None if ref.keys is None else named_keys(wraps)
                    ref = ref._replace(path=f"{ref.path} of version {head.number + 1}", key_id=sealer, keys=named)
                    counts[ref.path] = wraps
                refs.append(ref)
            made = head._replace(number=head.number + 1, time_ms=now_ms, manifests=tuple(refs), key_id=sealer)
            versions.append(made)
        return replace(snapshot, keys=keys, versions=tuple(versions), counts=counts)


def moved_counts(counts: Mapping[str, int], moves: Mapping[str, str]) -> dict[str, int]:
    """Return how many DEKs each key wraps after the moves, {retired key: the key in its place}."""
    after: dict[str, int] = {}
    for key_id, count in counts.items():
        after[moves.get(key_id, key_id)] = after.get(moves.get(key_id, key_id), 0) + count
    return after
