"""Key material of a dataset's Parquet files: what Parquet's own key tools (parquet-java, Arrow) open them with.

A file with key material has each of its DEKs in two wraps. The manifest has the one that every file has, under a KEK
and bound to its use. The other is in the file's key metadata (PKMT1): there the KMS itself wraps the DEK, since a
reader that knows no manifest knows no KEK. The manifest records the second wraps, too, so that jobs know what the
versions of a master key open, and see when somebody changed them in a file. No job here opens a file by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ags_fast._types import KeyMaterial, check_choice
from ags_fast.keys.envelope import in_threads
from ags_fast.keys.kms import Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ags_fast.dataset.entries import FileEntry
    from ags_fast.keys.envelope import Envelope

KEYTOOLS: KeyMaterial = "keytools"
NBYTES = (16, 24)  # of a DEK. A KEK has 32, so that the wrap of such a DEK never passes for that of a KEK
CONCURRENCY = 8  # calls of the KMS at once
FOOTER = ""  # for a column's path in a record: the footer key


def check_key_material(key_material: str | None, dek_length: int) -> None:
    """Raise ValueError for a kind that there is not, and for data keys of a wrong length, or as long as KEKs."""
    check_choice("dek_length", dek_length, None, 16, 24, 32)
    check_choice("key_material", key_material, KeyMaterial, None)
    if key_material is not None and dek_length not in NBYTES:
        raise ValueError(
            f"with key_material, dek_length is 16 or 24 bytes, not {dek_length}: KEKs have {dek_length} bytes, and "
            "nobody may take a data key that the KMS has wrapped for a KEK"
        )


def with_key_material(envelope: Envelope, entries: Sequence[FileEntry], deks: Iterable[bytes]) -> list[FileEntry]:
    """Return the files; those that are to have key material (it is not None) get it, from the KMS.

    deks: Of all files, in the order of `FileEntry.wraps`.
    """
    if all(entry.key_material is None for entry in entries):
        return list(entries)
    todo: list[tuple[str, bytes]] = []
    rest = iter(deks)
    for entry in entries:
        mine = [(key_id, next(rest)) for key_id, _, _ in entry.wraps("")]
        todo += mine if entry.key_material is not None else []
    done = iter(in_threads(lambda item: envelope.wrap_bare(*item), todo, min(CONCURRENCY, len(todo))))
    made = []
    for entry in entries:
        if entry.key_material is not None:
            columns = [FOOTER, *(key["column"] for key in entry.column_keys or ())]
            entry = entry._replace(key_material=tuple(_record(column, *next(done)) for column in columns))
        made.append(entry)
    return made


def _record(column: str, master: str, wrapped: bytes) -> dict[str, Any]:
    version = wrapped.version if isinstance(wrapped, Wrapped) else None
    return {"column": column, "wrapping_key_id": master, "master_version": version, "wrapped_dek": bytes(wrapped)}
