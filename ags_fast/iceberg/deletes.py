"""Delete rows by deletion vectors, so that the rows which stay keep their row ids.

PyIceberg's own ``delete`` writes the rows that stay into new files, where they get new row ids. Version 3 wants a row
to keep its ``_row_id``: here only positions of deleted rows are written. Specification: Iceberg, "Deletion Vectors".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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

from ags_fast.errors import ConcurrentChangeError, FormatError, PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.commit import ATTEMPTS, edit, raw_metadata, table_io
from ags_fast.iceberg.manifests import DATA, DELETED, DELETES
from ags_fast.iceberg.puffin import DeletionVector, decode_vector, write_vectors
from ags_fast.iceberg.snapshots import head_of
from ags_fast.iceberg.work.heads import Writer, read_head
from ags_fast.iceberg.work.vectors import POSITION_DELETES, VectorFile, vectors_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.table import Table

    from ags_fast.iceberg.container import Container
    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.work.heads import Manifest

    _Held = list[tuple[Manifest, list[Known]]]  # the manifests of a snapshot, and their live files

__all__ = ["Deleted", "delete"]


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
        work = _Delete(table_io(table), head["snapshot-id"], branch, found, snapshot_properties or {})
        try:
            edit(table, work.change)
        except _MovedError:
            work.clean()
            continue
        except BaseException:
            work.abandon()
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


class _Delete:
    """What a snapshot without the rows is made of, for one head of a branch.

    Args:
        io: Of the table.
        head: The id of the snapshot in which the rows were looked for.
        branch: The branch.
        found: The positions of the rows, by data file.
        properties: More entries of the new snapshot's summary.
    """

    def __init__(
        self, io: FileIO, head: int, branch: str, found: dict[str, DeletionVector], properties: Mapping[str, str]
    ) -> None:
        self._io, self._head, self._branch, self._found, self._properties = io, head, branch, found, properties
        self._writer: Writer | None = None
        self.done = Deleted()

    def change(self, raw: Raw) -> Raw:
        """Return metadata with the new snapshot. Writes its files."""
        self.clean()
        head = read_head(self._io, raw, self._branch)
        if head is None or head.snapshot["snapshot-id"] != self._head:
            raise _MovedError(f"another commit came first on the branch {self._branch}")
        for one in head.manifests:
            if one.known.key_metadata is None:
                raise PolicyError(f"the manifest {one.known.path} is in plaintext, in an encrypted table")
        live = [(one, one.files()) for one in head.manifests]
        before = self._deleted_before(live)
        vectors, gone = self._new_vectors(live, before)
        self.done = Deleted()
        if not vectors and not gone:
            return raw
        self._writer = Writer(self._io, raw, self._branch)
        made = _Snapshot(self._writer, vectors, gone)
        records = [made.changed(one, files) for one, files in live]
        records += made.vector_manifests(live)
        summary = self._writer.begin(made.counts, "delete")["summary"]
        made.snapshot["summary"] = {**summary, **self._properties}
        self.done = Deleted(
            sum(map(len, vectors.values())) + made.counts["deleted-records"] - sum(map(len, before.values())),
            len(vectors),
            len(gone),
            made.snapshot["snapshot-id"],
        )
        return self._writer.commit(made.snapshot, head.listed, records)

    def clean(self) -> None:
        """Delete the files of an attempt that was not committed."""
        if self._writer is not None:
            self._writer.clean()

    def abandon(self) -> None:
        """After an error, delete what was written, unless the catalog may have made the commit all the same."""
        if self._writer is not None:
            self._writer.abandon()

    def _deleted_before(self, live: _Held) -> dict[str, DeletionVector]:
        """Return what deletion vectors and position deletes delete in the data files in which rows match."""
        every = [one for _, files in live for one in files]
        sequence = {one.path: one.sequence_number or 0 for one in every if one.content == DATA}
        before: dict[str, DeletionVector] = {}
        for one in every:
            if one.content != POSITION_DELETES:
                continue
            for path, vector in self._read_deletes(one).items():
                if path in self._found and (one.sequence_number or 0) >= sequence.get(path, 0):
                    before[path] = before[path] | vector if path in before else vector
        return before

    def _read_deletes(self, one: Known) -> dict[str, DeletionVector]:
        if one.referenced_data_file is not None and one.referenced_data_file not in self._found:
            return {}
        with self._io.open_known(one) as file:
            if one.format == "PUFFIN":
                if one.referenced_data_file is None or one.content_offset is None or one.content_size is None:
                    raise FormatError(f"the deletion vector in {one.path} names no data file, or no bytes")
                file.seek(one.content_offset)
                blob = file.read(one.content_size)
                return {one.referenced_data_file: decode_vector(blob, cardinality=one.record_count)}
            rows = pq.read_table(file, columns=["file_path", "pos"])
        return vectors_of(rows)

    def _new_vectors(
        self, live: _Held, before: dict[str, DeletionVector]
    ) -> tuple[dict[str, DeletionVector], set[str]]:
        """Return the new vector of each data file that gets one, and the files of which no row stays."""
        rows = {one.path: one.record_count for _, files in live for one in files if one.content == DATA}
        vectors, gone = {}, set()
        for path, found in self._found.items():
            old = before.get(path)
            whole = found if old is None else found | old
            if old is not None and len(whole) == len(old):
                before.pop(path)
            elif len(whole) == rows[path]:
                gone.add(path)
            else:
                vectors[path] = whole
        return vectors, gone


class _Snapshot:
    """A new snapshot, while its manifests are written.

    Attributes:
        snapshot: Its entry in the metadata.
        counts: What changed, for its summary.
    """

    def __init__(self, writer: Writer, vectors: Mapping[str, DeletionVector], gone: set[str]) -> None:
        self._writer, self._vectors, self._gone = writer, vectors, gone
        self.snapshot = writer.begin({}, "delete")
        self.counts: Counter[str] = Counter()

    def changed(self, one: Manifest, files: list[Known]) -> rewriting.Record:
        """Return what the new list says of a manifest, which is written anew if an entry of it goes."""
        content, counts = one.known.content, self.counts

        def goes(path: str, referenced: str | None) -> bool:
            if content == DATA:
                return path in self._gone
            return referenced is not None and (referenced in self._gone or referenced in self._vectors)

        if not any(goes(file.path, file.referenced_data_file) for file in files):
            return one.record
        container = one.container()
        kept = rewriting.entries(container, one.known)
        for entry in kept:
            file = entry["data_file"]
            if goes(file["file_path"], file.get("referenced_data_file")):
                entry["status"], entry["snapshot_id"] = DELETED, self.snapshot["snapshot-id"]
                counts["removed-files-size"] += file["file_size_in_bytes"]
                if content == DATA:
                    counts["deleted-data-files"] += 1
                    counts["deleted-records"] += file["record_count"]
                else:
                    counts["removed-delete-files"] += 1
                    counts["removed-dvs"] += 1
                    counts["removed-position-deletes"] += file["record_count"]
        return self._written(one, container, kept, content)

    def vector_manifests(self, live: _Held) -> list[rewriting.Record]:
        """Write the deletion vectors, and a manifest of them for each partition spec."""
        if not self._vectors:
            return []
        data, blobs = write_vectors(self._vectors)
        puffin = VectorFile.write(self._writer, data, dict(zip(self._vectors, blobs, strict=True)))
        made = []
        for spec in {one.known.spec_id for one, _ in live}:
            added, like = [], None
            for one, files in live:
                if one.known.content != DATA or one.known.spec_id != spec:
                    continue
                if not any(file.path in self._vectors for file in files):
                    continue
                like, container = one, one.container()
                for entry in rewriting.entries(container, one.known):
                    file = entry["data_file"]
                    path = file["file_path"]
                    if path in self._vectors:
                        fields = puffin.fields(path, path, file["partition"], len(self._vectors[path]))
                        added.append(rewriting.new_entry(container, self.snapshot["snapshot-id"], fields))
            if like is not None:
                made.append(self._written(like, like.container(), added, DELETES))
        self.counts["added-delete-files"] += len(self._vectors)
        self.counts["added-dvs"] += len(self._vectors)
        self.counts["added-position-deletes"] += sum(map(len, self._vectors.values()))
        self.counts["added-files-size"] += puffin.file.length
        return made

    def _written(
        self, like: Manifest, container: Container, kept: list[rewriting.Record], content: int
    ) -> rewriting.Record:
        written = self._writer.write_manifest(rewriting.manifest_bytes(container, kept, content))
        counts = rewriting.Counts.of(kept, self.snapshot["sequence-number"])
        return rewriting.list_record(written, counts, like=like.record, content=content, snapshot=self.snapshot)
