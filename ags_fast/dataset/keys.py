"""Decide which KEK wraps, which KEKs come, retire and leave: pure functions of a head's KEKs (rule 9)."""

from __future__ import annotations

import functools
import os
import secrets
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.keks import Keks
from ags_fast.dataset.kinds import GRACE_MS, Want
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import (
    MASTER_VERSION,
    REWRAPPED_MS,
    ROW,
    SCOPE,
    SUCCESSOR,
    KeyEntry,
    left_masters,
    moved,
    retired,
    retires_ms,
    with_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ags_fast.dataset.policy import Policy

Keys = dict[str, KeyEntry]


class Rotation(NamedTuple):
    """Which KEKs a rotation replaces."""

    from_master: str | None = None  # only those under this master key; None: all
    to_master: str | None = None  # the master key of the new ones; None: each stays under its own
    left: str | None = None  # the only master key that `to_master` takes the place of; None: it takes that of all
    double_wrap: bool = False  # replace keys in single wrap by KEKs, and the dataset's own KEK with them
    documents: bool = True  # also a KEK that only seals tables and documents, where the KMS wraps all data keys
    grace_ms: int = GRACE_MS  # how long the replaced KEKs stay at least
    only: frozenset[str] | None = None  # only the KEKs with these ids; None: all

    def concerns(self, key: KeyEntry) -> bool:
        """Whether it is about a KEK, or about its master key."""
        return self.from_master in (None, key.wrapping_key_id) and (self.only is None or key.key_id in self.only)

    def master_of(self, key: KeyEntry) -> str:
        """Return the master key that a KEK, or what takes its place, is under afterwards."""
        moves = self.to_master is not None and self.left in (None, key.wrapping_key_id)
        return self.to_master if moves and self.to_master else key.wrapping_key_id

    def kind_of(self, key: KeyEntry) -> Want:
        """Return the kind of the KEK that takes the place of another."""
        kind = Want.of(key)._replace(wrapping_key_id=self.master_of(key))
        return kind._replace(double_wrap=True, scope=None) if self.double_wrap else kind


def active(keys: Mapping[str, KeyEntry], kind: Want) -> list[KeyEntry]:
    """Return the active KEKs of a kind, the newest first."""
    return sorted(Keks.of(keys).active(kind), key=lambda key: (key.created_ms, key.key_id), reverse=True)


def _master_now(keys: Mapping[str, KeyEntry], wrapping_key_id: str) -> str:
    """Return a master key if an active KEK is under it, else the one that the dataset has moved to from there."""
    actives = [key for key in keys.values() if key.state == "active"]
    if any(key.wrapping_key_id == wrapping_key_id for key in actives):
        return wrapping_key_id
    moved_to = (key.wrapping_key_id for key in actives if wrapping_key_id in left_masters(key))
    return next(moved_to, wrapping_key_id)


def check_not_left(keys: Mapping[str, KeyEntry], wrapping_key_id: str) -> None:
    """Raise PolicyError if a dataset has left a master key, for a reason that the caller may not know."""
    now = _master_now(keys, wrapping_key_id)
    if now != wrapping_key_id:
        raise PolicyError(
            f"the keys of the dataset were rotated from the master key {wrapping_key_id!r} to {now!r}: "
            f"pass wrapping_key_id={now!r}, or rotate them back"
        )


def followed(keys: Mapping[str, KeyEntry], kind: Want) -> Want:
    """Return a kind under the master key that the dataset uses in the place of its own."""
    return kind._replace(wrapping_key_id=_master_now(keys, kind.wrapping_key_id))


@functools.cache
def writer_name() -> str:
    """Return the name of this process as a writer (`Policy.kek_scope`). A fork's child has another one."""
    return f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(8)}"


os.register_at_fork(after_in_child=writer_name.cache_clear)


def scopes_of(policy: Policy, paths: Sequence[str], job_id: str, now_ms: int) -> list[str | None]:
    """Return the scope of the KEK of each file of a job, as a policy has it; None is the dataset."""
    return policy.scopes(paths, job_id, now_ms, writer_name() if policy.kek_scope == "writer" else None)


def kinds_of_files(
    scopes: Sequence[str | None], masters: Sequence[Mapping[str, str]], main: str, double_wrap: bool
) -> list[list[Want]]:
    """Return for each new file the kind of the KEK of its own data key, and then those of its columns.

    scopes: What `scopes_of` has said. masters: {column: master key} of the columns of each file that have a key of
    their own. A column under `main`, the master key of the rest, needs no KEK apart: one call of the KMS opens both.
    """
    known: dict[tuple[str | None, ...], list[Want]] = {}  # most files share one list
    kinds = []
    for scope, columns in zip(scopes, masters, strict=True):
        scope = scope if double_wrap else None
        if (each := known.get((scope, *columns.values()))) is None:
            wants = (Want(master, double_wrap, master != main, scope) for master in columns.values())
            each = known[scope, *columns.values()] = [Want(main, double_wrap, False, scope), *wants]
        kinds.append(each)
    return kinds


def choose(
    keys: Mapping[str, KeyEntry], kind: Want, uses: int, policy: Policy, now_ms: int, spent: Collection[str] = ()
) -> KeyEntry | None:
    """Return the KEK of a kind that is to wrap so many more data keys; None: a new one is needed.

    spent: KEKs that have no more uses.
    """
    for key in active(keys, kind):
        if key.key_id in spent:
            continue
        if not key.double_wrap or (not policy.outlived(key.created_ms, now_ms) and uses <= policy.kek_uses - key.uses):
            return key
    return None


def with_new(keys: Mapping[str, KeyEntry], new: Mapping[str, KeyEntry], policy: Policy, now_ms: int) -> Keks:
    """Return the KEKs with those that a job brings. What is too old by then, or has no use left, retires."""
    after: Keys = {}
    for key in new.values():
        for old in active(keys, Want.of(key)):
            spent = old.double_wrap and old.uses >= policy.kek_uses
            if spent or policy.outlived(old.created_ms, now_ms):
                after[old.key_id] = retired(old, key.key_id, GRACE_MS, now_ms)
                key = moved(key, old)
        after[key.key_id] = key
    return Keks.of(keys).changed(after)


def to_replace(
    keys: Mapping[str, KeyEntry], rotation: Rotation, wraps: Collection[str], seals: Collection[str] = ()
) -> Keys:
    """Return the KEKs that a rotation replaces: active ones, and retired ones that still wrap something.

    An active KEK with a scope that wraps nothing is not replaced: it retires, and a job that needs one makes it.

    In the newest version, the KEKs in `wraps` wrap data keys of files, and those in `seals` data keys of tables.
    """
    return {
        key_id: key
        for key_id, key in _asked_for(keys, rotation, wraps).items()
        if key_id in wraps or key_id in seals or (key.state == "active" and SCOPE not in key.properties)
    }


def _asked_for(keys: Mapping[str, KeyEntry], rotation: Rotation, wraps: Collection[str]) -> Keys:
    """Return the KEKs that a rotation is about, those that are to retire without a successor included."""
    mine = {key_id: key for key_id, key in keys.items() if rotation.concerns(key)}
    there = {key_id: key for key_id, key in mine.items() if key.state == "active" or key_id in wraps}
    singles = {key_id for key_id, key in there.items() if not key.double_wrap}
    if rotation.double_wrap:  # the new KEK seals tables and documents, too
        own = {key_id for key_id, key in mine.items() if Want.of(key) == Want(key.wrapping_key_id)}
        return {key_id: key for key_id, key in mine.items() if key_id in singles or (key_id in own and singles)}
    # In single wrap the KEK of tables and documents opens no file, and stays: there, every call is to be a file's.
    all_ = (
        rotation.documents or not singles or any(key.double_wrap and key_id in wraps for key_id, key in there.items())
    )
    return {
        key_id: key
        for key_id, key in mine.items()
        if all_ or not key.double_wrap or rotation.master_of(key) != key.wrapping_key_id
    }


def rotated(
    keys: Mapping[str, KeyEntry],
    rotation: Rotation,
    wraps: Collection[str],
    successors: Mapping[str, KeyEntry],
    now_ms: int,
) -> Keks:
    """Return the KEKs after a rotation: see `to_replace`. successors: by the id of each KEK replaced, the new one."""
    after: Keys = {}
    for key in _asked_for(keys, rotation, wraps).values():
        if key.state == "active":
            new = successors.get(key.key_id)
            after[key.key_id] = retired(key, new.key_id if new else None, rotation.grace_ms, now_ms)
    for old_id, new in successors.items():
        after[new.key_id] = moved(after.get(new.key_id, new), keys[old_id])
    return Keks.of(keys).changed(after)


def heir_kind(keys: Mapping[str, KeyEntry], key: KeyEntry) -> Want:
    """Return the kind of the KEK that wraps in the place of one that has retired or left."""
    last, seen = key, set[str]()
    while last.state != "active" and last.key_id not in seen:
        seen.add(last.key_id)
        last = keys.get(last.properties.get(SUCCESSOR, ""), last)
    return Want.of(last) if last.state == "active" else followed(keys, Want.of(key))


def to_rewrap(
    keys: Iterable[KeyEntry], rotation: Rotation, is_current: Callable[[KeyEntry], bool], *, all_: bool = False
) -> tuple[list[KeyEntry], list[KeyEntry]]:
    """Return the KEKs that the KMS is to wrap again, and those that stay as the current version has wrapped them.

    Keys in single wrap are left out. `is_current` asks whether the KMS tells that the current version of its master key
    wraps a KEK. `all_`: all KEKs go to another KMS.
    """
    todo: list[KeyEntry] = []
    rest: list[KeyEntry] = []
    for key in keys:
        if key.double_wrap and (all_ or rotation.concerns(key)):
            stays = not all_ and rotation.master_of(key) == key.wrapping_key_id and is_current(key)
            (rest if stays else todo).append(key)
    return todo, rest


def rewrapped_as(old: KeyEntry, new: KeyEntry, now_ms: int) -> KeyEntry:
    """Return a KEK in a new wrap. new: what the KMS has made of it, perhaps of an older state of it."""
    properties = with_version(old.properties, new.properties.get(MASTER_VERSION))
    properties[REWRAPPED_MS] = str(now_ms)
    if ROW in new.properties:
        properties[ROW] = new.properties[ROW]
    return moved(old.replace(wrapped=new.wrapped, wrapping_key_id=new.wrapping_key_id, properties=properties), old)


def leaving(
    keys: Mapping[str, KeyEntry], needed: Collection[str], planned: Collection[str], skip_grace: bool, now_ms: int
) -> set[str]:
    """Return the KEKs that may leave: no kept version needs them (rule 9), no plan names them, and no job is likely to.

    skip_grace: take no regard of jobs that may be about to plan a use of a KEK: they choose again.
    """
    found = set()
    for key in keys.values():
        if key.key_id in needed or (key.state == "active" and SCOPE not in key.properties):
            continue
        until = retires_ms(key) if key.state == "retired" else key.created_ms + GRACE_MS
        if key.key_id not in planned and (skip_grace or until <= now_ms):
            found.add(key.key_id)
    return found
