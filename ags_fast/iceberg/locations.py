"""Where files are."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["local_path", "open_cost"]


def local_path(location: str) -> str | None:
    """Return the path of a location in a local file system, which is read and written without a file object."""
    parts = urlsplit(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return parts.path
    return location if not parts.scheme else None


def open_cost(locations: Iterable[str]) -> int:
    """Return the cost of opening one of these files, in bytes of work, as engines count it."""
    from ags_fast.jobs.run import LOCAL_OPEN_COST, STORE_OPEN_COST  # late: workers have no need of it

    return LOCAL_OPEN_COST if all(map(local_path, locations)) else STORE_OPEN_COST
