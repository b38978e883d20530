"""Where files are, and whether they are encrypted."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyiceberg.io import InputFile

__all__ = ["ENCRYPTED", "is_encrypted", "local_path", "normal", "open_cost"]

ENCRYPTED = (b"AGS1", b"PARE")  # how an encrypted file begins
SAME_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "abfs", "wasb": "abfs"}


def normal(location: str) -> str:
    """Return a location in the one spelling by which locations are compared."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return location
    scheme = scheme.lower()
    if scheme == "file":
        return "/" + rest.removeprefix("//localhost").lstrip("/")
    return f"{SAME_SCHEMES.get(scheme, scheme)}:{rest}"


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


def is_encrypted(source: InputFile) -> bool:
    """Tell by its first bytes whether a file is encrypted."""
    with source.open() as file:
        return bytes(file.read(4)) in ENCRYPTED
