"""inspect: what a file claims about its encryption, without a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ags_fast.columnar.thrift import Struct
from ags_fast.parquet.opened import Opened
from ags_fast.parquet.reading import Reading
from ags_fast.parquet.spec import TAIL_NBYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ags_fast._types import ReadableSource

__all__ = ["inspect", "shown"]


def shown(value: bytes | None) -> Any:
    """Show bytes to people: key material decoded, text as text, all else as hexadecimal digits."""
    if not value:
        return None
    from ags_fast.parquet.keytools import describe

    material = describe(value)
    if material is not None:
        return material
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"hex": value.hex()}
    return text if text.isprintable() else {"hex": value.hex()}


def inspect(src: ReadableSource, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Show what a Parquet file claims about its encryption, without a key. None of it is authenticated.

    Args:
        src: A path, a URL, a bytes-like object or a seekable binary file.
        storage_options: Options for fsspec, of a URL.

    Returns:
        A dictionary that can be written as JSON. "footer" is "encrypted", "signed" or "plain". "aad_prefix" is the
        stored AAD prefix; "aad_prefix_required" tells whether readers must supply it. Key metadata is decoded if it is
        Parquet's key material (PKMT1) or text. Sizes are in bytes. "columns" is None if the footer hides the columns.

    Raises:
        FormatError: The file is not a Parquet file.
    """
    with Opened(src, Reading(storage_options=storage_options)) as opened:
        crypto = opened.crypto
        answer: dict[str, Any] = {
            "file_length": opened.source.size,
            "footer": "plain" if crypto is None else "encrypted" if opened.encrypted_footer else "signed",
            "footer_length": opened.source.size - TAIL_NBYTES - opened.footer_offset,
            "algorithm": None if crypto is None else crypto.algorithm,
            "aad_prefix": None if crypto is None else shown(crypto.stored),
            "aad_prefix_required": crypto is not None and crypto.supply and crypto.stored is None,
            "aad_file_unique": None if crypto is None or crypto.unique is None else crypto.unique.hex(),
            "footer_key_metadata": None if crypto is None else shown(crypto.key_metadata),
            "row_groups": None,
            "num_rows": None,
            "created_by": None,
            "columns": None,
        }
        if opened.encrypted_footer:
            return answer
        fields = Struct(opened.data)
        created_by = fields.binary(6)
        answer["row_groups"] = len(opened.groups)
        answer["num_rows"] = fields.integer(3)
        answer["created_by"] = None if created_by is None else created_by.decode("utf-8", "replace")
        columns: dict[int, dict[str, Any]] = {}
        for chunk in opened.chunks():
            column = columns.setdefault(
                chunk.column,
                {"path": chunk.name, "key": chunk.kind, "key_metadata": shown(chunk.key_metadata), "nbytes": 0},
            )
            column["nbytes"] += max(0, chunk.metadata.compressed_nbytes) if chunk.metadata is not None else 0
        answer["columns"] = list(columns.values())
        return answer
