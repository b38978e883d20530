"""Parquet Modular Encryption without decoding a value: encrypt, decrypt and re-key files, read them as plain ones."""

from __future__ import annotations

from ags_fast._lazy import attribute as _attribute
from ags_fast.parquet._file import FOOTER_KEY, Keys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ags_fast.parquet._check import inspect, verify
    from ags_fast.parquet._transcode import ColumnReport, Report, decrypt_file, encrypt_file, reencrypt_file
    from ags_fast.parquet._view import filesystem, open_plain
    from ags_fast.parquet._write import write_table

__all__ = [
    "FOOTER_KEY",
    "ColumnReport",
    "Keys",
    "Report",
    "decrypt_file",
    "encrypt_file",
    "filesystem",
    "inspect",
    "open_plain",
    "reencrypt_file",
    "verify",
    "write_table",
]

_HOMES = {
    "_transcode": ("ColumnReport", "Report", "decrypt_file", "encrypt_file", "reencrypt_file"),
    "_check": ("inspect", "verify"),
    "_view": ("filesystem", "open_plain"),
    "_write": ("write_table",),
}


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _HOMES, name)
