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
    """A kind of key.

    Attributes:
        wrapping_key_id: The master key.
        double_wrap: Whether a KEK wraps data keys; else the KMS does.
        columns: The key wraps data keys of Parquet columns, and nothing else.
        scope: The files that the key is for; None: the dataset's own key, which may seal documents and tables.
    """

    wrapping_key_id: str
    double_wrap: bool = True
    columns: bool = False
    scope: str | None = None

    @classmethod
    def of(cls, entry: KeyEntry) -> Want:
        """Return the kind of a key."""
        return cls(entry.wrapping_key_id, entry.double_wrap, for_columns(entry), entry.properties.get(SCOPE))

    def properties(self) -> dict[str, str]:
        """Return the properties of a key of this kind."""
        return (dict(COLUMNS) if self.columns else {}) | ({} if self.scope is None else {SCOPE: self.scope})

    def new_kek(self, kms: KmsClient) -> KeyEntry:
        """Make a key of this kind, and see the KMS unwrap it. This takes two calls of the KMS; in single wrap none."""
        made = new_kek(kms, self.wrapping_key_id, double_wrap=self.double_wrap, properties=self.properties())
        if made.double_wrap:
            check_wrap(kms, made)
        return made


class Uses(NamedTuple):
    """How often a job may use a key.

    Attributes:
        data_keys: The data keys to wrap.
        spare: More wraps: for documents and tables, and for data keys that are wrapped a second time.
    """

    data_keys: int = 0
    spare: int = 0


def master_now(wrapping_key_id: str, active: Iterable[KeyEntry]) -> str:
    """Return the master key that a dataset uses in the place of one.

    Args:
        wrapping_key_id: A master key.
        active: The active keys of the dataset.

    Returns:
        The master key itself if an active key is under it, else the master key that the dataset has moved to.
    """
    active = list(active)
    if any(entry.wrapping_key_id == wrapping_key_id for entry in active):
        return wrapping_key_id
    moved_to = (entry.wrapping_key_id for entry in active if wrapping_key_id in left_masters(entry))
    return next(moved_to, wrapping_key_id)


def clock_ms() -> int:
    """Return the time, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def is_idle(entry: KeyEntry, used: Container[str]) -> bool:
    """Return whether a KEK has a scope and is not in `used`: its folder, day or job is over."""
    return SCOPE in entry.properties and entry.key_id not in used
