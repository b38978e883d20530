"""Parquet Modular Encryption without decoding a value: encrypt, decrypt and re-key files, read them as plain ones."""

from __future__ import annotations

from ags_fast._lazy import lazy as _lazy
from ags_fast.parquet.keys import FOOTER_KEY, Keys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ags_fast.parquet.inspection import inspect
    from ags_fast.parquet.plain_fs import filesystem
    from ags_fast.parquet.polars_scan import scan_polars
    from ags_fast.parquet.report import ColumnReport, Report
    from ags_fast.parquet.transcode import decrypt_file, encrypt_file, reencrypt_file
    from ags_fast.parquet.verification import verify
    from ags_fast.parquet.view import open_plain
    from ags_fast.parquet.write import write_table

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
    "scan_polars",
    "verify",
    "write_table",
]

# No module has the name of a function here: `ags_fast.parquet.verify` would be whichever of the two came last.
_HOMES = {
    "inspection": ("inspect",),
    "plain_fs": ("filesystem",),
    "polars_scan": ("scan_polars",),
    "report": ("ColumnReport", "Report"),
    "transcode": ("decrypt_file", "encrypt_file", "reencrypt_file"),
    "verification": ("verify",),
    "view": ("open_plain",),
    "write": ("write_table",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
