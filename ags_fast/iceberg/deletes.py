"""Delete rows by deletion vectors, so that the rows which stay keep their row ids.

PyIceberg's own ``delete`` writes the rows that stay into new files, where they get new row ids. Version 3 wants a row
to keep its ``_row_id``: here only positions of deleted rows are written. Specification: Iceberg, "Deletion Vectors".
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyiceberg.exceptions import ValidationException
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import (
    _InclusiveMetricsEvaluator,  # noqa: PLC2701 (it has no public name)
    bind,
    extract_field_ids,
)
from pyiceberg.io.pyarrow import ArrowScan, expression_to_pyarrow
from pyiceberg.manifest import ManifestContent, read_manifest_list
from pyiceberg.schema import prune_columns
from pyiceberg.table import FileScanTask
from pyiceberg.table.refs import SnapshotRefType

from ags_fast.errors import FormatError, PolicyError
from ags_fast.iceberg import policy, rewriting
from ags_fast.iceberg.commit import table_io
from ags_fast.iceberg.manifests import DATA, DELETED
from ags_fast.iceberg.reading import MANIFEST
from ags_fast.iceberg.snapshots import check_texts, snapshot_of, told
from ags_fast.iceberg.walk import Tree
from ags_fast.iceberg.work.heads import Writer, commit
from ags_fast.iceberg.work.vectors import POSITION_DELETES, VectorFile, read_deletes
from ags_fast.puffin.vectors import DeletionVector, decode_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from ags_fast.iceberg.io import FileIO
    from ags_fast.iceberg.manifests import Known
    from ags_fast.iceberg.metadata import Raw
    from ags_fast.iceberg.reading import Node
    from ags_fast.iceberg.work.heads import Head

    _Held = list[tuple[Node, list[Known]]]  # the manifests of a snapshot, and their live files
    _Rows = dict[str, DeletionVector]  # positions by data file

__all__ = ["Deleted", "delete"]

ISOLATION = "write.delete.isolation-level"
SERIALIZABLE, SNAPSHOT = "serializable", "snapshot"


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

    Rows are looked for in the snapshot that `table` has, as in PyIceberg 0.12. If other commits to the branch came
    since, the delete is made on top of them, or it conflicts with one. The table's property
    ``write.delete.isolation-level`` decides what becomes of rows that were added since: with ``serializable``, the
    default, a file that may have rows that match is a conflict; with ``snapshot`` such rows stay.

    Args:
        table: An encrypted table of a catalog of ags_fast.iceberg.
        row_filter: As for ``scan``.
        branch: The branch to commit to.
        snapshot_properties: More entries of the snapshot's summary: text. Those that a delete makes win.
        case_sensitive: Whether the filter names columns with their case.

    Returns:
        How many rows and files went.

    Raises:
        ValidationException: PyIceberg's. A commit since has added rows that may match, has deleted some of the rows
            itself, or has removed or rewritten their files. `table` is the newest version then.
        ConcurrentChangeError: Other commits came first, 20 times in a row.
        PolicyError: The table is in plaintext.
        IntegrityError, FormatError: A file was changed.
        TypeError: `snapshot_properties` are not text.
        ValueError: `branch` is a tag, or the isolation level is unknown.
    """
    check_texts(snapshot_properties or {})
    if not table_io(table).encrypted:
        raise PolicyError(f"the table has no {policy.KEY_ID}: use PyIceberg's own delete for a table in plaintext")
    ref = table.metadata.refs.get(branch)
    if ref is not None and ref.snapshot_ref_type != SnapshotRefType.BRANCH:
        raise ValueError(f"{branch} is a tag, not a branch: no commit changes it")
    expression = parse(row_filter) if isinstance(row_filter, str) else row_filter
    found = {} if ref is None else _matches(table, expression, branch, case_sensitive)
    evaluate = _InclusiveMetricsEvaluator(table.schema(), expression, case_sensitive).eval
    base = None if ref is None else ref.snapshot_id
    work = _Delete(table_io(table), base, branch, found, evaluate, snapshot_properties or {})
    commit(table, work.change, branch=branch)
    return work.done


def _matches(table: Table, expression: BooleanExpression, branch: str, case_sensitive: bool) -> _Rows:
    """Return the positions of the rows that match, by data file, deleted rows included."""
    metadata, schema = table.metadata, table.schema()
    bound = bind(schema, expression, case_sensitive=case_sensitive)
    ids = extract_field_ids(bound)  # none: the filter is true for all rows, or for none
    wanted = prune_columns(schema, ids, select_full_types=True) if ids else schema
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
class _Delete:
    """What a snapshot without the rows is made of, for one head of a branch."""

    io: FileIO
    base: int | None  # the id of the snapshot in which the rows were looked for; None if the branch had none
    branch: str
    found: _Rows  # the rows that match, those included that `base` had deleted
    evaluate: Callable[[DataFile], bool]  # tells by a data file's bounds whether it may have rows that match
    properties: Mapping[str, str]  # more entries of the new snapshot's summary
    done: Deleted = field(default_factory=Deleted)

    def change(self, raw: Raw, head: Head | None, writer: Writer) -> Raw:
        """Return metadata with the new snapshot. Writes its files. Refuses, as `_check_others` does."""
        self.done = Deleted()
        live = [(one, one.files()) for one in (head.manifests if head is not None else ())]
        for one, _ in live:
            if one.known.key_metadata is None:
                raise PolicyError(f"the manifest {one.known.path} is in plaintext, in an encrypted table")
        files = [one for _, named in live for one in named]
        before = self._deleted_before(files)
        if (head.snapshot["snapshot-id"] if head is not None else None) != self.base:
            self._check_others(raw, head, files, before)
        vectors, gone = self._new_vectors(files, before)
        if head is None or not (vectors or gone):
            return raw
        made = _Snapshot(writer, vectors, gone)
        records = [made.changed(one, named) for one, named in live]
        records += made.vector_manifests(live)
        summary = writer.begin(made.counts, "delete")["summary"]
        made.snapshot["summary"] = told(summary, self.properties)
        rows = sum(map(len, vectors.values())) + made.counts["deleted-records"] - sum(map(len, before.values()))
        self.done = Deleted(rows, len(vectors), len(gone), made.snapshot["snapshot-id"])
        return writer.commit(made.snapshot, head.listed, records)

    def _check_others(self, raw: Raw, head: Head | None, files: list[Known], before: _Rows) -> None:
        """Refuse a delete that a commit since its base contradicts. PyIceberg's functions differ between versions."""
        level = str(raw["properties"].get(ISOLATION, SERIALIZABLE)).lower()
        if level not in (SERIALIZABLE, SNAPSHOT):
            raise ValueError(f"{ISOLATION} is {level!r}: it must be {SERIALIZABLE!r} or {SNAPSHOT!r}")
        since: dict[Any, Raw] = {}
        number = None if head is None else head.snapshot["snapshot-id"]
        while number not in (self.base, *since) and (snapshot := snapshot_of(raw, number)) is not None:
            since[number], number = snapshot, snapshot.get("parent-snapshot-id")
        base = snapshot_of(raw, self.base)
        if number != self.base or (base is None and number is not None):
            raise self._conflict(f"snapshot {self.base}, in which rows were looked for, is not in its history")
        added = (file for snapshot in since.values() for file in self._added(snapshot))
        if level == SERIALIZABLE and any(map(self._may_match, added)):
            raise self._conflict("another commit added a file that may have rows that match")
        if lost := self.found.keys() - {one.path for one in files if one.content == DATA}:
            raise self._conflict(f"another commit removed or rewrote {min(lost)}, which has rows that match")
        kinds = {one.content for one in files if one.content != DATA and one.snapshot_id in since}
        if base is None or not (kinds and self.found):
            return
        walked = Tree.of(self.io.session, self.io.inner, raw).walk([base])
        then = self._deleted_before([file for one in walked if one.kind == MANIFEST for file in one.files()])
        if kinds != {POSITION_DELETES} or self._rows(then) != self._rows(before):
            raise self._conflict("another commit deleted rows that match")

    def _may_match(self, file: DataFile) -> bool:
        try:
            return self.evaluate(file)
        except struct.error:  # the column has a wider type since
            return True

    def _conflict(self, why: str) -> ValidationException:
        return ValidationException(f"the branch {self.branch} has moved: {why}. Delete again from the newest version")

    def _rows(self, before: _Rows) -> int:
        """Return how many rows match that were not deleted before."""
        none = DeletionVector.of(())
        return sum(len(one | before.get(path, none)) - len(before.get(path, none)) for path, one in self.found.items())

    def _added(self, snapshot: Raw) -> Iterator[DataFile]:
        """Yield the data files whose rows a snapshot has added."""
        number = snapshot["snapshot-id"]
        if (snapshot.get("summary") or {}).get("operation") not in ("append", "overwrite"):
            return  # a `replace` has the rows that were there
        for one in read_manifest_list(self.io.new_input(snapshot["manifest-list"])):
            if one.added_snapshot_id == number and one.content == ManifestContent.DATA:
                entries = one.fetch_manifest_entry(self.io)
                yield from (entry.data_file for entry in entries if entry.snapshot_id == number)

    def _deleted_before(self, files: list[Known]) -> _Rows:
        """Return what deletion vectors and position deletes delete in the data files in which rows match."""
        sequence = {one.path: one.sequence_number or 0 for one in files if one.content == DATA}
        before: _Rows = {}
        for one in files:
            if one.content != POSITION_DELETES:
                continue
            for path, vector in self._read_deletes(one).items():
                if path in self.found and (one.sequence_number or 0) >= sequence.get(path, 0):
                    before[path] = before[path] | vector if path in before else vector
        return before

    def _read_deletes(self, one: Known) -> _Rows:
        if one.referenced_data_file is not None and one.referenced_data_file not in self.found:
            return {}
        with self.io.open_known(one) as file:
            if one.format == "PUFFIN":
                if one.referenced_data_file is None or one.content_offset is None or one.content_size is None:
                    raise FormatError(f"the deletion vector in {one.path} names no data file, or no bytes")
                file.seek(one.content_offset)
                blob = file.read(one.content_size)
                return {one.referenced_data_file: decode_vector(blob, cardinality=one.record_count)}
            return read_deletes(file, one)

    def _new_vectors(self, files: list[Known], before: _Rows) -> tuple[_Rows, set[str]]:
        """Return the new vector of each data file that gets one, and the files of which no row stays."""
        rows = {one.path: one.record_count for one in files if one.content == DATA}
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


class _Snapshot:
    """A new snapshot, while its manifests are written."""

    def __init__(self, writer: Writer, vectors: _Rows, gone: set[str]) -> None:
        self._writer, self._vectors, self._gone = writer, vectors, gone
        self.snapshot = writer.begin({}, "delete")
        self.counts: Counter[str] = Counter()  # for its summary

    def changed(self, one: Node, files: list[Known]) -> rewriting.Record:
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
        return self._writer.write_manifest(container, kept, content, like=one.record, snapshot=self.snapshot)

    def vector_manifests(self, live: _Held) -> list[rewriting.Record]:
        """Write the deletion vectors and their manifests, and return what the list says of these."""
        if not self._vectors:
            return []
        puffin = VectorFile(self._writer, self._vectors, {path: path for path in self._vectors})
        for one, files in live:
            if one.known.content == DATA and any(file.path in self._vectors for file in files):
                puffin.note(one, rewriting.entries(one.container(), one.known))
        self.counts["added-delete-files"] += len(self._vectors)
        self.counts["added-dvs"] += len(self._vectors)
        self.counts["added-position-deletes"] += sum(map(len, self._vectors.values()))
        self.counts["added-files-size"] += puffin.length
        return puffin.write_manifests(self.snapshot)
