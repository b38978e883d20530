"""Decide which KEK wraps, which KEKs come, retire and leave: pure functions of a head's KEKs (rule 9)."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.dataset.keks import GRACE_MS, Want, master_now
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import SCOPE, SUCCESSOR, KeyEntry, moved, retired, retires_ms
from ags_fast.onelog.keks import Keks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ags_fast.dataset.policy import Policy

Keys = dict[str, KeyEntry]


class Rotation(NamedTuple):
    """Which KEKs a rotation replaces.

    Attributes:
        from_master: Only those under this master key; None: all.
        to_master: The master key of the new ones; None: each stays under its own.
        left: The only master key that `to_master` takes the place of; None: it takes the place of all.
        double_wrap: Replace the keys in single wrap by KEKs, and the dataset's own KEK with them. False: each key is
            replaced by one of its kind.
        documents: Also replace a KEK that only seals tables and documents, where the KMS wraps all data keys.
        grace_ms: How long the replaced KEKs stay at least, in milliseconds.
    """

    from_master: str | None = None
    to_master: str | None = None
    left: str | None = None
    double_wrap: bool = False
    documents: bool = True
    grace_ms: int = GRACE_MS

    def concerns(self, key: KeyEntry) -> bool:
        """Whether it is about the master key of a KEK."""
        return self.from_master in (None, key.wrapping_key_id)

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


def check_not_left(keys: Mapping[str, KeyEntry], wrapping_key_id: str) -> None:
    """Raise PolicyError if a dataset has left a master key, for a reason that the caller may not know."""
    now = master_now(wrapping_key_id, (key for key in keys.values() if key.state == "active"))
    if now != wrapping_key_id:
        raise PolicyError(
            f"the keys of the dataset were rotated from the master key {wrapping_key_id!r} to {now!r}: "
            f"pass wrapping_key_id={now!r}, or rotate them back"
        )


def followed(keys: Mapping[str, KeyEntry], kind: Want) -> Want:
    """Return a kind under the master key that the dataset uses in the place of its own."""
    actives = (key for key in keys.values() if key.state == "active")
    return kind._replace(wrapping_key_id=master_now(kind.wrapping_key_id, actives))


@functools.cache
def writer_name() -> str:
    """Return the name of this process as a writer (`Policy.kek_scope`). A fork's child has another one."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"


os.register_at_fork(after_in_child=writer_name.cache_clear)


def scopes_of(policy: Policy, paths: Sequence[str], job_id: str, now_ms: int) -> list[str | None]:
    """Return the scope of the KEK of each file of a job, as a policy has it; None is the dataset."""
    return policy.scopes(paths, job_id, now_ms, writer_name() if policy.kek_scope == "writer" else None)


def kinds_of_files(
    scopes: Sequence[str | None], masters: Sequence[Mapping[str, str]], main: str, double_wrap: bool
) -> list[list[Want]]:
    """Return for each new file the kind of the KEK of its own data key, and then those of its columns.

    Args:
        scopes: For each file what `scopes_of` has said.
        masters: For each file, {column: master key} of the columns that have a key of their own.
        main: The master key of the rest. A column under it needs no KEK apart: one call of the KMS opens both.
        double_wrap: Whether KEKs wrap the data keys; else the KMS does.
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
    """Return the KEK that is to wrap more data keys; None: a new one is needed.

    Args:
        keys: The head's KEKs.
        kind: Of the KEK.
        uses: How many data keys it is to wrap.
        policy: How long a KEK serves, and how often.
        now_ms: The time, in milliseconds since the epoch.
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

    Args:
        keys: The head's KEKs.
        rotation: Which of them.
        wraps: The KEKs that wrap data keys of files in the newest version.
        seals: The KEKs that wrap data keys of tables there.
    """
    chosen = _asked_for(keys, rotation, wraps)
    return {
        key_id: key
        for key_id, key in chosen.items()
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
    """Return the KEKs after a rotation.

    Args:
        keys: The head's KEKs.
        rotation: Which of them it replaces.
        wraps: As for `to_replace`.
        successors: By the id of each KEK that is replaced, the new one.
        now_ms: The time, in milliseconds since the epoch.
    """
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


def leaving(
    keys: Mapping[str, KeyEntry], needed: Collection[str], planned: Collection[str], skip_grace: bool, now_ms: int
) -> set[str]:
    """Return the KEKs that may leave: no kept version needs them, and no job is likely to.

    Args:
        keys: The head's KEKs.
        needed: The KEKs that kept versions need (rule 9).
        planned: The KEKs that open plans name.
        skip_grace: Whether to take no regard of jobs that may be about to use a KEK: they wrap again.
        now_ms: The time, in milliseconds since the epoch.
    """
    found = set()
    for key in keys.values():
        if key.key_id in needed or (key.state == "active" and SCOPE not in key.properties):
            continue
        until = retires_ms(key) if key.state == "retired" else key.created_ms + GRACE_MS
        if skip_grace or (until <= now_ms and key.key_id not in planned):
            found.add(key.key_id)
    return found
