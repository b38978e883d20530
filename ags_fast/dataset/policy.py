"""The policy of a dataset for later jobs: how files share KEKs, how long KEKs serve, which versions are kept."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SCOPES = ("dataset", "partition", "day", "writer")
FILES = re.compile(r"files:([1-9][0-9]{0,8})")
DAY_MS = 86_400_000
MAX_USES = (1 << 32) - (1 << 20)


@dataclass(frozen=True, slots=True)
class Policy:
    """How files share the KEKs of a dataset, how long KEKs serve, and how many versions later jobs keep.

    Attributes:
        kek_scope: Which files have their data keys wrapped by one KEK: all files of the ``"dataset"``, of a
            ``"partition"`` (the folder that a file is in), of a ``"day"`` (UTC, when the job began), of a ``"writer"``
            (a process), or N files of a job with ``"files:N"``. Manifests and documents have the dataset's own KEK.
        kek_lifetime_days: Days after which a KEK wraps nothing more; the next job makes a new one.
        kek_uses: How many data keys jobs may wrap by one KEK: less than 2**32 (NIST SP 800-38D), minus some for
            documents of jobs and retries. A rotation may move more to a new KEK, so that it can replace any KEK.
        keep: Jobs that commit a version expire all versions but this number of the newest; None keeps all versions.
        keep_days: Versions younger than this number of days are kept too. Needs `keep`. None: no such versions.

    Raises:
        ValueError: A field is out of its bounds.
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
        """Return a copy with other values in these fields."""
        return replace(self, **changes)

    def for_expiry(self, keep: int | None, days: float | None) -> Policy:
        """Return the policy by which an expiry with these arguments keeps versions. keep None: as many as this one."""
        if keep is None and days is None:
            return self
        return self.replace(keep=self.keep if keep is None else keep, keep_days=days)

    def scopes(self, paths: Sequence[str], job_id: str, now_ms: int, writer: str | None = None) -> list[str | None]:
        """Return the scope of the KEK of each file; None is the dataset. writer: the process; None: the job is one."""
        if self.kek_scope == "partition":
            return [f"partition:{path.rpartition('/')[0]}" for path in paths]
        if self.kek_scope == "day":
            return [f"day:{datetime.fromtimestamp(now_ms / 1000, UTC):%Y-%m-%d}"] * len(paths)
        if self.kek_scope in ("dataset", "writer"):
            return [None if self.kek_scope == "dataset" else f"writer:{writer or job_id}"] * len(paths)
        count = int(self.kek_scope.partition(":")[2])
        return [f"files:{job_id}/{n // count}" for n in range(len(paths))]

    def outlived(self, created_ms: int, now_ms: int) -> bool:
        """Return whether a KEK created at `created_ms` is too old to wrap. Times are in ms since the epoch."""
        return now_ms - created_ms >= self.kek_lifetime_days * DAY_MS

    def to_json(self) -> dict[str, Any]:
        """Return the policy as a JSON object."""
        return asdict(self)
