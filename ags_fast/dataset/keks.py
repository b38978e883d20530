"""The kinds of KEKs in a dataset, their properties, and how they retire."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from ags_fast.keys.entry import COLUMNS, SCOPE, KeyEntry, for_columns, left_masters
from ags_fast.keys.kek import check_wrap, new_kek
from ags_fast.keys.kms import KmsClient

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


GRACE_MS = 7 * 86_400_000  # a writer that takes longer is a mistake
SLACK_USES = 64  # of a key, for the documents and tables of a job


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
        return (dict(COLUMNS) if self.columns else {}) | ({} if self.scope is None else {SCOPE: self.scope})

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


def master_now(wrapping_key_id: str, active: Iterable[KeyEntry]) -> str:
    """The master key itself, or if no active key is under it any more, the one to which a dataset has left it."""
    active = list(active)
    if any(entry.wrapping_key_id == wrapping_key_id for entry in active):
        return wrapping_key_id
    moved_to = (entry.wrapping_key_id for entry in active if wrapping_key_id in left_masters(entry))
    return next(moved_to, wrapping_key_id)


def clock_ms() -> int:
    """The time now, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def is_idle(entry: KeyEntry, used: Container[str]) -> bool:
    """Whether a KEK is for some files only, and none of them is there: of a folder, day or job that is over."""
    return SCOPE in entry.properties and entry.key_id not in used
