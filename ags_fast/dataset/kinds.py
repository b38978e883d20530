"""The kinds of KEKs in a dataset, their properties, and how they retire."""

from __future__ import annotations

import time
from typing import NamedTuple

from ags_fast.keys.entry import COLUMNS, SCOPE, KeyEntry, for_columns
from ags_fast.keys.kek import check_wrap, new_kek
from ags_fast.keys.kms import KmsClient

GRACE_MS = 7 * 86_400_000  # a writer that takes longer is a mistake
SLACK_USES = 64  # of a key, for the documents and tables of a job


class Want(NamedTuple):
    """A kind of key."""

    wrapping_key_id: str  # the master key
    double_wrap: bool = True  # whether a KEK wraps data keys; else the KMS does
    columns: bool = False  # it wraps data keys of Parquet columns, and nothing else
    scope: str | None = None  # the files that it is for; None: the dataset's own, which may seal documents and tables

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


def clock_ms() -> int:
    """Return the time, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
