"""Rows: what a job has done with one file, or with one of the objects and keys around files."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """The outcome of one file. Holds no key, wrapped or not."""

    src: str
    dst: str | None
    status: str  # "ok", "skipped" or "failed"; "planned" in a dry run
    error_class: str | None = None  # why the file failed, or was skipped
    error: str | None = None
    plain_length: int | None = None  # bytes
    file_length: int | None = None  # bytes, encrypted
    block_size: int | None = None  # bytes
    format: str | None = None
    key_id: str | None = None
    seconds: float = 0.0
    attempt: int = 0  # 0 is the first
    host: str | None = None
    checksum: str | None = None  # encrypt with checksum=True: of the source, keyed, in hex
    source_length: int | None = None  # bytes of the source; of Parquet, `plain_length` is of the plaintext view

    @property
    def nbytes(self) -> int:
        """The size of the file for users, in bytes; 0 if that is not known."""
        return self.source_length or self.plain_length or 0


def shown(name: str) -> str:
    """Return a file's name as text for tables and documents; bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
