"""The kinds of KEKs in a dataset, their properties, and how they retire."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.errors import FormatError
from ags_fast.keys.envelope import (
    KeyEntry,
    check_wrap,
    new_kek,
)
from ags_fast.keys.kms import KmsClient
from ags_fast.keys.resolver import COLUMNS, for_columns

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


GRACE_MS = 7 * 86_400_000  # a writer that takes longer is a mistake
SLACK_USES = 64  # of a key, for the documents and tables of a job
# Properties of KEKs.
SCOPE = "scope"  # the files that it is for; without it, it may seal documents and tables, too
SUCCESSOR = "successor"  # of a retired one: the key that took its place
MOVED_FROM = "moved-from"  # JSON: the master keys that it, and what it took the place of, were under before
RETIRES_MS = "retires-ms"  # of a retired one: until then, a writer may come that knows no other


class Want(NamedTuple):
    """A kind of key."""

    wrapping_key_id: str  # the master key that it is under
    double_wrap: bool = True
    columns: bool = False  # it wraps data keys of Parquet columns, and nothing else
    scope: str | None = None  # the files that it is for; None: the dataset's own, which may seal documents and tables

    @classmethod
    def of(cls, entry: KeyEntry) -> Want:
        """The kind that a key is of."""
        return cls(entry.wrapping_key_id, entry.double_wrap, for_columns(entry), entry.properties.get(SCOPE))

    def properties(self) -> dict[str, str]:
        """The properties of a key of this kind."""
        return (COLUMNS if self.columns else {}) | ({} if self.scope is None else {SCOPE: self.scope})

    def new_kek(self, kms: KmsClient) -> KeyEntry:
        """Make a key of this kind, and see the KMS unwrap it. Two calls of the KMS; in single wrap none."""
        made = new_kek(kms, self.wrapping_key_id, double_wrap=self.double_wrap, properties=self.properties())
        if made.double_wrap:
            check_wrap(kms, made)
        return made


class Uses(NamedTuple):
    """How often a job may use a key."""

    data_keys: int = 0  # to wrap them
    spare: int = 0  # for documents and tables, and data keys that are wrapped again


def left_masters(entry: KeyEntry) -> list[str]:
    """The master keys that it, and those that it took the place of, were under."""
    try:
        return [str(key_id) for key_id in json.loads(entry.properties.get(MOVED_FROM, "[]"))]
    except (TypeError, ValueError):
        raise FormatError(f"the key {entry.key_id!r} has an impossible {MOVED_FROM}") from None


def moved(entry: KeyEntry, old: KeyEntry) -> KeyEntry:
    """A key that takes the place of `old`, and says which master keys were left on the way."""
    left = {*left_masters(entry), *left_masters(old), old.wrapping_key_id} - {entry.wrapping_key_id}
    properties = {name: text for name, text in entry.properties.items() if name != MOVED_FROM}
    return entry.replace(properties=properties | ({MOVED_FROM: json.dumps(sorted(left))} if left else {}))


def master_now(wrapping_key_id: str, active: Iterable[KeyEntry]) -> str:
    """The master key itself, or if no active key is under it any more, the one to which a dataset has left it."""
    active = list(active)
    if any(entry.wrapping_key_id == wrapping_key_id for entry in active):
        return wrapping_key_id
    moved_to = (entry.wrapping_key_id for entry in active if wrapping_key_id in left_masters(entry))
    return next(moved_to, wrapping_key_id)


def retires_ms(entry: KeyEntry) -> int:
    """Until when a retired key stays, in milliseconds since the epoch."""
    text = entry.properties.get(RETIRES_MS, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise FormatError(f"the key {entry.key_id!r} has an impossible {RETIRES_MS}")
    return int(text)


def clock_ms() -> int:
    """The time now, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def retired(entry: KeyEntry, successor: str | None, grace_ms: int, now_ms: int) -> KeyEntry:
    """A key that opens, and no longer wraps. Until the grace is over, writers may come that know no other."""
    properties = {**entry.properties, RETIRES_MS: str(now_ms + grace_ms)}
    if successor is not None:
        properties[SUCCESSOR] = successor
    return entry.replace(state="retired", properties=properties)


REWRAPPED_MS = "rewrapped-ms"  # a property of KEKs that R3 has wrapped, until `expire` has seen that they open


def is_idle(entry: KeyEntry, used: Container[str]) -> bool:
    """Whether a KEK is for some files only, and none of them is there: of a folder, day or job that is over."""
    return SCOPE in entry.properties and entry.key_id not in used
