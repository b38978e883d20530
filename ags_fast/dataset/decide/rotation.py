"""Replace KEKs, or what wraps the KEKs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.decide.change import Change
from ags_fast.dataset.decide.keys import active, heir, provisional
from ags_fast.dataset.decide.reservation import reserve
from ags_fast.dataset.keks import SLACK_USES, Uses, Want, is_idle
from ags_fast.dataset.policy import Policy
from ags_fast.keys.entry import (
    MASTER_VERSION,
    REWRAPPED_MS,
    KeyEntry,
    moved,
    retired,
    with_version,
)
from ags_fast.keys.stores.base import changed

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from ags_fast.dataset.snapshot import Snapshot


class Rotation(NamedTuple):
    """What a rotation is asked to do.

    Attributes:
        what: "kek", "mek" or "double-wrap".
        master: The master key to use from now on; None: each key stays under its own.
        from_master: Rotate only what is under this master key; None: everything.
        left: The master key that `master` takes the place of.
        documents: In single wrap, replace the KEK of manifests and documents, too.
    """

    what: str
    master: str | None
    from_master: str | None
    left: str
    documents: bool = False

    def concerns(self, entry: KeyEntry) -> bool:
        """Return whether a key is under the master key to rotate."""
        return self.from_master in (None, entry.wrapping_key_id)

    def master_of(self, entry: KeyEntry) -> str:
        """Return the master key that a key, or its successor, gets under."""
        return self.master if self.master and entry.wrapping_key_id == self.left else entry.wrapping_key_id


def replace_keks(
    snapshot: Snapshot, rotation: Rotation, made: Mapping[Want, KeyEntry], grace_ms: int, now_ms: int
) -> Change:
    """Retire active KEKs in favour of new ones.

    A KEK with a scope that wraps nothing in the newest version retires without a successor: a writer that still wants
    it gets one of its kind.

    Args:
        snapshot: The keys and the newest version.
        rotation: What is asked: "kek" or "double-wrap".
        made: The new KEKs that the KMS has made, by kind.
        grace_ms: How long the old KEKs stay at least, in milliseconds.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        The keys to put in; and for each old KEK the new one, or None (`successors`).
    """
    # By active key: the DEKs that it wraps, and those of retired keys that it will wrap in their places.
    wrapped: Counter[str] = Counter()
    for key_id, count in snapshot.used().items():
        last = heir(snapshot.keys, snapshot.keys[key_id]) if key_id in snapshot.keys else None
        if isinstance(last, KeyEntry):
            wrapped[last.key_id] += count
    wants: dict[str, Want | None] = {}
    for entry in _to_replace(active(snapshot.keys.values()), rotation, wrapped):
        # A KEK that is younger than the version may be for what somebody is about to commit.
        if is_idle(entry, wrapped) and snapshot.head is not None and entry.created_ms < snapshot.head.time_ms:
            wants[entry.key_id] = None
            continue
        want = Want.of(entry)._replace(wrapping_key_id=rotation.master_of(entry))
        wants[entry.key_id] = want if rotation.what == "kek" else want._replace(double_wrap=True, scope=None)
    kinds = sorted({want for want in wants.values() if want is not None}, key=repr)
    makes = [want for want in kinds if want not in made]
    new: dict[Want, KeyEntry] = {}
    for want in kinds:
        entry = made.get(want) or provisional(want, makes.index(want), now_ms)
        old_ids = [old_id for old_id, kind in wants.items() if kind == want]
        for old_id in old_ids:
            entry = moved(entry, snapshot.keys[old_id])
        uses = sum(wrapped[old_id] for old_id in old_ids)
        new[want] = entry.replace(uses=snapshot.policy.reserved(0, uses, SLACK_USES))
    successors = {old_id: None if want is None else new[want] for old_id, want in wants.items()}
    return Change(install(snapshot.keys, successors, grace_ms, now_ms), tuple(makes), successors=successors)


def counted_moves(snapshot: Snapshot, change: Change) -> set[tuple[str, str]]:
    """Return the moves that the uses of the successors include: (path of a manifest, KEK that wraps DEKs in it).

    Args:
        snapshot: What `replace_keks` has seen.
        change: What `replace_keks` has decided.
    """
    new = {entry.key_id for entry in change.successors.values() if entry is not None}
    keys = changed(snapshot.keys, change.keys)
    heirs = {key_id: heir(keys, keys[key_id]) for key_id in snapshot.used() if key_id in keys}
    counted = {key_id for key_id, key in heirs.items() if isinstance(key, KeyEntry) and key.key_id in new}
    refs = snapshot.head.manifests if snapshot.head else ()
    return {(ref.path, key_id) for ref in refs for key_id in counted & snapshot.wraps(ref).keys()}


def _to_replace(there: Sequence[KeyEntry], rotation: Rotation, used: Container[str]) -> list[KeyEntry]:
    """Return the active keys that a rotation replaces.

    Args:
        there: The active keys.
        rotation: What is asked.
        used: The keys that wrap DEKs of the newest version, or will wrap them in the places of retired keys.
    """
    singles = [entry for entry in there if not entry.double_wrap]
    doubles = [entry for entry in there if entry.double_wrap]
    if rotation.what == "double-wrap":  # the new KEK seals the documents, too
        found = singles and singles + [e for e in doubles if Want.of(e) == Want(e.wrapping_key_id)]
    else:
        # In single wrap, the KEK of the documents opens no file and stays: there, every call is to be a file's.
        in_use = rotation.documents or not singles or any(entry.key_id in used for entry in doubles)
        found = singles + [e for e in doubles if in_use or rotation.master_of(e) != e.wrapping_key_id]
    return [entry for entry in found if rotation.concerns(entry)]


def install(
    keys: Mapping[str, KeyEntry], successors: Mapping[str, KeyEntry | None], grace_ms: int, now_ms: int
) -> dict[str, KeyEntry | None]:
    """Put successors in, and retire what they take the places of. What has retired since stays as it is.

    Args:
        keys: The keys, as they are now.
        successors: By the id of each old KEK the new one; None: none.
        grace_ms: How long the old KEKs stay at least, in milliseconds.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        What to put into the key store.
    """
    changes: dict[str, KeyEntry | None] = {}
    for old_id, entry in successors.items():
        old = keys.get(old_id)
        if old is not None and old.state == "active":
            changes[old_id] = retired(old, None if entry is None else entry.key_id, grace_ms, now_ms)
            if entry is not None:
                changes[entry.key_id] = entry
    return changes


def rewrite_manifests(snapshot: Snapshot, made: Mapping[Want, KeyEntry], now_ms: int) -> Change:
    """Rewrite the manifests of the newest version that a retired key seals, or wraps something in.

    Args:
        snapshot: The keys and the newest version.
        made: The new KEKs that the KMS has made, by kind, where no heir of a retired key is left.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        The manifests (`rewrites`), whether a retired key seals the version itself (`reseals`), the keys that wrap in
        the places of others (`moves`), and new keys.
    """
    head = snapshot.head
    needs = {ref.path: {ref.key_id, *snapshot.wraps(ref)} for ref in (head.manifests if head else ())}
    used: set[str] = set().union(*needs.values())
    heirs = {
        entry.key_id: heir(snapshot.keys, entry)
        for entry in snapshot.keys.values()
        if entry.state == "retired" and entry.key_id in used
    }
    wants = {want: Uses() for want in heirs.values() if isinstance(want, Want)}
    change = reserve(snapshot.keys.values(), wants, Policy(), made, now_ms)
    moves = {old: (change.chosen[key] if isinstance(key, Want) else key).key_id for old, key in heirs.items()}
    refs = tuple(ref for ref in (head.manifests if head else ()) if not needs[ref.path].isdisjoint(moves))
    sealer = snapshot.keys.get(head.key_id) if head else None
    reseals = sealer is not None and sealer.state == "retired"
    return Change(change.keys, change.makes, moves=moves, rewrites=refs, reseals=reseals)


def rewrap_keks(
    keys: Iterable[KeyEntry], rotation: Rotation, is_current: Callable[[KeyEntry], bool], leaves_kms: bool
) -> tuple[list[KeyEntry], list[KeyEntry]]:
    """Choose the KEKs that the KMS is to wrap again.

    Args:
        keys: All keys of the key store.
        rotation: What is asked.
        is_current: Whether the KMS tells that the current version of its master key wraps a KEK.
        leaves_kms: All KEKs go to another KMS.

    Returns:
        The KEKs to wrap again, and the KEKs that the current version of their master key wraps already.
    """
    todo: list[KeyEntry] = []
    rest: list[KeyEntry] = []
    for entry in keys:
        if entry.double_wrap and (leaves_kms or rotation.concerns(entry)):
            stays = not leaves_kms and rotation.master_of(entry) == entry.wrapping_key_id
            (rest if stays and is_current(entry) else todo).append(entry)
    return todo, rest


def put_in_wraps(
    keys: Iterable[KeyEntry], wrapped: Mapping[bytes | None, KeyEntry], now_ms: int
) -> dict[str, KeyEntry | None]:
    """Give KEKs their new wraps, and mark them until an expiry has seen that the wraps open.

    Args:
        keys: The KEKs that were wrapped again.
        wrapped: What the KMS has made, by the wrap that it was made of.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        What to put into the key store.
    """
    changes: dict[str, KeyEntry | None] = {}
    for entry in keys:
        new = wrapped[entry.wrapped]
        properties = with_version(entry.properties, new.properties.get(MASTER_VERSION))
        properties[REWRAPPED_MS] = str(now_ms)
        changes[entry.key_id] = moved(new.replace(properties=properties, state=entry.state, uses=entry.uses), entry)
    return changes
