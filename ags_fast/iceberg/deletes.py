"""Delete rows by deletion vectors, so that the rows which stay keep their row ids.

PyIceberg's own ``delete`` writes the rows that stay into new files, where they get new row ids. Version 3 wants a row
to keep its ``_row_id``: here only positions of deleted rows are written. Specification: Iceberg, "Deletion Vectors".
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io.pyarrow import ArrowScan, expression_to_pyarrow
from pyiceberg.schema import prune_columns
from pyiceberg.table import FileScanTask
from pyiceberg.table.locations import load_location_provider

from ags_fast.errors import ConcurrentChangeError, FormatError, PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.commit import ATTEMPTS, edit, raw_metadata, table_io
from ags_fast.iceberg.container import read_container
from ags_fast.iceberg.manifests import DATA, DELETED, DELETES, Known, data_files, manifests
from ags_fast.iceberg.puffin import DeletionVector, decode_vector, write_vectors
from ags_fast.iceberg.reading import open_whole
from ags_fast.iceberg.snapshots import begin_snapshot, head_of, with_snapshot
from ags_fast.iceberg.writing import write_sealed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.io import FileIO as InnerIO
    from pyiceberg.table import Table

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.metadata import Raw

__all__ = ["Deleted", "delete"]

POSITION_DELETES = 1  # content of a file


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete did.

    Attributes:
        rows: How many rows it deleted.
        vectors: How many data files have a new deletion vector.
        files: How many data files it removed, since no row of theirs stays.
        snapshot_id: The new snapshot; None if no row matched, and nothing was committed.
    """

    rows: int = 0
    vectors: int = 0
    files: int = 0
    snapshot_id: int | None = None


class _MovedError(ConcurrentChangeError):
    """The branch has another head than the one whose rows were looked at."""


def delete(
    table: Table,
    row_filter: str | BooleanExpression,
    *,
    branch: str = "main",
    snapshot_properties: Mapping[str, str] | None = None,
    case_sensitive: bool = True,
) -> Deleted:
    """Delete the rows that match a filter, and leave the files of the others as they are.

    Each data file with such a row gets one deletion vector, which includes what deletion vectors and position deletes
    have deleted there before; a data file whose last row goes is removed. Afterwards `table` is the new version.

    Args:
        table: An encrypted table of a catalog of ags_fast.iceberg.
        row_filter: As for ``scan``.
        branch: The branch to commit to.
        snapshot_properties: More entries of the snapshot's summary.
        case_sensitive: Whether the filter names columns with their case.

    Returns:
        How many rows and files went.

    Raises:
        ConcurrentChangeError: Other commits to the branch came first, 20 times in a row.
        PolicyError: The table is in plaintext.
        IntegrityError, FormatError: A file was changed.
    """
    expression = parse(row_filter) if isinstance(row_filter, str) else row_filter
    for _ in range(ATTEMPTS):
        table.refresh()
        raw = raw_metadata(table)
        if not policy.is_encrypted(raw):
            raise PolicyError(f"the table has no {policy.KEY_ID}: use PyIceberg's own delete for a table in plaintext")
        head = head_of(raw, branch)
        if head is None:
            return Deleted()
        found = _matches(table, expression, branch, case_sensitive)
        if not found:
            return Deleted()
        work = _Delete(table_io(table), head["snapshot-id"], branch, found, dict(snapshot_properties or {}))
        try:
            edit(table, work.change)
        except _MovedError:
            work.clean()
            continue
        except BaseException:
            if not work.handed_over:  # afterwards the catalog may have made the commit, although an error came back
                work.clean()
            raise
        return work.done
    raise ConcurrentChangeError(f"other commits to {branch} came first, {ATTEMPTS} times in a row: try again")


def _matches(
    table: Table, expression: BooleanExpression, branch: str, case_sensitive: bool
) -> dict[str, DeletionVector]:
    """Return the positions of the rows that match, by data file, deleted rows included."""
    metadata, schema = table.metadata, table.schema()
    bound = bind(schema, expression, case_sensitive=case_sensitive)
    ids = extract_field_ids(bound)
    if not ids:  # the filter is true for all rows, or for none
        wanted: Any = schema
    else:
        wanted = prune_columns(schema, ids, select_full_types=True)
    scan = ArrowScan(metadata, table.io, wanted, AlwaysTrue())
    found = {}
    planned = table.scan(row_filter=expression, case_sensitive=case_sensitive)
    if branch != "main":  # a scan of a snapshot has the columns of that time
        planned = planned.use_ref(branch)
    for task in planned.plan_files():
        rows = scan.to_table([FileScanTask(task.file)])
        if len(rows) != task.file.record_count:
            raise FormatError(f"{task.file.file_path} has {len(rows)} rows, its entry says {task.file.record_count}")
        name = "position" + "_" * max(map(len, rows.column_names), default=0)
        rows = rows.append_column(name, pa.array(np.arange(len(rows))))
        matching = rows.filter(expression_to_pyarrow(bound, schema))[name]
        if len(matching):
            found[task.file.file_path] = DeletionVector.of(matching.to_numpy())
    return found


@dataclass(slots=True)
class _Manifest:
    """A manifest of the snapshot that is changed."""

    record: rewriting.Record  # what the list says of it
    known: Known
    data: bytes
    files: list[Known]

    def container(self) -> Container:
        return read_container(self.data)


@dataclass
class _Delete:
    """One attempt: what a snapshot without the rows is made of."""

    io: FileIO
    head: int
    branch: str
    found: dict[str, DeletionVector]
    properties: dict[str, str]
    written: list[str] = field(default_factory=list)
    handed_over: bool = False  # whether the catalog has had metadata that name what is written
    done: Deleted = field(default_factory=Deleted)

    def change(self, raw: Raw) -> Raw:
        """Return metadata with the new snapshot. Writes its files."""
        self.clean()
        self.handed_over = False
        head = head_of(raw, self.branch)
        if head is None or head["snapshot-id"] != self.head:
            raise _MovedError(f"another commit came first on the branch {self.branch}")
        self.done = Deleted()
        session, path = self.io.session, head["manifest-list"]
        inner = self.io.inner(path)
        data = open_whole(Known(path, 0, session.list_key(path)), inner)
        listed = read_container(data)
        records = list(listed.records())
        all_manifests = [
            self._read(record, known, inner) for record, known in zip(records, manifests(listed), strict=True)
        ]
        before = self._deleted_before(all_manifests, inner)
        vectors, gone = self._new_vectors(all_manifests, before)
        if not vectors and not gone:
            return raw
        counts: Counter[str] = Counter()
        snapshot = begin_snapshot(raw, "delete", {}, branch=self.branch)
        made = [self._changed(one, vectors, gone, snapshot, counts, raw, inner) for one in all_manifests]
        made += self._vector_manifests(all_manifests, vectors, snapshot, counts, raw, inner)
        summary = begin_snapshot(raw, "delete", counts, branch=self.branch)["summary"]
        snapshot["summary"] = {**summary, **self.properties}
        plain, added_rows = rewriting.list_bytes(read_container(data), made, snapshot)
        written = self._write(f"snap-{snapshot['snapshot-id']}-0-{uuid.uuid4()}.avro", plain, raw, inner)
        self.done = Deleted(
            sum(map(len, vectors.values())) + counts["deleted-records"] - sum(map(len, before.values())),
            len(vectors),
            len(gone),
            snapshot["snapshot-id"],
        )
        made_raw = with_snapshot(raw, snapshot, written, added_rows, session.kms, branch=self.branch)
        self.handed_over = True
        return made_raw

    def clean(self) -> None:
        """Delete the files of an attempt that was not committed."""
        while self.written:
            path = self.written.pop()
            try:
                self.io.inner(path).delete(path)
            except OSError:
                pass  # verify(orphans=True) names it

    def _read(self, record: rewriting.Record, known: Known, inner: InnerIO) -> _Manifest:
        if known.key_metadata is None:
            raise PolicyError(f"the manifest {known.path} is in plaintext, in an encrypted table")
        data = open_whole(known, inner)
        return _Manifest(record, known, data, data_files(read_container(data), known))

    def _deleted_before(self, all_manifests: list[_Manifest], inner: InnerIO) -> dict[str, DeletionVector]:
        """Return what deletion vectors and position deletes delete in the data files in which rows match."""
        sequence = {
            one.path: one.sequence_number or 0
            for manifest in all_manifests
            if manifest.known.content == DATA
            for one in manifest.files
            if one.status != DELETED
        }
        before: dict[str, DeletionVector] = {}
        for manifest in all_manifests:
            if manifest.known.content != DELETES:
                continue
            for one in manifest.files:
                if one.status == DELETED or one.content != POSITION_DELETES:
                    continue
                for path, vector in self._read_deletes(one, inner).items():
                    if path in self.found and (one.sequence_number or 0) >= sequence.get(path, 0):
                        before[path] = before[path] | vector if path in before else vector
        return before

    def _read_deletes(self, one: Known, inner: InnerIO) -> dict[str, DeletionVector]:
        if one.referenced_data_file is not None and one.referenced_data_file not in self.found:
            return {}
        with self.io.open_known(one) as file:
            if one.format == "PUFFIN":
                if one.referenced_data_file is None or one.content_offset is None or one.content_size is None:
                    raise FormatError(f"the deletion vector in {one.path} names no data file, or no bytes")
                file.seek(one.content_offset)
                blob = file.read(one.content_size)
                return {one.referenced_data_file: decode_vector(blob, cardinality=one.record_count)}
            rows = pq.read_table(file, columns=["file_path", "pos"])
        paths = rows["file_path"].unique().to_pylist()
        return {
            path: DeletionVector.of(rows.filter(pa.compute.equal(rows["file_path"], path))["pos"].to_numpy())
            for path in paths
            if path in self.found
        }

    def _new_vectors(
        self, all_manifests: list[_Manifest], before: dict[str, DeletionVector]
    ) -> tuple[dict[str, DeletionVector], set[str]]:
        """Return the new vector of each data file that gets one, and the files of which no row stays."""
        rows = {
            one.path: one.record_count for manifest in all_manifests for one in manifest.files if one.content == DATA
        }
        vectors, gone = {}, set()
        for path, found in self.found.items():
            old = before.get(path)
            whole = found if old is None else found | old
            if old is not None and len(whole) == len(old):
                before.pop(path)
            elif len(whole) == rows[path]:
                gone.add(path)
            else:
                vectors[path] = whole
        return vectors, gone

    def _changed(
        self,
        one: _Manifest,
        vectors: Mapping[str, DeletionVector],
        gone: set[str],
        snapshot: Raw,
        counts: Counter[str],
        raw: Raw,
        inner: InnerIO,
    ) -> rewriting.Record:
        """Return what the new list says of a manifest, which is written anew if an entry of it goes."""
        content = one.known.content

        def goes(path: str, referenced: str | None) -> bool:
            if content == DATA:
                return path in gone
            return referenced is not None and (referenced in gone or referenced in vectors)

        if not any(goes(file.path, file.referenced_data_file) for file in one.files if file.status != DELETED):
            return one.record
        container = one.container()
        kept = rewriting.entries(container, one.known)
        for entry in kept:
            file = entry["data_file"]
            if goes(file["file_path"], file.get("referenced_data_file")):
                entry["status"], entry["snapshot_id"] = DELETED, snapshot["snapshot-id"]
                counts["removed-files-size"] += file["file_size_in_bytes"]
                if content == DATA:
                    counts["deleted-data-files"] += 1
                    counts["deleted-records"] += file["record_count"]
                else:
                    counts["removed-delete-files"] += 1
                    counts["removed-dvs"] += 1
                    counts["removed-position-deletes"] += file["record_count"]
        written = self._write(f"{uuid.uuid4()}-m0.avro", rewriting.manifest_bytes(container, kept, content), raw, inner)
        count = rewriting.Counts.of(kept, snapshot["sequence-number"])
        return rewriting.list_record(written, count, like=one.record, content=content, snapshot=snapshot)

    def _vector_manifests(
        self,
        all_manifests: list[_Manifest],
        vectors: Mapping[str, DeletionVector],
        snapshot: Raw,
        counts: Counter[str],
        raw: Raw,
        inner: InnerIO,
    ) -> list[rewriting.Record]:
        """Write the deletion vectors, and a manifest of them for each partition spec."""
        if not vectors:
            return []
        puffin, blobs = write_vectors(vectors)
        location = self._location(raw, f"{uuid.uuid4()}-deletes.puffin", data=True)
        sealed = self._write_to(location, puffin, raw, inner)
        assert sealed.key_metadata is not None
        places = dict(zip(vectors, blobs, strict=True))
        made = []
        for spec in {one.known.spec_id for one in all_manifests}:
            added, like = [], None
            for one in all_manifests:
                if one.known.content != DATA or one.known.spec_id != spec:
                    continue
                if not any(file.path in vectors for file in one.files if file.status != DELETED):
                    continue
                like = one
                container = one.container()
                for entry in rewriting.entries(container, one.known):
                    path = entry["data_file"]["file_path"]
                    if path in vectors:
                        file = {
                            "content": POSITION_DELETES,
                            "file_path": location,
                            "file_format": "PUFFIN",
                            "partition": entry["data_file"]["partition"],
                            "record_count": len(vectors[path]),
                            "file_size_in_bytes": sealed.length,
                            "key_metadata": sealed.key_metadata.encode(),
                            "referenced_data_file": path,
                            "content_offset": places[path].offset,
                            "content_size_in_bytes": places[path].length,
                        }
                        added.append(rewriting.new_entry(container, snapshot["snapshot-id"], file))
            if like is not None:
                plain = rewriting.manifest_bytes(like.container(), added, DELETES)
                written = self._write(f"{uuid.uuid4()}-m0.avro", plain, raw, inner)
                count = rewriting.Counts.of(added, snapshot["sequence-number"])
                made.append(rewriting.list_record(written, count, like=like.record, content=DELETES, snapshot=snapshot))
        counts["added-delete-files"] += len(vectors)
        counts["added-dvs"] += len(vectors)
        counts["added-position-deletes"] += sum(map(len, vectors.values()))
        counts["added-files-size"] += sealed.length
        return made

    def _location(self, raw: Raw, name: str, *, data: bool = False) -> str:
        provider = load_location_provider(raw["location"], raw["properties"])
        return provider.new_data_location(name) if data else provider.new_metadata_location(name)

    def _write(self, name: str, plain: bytes, raw: Raw, inner: InnerIO) -> Known:
        return self._write_to(self._location(raw, name), plain, raw, inner)

    def _write_to(self, location: str, plain: bytes, raw: Raw, inner: InnerIO) -> Known:
        self.written.append(location)
        known = write_sealed(location, plain, int(raw["properties"].get(policy.KEY_LENGTH, "16")), inner)
        self.io.session.learn(known)
        return known
