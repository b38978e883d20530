"""Decide what a job changes in a dataset: pure functions from what was read to a `Change`.

Nothing here reads, writes, asks a KMS or looks at a clock. So a job that loses a compare-and-swap reads and decides
again, a dry run prints the decision, and an audit applies decisions one after the other (`Change.apply_to`). A decision
that needs a new KEK lists the kind of that KEK in `Change.makes` and works with a provisional entry. A job then has the
KMS make the KEK and decides again; a dry run and an audit go on with the provisional entry.

The rules:

- A KEK is active, then retired, then removed. No step goes back.
- Jobs wrap by the newest active KEK of each kind (`Want`: master key, wrap, columns, scope). `uses` counts wraps before
  they are made, never goes down, and stays within the policy in what jobs reserve. A KEK beyond its lifetime or uses
  retires in favour of a new one.
- A retired KEK names its successor. The successors of a key end with an active key, its heir, or with none; then a key
  of the same kind takes its place.
- A rotation first replaces KEKs in the key store. Then each commit wraps by heirs, so the manifests of one more version
  are all that is left to rewrite. The new KEKs count all DEKs that they will wrap, even beyond `kek_uses`: a KEK that
  has leaked must go in one step.
- An expiry keeps the newest version, all that a version needs, and all that an open job needs or may wrap by when it
  commits. What else has retired stays for its grace, for writers that know no other KEK.
- Newer changes of other jobs win: a commit leaves out the paths that another job has changed, or refuses as a whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.keks import GRACE_MS, SLACK_USES, Uses, Want, is_idle, master_now
from ags_fast.dataset.merging import to_compact
from ags_fast.dataset.policy import DAY_MS, Policy
from ags_fast.dataset.snapshot import of_jobs
from ags_fast.dataset.tables import named_keys
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import (
    MASTER_VERSION,
    REWRAPPED_MS,
    SCOPE,
    SUCCESSOR,
    KeyEntry,
    moved,
    retired,
    retires_ms,
    seals_documents,
    with_version,
)
from ags_fast.keys.stores.base import changed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

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
    versions: tuple[Version, ...] = ()  # to remove
    manifests: tuple[TableRef, ...] = ()  # to remove with them
    stay: Mapping[str, str] = field(default_factory=dict)  # retired keys that stay, and why
    checks: tuple[str, ...] = ()  # KEKs whose newest wraps must be seen to open before older wraps are removed
    adds: tuple[FileEntry, ...] = ()  # files to put into the next version
    removes: Mapping[str, str] = field(default_factory=dict)  # files to take out: {path: object}
    breaks: frozenset[str] = frozenset()  # numbered sets that lose a member, so that they are no sets any more
    refused: tuple[FileEntry, ...] = ()  # files of a wish whose paths another job has changed
    merges: tuple[TableRef, ...] = ()  # manifests to merge into one run
    policy: Policy | None = None  # of the next version; None: as it was

    def __bool__(self) -> bool:
        files = self.adds or self.removes or self.merges or self.policy is not None
        return bool(self.keys or self.rewrites or self.versions or self.manifests or files)

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
        if self.rewrites and snapshot.head is not None:
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


# ---------------------------------------------------------------------------------------------------------- KEKs


def active(keys: Iterable[KeyEntry]) -> list[KeyEntry]:
    """Return the keys that may wrap, the oldest first."""
    return sorted((key for key in keys if key.state == "active"), key=lambda key: (key.created_ms, key.key_id))


def main_key(keys: Iterable[KeyEntry]) -> KeyEntry:
    """Return the newest key that may seal documents. Raises PolicyError without such a key."""
    if not (there := [key for key in active(keys) if seals_documents(key)]):
        raise PolicyError("the dataset has no active key that seals documents: name a wrapping_key_id")
    return there[-1]


def line(keys: Mapping[str, KeyEntry], entry: KeyEntry) -> Iterator[KeyEntry]:
    """Yield a key, and the keys that took its place, one after the other. Ends also if they go in a circle."""
    last: KeyEntry | None = entry
    seen: set[str] = set()
    while last is not None and last.key_id not in seen:
        yield last
        seen.add(last.key_id)
        last = keys.get(last.properties.get(SUCCESSOR, ""))


def heir(keys: Mapping[str, KeyEntry], entry: KeyEntry) -> KeyEntry | Want:
    """Return the active key that wraps in the place of a key: itself or a successor. If none is left: its kind."""
    for last in line(keys, entry):
        if last.state == "active":
            return last
    want = Want.of(entry)
    return want._replace(wrapping_key_id=master_now(want.wrapping_key_id, active(keys.values())))


def provisional(want: Want, number: int, now_ms: int) -> KeyEntry:
    """Return the entry of a KEK that is still to be made. number: unique among those of one decision."""
    name = f"new KEK {now_ms}-{number}"
    return KeyEntry(
        name, want.wrapping_key_id, name.encode() if want.double_wrap else None, "active", now_ms, 0, want.properties()
    )


def reserve(
    keys: Iterable[KeyEntry],
    wants: Mapping[Want, Uses],
    policy: Policy,
    made: Mapping[Want, KeyEntry],
    now_ms: int,
    where: str = "the dataset",
) -> Change:
    """Reserve uses of each kind on the newest active key, or on a new key.

    A key whose uses or lifetime are over, as `policy` has it, retires in favour of the new key. In single wrap nothing
    is reserved, since the KMS counts its own.

    Args:
        keys: All keys, or all active ones.
        wants: How often a job may use a key of each kind.
        policy: How long and how often a KEK may serve.
        made: The new KEKs that the KMS has made, by kind.
        now_ms: The time, in milliseconds since the epoch.
        where: Names the dataset in errors.

    Returns:
        The keys to put in, and for each kind the key to use (`chosen`).

    Raises:
        PolicyError: One KEK may not be used that often, or the dataset has left the master key.
    """
    there = active(keys)
    newest = {Want.of(key): key for key in there}
    chosen: dict[Want, KeyEntry] = {}
    changes: dict[str, KeyEntry | None] = {}
    makes: list[Want] = []
    for want, uses in wants.items():
        held = newest.get(want)
        if held is not None and not want.double_wrap:
            chosen[want] = held  # the KMS counts its own
            continue
        if held is None or policy.outlived(held.created_ms, now_ms) or not policy.has_room(held.uses, *uses):
            if not policy.has_room(0, *uses):
                raise PolicyError(
                    f"one KEK would wrap {uses.data_keys} data keys, and the dataset's policy allows "
                    f"{policy.kek_uses}: share it among fewer files by the policy's kek_scope"
                )
            if want not in made:
                _check_not_left(want.wrapping_key_id, there, where)
                makes.append(want)
            fresh = made.get(want) or provisional(want, len(makes), now_ms)
            if held is not None:
                fresh = moved(fresh, held)
                changes[held.key_id] = retired(held, fresh.key_id, GRACE_MS, now_ms)
            held = fresh
        chosen[want] = held.replace(uses=policy.reserved(held.uses, *uses)) if want.double_wrap else held
        if chosen[want] != newest.get(want):
            changes[held.key_id] = chosen[want]
    return Change(changes, tuple(makes), chosen)


def kinds_for_files(
    paths: Sequence[str],
    masters: Sequence[Mapping[str, str]],
    main: str,
    double_wrap: bool,
    policy: Policy,
    job_id: str,
    now_ms: int,
) -> tuple[list[list[Want]], dict[Want, Uses]]:
    """Say which kinds of keys wrap the DEKs of new files, and how often.

    Args:
        paths: The paths of the files.
        masters: For each file, {column: master key} of the columns that have a key of their own.
        main: The master key of the rest.
        double_wrap: Whether KEKs wrap the DEKs; else the KMS does.
        policy: How files share KEKs.
        job_id: The id of the job.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        For each file the kind for its own DEK, and then the kinds for its columns; and the uses of each kind. They
        include spare uses for documents and tables, and for DEKs that are wrapped a second time.
    """
    scopes = policy.scopes(paths, job_id, now_ms) if double_wrap else [None] * len(paths)
    # Under the master key of the rest, a column needs no key apart: one call of the KMS opens both.
    kinds = [
        [Want(main, double_wrap, False, scope)]
        + [Want(master, double_wrap, master != main, scope) for master in columns.values()]
        for scope, columns in zip(scopes, masters, strict=True)
    ]
    counts = Counter(kind for each in kinds for kind in each)
    uses = {kind: Uses(count, spare=count) for kind, count in counts.items()}  # where a name is taken, wrapped again
    own = uses.get(Want(main), Uses())
    uses[Want(main)] = own._replace(spare=own.spare + SLACK_USES + len(paths) // 1000)  # documents and tables
    return kinds, uses


def with_keys(
    entries: Sequence[FileEntry],
    kinds: Sequence[Sequence[Want]],
    masters: Sequence[Mapping[str, str]],
    chosen: Mapping[Want, KeyEntry],
) -> list[FileEntry]:
    """Return the entries with the ids of the keys that will wrap their DEKs.

    Args:
        entries: New files.
        kinds: For each file what `kinds_for_files` has said.
        masters: What `kinds_for_files` was given.
        chosen: The key of each kind.
    """
    return [
        entry._replace(
            key_id=chosen[first].key_id,
            column_keys=tuple(
                {"column": column, "key_id": chosen[kind].key_id, "wrapped_dek": b""}
                for column, kind in zip(columns, rest, strict=True)
            )
            or None,
        )
        for entry, (first, *rest), columns in zip(entries, kinds, masters, strict=True)
    ]


def _check_not_left(wrapping_key_id: str, there: Iterable[KeyEntry], where: str) -> None:
    """Raise PolicyError if the dataset has left this master key, for a reason that the job may not know."""
    now = master_now(wrapping_key_id, there)
    if now != wrapping_key_id:
        raise PolicyError(
            f"the keys of {where} were rotated from the master key {wrapping_key_id!r} to {now!r}: "
            f"pass wrapping_key_id={now!r}, or rotate them back"
        )


# ---------------------------------------------------------------------------------------------------------- rotation


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
        The manifests (`rewrites`), the keys that wrap in the places of others (`moves`), and new keys.
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
    return Change(change.keys, change.makes, moves=moves, rewrites=refs)


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


# ---------------------------------------------------------------------------------------------------------- expiry


def expire_versions(snapshot: Snapshot, keep: int, keep_ms: float | None, now_ms: int) -> Change:
    """Remove the versions beyond the newest `keep`, and the manifests that only they have.

    Args:
        snapshot: What there is.
        keep: How many versions stay, at least 1.
        keep_ms: Keep versions that are younger than this, too, in milliseconds.
        now_ms: The time, in milliseconds since the epoch.

    Returns:
        The versions and manifests to remove.
    """
    gone = tuple(
        version for version in snapshot.versions[:-keep] if keep_ms is None or version.time_ms < now_ms - keep_ms
    )
    kept = {ref.path for version in snapshot.versions if version not in gone for ref in version.manifests}
    refs = {ref.path: ref for version in gone for ref in version.manifests if ref.path not in kept}
    return Change(versions=gone, manifests=tuple(refs.values()))


def _needed(snapshot: Snapshot) -> tuple[dict[str, str], set[str | None]]:
    """Return the keys that versions and open jobs need, with the reasons; and the scopes of the keys of open jobs.

    When a job commits, DEKs that retired keys wrap are wrapped by their successors, or by KEKs of the same scope.
    """
    needed = snapshot.needed()
    scopes: set[str | None] = set()
    for key_id, why in of_jobs(snapshot.jobs).items():
        for last in line(snapshot.keys, snapshot.keys[key_id]) if key_id in snapshot.keys else ():
            scopes.add(last.properties.get(SCOPE))
            needed.setdefault(last.key_id, why)
    return needed, scopes


def expire_keys(snapshot: Snapshot, force: bool, now_ms: int, unsure: Collection[str] = ()) -> Change:
    """Remove retired keys that no version and no open job needs, and whose grace is over.

    KEKs with a scope none of whose files is left retire; a later expiry removes them.

    Args:
        snapshot: What there is.
        force: Do not wait for the grace, and remove such KEKs at once.
        now_ms: The time, in milliseconds since the epoch.
        unsure: KEKs of which the caller could not see that their newest wraps open: they keep their marks.

    Returns:
        The keys to change and to take out; which retired keys stay, and why (`stay`); and the KEKs whose newest wraps
        the caller must see to open (`checks`).
    """
    needed, scopes = _needed(snapshot)
    keys: dict[str, KeyEntry | None] = {}
    stay: dict[str, str] = {}
    for entry in snapshot.keys.values():
        if entry.state == "active" and is_idle(entry, needed) and entry.properties[SCOPE] not in scopes:
            if force:
                keys[entry.key_id] = None
            elif now_ms - entry.created_ms > GRACE_MS:
                keys[entry.key_id] = retired(entry, None, GRACE_MS, now_ms)
        if entry.state == "retired":
            why = needed.get(entry.key_id)
            if why is None and not force and now_ms < retires_ms(entry):
                why = f"its grace is over in {(retires_ms(entry) - now_ms) / DAY_MS:.1f} days"
            if why is None:
                keys[entry.key_id] = None
            else:
                stay[entry.key_id] = why
    gone = {key_id: snapshot.keys[key_id] for key_id, entry in keys.items() if entry is None}
    left = [keys.get(key_id) or entry for key_id, entry in snapshot.keys.items() if key_id not in gone]
    for entry in left:
        properties = dict(entry.properties)
        if entry.key_id not in unsure:
            properties.pop(REWRAPPED_MS, None)
        if properties.get(SUCCESSOR) in gone:  # so that the way to the newest key goes on
            rest = (last.key_id for last in line(snapshot.keys, entry) if last.key_id not in {*gone, entry.key_id})
            properties[SUCCESSOR] = next(rest, "")
        if properties != entry.properties:
            keys[entry.key_id] = entry.replace(properties=properties)
    checks = tuple(entry.key_id for entry in left if REWRAPPED_MS in entry.properties)
    return Change(keys, stay=stay, checks=checks)


# ---------------------------------------------------------------------------------------------------------- files


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
    """

    operation: str
    job_id: str
    add: Sequence[FileEntry] = ()
    remove: Sequence[FileEntry] = ()
    base: Version | None = None
    whole: bool = False
    compact: bool = False
    policy: Policy | None = None

    def paths(self) -> set[str]:
        """Return the paths of its files."""
        return {entry.path for files in (self.add, self.remove) for entry in files}


def next_version(wish: Wish, head: Version | None, there: Mapping[str, str] | None) -> Change:
    """Decide what a wish changes in the newest version.

    Args:
        wish: What the job wants.
        head: The newest version.
        there: {path: object} of the files that the newest version has at the paths of the wish. None: the files that
            the job has seen.
    """
    if wish.compact:
        return Change(merges=tuple(to_compact(head.manifests if head else ())))
    old = {entry.path: entry.file for entry in wish.remove}
    skips: set[str] = set()
    refused: tuple[FileEntry, ...] = ()
    if there is not None:
        new = {entry.path: entry.file for entry in wish.add}
        skips = {path for path in old.keys() | new.keys() if there.get(path) != old.get(path)}
        late = skips if wish.whole else {path for path in skips if there.get(path) != new.get(path)}
        refused = tuple(
            [entry for entry in wish.add if entry.path in late]
            + [entry for entry in wish.remove if entry.path in late - new.keys()]
        )
        if wish.whole and refused:
            return Change(refused=refused)
    adds = tuple(entry for entry in wish.add if entry.path not in skips)
    removes = {path: file for path, file in old.items() if path not in skips}
    policy = wish.policy if adds or removes or not (wish.add or wish.remove) else None
    return Change(
        adds=adds, removes=removes, breaks=_broken(wish.remove, adds, removes), refused=refused, policy=policy
    )


def _broken(remove: Iterable[FileEntry], adds: Iterable[FileEntry], removes: Container[str]) -> frozenset[str]:
    """Return the numbered sets that lose a member which no file with its number replaces."""
    members = {entry.path: entry.set_id for entry in remove if entry.set_id is not None and entry.path in removes}
    if not members:
        return frozenset()
    replaced = {entry.path for entry in adds if entry.set_id is not None and members.get(entry.path) == entry.set_id}
    return frozenset(set_id for path, set_id in members.items() if path not in replaced)
