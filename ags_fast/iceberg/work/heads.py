"""The newest snapshot of a branch: its manifests, read, and the files of the snapshot that follows."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyiceberg.table.locations import load_location_provider

from ags_fast.errors import PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.manifests import DELETED, Known, data_files, manifests
from ags_fast.iceberg.reading import open_whole
from ags_fast.iceberg.snapshots import begin_snapshot, head_of, with_snapshot
from ags_fast.iceberg.writing import write_sealed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw

__all__ = ["Head", "Manifest", "Writer", "read_head"]


@dataclass(slots=True, repr=False)
class Manifest:
    """A manifest of the snapshot.

    Attributes:
        record: What the list says of it.
        known: The same, and its key.
        data: Its plaintext, with keys.
    """

    record: rewriting.Record
    known: Known
    data: bytes

    def container(self) -> Container:
        """Return the manifest. Each call returns one whose keys are still there."""
        return read_container(self.data)

    def files(self) -> list[Known]:
        """Return its live files."""
        return [one for one in data_files(self.container(), self.known) if one.status != DELETED]


@dataclass(slots=True, repr=False)
class Head:
    """The newest snapshot of a branch.

    Attributes:
        snapshot: Its entry in the metadata.
        listed: Its manifest list.
        manifests: What the list names.
    """

    snapshot: Raw
    listed: Container
    manifests: list[Manifest]

    def files(self) -> list[Known]:
        """Return its live files. A file with several deletion vectors is there several times."""
        return [file for one in self.manifests for file in one.files()]


def read_head(io: FileIO, raw: Raw, branch: str = "main") -> Head | None:
    """Read the newest snapshot of a branch; None if there is none.

    Raises:
        KeyAccessError: The key of the list is lost, or the KMS refuses.
        PolicyError: The list or a manifest of an encrypted table is in plaintext.
        IntegrityError, FormatError: The list, or a manifest, was changed.
    """
    snapshot = head_of(raw, branch)
    if snapshot is None:
        return None
    path = snapshot.get("manifest-list")
    if path is None:
        raise PolicyError(
            "the newest snapshot names manifests without a list, as early writers did: append to it first"
        )
    encrypted = policy.is_encrypted(raw)
    key = io.session.list_key(path) if encrypted else None
    if encrypted and key is None:
        io.session.check_plaintext(path)  # else forged files would be written anew, under keys of the table
    data = open_whole(Known(path, 0, key), io.inner(path))
    listed = read_container(data)
    records, named = list(listed.records()), manifests(read_container(data))
    for known in named:
        if encrypted and known.key_metadata is None:
            io.session.check_plaintext(known.path)
    found = [
        Manifest(record, known, open_whole(known, io.inner(known.path)))
        for record, known in zip(records, named, strict=True)
    ]
    return Head(snapshot, listed, found)


class Writer:
    """Writes the metadata files of one attempt to commit a snapshot, and deletes them if the commit fails.

    Args:
        io: Of the table.
        raw: The metadata that are changed.
        branch: The branch that gets the snapshot.
    """

    _handed_over = False  # whether the catalog may have had metadata that name what is written

    def __init__(self, io: FileIO, raw: Raw, branch: str = "main") -> None:
        self._io, self._raw, self._branch = io, raw, branch
        self._written: list[str] = []

    def use(self, raw: Raw) -> Raw:
        """Go on with other metadata than those that are changed. Returns them."""
        self._raw = raw
        return raw

    def location(self, name: str, *, data: bool = False) -> str:
        """Return where a file of this name goes."""
        provider = load_location_provider(self._raw["location"], self._raw["properties"])
        return provider.new_data_location(name) if data else provider.new_metadata_location(name)

    def write(self, location: str, plain: bytes) -> Known:
        """Write an encrypted file."""
        self._written.append(location)
        nbytes = int(self._raw["properties"].get(policy.KEY_LENGTH, "16"))
        known = write_sealed(location, plain, nbytes, self._io.inner(location))
        self._io.session.learn(known)
        return known

    def write_manifest(self, plain: bytes) -> Known:
        """Write a manifest."""
        return self.write(self.location(f"{uuid.uuid4()}-m0.avro"), plain)

    def begin(self, summary: Mapping[str, Any], operation: str = "replace") -> Raw:
        """Return a new snapshot, without its manifest list."""
        return begin_snapshot(self._raw, operation, summary, branch=self._branch)

    def commit(self, snapshot: Raw, listed: Container, records: Iterable[rewriting.Record]) -> Raw:
        """Write the manifest list of a snapshot, and return metadata with that snapshot as the newest."""
        plain, added_rows = rewriting.list_bytes(listed, records, snapshot)
        written = self.write(self.location(f"snap-{snapshot['snapshot-id']}-0-{uuid.uuid4()}.avro"), plain)
        made = with_snapshot(self._raw, snapshot, written, added_rows, self._io.session.kms, branch=self._branch)
        self._handed_over = True
        return made

    def abandon(self) -> None:
        """After an error, delete what was written, unless the catalog may have made the commit all the same."""
        if not self._handed_over:
            self.clean()

    def clean(self) -> None:
        """Delete what was written: the metadata that name it were not committed."""
        while self._written:
            path = self._written.pop()
            self._io.session.forget(path)
            with suppress(OSError):  # else verify(orphans=True) names it
                self._io.inner(path).delete(path)
