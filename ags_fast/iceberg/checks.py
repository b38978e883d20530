"""Check single files of an encrypted table: manifest lists, manifests, data and delete files, statistics.

A function here returns what a file names, or raises the error that says what is wrong with the file.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ags_fast import parquet
from ags_fast.ags1 import AgsCodec
from ags_fast.errors import FormatError, IntegrityError, KeyAccessError, PolicyError
from ags_fast.iceberg import manifests
from ags_fast.iceberg.container import Container, read_container
from ags_fast.iceberg.locations import local_path
from ags_fast.iceberg.manifests import DATA, DELETED, Known
from ags_fast.iceberg.puffin import decode_vector
from ags_fast.iceberg.reading import check_length
from ags_fast.keys.iceberg import manifest_list_key, read_encryption_keys
from ags_fast.stream import AgsReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.io import FileIO as InnerIO

    from ags_fast.iceberg.metadata import Raw
    from ags_fast.keys.kms import KmsClient
    from ags_fast.keys.metadata import StandardKeyMetadata

__all__ = [
    "Item",
    "ListKeys",
    "Listed",
    "Opener",
    "check_file",
    "kind_of",
    "read_list",
    "read_manifest",
    "statistics_state",
]

AGS1, PARE = b"AGS1", b"PARE"
# Ids of the fields of a list with the files and rows of a manifest: added, existing, deleted.
COUNTS = ((504, 505, 506), (512, 513, 514))
STATUSES = (1, 0, 2)
LOST = "it is encrypted, but its entry has no key: the writer lost the key, and nothing can open the file. "
LOST_VECTOR = (
    "it is encrypted, but its entry has no key: nobody changed it. Iceberg Java 1.11.0 writes deletion vectors without "
    "their keys (apache/iceberg issue 16157), so nothing can open this one. Roll the table back to the snapshot before "
    "the delete, and delete again with a later version"
)


@dataclass(slots=True)
class Listed:
    """What a list says of a manifest.

    Attributes:
        known: The manifest.
        files: How many files it has: added, existing, deleted; None where the list does not say.
        rows: The same of rows.
        before: Whether its snapshot is one from before the encryption, in which files are in plaintext.
    """

    known: Known
    files: tuple[int | None, ...]
    rows: tuple[int | None, ...]
    before: bool = False


@dataclass(slots=True)
class Item:
    """A file to check.

    Attributes:
        known: What a manifest says of it.
        whole: Whether its tags are to be checked; else only the vectors.
        vectors: Offset, size and number of rows of the deletion vectors in it.
        again: Whether it was checked before, as another manifest names it.
        before: As of a `Listed`.
    """

    known: Known
    whole: bool = True
    again: bool = False
    before: bool = False
    vectors: list[tuple[int, int, int]] = field(default_factory=list)


class ListKeys:
    """The keys of the manifest lists that metadata name. A KEK that the KMS refuses is asked for once.

    Args:
        raw: The metadata.
        kms: Unwraps the KEKs.
    """

    def __init__(self, raw: Mapping[str, Any], kms: KmsClient) -> None:
        self._entries = {one.get("key-id"): one for one in raw.get("encryption-keys") or () if isinstance(one, dict)}
        self._kms = kms
        self._refused: dict[str, str] = {}

    def of(self, snapshot: Raw) -> StandardKeyMetadata | None:
        """Return the key of a snapshot's list; None if it is in plaintext.

        Raises:
            KeyAccessError: The key or its KEK is lost, or the KMS refuses.
            IntegrityError, FormatError: The key was changed.
        """
        key_id = snapshot.get("key-id")
        if not key_id:
            return None
        key = self._entries.get(key_id)
        kek_id = str((key or {}).get("encrypted-by-id"))
        if kek_id in self._refused:
            raise KeyAccessError(self._refused[kek_id])
        kek = self._entries.get(kek_id)
        entries = [one for one in (key, kek) if one is not None]
        try:
            return manifest_list_key(read_encryption_keys(entries), key_id, self._kms)
        except KeyAccessError as error:
            if kek is not None:
                self._refused[kek_id] = str(error)
            raise


def kind_of(one: Known) -> str:
    """Return what a file of a manifest is: ``data``, ``deletion-vector``, or the kind of its deletes."""
    if one.format == "PUFFIN":
        return "deletion-vector"
    return ("data", "position-deletes", "equality-deletes")[one.content]


# ------------------------------------------------------------------------------------------------ lists and manifests


def read_list(path: str, key: StandardKeyMetadata | None, inner: InnerIO) -> tuple[list[Listed], int]:
    """Return the manifests that a list names, and the list's bytes on storage.

    Args:
        path: The list.
        key: Its key; None reads plaintext.
        inner: Opens files as they are stored.
    """
    container, nbytes = _container(Known(path, 0, key), inner)
    if not manifests.is_list(container):
        raise FormatError("it is a manifest, where a manifest list belongs")
    names = {one.get("field-id"): one["name"] for one in container.schema["fields"]}
    counts = [
        [tuple(record.get(names.get(field_id, "")) for field_id in ids) for ids in COUNTS]
        for record in container.records()
    ]
    found = manifests.manifests(container)
    return [Listed(one, files, rows) for one, (files, rows) in zip(found, counts, strict=True)], nbytes


def read_manifest(listed: Listed, inner: InnerIO) -> tuple[list[Item], str | None]:
    """Return the live files that a manifest names, and what its list says wrongly of it, or None.

    Deletion vectors in one Puffin file are one item.
    """
    known = listed.known
    container, _ = _container(known, inner)
    if manifests.is_list(container):
        raise FormatError("it is a manifest list, where a manifest belongs")
    files: Counter[int] = Counter()
    rows: Counter[int] = Counter()
    found: dict[str, Item] = {}
    for one in manifests.data_files(container, known):
        files[one.status] += 1
        rows[one.status] += one.record_count
        if one.status == DELETED:
            continue
        item = found.setdefault(one.path, Item(one, before=listed.before))
        if one.format == "PUFFIN":
            item.vectors.append((one.content_offset or 0, one.content_size or 0, one.record_count))
    return list(found.values()), _disagreement(listed, files, rows)


def _disagreement(listed: Listed, files: Counter[int], rows: Counter[int]) -> str | None:
    for what, claimed, real in (("files", listed.files, files), ("rows", listed.rows, rows)):
        for name, status, claim in zip(("added", "existing", "deleted"), STATUSES, claimed, strict=True):
            if claim is not None and claim != real[status]:
                return f"its list says that it has {claim} {name} {what}, and it has {real[status]}"
    return None


def _container(known: Known, inner: InnerIO) -> tuple[Container, int]:
    """Open a whole file, also if its entry has no key."""
    with inner.new_input(known.path).open() as file:
        data = file.read()
    key = known.key_metadata
    if key is None:
        if bytes(data[:4]) == AGS1:
            raise KeyAccessError(LOST + "Roll the table back to a snapshot that does not need it")
        return read_container(data), len(data)
    check_length(known)
    length = key.file_length if key.file_length is not None else known.length or None
    plain = AgsCodec(key.encryption_key, aad_prefix=key.aad_prefix).decrypt(data, length=length)
    if length is not None and len(data) > length:
        raise IntegrityError(f"all tags pass, but {len(data) - length} bytes follow its trusted length of {length}")
    return read_container(plain), len(data)


# --------------------------------------------------------------------------------------------------------------- files


class Opener(Protocol):
    """What opens files as they are stored, such as a `FileIO`."""

    def inner(self, location: str, /) -> InnerIO:
        """Return PyIceberg's own FileIO for a location."""


def check_file(io: Opener, item: Item) -> int | None:
    """Check every tag of a data or delete file, and its length. Returns its bytes of plaintext, if that is known.

    Raises:
        IntegrityError, FormatError: It was changed, cut or swapped.
        PolicyError: It is in plaintext, or has a format that has no encryption.
        KeyAccessError: It is encrypted, and nothing has its key.
        OSError: It cannot be read, or is not there.
    """
    known, inner = item.known, io.inner(item.known.path)
    key = known.key_metadata
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
    with inner.new_input(known.path).open() as file:
        head = bytes(file.read(4))
    if head in (AGS1, PARE):
        if known.format == "PUFFIN":
            raise KeyAccessError(LOST_VECTOR)
        raise KeyAccessError(LOST + "Restore an older snapshot, or delete the file from the table")
    added = " Iceberg Java's add_files does that." if known.content == DATA else ""
    raise PolicyError(f"it is in plaintext, in an encrypted table.{added} Write its rows again, and expire this one")


def statistics_state(one: Raw, inner: InnerIO) -> tuple[str, int]:
    """Return what protects a statistics file: ``plain`` or ``encrypted``; and its bytes on storage."""
    source = inner.new_input(one["statistics-path"])
    with source.open() as file:
        head = bytes(file.read(4))
    return ("encrypted" if head in (AGS1, PARE) else "plain"), len(source)
