"""Decide what a job changes in a dataset: pure functions from what was read to a `Change`.

Nothing here reads, writes, asks a KMS or looks at a clock. A decision that needs a new KEK lists its kind in
`Change.makes` and works with a provisional entry. A job then has the KMS make the KEK and decides again with the KEK at
hand; a dry run and an audit go on with the provisional entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ags_fast.dataset.keks import GRACE_MS, Uses, Want, master_now
from ags_fast.errors import PolicyError
from ags_fast.keys.entry import SCOPE, SUCCESSOR, KeyEntry, for_columns, moved, retired

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.dataset.policy import Policy


@dataclass(frozen=True)
class Change:
    """What a decision changes. A job applies it, a dry run prints it, and an audit counts it."""

    keys: Mapping[str, KeyEntry | None] = field(default_factory=dict)  # to put into the key store; None: to take out
    makes: tuple[Want, ...] = ()  # KEKs that the KMS is still to make; `keys` has provisional entries in their places
    chosen: Mapping[Want, KeyEntry] = field(default_factory=dict)  # the key to use of each kind that was wanted


# ---------------------------------------------------------------------------------------------------------- KEKs


def active(keys: Iterable[KeyEntry]) -> list[KeyEntry]:
    """The keys that may wrap, the oldest first."""
    return sorted((key for key in keys if key.state == "active"), key=lambda key: (key.created_ms, key.key_id))


def main_key(keys: Iterable[KeyEntry]) -> KeyEntry:
    """The newest key that may seal documents; else the newest that wraps data keys. PolicyError if there is none."""
    there = [key for key in active(keys) if not for_columns(key)]
    if not there:
        raise PolicyError("the dataset has no active key: name a wrapping_key_id")
    unscoped = [key for key in there if SCOPE not in key.properties]
    documents = [key for key in unscoped if key.double_wrap]
    return (documents or unscoped or there)[-1]


def heir(keys: Mapping[str, KeyEntry], entry: KeyEntry) -> KeyEntry | Want:
    """The active key that wraps in the place of a key: itself or a successor. If none is left: its kind."""
    last = entry
    while last.state != "active" and (follower := keys.get(last.properties.get(SUCCESSOR, ""))) is not None:
        last = follower
    if last.state == "active":
        return last
    want = Want.of(entry)
    return want._replace(wrapping_key_id=master_now(want.wrapping_key_id, active(keys.values())))


def provisional(want: Want, number: int, now_ms: int) -> KeyEntry:
    """The entry of a KEK that is still to be made."""
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
    """For each kind, reserve these uses on the newest active key, or on a new key.

    A key whose uses or lifetime are over, as `policy` has it, retires in favour of the new key.

    Args:
        keys: All keys, or all active ones.
        wants: How often a job may use a key of each kind.
        policy: How long and how often a KEK may serve.
        made: The new KEKs that the KMS has made, by kind.
        now_ms: The time, in milliseconds since the epoch.
        where: Names the dataset in errors.
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
        changes[held.key_id] = chosen[want]
    return Change(changes, tuple(makes), chosen)


def _check_not_left(wrapping_key_id: str, there: Iterable[KeyEntry], where: str) -> None:
    """PolicyError if the dataset has left this master key: there may be a reason, of which not every job knows."""
    now = master_now(wrapping_key_id, there)
    if now != wrapping_key_id:
        raise PolicyError(
            f"the keys of {where} were rotated from the master key {wrapping_key_id!r} to {now!r}: "
            f"pass wrapping_key_id={now!r}, or rotate them back"
        )
