"""Where files are."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["local_path"]


def local_path(location: str) -> str | None:
    """Return the path of a location in a local file system, which is read and written without a file object."""
    parts = urlsplit(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return parts.path
    return location if not parts.scheme else None
