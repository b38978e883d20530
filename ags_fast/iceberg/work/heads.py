"""The newest snapshot of a branch: its manifests, read, and the files of the snapshot that follows."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyiceberg.table.locations import load_location_provider

from ags_fast.errors import ConcurrentChangeError, PolicyError
from ags_fast.iceberg import policy, properties, rewriting
from ags_fast.iceberg.commit import edit, table_io
from ags_fast.iceberg.container import codec_of
from ags_fast.iceberg.reading import Node, refuse
from ags_fast.iceberg.snapshots import begin_snapshot, head_of, with_snapshot
from ags_fast.iceberg.walk import Tree
from ags_fast.iceberg.writing import write_sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyiceberg.table import Table
    from pyiceberg.table.locations import LocationProvider

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw

__all__ = ["Head", "Writer", "commit", "location_provider", "read_head"]


@dataclass(slots=True, repr=False)
class Head:
    """The newest snapshot of a branch."""

    snapshot: Raw
    listed: Container  # its manifest list
    named: list[Node]  # its manifests, with the records of the list
    tree: Tree  # which reads them

    @property
    def manifests(self) -> list[Node]:
        """Its manifests, read. PolicyError if one of an encrypted table is in plaintext."""
        for one in self.named:
            if self.tree.read(one).error is not None:
                refuse(one)
        return self.named

    def files(self) -> list[Known]:
        """Return its live files. A file with several deletion vectors is there several times."""
        return [file for one in self.manifests for file in one.files()]


def read_head(io: FileIO, raw: Raw, branch: str = "main") -> Head | None:
    """Read the newest snapshot of a branch. PolicyError if the list of an encrypted table is in plaintext."""
    snapshot = head_of(raw, branch)
    if snapshot is None:
        return None
    if snapshot.get("manifest-list") is None:
        raise PolicyError(
            "the newest snapshot names manifests without a list, as early writers did: append to it first"
        )
    # In an encrypted table files that were forged in plaintext would be written anew, under keys of the table.
    tree = Tree.of(io.session, io.inner, raw, plaintext=not policy.is_encrypted(raw), counts=True)
    listed = next(tree.walk([snapshot]))
    container = listed.container()
    pairs = zip(container.records(), listed.named, strict=True)
    return Head(snapshot, container, [Node(one, snapshot, record=record) for record, one in pairs], tree)


def commit(
    table: Table,
    change: Callable[[Raw, Head | None, Writer], Raw],
    *,
    branch: str = "main",
    known: tuple[Raw, Head | None] = ({}, None),
) -> Raw:
    """Commit a snapshot, and delete what attempts wrote that were not committed. Returns the new metadata.

    What an attempt wrote stays if the catalog may have had it, unless the newest metadata show that it was not made.
    `change` gets the newest snapshot of the branch. It returns the new metadata, after it has written what they name,
    and is called again if another commit came first. If it raises a ConcurrentChangeError, nothing was committed.
    `known` are metadata whose newest snapshot the caller has read.
    """
    io = table_io(table)
    writers: list[Writer] = []

    def attempt(raw: Raw) -> Raw:
        for writer in writers:
            writer.clean()
        head = known[1] if known[0] == raw else read_head(io, raw, branch)
        writers.append(Writer(io, raw, branch))
        return change(raw, head, writers[-1])

    try:
        return edit(table, attempt)
    except BaseException as error:
        for writer in writers:
            if isinstance(error, ConcurrentChangeError) or not writer.handed_over:
                writer.clean()
        raise


def location_provider(raw: Raw) -> LocationProvider:
    """Return what names new files of a table: one of PyIceberg's own, never one that the table names."""
    return load_location_provider(raw["location"], properties.shown(raw.get("properties"), properties.TABLE))


class Writer:
    """Writes the metadata files of one attempt to commit a snapshot, and deletes them if the commit fails."""

    handed_over = False  # whether the catalog may have had metadata that name what is written

    def __init__(self, io: FileIO, raw: Raw, branch: str = "main") -> None:
        self._io, self._raw, self._branch = io, raw, branch
        self._codec = codec_of(raw.get("properties") or {})
        self._written: list[str] = []

    def use(self, raw: Raw) -> Raw:
        """Go on with other metadata than those that are changed. Returns them."""
        self._raw = raw
        return raw

    def location(self, name: str, *, data: bool = False) -> str:
        """Return where a file of this name goes."""
        provider = location_provider(self._raw)
        return provider.new_data_location(name) if data else provider.new_metadata_location(name)

    def write(self, location: str, plain: bytes) -> Known:
        """Write an encrypted file."""
        self._written.append(location)
        nbytes = int(self._raw["properties"].get(policy.KEY_LENGTH, "16"))
        known = write_sealed(location, plain, nbytes, self._io.inner(location))
        self._io.table.note(known)
        return known

    def write_manifest(
        self, container: Container, kept: list[rewriting.Record], content: int, *, like: rewriting.Record, snapshot: Raw
    ) -> rewriting.Record:
        """Write a manifest with other entries, and return what the list says of it.

        `container` is the manifest that it replaces, or one of the same partition spec; `like` is what its list says.
        """
        plain = rewriting.manifest_bytes(container, kept, content, self._codec)
        written = self.write(self.location(f"{uuid.uuid4()}-m0.avro"), plain)
        written.content = content
        return rewriting.list_record(written, kept, like=like, snapshot=snapshot)

    def begin(self, summary: Mapping[str, Any], operation: str = "replace") -> Raw:
        """Return a new snapshot, without its manifest list."""
        return begin_snapshot(self._raw, operation, summary, branch=self._branch)

    def commit(self, snapshot: Raw, listed: Container, records: list[rewriting.Record]) -> Raw:
        """Write the manifest list of a snapshot, and return metadata with that snapshot as the newest."""
        plain, added_rows = rewriting.list_bytes(listed, records, snapshot, self._codec)
        written = self.write(self.location(f"snap-{snapshot['snapshot-id']}-0-{uuid.uuid4()}.avro"), plain)
        made = with_snapshot(self._raw, snapshot, written, added_rows, self._io.table, branch=self._branch)
        self.handed_over = True
        return made

    def clean(self) -> None:
        """Delete what was written: the metadata that name it were not committed."""
        while self._written:
            path = self._written.pop()
            self._io.table.forget(path)
            with suppress(OSError):  # else verify(orphans=True) names it
                self._io.inner(path).delete(path)
