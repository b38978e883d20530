"""Check single files of an encrypted table: manifest lists, manifests, data and delete files."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ags_fast import parquet
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import policy
from ags_fast.iceberg.locations import is_encrypted, local_path
from ags_fast.iceberg.manifests import DATA, DELETED, STATUSES, Known
from ags_fast.iceberg.reading import LIST, LOST, MANIFEST, check_length
from ags_fast.puffin.vectors import decode_vector
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.reading import Node
    from ags_fast.keys.metadata import StandardKeyMetadata

__all__ = ["Item", "check_counts", "check_file", "check_node", "items_of"]

PLAIN = {
    LIST: "the snapshot has no key-id: its manifest list is in plaintext",
    MANIFEST: "the manifest is in plaintext, and shows the keys of its files to whoever can read it. Iceberg Java "
    f"1.11's rewrite_manifests does that. If it was you: load the catalog with {policy.PLAINTEXT_FILES}=allow, call "
    "rekey(table, what='data'), and expire this snapshot",
}
LOST_VECTOR = (
    "it is encrypted, but its entry has no key: nobody changed it. Iceberg Java 1.11.0 writes deletion vectors without "
    "their keys (apache/iceberg issue 16157), so nothing can open this one. Roll the table back to the snapshot before "
    "the delete, and delete again with a later version"
)


@dataclass(slots=True)
class Item:
    """A file to check."""

    known: Known
    whole: bool = True  # whether its tags are to be checked; else only the vectors
    again: bool = False  # whether it was checked before, as another manifest names it
    before: bool = False  # whether its snapshot is one from before the encryption, in which files are in plaintext
    vectors: list[tuple[int, int, int]] = field(default_factory=list)  # offset, size and number of rows of each


# ------------------------------------------------------------------------------------------------ lists and manifests


def check_node(node: Node) -> None:
    """Check what opening a list or manifest does not.

    Raises:
        IntegrityError: Bytes follow its trusted length.
        FormatError: Its list says something else of its files.
        PolicyError: It is in plaintext.
    """
    if node.nbytes > node.length:
        more = node.nbytes - node.length
        raise IntegrityError(f"all tags pass, but {more} bytes follow its trusted length of {node.length}")
    if node.kind == MANIFEST:
        check_counts(node)
    if node.known.key_metadata is None:
        raise PolicyError(PLAIN[node.kind])


def check_counts(node: Node) -> None:
    """Check that a manifest has as many files and rows as its list says. FormatError."""
    real: Counter[tuple[str, int]] = Counter()
    for one in node.named:
        real["files", one.status] += 1
        real["rows", one.status] += one.record_count
    asked = ((what, name, status) for what in ("files", "rows") for name, status in STATUSES)
    for (what, name, status), claim in zip(asked, node.known.counts, strict=False):
        if claim is not None and claim != real[what, status]:
            raise FormatError(f"its list says that it has {claim} {name} {what}, and it has {real[what, status]}")


def items_of(node: Node, *, before: bool) -> list[Item]:
    """Return the live files of a manifest. Deletion vectors in one Puffin file are one item."""
    found: dict[str, Item] = {}
    for one in node.named:
        if one.status == DELETED:
            continue
        item = found.setdefault(one.path, Item(one, before=before))
        if one.format == "PUFFIN":
            item.vectors.append((one.content_offset or 0, one.content_size or 0, one.record_count))
    return list(found.values())


# --------------------------------------------------------------------------------------------------------------- files


def check_file(inner: InnerIO, item: Item) -> int | None:
    """Check every tag of a data or delete file, and its length. Returns its bytes of plaintext, if that is known.

    Raises:
        IntegrityError, FormatError: It was changed, cut or swapped.
        PolicyError: It is in plaintext, or has a format that has no encryption.
        KeyAccessError: It is encrypted, and nothing has its key.
    """
    known, key = item.known, item.known.key_metadata
    if key is None:
        _refuse_without_key(known, inner)
    check_length(known)
    with closing(inner.new_input(known.path).open()) as opened:
        source: Any = local_path(known.path) or opened
        size = os.path.getsize(source) if source is not opened else opened.seek(0, os.SEEK_END)
        if source is opened:
            opened.seek(0)
        if size != known.length:
            raise IntegrityError(f"the storage has {size} bytes of it, and its manifest says {known.length}")
        assert key is not None
        if known.format == "PARQUET":
            return _check_parquet(source, key)
        if known.format not in ("AVRO", "PUFFIN"):
            raise PolicyError(f"it has the format {known.format}, which has no encryption that Iceberg uses")
        with AgsReader(source, key.encryption_key, length=known.length, aad_prefix=key.aad_prefix, threads=1) as reader:
            if item.whole:
                reader.verify()
            for offset, nbytes, rows in item.vectors:
                decode_vector(reader.read_at(offset, nbytes), cardinality=rows)
            return reader.length


def _check_parquet(source: Any, key: StandardKeyMetadata) -> int | None:
    keys = parquet.Keys(footer=key.encryption_key)
    report = parquet.verify(source, keys, aad_prefix=key.aad_prefix, threads=1)
    plain = [column.path for column in report.columns if column.key == "plain"]
    if report.footer != "encrypted" or plain:
        what = f"the column {plain[0]}" if plain else "its footer"
        raise PolicyError(f"{what} is in plaintext")
    return report.plain_length


def _refuse_without_key(known: Known, inner: InnerIO) -> None:
    if is_encrypted(inner.new_input(known.path)):
        if known.format == "PUFFIN":
            raise KeyAccessError(LOST_VECTOR)
        raise KeyAccessError(LOST + "Restore an older snapshot, or delete the file from the table")
    added = " Iceberg Java's add_files does that." if known.content == DATA else ""
    raise PolicyError(f"it is in plaintext, in an encrypted table.{added} Write its rows again, and expire this one")
