"""What a dataset lays down for jobs to come: how many files share a KEK, how long, and how much of the past is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ags_fast.errors import FormatError

SCOPES = ("dataset", "partition", "day", "writer")
FILES = re.compile(r"files:([1-9][0-9]{0,8})")
DAY_MS = 86_400_000
MAX_USES = (1 << 32) - (1 << 20)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a dataset's KEKs are shared, how long they serve, and how many versions later jobs keep.

    kek_scope: which files have their data keys wrapped by one KEK: all of the ``"dataset"``, those of a ``"partition"``
    (the folder that a file is in), of a ``"day"`` (UTC, when the job began), of a ``"writer"`` (a job), or
    ``"files:10000"``, so many. Manifests and documents have the dataset's own KEK in any case. In single wrap there are
    no KEKs to share. kek_lifetime_days: a KEK that is older wraps nothing more; the next job makes a new one. kek_uses:
    how many data keys a KEK may wrap: below 2**32 (NIST SP 800-38D), less some for documents of jobs and second tries.

    keep: jobs that commit a version expire all but so many of the newest; None keeps all. keep_days: and none that is
    younger.
    """

    kek_scope: str = "dataset"
    kek_lifetime_days: float = 730
    kek_uses: int = MAX_USES
    keep: int | None = None
    keep_days: float | None = None

    def __post_init__(self) -> None:
        if self.kek_scope not in SCOPES and not FILES.fullmatch(self.kek_scope):
            raise ValueError(f"kek_scope is {', '.join(SCOPES)} or 'files:10000', not {self.kek_scope!r}")
        if type(self.kek_uses) is not int or not 1 <= self.kek_uses <= MAX_USES:
            raise ValueError(f"kek_uses is a whole number from 1 to {MAX_USES}, not {self.kek_uses!r}")
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise ValueError(f"keep is a whole number of versions from 1, not {self.keep!r}")
        for name, days in (("kek_lifetime_days", self.kek_lifetime_days), ("keep_days", self.keep_days)):
            if days is not None and (type(days) not in (int, float) or not 0 <= days < 1e6):
                raise ValueError(f"{name} is a number of days from 0, not {days!r}")
        if self.keep_days is not None and self.keep is None:
            raise ValueError("keep_days goes with keep, the number of versions that are kept anyway")

    def replace(self, **changes: Any) -> Policy:
        """The same with other values in these fields."""
        return replace(self, **changes)

    def scopes(self, paths: list[str], job_id: str) -> list[str | None]:
        """For each file of a job, the scope of its KEK; None is the dataset."""
        if self.kek_scope == "partition":
            return [f"partition:{path.rpartition('/')[0]}" for path in paths]
        if self.kek_scope == "day":
            return [f"day:{datetime.now(UTC):%Y-%m-%d}"] * len(paths)
        if self.kek_scope == "writer":
            return [f"writer:{job_id}"] * len(paths)
        if self.kek_scope == "dataset":
            return [None] * len(paths)
        count = int(self.kek_scope.partition(":")[2])
        return [f"files:{job_id}/{n // count}" for n in range(len(paths))]

    def outlived(self, created_ms: int, now_ms: int) -> bool:
        """Whether a KEK made then is too old to wrap. Both in milliseconds since the epoch."""
        return now_ms - created_ms >= self.kek_lifetime_days * DAY_MS

    def has_room(self, used: int, data_keys: int, spare: int) -> bool:
        """Whether a KEK that was reserved `used` times may wrap so many more data keys, and if need be `spare` others.

        kek_uses counts data keys. The limit of AES-GCM, far above, is kept for the others, too.
        """
        return used + data_keys <= self.kek_uses and used + data_keys + spare <= MAX_USES

    def reserved(self, used: int, data_keys: int, spare: int) -> int:
        """`used`, after that. Of a small kek_uses what is spare takes a sixteenth at most."""
        return max(used + data_keys, min(self.kek_uses, used + data_keys + min(spare, self.kek_uses // 16)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Policy:
        """FormatError for what no policy is; a newer ags_fast's fields are let be."""
        if not isinstance(value, Mapping):
            raise FormatError("a dataset's policy is a JSON object")
        try:
            return cls(**{name: value[name] for name in cls.__slots__ if name in value})
        except (TypeError, ValueError) as error:
            raise FormatError(f"a dataset's policy is impossible: {error}") from None
